"""Resampling of images: Resize, Upsample, and reading at the points of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Value


class Reading(NamedTuple):
    """How the input is read, in the words of ONNX's attributes."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    beyond: float = 0.0
    """The value outside the image (tf_crop_and_resize)."""


class Target(NamedTuple):
    """What is to be reached along each of some axes: by scales, else by lengths given at run time."""

    axes: tuple[int, ...]
    scales: tuple[float, ...] | None = None
    policy: str = "stretch"
    region: tuple[float, ...] | None = None
    """Begins, then ends, as shares of the lengths."""


Step = tuple[int, int, float]
"""(axis, new length, scale)"""


def in_fp32(x: float) -> float:
    """Rounded to 24 bits (Dekker 1971): arithmetic, which torch.compile can follow, unlike a conversion."""
    spread = x * (2**29 + 1)
    return spread - (spread - x)


def steps_to(shape: Sequence[int], target: Target, lengths: Sequence[int] | None) -> list[Step]:
    """The axes that change. A scaled length is rounded down in fp32, as runtimes do: 10 x 0.7 is 7."""
    olds = [shape[axis] for axis in target.axes]
    if target.scales is not None:
        scales = list(target.scales)
        news = [math.floor(in_fp32(old * s)) for old, s in zip(olds, scales, strict=True)]
    else:
        assert lengths is not None
        news, scales = list(lengths), [new / old for new, old in zip(lengths, olds, strict=True)]
        if target.policy != "stretch":
            scales = [min(scales) if target.policy == "not_larger" else max(scales)] * len(scales)
            news = [math.floor(s * old + 0.5) for s, old in zip(scales, olds, strict=True)]
    steps = zip(target.axes, news, scales, strict=True)
    return [s for s in steps if s[1] != shape[s[0]] or s[2] != 1 or target.region is not None]


def resize(x: torch.Tensor, target: Target, lengths: Sequence[int] | None, how: Reading) -> torch.Tensor:
    """torch's kernel where it computes the same, else one axis after the other."""
    steps = steps_to(x.shape, target, lengths)
    if (kernel := torch_mode(x, steps, how)) is not None:
        news = {axis: new for axis, new, _ in steps}
        wanted = [news.get(axis, x.shape[axis]) for axis in range(2, x.ndim)]
        corners = None if kernel == "nearest" else how.coordinates == "align_corners"
        return F.interpolate(x, wanted, mode=kernel, align_corners=corners)
    y = x if x.is_floating_point() or how.mode == "nearest" else x.to(torch.float32)
    inside = torch.ones([1] * x.ndim, dtype=torch.bool, device=x.device)
    for axis, new, scale in steps:
        part = None
        if target.region is not None:
            i, count = target.axes.index(axis), len(target.axes)
            part = (target.region[i], target.region[i + count])
        at = source(x.shape[axis], new, scale, how.coordinates, part, x.device)
        if how.coordinates == "tf_crop_and_resize":
            within = (at >= 0) & (at <= x.shape[axis] - 1)
            inside = inside & within.reshape([-1] + [1] * (x.ndim - 1 - axis))
        y = nearest_along(y, axis, at, scale, how) if how.mode == "nearest" else weighted_along(y, axis, at, scale, how)
    if how.coordinates == "tf_crop_and_resize":
        y = torch.where(inside, y, how.beyond)
    return y.to(x.dtype)


def torch_mode(x: torch.Tensor, steps: Sequence[Step], how: Reading) -> str | None:
    """The mode of `F.interpolate` that computes the same, if there is one."""
    if not x.is_floating_point() or not 3 <= x.ndim <= 5 or how.antialias or how.exclude_outside:
        return None
    if not steps or any(axis < 2 or new != x.shape[axis] * scale for axis, new, scale in steps):
        return None
    if how.mode == "nearest":
        doubles = all(scale in (1, 2, 4, 8) for _, _, scale in steps)  # torch multiplies by 1/scale: exact for these
        return "nearest" if doubles and (how.coordinates, how.rounding) == ("asymmetric", "floor") else None
    known = how.coordinates in ("half_pixel", "half_pixel_symmetric", "align_corners") or (
        how.coordinates == "pytorch_half_pixel" and all(new > 1 for _, new, _ in steps)
    )
    if not known:
        return None
    if how.mode == "cubic":
        # it reads every spatial axis by its weights, and those it leaves as they are exactly
        return "bicubic" if x.ndim == 4 and how.cubic == -0.75 else None
    return {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]


