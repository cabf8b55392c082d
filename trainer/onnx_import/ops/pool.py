"""Rules for MaxPool, AveragePool, LpPool, MaxUnpool and the global pools, in one to three spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.conv import CONV, for_spatial_dims, pad_spatial, pads_of, same_pads
from onward.trainer.onnx_import.tracing.values import Value

MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

Window = Sequence[Sequence[int]]
"""Kernel, strides, dilations."""


def _window(c: Call, x: Value) -> tuple[Window, list[int] | None, bool, bool]:
    """Return the window, its pads (None: auto_pad on a dynamic dimension), whether lengths are rounded up, and whether
    of an odd number of pads the last side gets one more."""
    rank = x.ndim - 2
    window = [list(c.attr("kernel_shape")), c.attr("strides", [1] * rank), c.attr("dilations", [1] * rank)]
    upper = c.attr("auto_pad", "NOTSET") == "SAME_UPPER"
    return window, pads_of(c, x, window), bool(c.attr("ceil_mode", 0)), upper


def _torch_supports(window: Window, pads: Sequence[int] | None) -> bool:
    """Whether torch's pools accept these pads: equal on both sides, at most half the kernel."""
    rank = len(window[0])
    if pads is None or pads[:rank] != pads[rank:]:
        return False
    # torch raises an error for greater pads
    return all(2 * pad <= length for pad, length in zip(pads, [*window[0]] * 2, strict=True))


