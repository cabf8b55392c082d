"""Reductions over axes, running sums, and the largest elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.ops.table import Call, Rule, lower
from trainer.ops.values import Value


def reduce_sum(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Sum in the type of `x`; torch would widen integers."""
    return torch.sum(x, list(axes), keepdim=keepdims, dtype=x.dtype)


def reduce_mean(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Mean; every axis in `axes` is reduced."""
    return torch.mean(x, list(axes), keepdim=keepdims)


def reduce_product(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Product, one axis at a time."""
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims, dtype=x.dtype)
    return x


def reduce_max(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Maximum; of booleans, whether any is true."""
    return torch.amax(x, list(axes), keepdim=keepdims)


def reduce_min(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Minimum; of booleans, whether all are true."""
    return torch.amin(x, list(axes), keepdim=keepdims)


def reduce_l1(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Sum of absolute values."""
    return reduce_sum(torch.abs(x), axes, keepdims)


def reduce_sum_square(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Sum of squares."""
    return reduce_sum(x * x, axes, keepdims)


def reduce_l2(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Root of the sum of squares."""
    return torch.sqrt(reduce_sum_square(x, axes, keepdims))


def reduce_log_sum(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Logarithm of the sum."""
    return torch.log(reduce_sum(x, axes, keepdims))


def reduce_log_sum_exp(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Logarithm of the sum of exponentials."""
    return torch.logsumexp(x, list(axes), keepdim=keepdims)


REDUCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "ReduceSum": (reduce_sum, (1, 11, 13)),
    "ReduceMean": (reduce_mean, (1, 11, 13, 18)),
    "ReduceProd": (reduce_product, (1, 11, 13, 18)),
    "ReduceMax": (reduce_max, (1, 11, 12, 13, 18, 20)),
    "ReduceMin": (reduce_min, (1, 11, 12, 13, 18, 20)),
    "ReduceL1": (reduce_l1, (1, 11, 13, 18)),
    "ReduceL2": (reduce_l2, (1, 11, 13, 18)),
    "ReduceSumSquare": (reduce_sum_square, (1, 11, 13, 18)),
    "ReduceLogSum": (reduce_log_sum, (1, 11, 13, 18, 28)),
    "ReduceLogSumExp": (reduce_log_sum_exp, (1, 11, 13, 18, 28)),
}


def _reduction(function: Callable[..., Any]) -> Rule:
    def rule(c: Call, x: Value, given: Value = None) -> Value:
        axes = c.axes(given)
        keepdims, noop = bool(c.attr("keepdims", 1)), c.attr("noop_with_empty_axes", 0)
        if not axes and noop:
            axes = []
            if c.op in ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceLogSumExp"):
                return x
            if c.op in ("ReduceL1", "ReduceL2"):
                return c(torch.abs, x)
            return c(torch.mul, x, x) if c.op == "ReduceSumSquare" else c(torch.log, x)
        chosen = [c.axis(x, axis) for axis in axes] if axes else list(range(x.ndim))
        return c(function, x, chosen, keepdims) if chosen else x if x.ndim else c(function, x, [], keepdims)

    return rule


for _name, (_function, _since) in REDUCTIONS.items():
    lower(_name, since=_since)(_reduction(_function))


@lower("ArgMax", "ArgMin", since=(1, 11, 12, 13))
def arg_reduce(c: Call, x: Value) -> Value:
    axis, keepdims = c.axis(x, c.attr("axis", 0)), bool(c.attr("keepdims", 1))
    function = torch.argmax if c.op == "ArgMax" else torch.argmin
    if not c.attr("select_last_index", 0):
        return c(function, x, axis, keepdims)
    found = c(function, c(torch.flip, x, [axis]), axis, keepdims)
    return c(torch.sub, c.size(x, axis) - 1, found)


def running(x: torch.Tensor, axis: int, exclusive: bool, reverse: bool) -> torch.Tensor:
    """Sum of the elements up to each one along `axis`, itself left out if `exclusive`."""
    x = x.flip(axis) if reverse else x
    total = torch.cumsum(x, axis, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(axis) if reverse else total


@lower("CumSum", since=(11, 14))
def cumsum(c: Call, x: Value, axis: Value) -> Value:
    where = c.axis(x, int(c.number(axis)))
    return c(running, x, where, bool(c.attr("exclusive", 0)), bool(c.attr("reverse", 0)))


def largest(x: torch.Tensor, count: int, axis: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest (or smallest) elements in order, and where they were; of equals, the first."""
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@lower("TopK", since=(1, 10, 11, 24))
def top_k(c: Call, x: Value, k: Value = None) -> Value:
    c.attr("sorted")  # unsorted means: in any order
    count = c.attr("k") if k is None else c.ints(k)[0]
    return c(largest, x, count, c.axis(x, c.attr("axis", -1)), bool(c.attr("largest", 1)))