def source(
    old: int, new: int, scale: float, coordinates: str, part: tuple[float, float] | None, device: torch.device
) -> torch.Tensor:
    """Where each new element is read, as a coordinate of the old ones, in fp32 like runtimes: ties fall alike."""
    at = torch.arange(new, dtype=torch.float32, device=device)
    step = torch.full_like(at, scale)  # a tensor, because torch multiplies by the inverse of a number
    width = scale * old  # not rounded, as ONNX has it; onnxruntime takes the new length
    if coordinates == "asymmetric":
        return at / step
    if coordinates == "align_corners":
        return at * (old - 1) / (width - 1) if width != 1 else at * 0
    if coordinates == "tf_crop_and_resize":
        assert part is not None
        first, last = part
        if width == 1:
            return at * 0 + 0.5 * (first + last) * (old - 1)
        return first * (old - 1) + at * (last - first) * (old - 1) / (width - 1)
    if coordinates == "pytorch_half_pixel" and new <= 1:
        return at * 0
    shift = old / 2 * (1 - new / width) if coordinates == "half_pixel_symmetric" else 0.0
    return shift + (at + 0.5) / step - 0.5


def nearest_along(x: torch.Tensor, axis: int, at: torch.Tensor, scale: float, how: Reading) -> torch.Tensor:
    """Read one axis at the nearest elements."""
    rounding = how.rounding
    if rounding == "simple":  # version 10 leaves it open; runtimes keep the later element when they shrink
        rounding = "ceil" if scale < 1 else "floor"
    if rounding.startswith("round"):
        at = torch.ceil(at - 0.5) if rounding == "round_prefer_floor" else torch.floor(at + 0.5)
    at = torch.ceil(at) if rounding == "ceil" else torch.floor(at)
    return x.index_select(axis, at.clamp(0, x.shape[axis] - 1).to(torch.int64))


def weighted_along(x: torch.Tensor, axis: int, at: torch.Tensor, scale: float, how: Reading) -> torch.Tensor:
    """Read one axis as weighted means of its neighbours; beyond the ends, of the last element."""
    reach = 1 if how.mode == "linear" else 2
    stretch = min(scale, 1.0) if how.antialias else 1.0
    first = math.floor(-reach / stretch) + 1
    base = torch.floor(at)
    weights = []
    for step in range(first, 2 - first):
        weight = kernel(((step - (at - base)) * stretch).abs(), how)
        place = base + step
        if how.exclude_outside:
            weight = torch.where((place >= 0) & (place <= x.shape[axis] - 1), weight, 0.0)
        weights.append((place, weight))
    total = sum((weight for _, weight in weights), torch.zeros_like(at))
    y = None
    for place, weight in weights:
        if how.exclude_outside or how.antialias:
            weight = weight / total
        rows = x.index_select(axis, place.clamp(0, x.shape[axis] - 1).to(torch.int64))
        term = rows * weight.to(x.dtype).reshape([-1] + [1] * (x.ndim - 1 - axis))
        y = term if y is None else y + term
    assert y is not None
    return y


def kernel(distance: torch.Tensor, how: Reading) -> torch.Tensor:
    """The weight of an element at this distance: a triangle, or the cubic convolution of Keys (1981)."""
    if how.mode == "linear":
        return (1 - distance).clamp_min(0)
    a, d = how.cubic, distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))


@lower("Upsample", since=(7, 9, 10))
def upsample(c: Call, x: Value, scales: Value = None) -> Value:
    given = c.attr("scales") if scales is None else c.constant(scales).tolist()
    how = Reading(_mode(c), "asymmetric", "simple")
    return _resized(c, x, Target(tuple(range(x.ndim)), tuple(given)), None, how)