def _borders(
    lengths: Sequence[int], window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool
) -> tuple[list[int], list[int]]:
    """Return the pads, and the pads extended for the last window where lengths are rounded up (ceil_mode)."""
    pads = same_pads(lengths, window, upper) if pads is None else list(pads)
    rank = len(lengths)
    reach = list(pads)
    for dim, (length, k, s, d) in enumerate(zip(lengths, *window, strict=True)):
        # how far a window can move within the padded length: its extent is (k - 1) d + 1
        span = length + pads[dim] + pads[dim + rank] - (k - 1) * d - 1
        # the number of windows, of which the last one may reach beyond the pads
        count = (-(-span // s) if ceil else span // s) + 1
        if ceil and (count - 1) * s >= length + pads[dim]:
            count -= 1  # ONNX omits a window that begins in the padding at the end
        # what the last window reaches beyond the pads is padding too, which only the averages must not count
        reach[dim + rank] += max((count - 1) * s - span, 0)
    return pads, reach


# -- maximum


def max_pool(x: torch.Tensor, window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool) -> torch.Tensor:
    """Pool x [batch, channels, *lengths] with any pads, and integers, which torch does not support."""
    # padded by -inf, which is never a maximum: the pool itself then pads nothing
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    wide = x if x.is_floating_point() else x.to(torch.float32)  # exact for 8 bits
    y = MAX_POOL[x.ndim - 2](pad_spatial(wide, reach, -math.inf), window[0], window[1], 0, window[2])
    pooled: torch.Tensor = y.to(x.dtype)
    return pooled


def max_pool_with_indices(
    x: torch.Tensor, window: Window, pads: Sequence[int] | None, *, ceil: bool, upper: bool, column_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maxima and their flat indices in `x` [batch, channels, *lengths], both of the pooled shape.

    column_major: the first spatial dimension varies fastest.
    """
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    wide = pad_spatial(x if x.is_floating_point() else x.to(torch.float32), reach, -math.inf)
    rank = x.ndim - 2
    y, index = MAX_POOL[rank](wide, window[0], window[1], 0, window[2], return_indices=True)
    lengths = x.shape[2:]
    flat = torch.zeros_like(index)
    for dim in reversed(range(rank)):
        # torch's index counts in the padded plane: split into coordinates, from the last dimension on, without the pads
        at = index % wide.shape[dim + 2] - reach[dim]
        index = torch.div(index, wide.shape[dim + 2], rounding_mode="floor")
        # the coordinate counts as often as there are elements in the dimensions that vary faster
        flat = flat + at * math.prod(lengths[:dim] if column_major else lengths[dim + 1 :])
    # ONNX counts over batch and channels
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * rank)
    return y.to(x.dtype), flat + planes * math.prod(lengths)


@lower("MaxPool", since=(1, 8, 10, 11, 12, 22))
def max_pool_(c: Call, x: Value) -> Value:
    function = for_spatial_dims(MAX_POOL, x)
    rank = x.ndim - 2
    window, pads, ceil, upper = _window(c, x)
    column_major = bool(c.attr("storage_order", 0))
    # the flat indices cost time, and are computed only where something reads the second result
    if c.wants(1):
        return c(max_pool_with_indices, x, window, pads, ceil=ceil, upper=upper, column_major=column_major)
    if pads is not None and _torch_supports(window, pads) and x.dtype.is_floating_point:
        return c(function, x, window[0], window[1], pads[:rank], window[2], ceil_mode=ceil)
    return c(max_pool, x, window, pads, ceil, upper)


def max_unpool(
    x: torch.Tensor, indices: torch.Tensor, window: Window, pads: Sequence[int], wanted: Sequence[int] | None
) -> torch.Tensor:
    """Put each element at its index in a tensor of zeros, which is padded at the ends to the wanted shape.

    x, indices: [batch, channels, *pooled lengths].
    """
    rank = x.ndim - 2
    # the length of which the window makes the pooled one: the inverse of the formula of MaxPool, without ceil_mode
    lengths = [
        (n - 1) * s - pads[dim] - pads[dim + rank] + k
        for dim, (n, k, s) in enumerate(zip(x.shape[2:], *window[:2], strict=True))
    ]
    shape = [*x.shape[:2], *lengths]
    # ONNX's indices are flat over batch and channels, torch's within each plane
    flat = x.new_zeros(math.prod(shape)).scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(shape)
    if wanted is None:
        return flat
    return pad_spatial(flat, [*[0] * x.ndim, *(b - a for a, b in zip(shape, wanted, strict=True))])


@lower("MaxUnpool", since=(9, 11, 22))
def max_unpool_(c: Call, x: Value, indices: Value, shape: Value = None) -> Value:
    rank = x.ndim - 2
    window = [c.attr("kernel_shape"), c.attr("strides", [1] * rank)]
    wanted = None if shape is None else c.ints(shape)
    return c(max_unpool, x, indices, window, c.attr("pads", [0] * 2 * rank), wanted)


# -- sums over windows


def window_sums(x: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the sum of every window of x [batch, channels, *lengths], dilated or not: a convolution with ones."""
    # each channel is a sample of its own, so that one kernel of ones serves all of them
    planes = x.reshape(-1, 1, *x.shape[2:])
    ones = x.new_ones(1, 1, *window[0])
    sums: torch.Tensor = CONV[x.ndim - 2](planes, ones, None, window[1], 0, window[2])
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def average_pool(
    x: torch.Tensor, window: Window, pads: Sequence[int] | None, *, ceil: bool, upper: bool, count_pads: bool
) -> torch.Tensor:
    """Pool x [batch, channels, *lengths] with any pads and dilations.

    What a window covers beyond the pads (ceil_mode) is never counted.
    """
    rank = x.ndim - 2
    pads, reach = _borders(x.shape[2:], window, pads, ceil, upper)
    # the number of elements in each window: pads count or not, what lies beyond them never does
    counted = pad_spatial(torch.ones_like(x[:1, :1]), pads, 1.0 if count_pads else 0.0)
    # the part of the last window that ceil_mode adds is padded by zeros, so that it counts in no sum
    beyond = [b - a for a, b in zip(pads, reach, strict=True)]
    counts = window_sums(pad_spatial(counted, beyond), window)
    # zeros add nothing to a sum: which of them count is decided by `counts` alone
    padded = pad_spatial(x, reach)
    if all(d == 1 for d in window[2]):
        means: torch.Tensor = AVERAGE_POOL[rank](padded, window[0], window[1])
        # torch's kernel divides by the size of the window; this corrects it to the number of elements that count
        return means * math.prod(window[0]) / counts
    return window_sums(padded, window) / counts


@lower("AveragePool", since=(7, 10, 11, 19, 22))
def average_pool_(c: Call, x: Value) -> Value:
    function = for_spatial_dims(AVERAGE_POOL, x)
    rank = x.ndim - 2
    window, pads, ceil, upper = _window(c, x)
    count_pads = bool(c.attr("count_include_pad", 0))
    # torch has no average over a dilated window
    dilated = any(dilation != 1 for dilation in window[2])
    if pads is not None and _torch_supports(window, pads) and not dilated:
        return c(function, x, window[0], window[1], pads[:rank], ceil, count_pads)
    return c(average_pool, x, window, pads, ceil=ceil, upper=upper, count_pads=count_pads)


def lp_norm(powers: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-th root of sums [...] of p-th powers, with a gradient of zero at zero."""
    # the root is differentiated only where it is finite: `where` would multiply inf by 0, which is NaN
    some = powers > 0
    # the inner choice keeps the root away from 0, the outer one puts the zero back
    return torch.where(some, torch.where(some, powers, 1.0).pow(1.0 / p), 0.0)


def lp_pool(
    x: torch.Tensor, p: float, window: Window, pads: Sequence[int] | None, ceil: bool, upper: bool
) -> torch.Tensor:
    """Return the p-norm of every window of x [batch, channels, *lengths]."""
    # padding by zeros adds nothing to a sum of powers
    reach = _borders(x.shape[2:], window, pads, ceil, upper)[1]
    return lp_norm(window_sums(pad_spatial(x.abs().pow(p), reach), window), p)


@lower("LpPool", since=(2, 11, 18, 22))
def lp_pool_(c: Call, x: Value) -> Value:
    for_spatial_dims(AVERAGE_POOL, x)
    window, pads, ceil, upper = _window(c, x)
    return c(lp_pool, x, c.attr("p", 2), window, pads, ceil, upper)


# -- global


@lower("GlobalAveragePool", "GlobalMaxPool", since=(1, 22))
def global_pool(c: Call, x: Value) -> Value:
    return c(torch.amax if c.op == "GlobalMaxPool" else torch.mean, x, list(range(2, x.ndim)), keepdim=True)


def global_lp_pool(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm of every plane: [batch, channels, *lengths] -> [batch, channels, 1, ...]."""
    return lp_norm(x.abs().pow(p).sum(list(range(2, x.ndim)), keepdim=True), p)


@lower("GlobalLpPool", since=(2, 22))
def global_lp_pool_(c: Call, x: Value) -> Value:
    return c(global_lp_pool, x, c.attr("p", 2))
