"""Compute quantized values as floating-point numbers; gradients pass as if nothing had been rounded.

    x --- / scale --- round, halves to even --- + zero --- clamp --- q          quantized_values
    q --- - zero --- x scale --- y                                              dequantize

These are the formulas of QuantizeLinear and DequantizeLinear (https://onnx.ai/onnx/operators/), on tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

ScaleLayout = tuple[int, int]
"""The axis along which scales differ, and the number of elements that share one (0: each index has its own)."""


def integer_bounds(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the greatest integer of a type."""
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def scale_axis(axis: int, ndim: int) -> int:
    """Return the axis of scales as a non-negative number; 0 where a tensor does not have it: one scale is for all."""
    return axis % ndim if -ndim <= axis < ndim else 0


def broadcast_scale(of: Tensor, x: Tensor, layout: ScaleLayout) -> Tensor:
    """Reshape scales or zero points to broadcast with x: one for all, for each index of an axis, or for each block."""
    axis, block = layout
    if of.numel() == 1:
        return of.reshape(())
    # each scale serves `block` elements, of which the last block may have fewer
    if of.ndim == x.ndim and block:
        return of.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return of.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)])


def straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """Return `rounded` with the gradient of x (straight-through estimator), both of one shape."""
    return rounded.detach() + (x - x.detach()) if x.requires_grad else rounded


def round_and_clamp(x: Tensor, zero: Tensor | float, bounds: tuple[int, int]) -> Tensor:
    """Round x [...] to the nearest integer (halves to even), add zero and clamp: gradient 1, and 0 where it clamps."""
    limits = []
    for bound in bounds:
        limit = bound - zero
        limits.append(limit.to(x.dtype) if isinstance(limit, Tensor) else x.new_full((), limit))
    least, greatest = limits
    # clamped before zero is added, so that a comparison with `nearest` finds what was clamped
    # torch rounds halves to even, as QuantizeLinear does
    nearest = torch.round(x)
    clamped = torch.clamp(nearest, least, greatest)
    return straight_through(clamped, torch.where(clamped == nearest, x, x.detach())) + zero


def quantized_values(
    x: Tensor, scale: Tensor, zero: Tensor | None, layout: ScaleLayout, bounds: tuple[int, int]
) -> Tensor:
    """Return x / scale + zero, rounded and clamped, in the shape of x. scale, zero: see `broadcast_scale`."""
    start = 0.0 if zero is None else broadcast_scale(zero, x, layout).to(scale.dtype)
    return round_and_clamp(x.to(scale.dtype) / broadcast_scale(scale, x, layout), start, bounds)


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None, layout: ScaleLayout) -> Tensor:
    """Return (x - zero) scale, in the shape of x; x is an integer tensor, or its value before storage."""
    # integers are subtracted as integers, wide enough not to wrap around
    if zero is not None:
        computed_in = x.dtype if x.dtype.is_floating_point and x.dtype.itemsize > 1 else scale.dtype
        if not x.dtype.is_floating_point:
            computed_in = torch.int64 if x.dtype in (torch.int32, torch.int64) else torch.int32
        x = x.to(computed_in) - broadcast_scale(zero, x, layout).to(computed_in)
    return x.to(scale.dtype) * broadcast_scale(scale, x, layout)
