"""Noise made of keys has the right distribution, and depends on the sample and the place in its tensor alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onward.trainer.onnx_import.ops.random import RandomNode, normal, uniform


def keys(*numbers: int, step: int = 9) -> Tensor:
    return torch.tensor([[number, step] for number in numbers])


def test_uniform_numbers_are_even_and_independent_of_each_other() -> None:
    drawn = uniform(keys(*range(1000)), (1000, 200), 0, "eps")
    assert 0 < float(drawn.min()) < 1e-4
    assert 1 - 1e-4 < float(drawn.max()) < 1
    counts = torch.histc(drawn, bins=50, min=0, max=1)
    expected = drawn.numel() / 50
    # chi squared with 49 degrees of freedom: above 100 once in 10^5 draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 100
    centred = (drawn - 0.5) * math.sqrt(12)
    for other in (centred.roll(1, 0), centred.roll(1, 1)):  # neighbouring samples, neighbouring elements
        assert abs(float((centred * other).mean())) < 5 / math.sqrt(drawn.numel())
    assert len(drawn.unique()) == drawn.numel()


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    drawn = normal(keys(*range(1000)), (1000, 200), 0, "eps")
    errors = [float((drawn**power).mean()) - moment for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3))]
    # the deviations of these means: sqrt of 1, 2, 15, 96 over the number of elements
    for error, variance in zip(errors, (1, 2, 15, 96), strict=True):
        assert abs(error) < 5 * math.sqrt(variance / drawn.numel())


@pytest.mark.parametrize(("axis", "shape"), [(0, (6, 4, 5)), (1, (4, 6, 5)), (2, (4, 5, 6)), (0, (12, 5))], ids=str)
def test_a_sample_has_its_numbers_in_every_micro_batch(axis: int, shape: tuple[int, ...]) -> None:
    own = keys(3, 5, 8, 1, 9, 7)
    whole = uniform(own, shape, axis, "eps")
    each = shape[axis] // 6
    for at in range(6):
        alone = uniform(own[at : at + 1], (*shape[:axis], each, *shape[axis + 1 :]), axis, "eps")
        assert torch.equal(alone, whole.narrow(axis, at * each, each))


def test_padding_does_not_change_the_numbers_of_a_row() -> None:
    own = keys(3, 5)
    longer = uniform(own, (2, 4, 9), 0, "eps")
    assert torch.equal(uniform(own, (2, 4, 6), 0, "eps"), longer[:, :, :6])


def test_nodes_samples_and_steps_differ() -> None:
    base = uniform(keys(1), (1, 8), 0, "eps")
    for other in (uniform(keys(2), (1, 8), 0, "eps"), uniform(keys(1), (1, 8), 0, "eps_1")):
        assert not bool((base == other).any())
    shared = [uniform(keys(1, 2, step=step), (3, 4), None, "eps") for step in (1, 1, 2)]
    assert torch.equal(shared[0], shared[1])
    assert not bool((shared[0] == shared[2]).any())
    assert uniform(keys(1), (), None, "eps").shape == ()


def test_bernoulli_and_multinomial_draw_with_their_probabilities() -> None:
    own = keys(*range(4000))
    chances = torch.tensor([0.1, 0.5, 0.85])
    kept = RandomNode("bernoulli", torch.float32, name="b", axis=0)(torch.empty(0), chances.expand(4000, 3), own)
    assert kept.mean(0).tolist() == pytest.approx(chances.tolist(), abs=5 * 0.5 / math.sqrt(4000))
    classes = torch.tensor([0.2, 0.0, 0.7, 0.1])
    node = RandomNode("multinomial", torch.int64, 5, name="m", axis=0)
    drawn = node(torch.empty(0), classes.log().expand(4000, 4), own)
    assert drawn.shape == (4000, 5)
    found = torch.bincount(drawn.reshape(-1), minlength=4) / drawn.numel()
    assert found.tolist() == pytest.approx(classes.tolist(), abs=5 * 0.5 / math.sqrt(20000))
    assert float(found[1]) == 0
