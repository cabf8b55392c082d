"""The comparison of two files on the same rows: signatures, and the interval of a paired bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from onward.trainer.data.schema.signature import Signature, TensorInfo
from onward.trainer.export.measuring.comparison import gain_interval, signature_differences

IMAGE = TensorInfo("image", "float32", (None, 3, 32, 32))
LOGITS = TensorInfo("logits", "float32", (None, 10))


def test_every_difference_of_inputs_and_outputs_is_named_and_equal_signatures_have_none() -> None:
    served = Signature((IMAGE, TensorInfo("mask", "bool", (None,))), (LOGITS,))
    assert signature_differences(served, served) == []
    new = Signature(
        (TensorInfo("image", "uint8", (None, 3, 32, 32)), TensorInfo("scale", "float32", ())),
        (TensorInfo("logits", "float32", (None, 12)),),
    )
    assert signature_differences(served, new) == [
        "input 'image' was float32 [any, 3, 32, 32], and is uint8 [any, 3, 32, 32]",
        "input 'mask' of the served file is gone",
        "input 'scale' is new",
        "output 'logits' was float32 [any, 10], and is float32 [any, 12]",
    ]
    turned = Signature(served.inputs[::-1], served.outputs)
    assert signature_differences(served, turned) == ["the inputs have another order: mask, image; it was image, mask"]


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_is_that_of_scipys_paired_bootstrap(confidence: float) -> None:
    random = np.random.default_rng(1)
    rows = 400
    difficulty = random.random(rows)
    served = (difficulty < 0.7).astype(float)
    new = ((difficulty < 0.75) ^ (random.random(rows) < 0.02)).astype(float)

    def totals(right: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack([right, np.ones(rows)], axis=1))

    def gain(times: torch.Tensor) -> float:
        before, after = times @ totals(served), times @ totals(new)
        return float(after[0] / after[1] - before[0] / before[1])

    low, high = gain_interval(rows, gain, confidence)
    expected = bootstrap(
        (served, new),
        lambda a, b: b.mean() - a.mean(),
        paired=True,
        vectorized=False,
        n_resamples=4000,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert low == pytest.approx(expected.low, abs=0.006)
    assert high == pytest.approx(expected.high, abs=0.006)
    # difficult rows are difficult for both: drawn apart, the interval would be much wider
    apart = bootstrap((new,), np.mean, n_resamples=2000, confidence_level=confidence, rng=np.random.default_rng(3))
    assert high - low < 0.8 * (apart.confidence_interval.high - apart.confidence_interval.low)
    assert gain_interval(rows, gain, confidence) == (low, high)
