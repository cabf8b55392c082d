"""Convolutions, pools and resampling, in one, two and three spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from trainer.ops.table import Call, lower
from trainer.ops.tracing import Traced
from trainer.ops.values import Unsupported, Value

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _of_rank(table: dict[int, Any], x: Value) -> Any:
    if x.ndim - 2 not in table:
        raise Unsupported(f"its input has {x.ndim} dimensions; 3 to 5 are implemented")
    return table[x.ndim - 2]


def _pads(c: Call, x: Value, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Begins, then ends; worked out from the input's size for auto_pad."""
    rank, mode = len(kernel), c.attr("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return list(c.attr("pads", [0] * 2 * rank))
    c.attr("pads")
    if mode == "VALID":
        return [0] * 2 * rank
    totals = []
    for dim, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        length = c.size(x, dim + 2)
        if isinstance(length, Traced):
            if s != 1:
                raise Unsupported(f"auto_pad={mode} with stride {s} on a dynamic dimension")
            length = 1
        totals.append(max((-(-length // s) - 1) * s + (k - 1) * d + 1 - length, 0))
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return small + large if mode == "SAME_UPPER" else large + small


def _padded(c: Call, x: Value, pads: Sequence[int], fill: float = 0.0) -> Value:
    rank = len(pads) // 2
    flat = [n for dim in reversed(range(rank)) for n in (pads[dim], pads[dim + rank])]
    return c(F.pad, x, flat, "constant", fill) if any(flat) else x


def _kernel(c: Call, weight: Value) -> list[int]:
    """The kernel's lengths, which the attribute may leave to the weight's shape."""
    given = c.attr("kernel_shape")
    lengths = [c.size(weight, dim) for dim in range(2, weight.ndim)]
    if given is not None and list(given) != lengths:
        raise Unsupported(f"kernel_shape {given} is not that of the weight, {lengths}")
    return lengths


@lower("Conv", since=(1, 11, 22))
def conv(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    function, rank = _of_rank(CONV, x), x.ndim - 2
    kernel = _kernel(c, weight)
    strides, dilations = c.attr("strides", [1] * rank), c.attr("dilations", [1] * rank)
    pads = _pads(c, x, kernel, strides, dilations)
    if pads[:rank] != pads[rank:]:
        x, pads = _padded(c, x, pads), [0] * 2 * rank
    return c(function, x, weight, bias, strides, pads[:rank], dilations, c.attr("group", 1))


@lower("ConvTranspose", since=(1, 11, 22))
def conv_transpose(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    """Computed without padding, then cut: covers pads that differ, output_shape and auto_pad alike."""
    function, rank = _of_rank(CONV_TRANSPOSE, x), x.ndim - 2
    kernel = _kernel(c, weight)
    strides, dilations = c.attr("strides", [1] * rank), c.attr("dilations", [1] * rank)
    extra, mode, wanted = c.attr("output_padding", [0] * rank), c.attr("auto_pad", "NOTSET"), c.attr("output_shape")
    pads, group = list(c.attr("pads", [0] * 2 * rank)), c.attr("group", 1)
    if mode != "NOTSET" or wanted is not None:
        pads = [0] * 2 * rank
        if mode != "VALID":
            pads, extra = _transposed_pads(c, x, [kernel, strides, dilations, extra], wanted, mode)
    if pads[:rank] == pads[rank:] and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return c(function, x, weight, bias, strides, pads[:rank], extra, group, dilations)
    y = c(function, x, weight, bias, strides, [0] * rank, [0] * rank, group, dilations)
    cut = [-pads[i] if i < rank else extra[i - rank] - pads[i] for i in range(2 * rank)]
    if bias is not None and any(n > 0 for n in cut):
        raise Unsupported("output_padding beyond the stride, with a bias")
    return _padded(c, y, cut)


def _transposed_pads(
    c: Call, x: Value, lists: Sequence[Sequence[int]], wanted: Sequence[int] | None, mode: str
) -> tuple[list[int], list[int]]:
    """Pads and output padding that give the wanted lengths, or (SAME) length x stride."""
    begins, ends, extras = [], [], []
    for dim, (k, s, d, e) in enumerate(zip(*lists, strict=True)):
        length = c.size(x, dim + 2)
        if isinstance(length, Traced):
            raise Unsupported("output_shape or auto_pad on a dynamic dimension")
        target = length * s if wanted is None else wanted[-len(lists[0]) :][dim]
        total = s * (length - 1) + e + (k - 1) * d + 1 - target
        extras.append(e + max(-total, 0))
        total = max(total, 0)
        first = total // 2 if mode == "SAME_UPPER" else total - total // 2
        begins.append(first)
        ends.append(total - first)
    return begins + ends, extras


# -- pools


def _window(c: Call, x: Value) -> tuple[list[int], list[int], list[int], list[int], bool]:
    rank = x.ndim - 2
    kernel = list(c.attr("kernel_shape"))
    strides, dilations = list(c.attr("strides", [1] * rank)), list(c.attr("dilations", [1] * rank))
    return kernel, strides, dilations, _pads(c, x, kernel, strides, dilations), bool(c.attr("ceil_mode", 0))


@lower("MaxPool", since=(1, 8, 10, 11, 12, 22))
def max_pool(c: Call, x: Value) -> Value:
    c.require("storage_order", 0)
    function, rank = _of_rank(MAX_POOL, x), x.ndim - 2
    kernel, strides, dilations, pads, ceil = _window(c, x)
    if c.wants(1):
        raise Unsupported("its Indices output is used")
    if not x.dtype.is_floating_point:
        raise Unsupported("it pools integers")
    if pads[:rank] != pads[rank:] or any(2 * p > k for p, k in zip(pads, kernel * 2, strict=True)):
        if ceil:
            raise Unsupported("ceil_mode with pads that differ or exceed half the kernel")
        x, pads = _padded(c, x, pads, -math.inf), [0] * 2 * rank
    return c(function, x, kernel, strides, pads[:rank], dilations, ceil_mode=ceil)


@lower("AveragePool", since=(7, 10, 11, 19, 22))
def average_pool(c: Call, x: Value) -> Value:
    function, rank = _of_rank(AVERAGE_POOL, x), x.ndim - 2
    kernel, strides, dilations, pads, ceil = _window(c, x)
    whole = bool(c.attr("count_include_pad", 0))
    if any(d != 1 for d in dilations):
        raise Unsupported(f"dilations {dilations}")
    if pads[:rank] == pads[rank:] and all(2 * p <= k for p, k in zip(pads, kernel * 2, strict=True)):
        return c(function, x, kernel, strides, pads[:rank], ceil, whole)
    if ceil:
        raise Unsupported("ceil_mode with pads that differ or exceed half the kernel")
    pooled = c(function, _padded(c, x, pads), kernel, strides)
    if whole:
        return pooled
    ones = c(torch.ones_like, x)
    return c(torch.div, pooled, c(function, _padded(c, ones, pads), kernel, strides))


@lower("LpPool", since=(2, 11, 18, 22))
def lp_pool(c: Call, x: Value) -> Value:
    function, p = _of_rank(AVERAGE_POOL, x), c.attr("p", 2)
    kernel, strides, dilations, pads, ceil = _window(c, x)
    if ceil or any(d != 1 for d in dilations):
        raise Unsupported("ceil_mode or dilations")
    powers = _padded(c, c(torch.pow, c(torch.abs, x), p), pads)
    total = c(torch.mul, c(function, powers, kernel, strides), math.prod(kernel))
    return c(torch.pow, total, 1.0 / p)


@lower("GlobalAveragePool", since=(1, 22))
def global_average_pool(c: Call, x: Value) -> Value:
    return c(torch.mean, x, list(range(2, x.ndim)), keepdim=True)


@lower("GlobalMaxPool", since=(1, 22))
def global_max_pool(c: Call, x: Value) -> Value:
    return c(torch.amax, x, list(range(2, x.ndim)), keepdim=True)


# -- resampling


@lower("Upsample", since=(7, 9, 10))
def upsample(c: Call, x: Value, scales: Value = None) -> Value:
    factors = c.attr("scales") if scales is None else c.constant(scales).tolist()
    c.require("mode", "nearest")
    return _nearest(c, x, _sizes_from(c, x, factors), "asymmetric", "floor")


@lower("Resize", since=(11, 13, 18, 19))
def resize(c: Call, x: Value, roi: Value = None, scales: Value = None, sizes: Value = None) -> Value:
    """Nearest and linear; cubic, antialiasing and regions are refused."""
    mode, transform = c.attr("mode", "nearest"), c.attr("coordinate_transformation_mode", "half_pixel")
    rounding = c.attr("nearest_mode", "round_prefer_floor")
    c.require("antialias", 0)
    c.require("exclude_outside", 0)
    c.require("axes", None)
    c.require("keep_aspect_ratio_policy", "stretch")
    c.attr("cubic_coeff_a"), c.attr("extrapolation_value")
    if sizes is not None and not (isinstance(sizes, torch.Tensor) and sizes.numel() == 0):
        target = c.ints(sizes)
    else:
        target = _sizes_from(c, x, c.constant(scales).tolist())
    if mode == "nearest":
        return _nearest(c, x, target, transform, rounding)
    if mode != "linear" or transform not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise Unsupported(f"mode={mode!r} with coordinate_transformation_mode={transform!r}")
    if any(_same(n, c.size(x, dim)) is False for dim, n in enumerate(target[:2])) or not 3 <= x.ndim <= 5:
        raise Unsupported("linear interpolation over the batch or the channels")
    if transform == "pytorch_half_pixel" and any(not isinstance(n, Traced) and n == 1 for n in target[2:]):
        raise Unsupported("pytorch_half_pixel to length 1")
    kind = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
    return c(F.interpolate, x, target[2:], mode=kind, align_corners=transform == "align_corners")


def _same(a: Value, b: Value) -> bool | None:
    return None if isinstance(a, Traced) or isinstance(b, Traced) else bool(a == b)


def _sizes_from(c: Call, x: Value, scales: Sequence[float]) -> list[Value]:
    """Lengths times scales, rounded down; whole scales may meet dynamic lengths.

    A length that scales to a fraction is refused: ONNX then interpolates by the scale, torch by the length.
    """
    target = []
    for dim, scale in enumerate(scales):
        length = c.size(x, dim)
        if float(scale).is_integer():
            target.append(length * int(scale))
        elif isinstance(length, Traced) or not float(length * scale).is_integer():
            raise Unsupported(f"scale {scale:g} of a length it does not divide")
        else:
            target.append(int(length * scale))
    return target


def _nearest(c: Call, x: Value, target: Sequence[Value], transform: str, rounding: str) -> Value:
    for dim, length in enumerate(target):
        if _same(length, c.size(x, dim)) is True or length is c.size(x, dim):
            continue
        x = c(nearest, x, dim, length, transform, rounding)
    return x


def nearest(x: torch.Tensor, dim: int, length: int, transform: str, rounding: str) -> torch.Tensor:
    """Resample one dimension to `length` by the nearest element, in ONNX's coordinates."""
    old = x.shape[dim]
    at = torch.arange(length, dtype=torch.float64, device=x.device)
    if transform == "asymmetric":
        at = at * old / length
    elif transform == "align_corners":
        at = at * (old - 1) / max(length - 1, 1)
    elif transform == "half_pixel" or (transform == "pytorch_half_pixel" and length > 1):
        at = (at + 0.5) * old / length - 0.5
    elif transform == "pytorch_half_pixel":
        at = at * 0
    else:
        raise NotImplementedError(f"coordinate_transformation_mode={transform!r}")
    if rounding.startswith("round"):
        at = torch.ceil(at - 0.5) if rounding == "round_prefer_floor" else torch.floor(at + 0.5)
    at = torch.ceil(at) if rounding == "ceil" else torch.floor(at)
    return x.index_select(dim, at.clamp(0, old - 1).to(torch.int64))


@lower("GridSample", since=(16, 20, 22))
def grid_sample(c: Call, x: Value, grid: Value) -> Value:
    mode = c.attr("mode", "bilinear" if c.version == 16 else "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding, corners = c.attr("padding_mode", "zeros"), bool(c.attr("align_corners", 0))
    return c(F.grid_sample, x, grid, mode=mode, padding_mode=padding, align_corners=corners)
