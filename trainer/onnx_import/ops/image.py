"""Rules for the resampling of images: Resize, Upsample, GridSample, AffineGrid, CenterCropPad.

Resize computes, for each new element, a coordinate in the old axis (`source_coordinates`), and interpolates there:

    old axis, length 4      0     1     2     3
    new axis, length 2         0.5         2.5        half_pixel: (i + 0.5) / scale - 0.5, scale 0.5
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.fixed_batch.batch_constants import kept_lengths
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value


class Interpolation(NamedTuple):
    """The attributes of Resize that say how the input is interpolated."""

    mode: str = "nearest"
    coordinate_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation_value: float = 0.0
    """The value outside the image (tf_crop_and_resize)."""


class ResizeTarget(NamedTuple):
    """The axes to resize, by scales or else to lengths that are given at run time."""

    axes: tuple[int, ...]
    scales: tuple[float, ...] | None = None
    policy: str = "stretch"
    roi: tuple[float, ...] | None = None
    """Starts, then ends, of each axis, as fractions of its length (tf_crop_and_resize)."""


AxisResize = tuple[int, int, float]
"""(axis, new length, scale)."""


def round_to_fp32(x: float) -> float:
    """Round to the 24 bits of fp32 by Dekker's splitting (1971): torch.compile can trace it, unlike a conversion."""
    shifted = x * (2**29 + 1)
    return shifted - (shifted - x)


def axis_resizes(shape: Sequence[int], target: ResizeTarget, lengths: Sequence[int] | None) -> list[AxisResize]:
    """Return the axes that change. A scaled length is rounded down in fp32, as runtimes do: 10 x 0.7 is 7."""
    olds = [shape[axis] for axis in target.axes]
    if target.scales is not None:
        scales = list(target.scales)
        # scales are fp32 in the file: in fp64, 10 x 0.7 would be a little less than 7
        news = [math.floor(round_to_fp32(old * s)) for old, s in zip(olds, scales, strict=True)]
    else:
        assert lengths is not None
        news = list(lengths)
        scales = [new / old for new, old in zip(lengths, olds, strict=True)]
        if target.policy != "stretch":
            # one scale for all axes keeps the aspect ratio, and the lengths are rounded again
            scales = [min(scales) if target.policy == "not_larger" else max(scales)] * len(scales)
            news = [math.floor(s * old + 0.5) for s, old in zip(scales, olds, strict=True)]
    resizes = list(zip(target.axes, news, scales, strict=True))
    # a region reads other elements even where the length stays
    if target.roi is not None:
        return resizes
    return [(axis, new, scale) for axis, new, scale in resizes if (new, scale) != (shape[axis], 1)]


def resize(
    x: torch.Tensor, target: ResizeTarget, lengths: Sequence[int] | None, options: Interpolation
) -> torch.Tensor:
    """Resize x [batch, channels, ...] by torch's kernel where it computes the same, else one axis after the other."""
    resizes = axis_resizes(x.shape, target, lengths)
    if (kernel := torch_mode(x, resizes, options)) is not None:
        news = {axis: new for axis, new, _ in resizes}
        wanted = [news.get(axis, x.shape[axis]) for axis in range(2, x.ndim)]
        corners = None if kernel == "nearest" else options.coordinate_mode == "align_corners"
        return F.interpolate(x, wanted, mode=kernel, align_corners=corners)
    y = x if x.is_floating_point() or options.mode == "nearest" else x.to(torch.float32)
    # tf_crop_and_resize may read outside of the image; these elements get extrapolation_value
    inside = torch.ones([1] * x.ndim, dtype=torch.bool, device=x.device)
    for axis, new, scale in resizes:
        part = None
        if target.roi is not None:
            i = target.axes.index(axis)
            count = len(target.axes)
            part = (target.roi[i], target.roi[i + count])
        at = source_coordinates(x.shape[axis], new, scale, options.coordinate_mode, part, x.device)
        if options.coordinate_mode == "tf_crop_and_resize":
            within = (at >= 0) & (at <= x.shape[axis] - 1)
            inside = inside & within.reshape([-1] + [1] * (x.ndim - 1 - axis))
        interpolate = interpolate_nearest if options.mode == "nearest" else interpolate_weighted
        y = interpolate(y, axis, at, scale, options)
    if options.coordinate_mode == "tf_crop_and_resize":
        y = torch.where(inside, y, options.extrapolation_value)
    return y.to(x.dtype)


