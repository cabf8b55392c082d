"""Adasum's arithmetic: factors, and where tensors lie in the stretch of a bucket that one rank works on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from onward.trainer.parallel.replicas.adasum import SMALLEST_SQUARE, Layout, _replicas_by_host, factors


def adasum(a: Tensor, b: Tensor) -> Tensor:
    layout = Layout([a.numel()], 0, a.numel())
    result = torch.empty_like(a)
    layout.add(a, b, factors(layout.products(a, b, 0, a.numel())), into=result)
    return result


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1, 0), (0, 1), (1, 1)),
        ((3, 4), (3, 4), (3, 4)),
        ((1, 1), (2, 0), (2, 0.5)),
        ((0, 0), (2, 5), (2, 5)),
        ((0, 0), (0, 0), (0, 0)),
        ((1, 2), (-1, -2), (0, 0)),
        ((1, 2), (3, 6), (2, 4)),
    ],
)
def test_pairs_of_onnx_runtimes_trainer(
    a: tuple[float, ...], b: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    for first, second in ((a, b), (b, a)):
        found = adasum(torch.tensor(first, dtype=torch.float32), torch.tensor(second, dtype=torch.float32))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_a_norm_too_small_to_divide_by_counts_as_none() -> None:
    below, above = SMALLEST_SQUARE * 0.99, SMALLEST_SQUARE * 1.01
    one, other = factors(torch.tensor([[below, below, below], [above, above, above]], dtype=torch.float64))
    assert one.tolist() == other.tolist() == [1.0, 0.5]
    # fp32 gradients of 1e-38 are far above: their squares are doubles
    tiny = torch.full((4,), 1e-38)
    assert torch.equal(adasum(tiny, tiny), tiny)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_not_lost(bad: float) -> None:
    poisoned = torch.tensor([bad, 1.0])
    for partner in (torch.ones(2), torch.zeros(2), poisoned):
        assert not adasum(poisoned, partner).isfinite().all()
        assert not adasum(partner, poisoned).isfinite().all()


def test_stretches_add_up_to_the_tensors_they_cut() -> None:
    lengths, total = [3, 1, 0, 7, 5], 16
    a, b = torch.randn(total), torch.randn(total)
    whole = Layout(lengths, 0, total).products(a, b, 0, total)
    ends = [3, 4, 4, 11, 16]
    for row, length, end in zip(whole, lengths, ends, strict=True):
        x, y = a[end - length : end].double(), b[end - length : end].double()
        torch.testing.assert_close(row, torch.stack([x @ x, x @ y, y @ y]))
    for cuts in ([0, 5, 16], [0, 0, 3, 4, 10, 16], [0, 16, 16]):
        halves, result = torch.zeros_like(whole), torch.empty(total)
        for start, stop in itertools.pairwise(cuts):
            layout, middle = Layout(lengths, start, stop), (stop - start) // 2
            own = slice(start, stop)
            halves += layout.products(a[own], b[own], 0, middle)
            halves += layout.products(a[own], b[own], middle, stop - start)
            layout.add(a[own], b[own], factors(whole), into=result[own])
        torch.testing.assert_close(halves, whole)
        parts = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
        expected = [adasum(a[part], b[part]) for part in parts]
        torch.testing.assert_close(result, torch.cat(expected))


def test_replicas_are_grouped_by_the_host_of_their_first_rank() -> None:
    assert _replicas_by_host([0, 2, 4, 6], [7, 7, 7, 7, 9, 9, 9, 9]) == [[0, 1], [2, 3]]
    assert _replicas_by_host([0, 1, 2, 3, 4], [5, 8, 5, 8, 5]) == [[0, 2, 4], [1, 3]]
