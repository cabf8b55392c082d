"""Losses are sums beside counts, so that means over any partition are the mean over the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.target_counts import count_targets, label_range
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses import chunked_loss
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.parallel.planning.dry_run import MemoryCounter

CPU = torch.device("cpu")


def loss_named(name: str, **settings: object) -> Loss:
    return Loss(config_of(name, **settings), ["logits", "hidden"])


def config_of(name: str, **settings: object) -> LossConfig:
    return LossConfig.model_validate({"name": name, "ignore_index": -100, **settings})


def metrics_of(name: str, **settings: object) -> EvaluationMetrics:
    return EvaluationMetrics(Losses([config_of(name, **settings)], ["logits", "hidden"]), device=CPU)


REFERENCE = {
    "cross_entropy": (torch.randn(6, 5), torch.randint(0, 5, (6,)), F.cross_entropy),
    "mse": (torch.randn(6, 1), torch.randn(6), lambda o, t: F.mse_loss(o, t[:, None])),
    "l1": (torch.randn(6, 2), torch.randn(6, 2), F.l1_loss),
    "bce_with_logits": (
        torch.randn(6),
        torch.randint(0, 2, (6,)),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.float()),
    ),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_sum_over_count_is_torchs_mean(name: str) -> None:
    output, labels, reference = REFERENCE[name]
    loss = loss_named(name)
    mean = loss(output, labels, 6) / loss.count(labels, 6)
    torch.testing.assert_close(mean, reference(output, labels))


def test_ignored_labels_count_neither_above_nor_below_the_line() -> None:
    loss = loss_named("cross_entropy", ignore_index=-1)
    output, labels = torch.randn(2, 4, 7), torch.randint(0, 7, (2, 4))
    labels[0, 1:] = -1
    assert loss.count(labels, 2) == 5
    torch.testing.assert_close(
        loss(output, labels, 2) / 5, F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-1)
    )


def test_a_column_of_labels_does_not_broadcast_against_a_column_of_outputs() -> None:
    assert loss_named("mse")(torch.zeros(4, 1), torch.ones(4), 4) == 4.0  # broadcast to [4, 4] it would be 16


def test_the_graphs_own_loss_is_weighted_by_its_samples() -> None:
    loss = loss_named("output", output="hidden")
    assert loss((torch.zeros(3), torch.tensor(2.0)), None, 5) == 10.0
    assert loss.count(None, 5) == 5


def test_half_precision_outputs_are_summed_in_fp32() -> None:
    assert loss_named("mse")(torch.ones(70000, dtype=torch.float16), torch.zeros(70000), 1) == 70000.0


def test_an_unknown_output_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="logits, hidden"):
        loss_named("mse", output="logit")


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2]])
def test_evaluation_does_not_depend_on_how_the_samples_are_batched(sizes: list[int]) -> None:
    output, labels, reference = REFERENCE["cross_entropy"]
    totals = metrics_of("cross_entropy")
    for out, lab in zip(output.split(sizes), labels.split(sizes), strict=True):
        totals.update(out, [lab], len(lab))
    values = totals.compute()
    assert values["loss"] == pytest.approx(float(reference(output, labels)), rel=1e-6)
    assert values["accuracy"] == pytest.approx(float((output.argmax(-1) == labels).float().mean()))


def test_regression_and_binary_tasks_have_their_metrics() -> None:
    output, labels, _ = REFERENCE["l1"]
    totals = metrics_of("l1")
    totals.update(output, [labels], 6)
    values = totals.compute()
    assert values["mae"] == pytest.approx(values["loss"], rel=1e-6)
    assert values["mse"] == pytest.approx(float(((output - labels) ** 2).mean()), rel=1e-5)
    output, labels, _ = REFERENCE["bce_with_logits"]
    totals = metrics_of("bce_with_logits")
    totals.update(output, [labels], 6)
    assert totals.compute()["accuracy"] == pytest.approx(float(((output > 0) == (labels > 0)).float().mean()))


def test_evaluating_nothing_gives_nan_not_a_good_score() -> None:
    totals = metrics_of("mse")
    assert math.isnan(totals.compute()["loss"])


def test_binary_accuracy_does_not_depend_on_the_batches_even_for_logits_that_look_like_probabilities() -> None:
    logits, labels = torch.tensor([0.2, 0.3, 0.4, -1.0]), torch.tensor([1, 1, 1, 0])
    for size in (4, 2, 1):
        totals = metrics_of("bce_with_logits")
        for out, lab in zip(logits.split(size), labels.split(size), strict=True):
            totals.update(out, [lab], size)
        assert totals.compute()["accuracy"] == 1.0


def test_a_batch_that_is_not_a_number_makes_the_loss_none() -> None:
    totals = metrics_of("mse")
    totals.update(torch.tensor([float("nan")]), [torch.zeros(1)], 1)
    totals.update(torch.ones(1), [torch.zeros(1)], 1)
    assert math.isnan(totals.compute()["loss"])


def batch_of(labels: torch.Tensor, config: LossConfig) -> Batch:
    counted = float(count_targets(labels, len(labels), config))
    rows = np.arange(100, 100 + len(labels))
    return Batch((), (labels,), len(labels), (counted,), label_ranges=(label_range(labels, config),), rows=rows)


def test_labels_that_are_no_classes_are_refused_with_their_values_rows_and_the_number_of_classes() -> None:
    loss, model = loss_named("cross_entropy"), config_of("cross_entropy")
    logits = torch.zeros(3, 2, 5)
    good = batch_of(torch.tensor([[0, 4], [-100, 1], [2, 3]]), model)
    loss.check_labels(good, (logits, logits))
    assert (good.num_targets, good.label_ranges) == ((5,), ((0, 4),))
    bad = batch_of(torch.tensor([[0, 5], [-100, 1], [7, -3]]), model)
    with pytest.raises(DataError, match=r"labels -3, 5, 7 in rows 100, 102 .*has 5 of them, 0\.\.4.*now -100\)"):
        loss.check_labels(bad, (logits, logits))
    many = batch_of(torch.arange(20), model)
    with pytest.raises(DataError, match=r"labels 5, 6, 7, 8, 9 and 10 more in rows 105, .* and 10 more"):
        loss.check_labels(many, torch.zeros(20, 5))


def test_labels_are_counted_on_the_host_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[1, -1], [-1, -1]])
    for name, settings, counted, extremes in (
        ("cross_entropy", {"ignore_index": -1}, 1, (1, 1)),
        ("cross_entropy", {"ignore_index": 1}, 3, (-1, -1)),
        ("mse", {}, 4, (0, 0)),
        ("output", {}, 2, (0, 0)),
    ):
        model = config_of(name, **settings)
        assert count_targets(labels, 2, model) == counted
        assert label_range(labels, model) == extremes
    ignored = config_of("cross_entropy", ignore_index=1)
    assert label_range(torch.ones(3, dtype=torch.int64), ignored) == (0, 0), "nothing is left to refuse"


def test_accuracy_leaves_out_ignored_labels_even_where_the_ignored_label_is_a_class() -> None:
    totals = metrics_of("cross_entropy", ignore_index=0)
    logits = torch.eye(3)[torch.tensor([0, 1, 1])]  # predicts 0, 1, 1
    totals.update(logits, [torch.tensor([[0], [1], [2]])], 3)
    assert totals.compute()["accuracy"] == 0.5


def loss_and_gradient(loss: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits)
    value.backward(torch.tensor(0.25))
    assert logits.grad is not None
    return [value.detach(), logits.grad]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_of_half_precision_logits_is_that_of_an_fp32_copy(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, 300, generator=random).mul(5).to(dtype)
    labels = torch.randint(0, 300, (4, 50), generator=random)
    labels[1, 3:9] = -100
    logits[0, 0, 7:9] = -torch.inf  # classes that a mask excludes
    expected, wanted = loss_and_gradient(
        lambda z: F.cross_entropy(z.float().flatten(0, 1), labels.flatten(), reduction="sum"), logits
    )
    loss, gradient = loss_and_gradient(lambda z: loss_named("cross_entropy")(z, labels, 4), logits)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    # one rounding to the type of the logits, as of the reference
    torch.testing.assert_close(gradient, wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert not gradient[1, 3:9].any()


def test_cross_entropy_in_chunks_has_the_bits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(37, 11).bfloat16(), torch.randint(0, 11, (37,))
    whole = loss_and_gradient(lambda z: chunked_loss.cross_entropy(z, labels, -100), logits)
    for elements in (1, 33, 100):
        monkeypatch.setitem(chunked_loss.CHUNK, "cpu", elements)
        chunked = loss_and_gradient(lambda z: chunked_loss.cross_entropy(z, labels, -100), logits)
        assert all(map(torch.equal, chunked, whole))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_makes_the_loss_and_the_gradient_so(poison: float) -> None:
    logits = torch.randn(3, 5).bfloat16()
    logits[1, 2] = poison
    loss, gradient = loss_and_gradient(lambda z: loss_named("cross_entropy")(z, torch.tensor([0, -100, 1]), 3), logits)
    assert math.isfinite(float(loss)), "the row is ignored"
    assert gradient[1].isnan().any(), "but its gradient is noticed, as torch's is"
    loss, _ = loss_and_gradient(lambda z: loss_named("cross_entropy")(z, torch.tensor([0, 4, 1]), 3), logits)
    assert math.isnan(float(loss))


def test_the_loss_of_fp32_logits_has_the_bits_of_torchs_cross_entropy() -> None:
    logits, labels = torch.randn(64, 100), torch.randint(0, 100, (64,))
    ours = loss_and_gradient(lambda z: loss_named("cross_entropy")(z, labels, 64), logits)
    torchs = loss_and_gradient(lambda z: F.cross_entropy(z, labels, reduction="sum"), logits)
    assert all(map(torch.equal, ours, torchs))


def test_the_loss_of_half_precision_logits_takes_two_bytes_for_each_of_them() -> None:
    logits = torch.zeros(1 << 14, 1 << 10, dtype=torch.bfloat16, requires_grad=True)
    with MemoryCounter() as counter:
        counter.ignore(logits)
        loss_named("cross_entropy")(logits, torch.zeros(1 << 14).long(), 1 << 14).backward()  # type: ignore[no-untyped-call]
    chunks, per_label = 3 * 4 * chunked_loss.CHUNK["cpu"], 64 * len(logits)
    assert counter.peak_bytes <= 2 * logits.numel() + chunks + per_label, "the gradient, beside the logits themselves"