def torch_mode(x: torch.Tensor, resizes: Sequence[AxisResize], options: Interpolation) -> str | None:
    """Return the mode of `F.interpolate` that computes the same; None if there is none."""
    if not x.is_floating_point() or not 3 <= x.ndim <= 5:
        return None
    if options.antialias or options.exclude_outside:
        return None
    # torch computes coordinates from the lengths alone: a scale that a rounded length does not have would be lost
    exact = all(axis >= 2 and new == x.shape[axis] * scale for axis, new, scale in resizes)
    if not resizes or not exact:
        return None
    coordinates = options.coordinate_mode
    if options.mode == "nearest":
        # torch multiplies by 1 / scale, which is exact for powers of two
        powers = all(scale in (1, 2, 4, 8) for _, _, scale in resizes)
        is_floor = (coordinates, options.nearest_mode) == ("asymmetric", "floor")
        return "nearest" if powers and is_floor else None
    if coordinates == "pytorch_half_pixel":
        # of a single element `source_coordinates` is 0, torch's the middle
        same = all(new > 1 for _, new, _ in resizes)
    else:
        same = coordinates in ("half_pixel", "half_pixel_symmetric", "align_corners")
    if not same:
        return None
    if options.mode == "cubic":
        # it interpolates both spatial axes; one that does not change is read exactly
        return "bicubic" if x.ndim == 4 and options.cubic_coeff_a == -0.75 else None
    return {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]


def source_coordinates(
    old: int, new: int, scale: float, coordinates: str, part: tuple[float, float] | None, device: torch.device
) -> torch.Tensor:
    """Return the old coordinate of each new element [new], in fp32 as in runtimes, so that ties are rounded alike."""
    at = torch.arange(new, dtype=torch.float32, device=device)
    step = torch.full_like(at, scale)  # a tensor, because torch multiplies by the inverse of a number
    width = scale * old  # not rounded, by ONNX; onnxruntime uses the new length
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


def interpolate_nearest(
    x: torch.Tensor, axis: int, at: torch.Tensor, scale: float, options: Interpolation
) -> torch.Tensor:
    """Resize one axis by the nearest element. at: [new length], coordinates in the old axis."""
    rounding = options.nearest_mode
    if rounding == "simple":  # version 10 does not define it; runtimes take the later element when they shrink
        rounding = "ceil" if scale < 1 else "floor"
    if rounding.startswith("round"):
        at = torch.ceil(at - 0.5) if rounding == "round_prefer_floor" else torch.floor(at + 0.5)
    at = torch.ceil(at) if rounding == "ceil" else torch.floor(at)
    return x.index_select(axis, at.clamp(0, x.shape[axis] - 1).to(torch.int64))


def interpolate_weighted(
    x: torch.Tensor, axis: int, at: torch.Tensor, scale: float, options: Interpolation
) -> torch.Tensor:
    """Resize one axis by weighted means of neighbours; beyond its ends the last element is repeated.

    at: [new length], coordinates in the old axis.
    """
    reach = 1 if options.mode == "linear" else 2
    # antialiasing widens the filter when the axis shrinks
    stretch = min(scale, 1.0) if options.antialias else 1.0
    first = math.floor(-reach / stretch) + 1
    base = torch.floor(at)
    weights = []
    for step in range(first, 2 - first):
        weight = filter_weight(((step - (at - base)) * stretch).abs(), options)
        place = base + step
        if options.exclude_outside:
            weight = torch.where((place >= 0) & (place <= x.shape[axis] - 1), weight, 0.0)
        weights.append((place, weight))
    # without exclusion and antialiasing the weights sum to 1 by construction
    total = sum((weight for _, weight in weights), torch.zeros_like(at))
    terms = []
    for place, weight in weights:
        if options.exclude_outside or options.antialias:
            weight = weight / total
        rows = x.index_select(axis, place.clamp(0, x.shape[axis] - 1).to(torch.int64))
        terms.append(rows * weight.to(x.dtype).reshape([-1] + [1] * (x.ndim - 1 - axis)))
    return functools.reduce(torch.add, terms)


