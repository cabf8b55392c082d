"""Pools: the largest, the mean or the p-norm of a window, in one, two and three spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.ops.conv import CONV, of_rank, pad_spatial, pads_of, same_pads
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Value

MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

Window = Sequence[Sequence[int]]
"""Kernel, strides, dilations."""


def _window(c: Call, x: Value) -> tuple[Window, list[int] | None, bool]:
    """The window, its pads (None: auto_pad on a dynamic dimension), and whether lengths are rounded up."""
    rank = x.ndim - 2
    window = [list(c.attr("kernel_shape")), c.attr("strides", [1] * rank), c.attr("dilations", [1] * rank)]
    return window, pads_of(c, x, window), bool(c.attr("ceil_mode", 0))


def _torch_has(window: Window, pads: Sequence[int] | None) -> bool:
    """Whether torch's pools take such pads: equal on both sides, at most half the kernel."""
    rank = len(window[0])
    return (
        pads is not None
        and pads[:rank] == pads[rank:]
        and all(2 * p <= k for p, k in zip(pads, [*window[0]] * 2, strict=True))
    )


def _borders(
    lengths: Sequence[int], window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool
) -> tuple[list[int], list[int]]:
    """The pads, and with them what the last window needs beyond the end where lengths are rounded up."""
    pads = same_pads(lengths, window, upper) if pads is None else list(pads)
    rank, reach = len(lengths), list(pads)
    for dim, (length, k, s, d) in enumerate(zip(lengths, *window, strict=True)):
        span = length + pads[dim] + pads[dim + rank] - (k - 1) * d - 1
        count = (-(-span // s) if ceil else span // s) + 1
        if ceil and (count - 1) * s >= length + pads[dim]:
            count -= 1  # a window must not begin in the padding at the end
        reach[dim + rank] += max((count - 1) * s - span, 0)
    return pads, reach


# -- the largest


def max_pool(x: torch.Tensor, window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool) -> torch.Tensor:
    """Any pads; integers too."""
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    wide = x if x.is_floating_point() else x.to(torch.float32)  # exact for 8 bits
    y = MAX_POOL[x.ndim - 2](pad_spatial(wide, reach, -math.inf), window[0], window[1], 0, window[2])
    pooled: torch.Tensor = y.to(x.dtype)
    return pooled


def max_pool_with_places(
    x: torch.Tensor, window: Window, pads: Sequence[int] | None, *, ceil: bool, upper: bool, by_column: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest, and where it was in all of `x` laid out flat; `by_column`: the first spatial dimension fastest."""
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    wide = pad_spatial(x if x.is_floating_point() else x.to(torch.float32), reach, -math.inf)
    rank = x.ndim - 2
    y, place = MAX_POOL[rank](wide, window[0], window[1], 0, window[2], return_indices=True)
    lengths, flat = x.shape[2:], torch.zeros_like(place)
    for dim in reversed(range(rank)):
        at = place % wide.shape[dim + 2] - reach[dim]
        place = torch.div(place, wide.shape[dim + 2], rounding_mode="floor")
        flat = flat + at * math.prod(lengths[:dim] if by_column else lengths[dim + 1 :])
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * rank)
    return y.to(x.dtype), flat + planes * math.prod(lengths)


@lower("MaxPool", since=(1, 8, 10, 11, 12, 22))
def max_pool_(c: Call, x: Value) -> Value:
    function, rank = of_rank(MAX_POOL, x), x.ndim - 2
    window, pads, ceil = _window(c, x)
    upper, by_column = c.attr("auto_pad", "NOTSET") == "SAME_UPPER", bool(c.attr("storage_order", 0))
    if c.wants(1):
        return c(max_pool_with_places, x, window, pads, ceil=ceil, upper=upper, by_column=by_column)
    if pads is not None and _torch_has(window, pads) and x.dtype.is_floating_point:
        return c(function, x, window[0], window[1], pads[:rank], window[2], ceil_mode=ceil)
    return c(max_pool, x, window, pads, ceil, upper)


def max_unpool(
    x: torch.Tensor, places: torch.Tensor, window: Window, pads: Sequence[int], wanted: Sequence[int] | None
) -> torch.Tensor:
    """Each element at its place in a tensor of zeros, which is then widened at the ends to the wanted shape."""
    rank = x.ndim - 2
    lengths = [
        (n - 1) * s - pads[dim] - pads[dim + rank] + k
        for dim, (n, k, s) in enumerate(zip(x.shape[2:], *window[:2], strict=True))
    ]
    shape = [*x.shape[:2], *lengths]
    # ONNX counts places through batch and channels, torch would count them in each plane
    flat = x.new_zeros(math.prod(shape)).scatter(0, places.reshape(-1), x.reshape(-1)).reshape(shape)
    if wanted is None:
        return flat
    return pad_spatial(flat, [*[0] * x.ndim, *(b - a for a, b in zip(shape, wanted, strict=True))])


@lower("MaxUnpool", since=(9, 11, 22))
def max_unpool_(c: Call, x: Value, places: Value, shape: Value = None) -> Value:
    rank = x.ndim - 2
    window = [c.attr("kernel_shape"), c.attr("strides", [1] * rank)]
    wanted = None if shape is None else c.ints(shape)
    return c(max_unpool, x, places, window, c.attr("pads", [0] * 2 * rank), wanted)


# -- sums over windows


def window_sums(x: torch.Tensor, window: Window) -> torch.Tensor:
    """The sum of every window, dilated ones too: a convolution of each plane with ones."""
    planes = x.reshape(-1, 1, *x.shape[2:])
    ones = x.new_ones(1, 1, *window[0])
    sums: torch.Tensor = CONV[x.ndim - 2](planes, ones, None, window[1], 0, window[2])
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def average_pool(
    x: torch.Tensor, window: Window, pads: Sequence[int] | None, *, ceil: bool, upper: bool, count_pads: bool
) -> torch.Tensor:
    """Any pads and dilations. What reaches beyond the pads, where lengths are rounded up, is never counted."""
    rank = x.ndim - 2
    pads, reach = _borders(x.shape[2:], window, pads, ceil, upper)
    counted = pad_spatial(torch.ones_like(x[:1, :1]), pads, 1.0 if count_pads else 0.0)
    beyond = [b - a for a, b in zip(pads, reach, strict=True)]
    counts = window_sums(pad_spatial(counted, beyond), window)
    padded = pad_spatial(x, reach)
    if all(d == 1 for d in window[2]):
        means: torch.Tensor = AVERAGE_POOL[rank](padded, window[0], window[1])
        return means * math.prod(window[0]) / counts
    return window_sums(padded, window) / counts


@lower("AveragePool", since=(7, 10, 11, 19, 22))
def average_pool_(c: Call, x: Value) -> Value:
    function, rank = of_rank(AVERAGE_POOL, x), x.ndim - 2
    window, pads, ceil = _window(c, x)
    upper, count_pads = c.attr("auto_pad", "NOTSET") == "SAME_UPPER", bool(c.attr("count_include_pad", 0))
    if pads is not None and _torch_has(window, pads) and all(d == 1 for d in window[2]):
        return c(function, x, window[0], window[1], pads[:rank], ceil, count_pads)
    return c(average_pool, x, window, pads, ceil=ceil, upper=upper, count_pads=count_pads)


def lp_norm(powers: torch.Tensor, p: float) -> torch.Tensor:
    """The p-th root of sums of p-th powers; its gradient at zero is zero."""
    some = powers > 0
    return torch.where(some, torch.where(some, powers, 1.0).pow(1.0 / p), 0.0)


def lp_pool(
    x: torch.Tensor, p: float, window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool
) -> torch.Tensor:
    """The p-norm of every window."""
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    return lp_norm(window_sums(pad_spatial(x.abs().pow(p), reach), window), p)


@lower("LpPool", since=(2, 11, 18, 22))
def lp_pool_(c: Call, x: Value) -> Value:
    of_rank(AVERAGE_POOL, x)
    window, pads, ceil = _window(c, x)
    upper = c.attr("auto_pad", "NOTSET") == "SAME_UPPER"
    return c(lp_pool, x, c.attr("p", 2), window, pads, ceil, upper)


# -- over everything


@lower("GlobalAveragePool", since=(1, 22))
def global_average_pool(c: Call, x: Value) -> Value:
    return c(torch.mean, x, list(range(2, x.ndim)), keepdim=True)


@lower("GlobalMaxPool", since=(1, 22))
def global_max_pool(c: Call, x: Value) -> Value:
    return c(torch.amax, x, list(range(2, x.ndim)), keepdim=True)


def global_lp_pool(x: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm of every plane."""
    return lp_norm(x.abs().pow(p).sum(list(range(2, x.ndim)), keepdim=True), p)


@lower("GlobalLpPool", since=(2, 22))
def global_lp_pool_(c: Call, x: Value) -> Value:
    return c(global_lp_pool, x, c.attr("p", 2))
