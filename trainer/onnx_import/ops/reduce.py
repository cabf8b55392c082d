"""Rules for reductions over axes, CumSum, ArgMax, TopK, NonZero and Unique.

A reduction has the dimensions of its operand without `axes`, or with length 1 there (keepdims).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onward.trainer.onnx_import.lowering.converter_table import Call, Rule, lower, lower_each
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Value


def reduce_sum(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Sum in the type of `x`; torch would promote integers to int64."""
    return torch.sum(x, list(axes), keepdim=keepdims, dtype=x.dtype)


def reduce_mean(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the mean over `axes`; of integers, rounded towards zero."""
    if not x.is_floating_point():
        # torch has no mean of integers
        count = math.prod(x.shape[axis] for axis in axes)
        return torch.div(reduce_sum(x, axes, keepdims), count, rounding_mode="trunc")
    return torch.mean(x, list(axes), keepdim=keepdims)


def reduce_product(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the product, one axis at a time, since torch.prod takes only one."""
    # from the last axis on, so that the positions of the others stay
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims, dtype=x.dtype)
    return x


def reduce_max(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the maximum; of booleans, any; of no elements, the lowest value of the type."""
    # torch refuses a maximum of no elements, which ONNX defines
    if any(x.shape[axis] == 0 for axis in axes):
        return _reduce_empty(x, axes, keepdims, value_limits(x.dtype)[0])
    return torch.amax(x, list(axes), keepdim=keepdims)


def reduce_min(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the minimum; of booleans, all; of no elements, the highest value of the type."""
    if any(x.shape[axis] == 0 for axis in axes):
        return _reduce_empty(x, axes, keepdims, value_limits(x.dtype)[1])
    return torch.amin(x, list(axes), keepdim=keepdims)


def value_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the lowest and the highest value of a type."""
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _reduce_empty(x: torch.Tensor, axes: Sequence[int], keepdims: bool, value: float) -> torch.Tensor:
    if keepdims:
        lengths = [1 if axis in axes else length for axis, length in enumerate(x.shape)]
    else:
        lengths = [length for axis, length in enumerate(x.shape) if axis not in axes]
    return torch.full(lengths, value, dtype=x.dtype, device=x.device)


def reduce_l1(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the sum of absolute values."""
    return reduce_sum(torch.abs(x), axes, keepdims)


def reduce_sum_square(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the sum of squares."""
    return reduce_sum(x * x, axes, keepdims)


def reduce_l2(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the root of the sum of squares, with a gradient of zero at zero."""
    if x.is_floating_point():
        norm: torch.Tensor = torch.linalg.vector_norm(x, 2, list(axes), keepdim=keepdims)
        return norm
    return torch.sqrt(reduce_sum_square(x, axes, keepdims)).to(x.dtype)


def reduce_log_sum(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the logarithm of the sum, in the type of x as all reductions."""
    return torch.log(reduce_sum(x, axes, keepdims)).to(x.dtype)


def reduce_log_sum_exp(x: torch.Tensor, axes: Sequence[int], keepdims: bool) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials."""
    return torch.logsumexp(x, list(axes), keepdim=keepdims).to(x.dtype)


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
        keepdims = bool(c.attr("keepdims", 1))
        noop = c.attr("noop_with_empty_axes", 0)
        # no axes: the result is x, with what the operator does to one element
        if not axes and noop:
            if c.op in ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceLogSumExp"):
                return x
            if c.op in ("ReduceL1", "ReduceL2"):
                return c(torch.abs, x)
            return c(torch.mul, x, x) if c.op == "ReduceSumSquare" else c(torch.log, x)
        # without axes and without noop_with_empty_axes everything is reduced
        chosen = [c.axis(x, axis) for axis in axes] if axes else list(range(x.ndim))
        return c(function, x, chosen, keepdims)

    return rule


lower_each(REDUCTIONS, _reduction)


@lower("ArgMax", "ArgMin", since=(1, 11, 12, 13))
def arg_reduce(c: Call, x: Value) -> Value:
    axis = c.axis(x, c.attr("axis", 0))
    keepdims = bool(c.attr("keepdims", 1))
    function = torch.argmax if c.op == "ArgMax" else torch.argmin
    if not c.attr("select_last_index", 0):
        return c(function, x, axis, keepdims)
    # the last of equal elements is the first one of the flipped tensor
    from_end = c(function, c(torch.flip, x, [axis]), axis, keepdims)
    return c(torch.sub, c.size(x, axis) - 1, from_end)


def cumulate(x: torch.Tensor, axis: int, product: bool, exclusive: bool, reverse: bool) -> torch.Tensor:
    """Return the sum or product of the elements up to each one along `axis`, without itself if `exclusive`.

    Both have the shape of x.
    """
    x = x.flip(axis) if reverse else x
    if exclusive:
        # shifted by one element, behind a 0 or a 1: a difference would be rounded, and NaN behind an infinity
        neutral = torch.full_like(x.narrow(axis, 0, min(1, x.shape[axis])), product)
        x = torch.cat((neutral, x.narrow(axis, 0, max(x.shape[axis] - 1, 0))), axis)
    # in the type of x, where torch would promote integers to int64
    total = (torch.cumprod if product else torch.cumsum)(x, axis, dtype=x.dtype)
    return total.flip(axis) if reverse else total


@lower("CumSum", since=(11, 14))
@lower("CumProd", since=(26,))
def cumulate_(c: Call, x: Value, axis: Value) -> Value:
    where = c.axis(x, int(c.number(axis)))
    return c(cumulate, x, where, c.op == "CumProd", bool(c.attr("exclusive", 0)), bool(c.attr("reverse", 0)))


def largest(x: torch.Tensor, count: int, axis: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest (or smallest) elements in order, and their indices; of equal ones, the first.

    Both have the shape of x, but for the length `count` of `axis`.
    """
    # torch cannot sort these types; with its sign bit flipped, an int64 is ordered as the uint64
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        low = x.to(torch.int64)
        _, indices = largest(
            low ^ torch.iinfo(torch.int64).min if x.dtype == torch.uint64 else low, count, axis, descending
        )
        return low.gather(axis, indices).to(x.dtype), indices
    # torch.topk does not say which of equal elements it takes; a stable sort takes the first, as ONNX asks for
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@lower("TopK", since=(1, 10, 11, 24))
def top_k(c: Call, x: Value, k: Value = None) -> Value:
    c.attr("sorted")  # unsorted means: in any order
    count = c.attr("k") if k is None else c.ints(k)[0]
    return c(largest, x, count, c.axis(x, c.attr("axis", -1)), bool(c.attr("largest", 1)))


# -- results whose length depends on the values


@lower("NonZero", since=(9, 13))
def non_zero(c: Call, x: Value) -> Value:
    """Return [dimensions, found]; a 0-d tensor counts as one element."""
    if not isinstance(x, torch.Tensor):
        raise NeedsRuntimeValues("how many elements are not zero is known only at run time")
    return c("t", c(torch.nonzero, x))


def unique(
    x: torch.Tensor, axis: int | None, in_order: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return distinct elements (or slices along `axis`), sorted or as they come; first indices, inverse, counts.

    first indices, counts: [distinct]; inverse: [elements], or [slices].
    """
    dim = 0 if axis is None else axis
    x = x.reshape(-1) if axis is None else x
    # torch gives no first indices: they follow from the inverse
    values, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=dim)
    positions = torch.arange(len(inverse), device=x.device)
    # the first index of each distinct element: the minimum over its occurrences
    first = positions.new_full((len(counts),), len(inverse)).scatter_reduce(0, inverse, positions, "amin")
    if not in_order:
        # by first occurrence; the inverse permutation renumbers what each element points at
        order = torch.argsort(first)
        values = values.index_select(dim, order)
        first = first[order]
        counts = counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts


@lower("Unique", since=(11, 28))
def unique_(c: Call, x: Value) -> Value:
    axis = c.attr("axis")
    if not isinstance(x, torch.Tensor):
        raise NeedsRuntimeValues("how many elements are distinct is known only at run time")
    return c(unique, x, None if axis is None else c.axis(x, axis), bool(c.attr("sorted", 1)))