def filter_weight(distance: torch.Tensor, options: Interpolation) -> torch.Tensor:
    """Return the weights of elements at distances [n]: a triangle, or the cubic convolution of Keys (1981)."""
    if options.mode == "linear":
        return (1 - distance).clamp_min(0)
    a = options.cubic_coeff_a
    d = distance
    # Horner's form of the two cubic polynomials, for distances up to 1 and up to 2
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))


@lower("Resize", since=(10,))
@lower("Upsample", since=(7, 9, 10))
def upsample(c: Call, x: Value, scales: Value = None) -> Value:
    given = c.attr("scales") if scales is None else c.constant(scales).tolist()
    options = Interpolation(_mode(c), "asymmetric", "simple")
    return _resized(c, x, ResizeTarget(tuple(range(x.ndim)), tuple(given)), None, options)


@lower("Resize", since=(11, 13, 18, 19))
def resize_(c: Call, x: Value, region: Value = None, scales: Value = None, sizes: Value = None) -> Value:
    options = Interpolation(
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
    # other modes ignore the region, which may then be anything
    cropped = options.coordinate_mode == "tf_crop_and_resize"
    part = tuple(c.constant(region).tolist()) if cropped else None
    # the operand that is not used may be an empty constant in place of a missing one
    if sizes is not None and not (isinstance(sizes, torch.Tensor) and sizes.numel() == 0):
        lengths = kept_lengths(c, x, axes, c.ints(sizes))
        return _resized(c, x, ResizeTarget(axes, None, policy, part), lengths, options)
    return _resized(c, x, ResizeTarget(axes, tuple(c.constant(scales).tolist()), "stretch", part), None, options)


def _mode(c: Call) -> str:
    c.require("mode", "nearest", "linear", "cubic", "bilinear")
    mode: str = c.attr("mode", "nearest")
    return "linear" if mode == "bilinear" else mode


def _resized(c: Call, x: Value, target: ResizeTarget, lengths: list[Value] | None, options: Interpolation) -> Value:
    if lengths is not None and target.policy == "stretch":  # omit an axis that keeps its dynamic length
        kept = [i for i, axis in enumerate(target.axes) if lengths[i] is not c.size(x, axis)]
        if target.roi is None and len(kept) < len(target.axes):
            target = target._replace(axes=tuple(target.axes[i] for i in kept))
            lengths = [lengths[i] for i in kept]
    # a scale of 1 leaves its axis as it is: one less axis to resize
    if target.scales is not None and target.roi is None:
        changed = [i for i, scale in enumerate(target.scales) if scale != 1]
        axes = tuple(target.axes[i] for i in changed)
        scales = tuple(target.scales[i] for i in changed)
        target = target._replace(axes=axes, scales=scales)
    return c(resize, x, target, lengths, options)


# -- grids


@lower("GridSample", since=(16, 20, 22))
def grid_sample(c: Call, x: Value, grid: Value) -> Value:
    mode = c.attr("mode", "bilinear" if c.version == 16 else "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding = c.attr("padding_mode", "zeros")
    corners = bool(c.attr("align_corners", 0))
    return c(F.grid_sample, x, grid, mode=mode, padding_mode=padding, align_corners=corners)


@lower("AffineGrid", since=(20,))
def affine_grid(c: Call, theta: Value, size: Value) -> Value:
    return c(F.affine_grid, theta, c.ints(size), align_corners=bool(c.attr("align_corners", 0)))


# -- cropping and padding to a size


def crop_or_pad(x: torch.Tensor, axes: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Crop or pad axes of x with zeros at both ends to lengths; of an odd difference, the larger half at the end."""
    pads = [0] * 2 * x.ndim
    for axis, length in zip(axes, lengths, strict=True):
        extra = length - x.shape[axis]
        before = extra // 2 if extra > 0 else -(-extra // 2)
        pads[2 * (x.ndim - 1 - axis)], pads[2 * (x.ndim - 1 - axis) + 1] = before, extra - before
    return F.pad(x, pads)


@lower("CenterCropPad", since=(18,))
def center_crop_pad(c: Call, x: Value, shape: Value) -> Value:
    axes = [c.axis(x, axis) for axis in c.attr("axes", list(range(x.ndim)))]
    return c(crop_or_pad, x, axes, c.ints(shape))