@lower("Resize", since=(10,))
def resize_10(c: Call, x: Value, scales: Value) -> Value:
    how = Reading(_mode(c), "asymmetric", "simple")
    return _resized(c, x, Target(tuple(range(x.ndim)), tuple(c.constant(scales).tolist())), None, how)


@lower("Resize", since=(11, 13, 18, 19))
def resize_11(c: Call, x: Value, region: Value = None, scales: Value = None, sizes: Value = None) -> Value:
    how = Reading(
        _mode(c),
        c.attr("coordinate_transformation_mode", "half_pixel"),
        c.attr("nearest_mode", "round_prefer_floor"),
        c.attr("cubic_coeff_a", -0.75),
        bool(c.attr("exclude_outside", 0)),
        bool(c.attr("antialias", 0)),
        c.attr("extrapolation_value", 0.0),
    )
    axes = tuple(c.axis(x, axis) for axis in c.attr("axes", range(x.ndim)))
    policy = c.attr("keep_aspect_ratio_policy", "stretch")
    cropped = how.coordinates == "tf_crop_and_resize"
    part = tuple(c.constant(region).tolist()) if cropped else None
    if sizes is not None and not (isinstance(sizes, torch.Tensor) and sizes.numel() == 0):
        return _resized(c, x, Target(axes, None, policy, part), c.ints(sizes), how)
    return _resized(c, x, Target(axes, tuple(c.constant(scales).tolist()), "stretch", part), None, how)


def _mode(c: Call) -> str:
    c.require("mode", "nearest", "linear", "cubic", "bilinear")
    mode: str = c.attr("mode", "nearest")
    return "linear" if mode == "bilinear" else mode


def _resized(c: Call, x: Value, target: Target, lengths: list[Value] | None, how: Reading) -> Value:
    if lengths is not None and target.policy == "stretch":  # an axis that keeps its dynamic length is left out
        kept = [i for i, axis in enumerate(target.axes) if lengths[i] is not c.size(x, axis)]
        if target.region is None and len(kept) < len(target.axes):
            target = target._replace(axes=tuple(target.axes[i] for i in kept))
            lengths = [lengths[i] for i in kept]
    if target.scales is not None and target.region is None:
        changed = [i for i, scale in enumerate(target.scales) if scale != 1]
        axes, scales = tuple(target.axes[i] for i in changed), tuple(target.scales[i] for i in changed)
        target = target._replace(axes=axes, scales=scales)
    return c(resize, x, target, lengths, how)


# -- grids


@lower("GridSample", since=(16, 20, 22))
def grid_sample(c: Call, x: Value, grid: Value) -> Value:
    mode = c.attr("mode", "bilinear" if c.version == 16 else "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding, corners = c.attr("padding_mode", "zeros"), bool(c.attr("align_corners", 0))
    return c(F.grid_sample, x, grid, mode=mode, padding_mode=padding, align_corners=corners)


@lower("AffineGrid", since=(20,))
def affine_grid(c: Call, theta: Value, size: Value) -> Value:
    return c(F.affine_grid, theta, c.ints(size), align_corners=bool(c.attr("align_corners", 0)))


# -- cutting and padding to a size


def centre(x: torch.Tensor, axes: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Cut or pad with zeros at both ends; of an odd difference the larger half at the end."""
    pads = [0] * 2 * x.ndim
    for axis, length in zip(axes, lengths, strict=True):
        extra = length - x.shape[axis]
        before = extra // 2 if extra > 0 else -(-extra // 2)
        pads[2 * (x.ndim - 1 - axis)], pads[2 * (x.ndim - 1 - axis) + 1] = before, extra - before
    return F.pad(x, pads)


@lower("CenterCropPad", since=(18,))
def center_crop_pad(c: Call, x: Value, shape: Value) -> Value:
    axes = [c.axis(x, axis) for axis in c.attr("axes", list(range(x.ndim)))]
    return c(centre, x, axes, c.ints(shape))
