"""Quantized arithmetic, computed exactly, through which gradients pass as if nothing had been rounded.

A quantized value is computed as the floating-point number it stands for (`levels`) and only then stored as an
integer (`cast.stored_as`). Who makes a float of it again is given the former (`cast.behind`): so gradients
reach what was quantized, but for what was clamped. Weights that the file stores as integers stay frozen.
"""

from __future__ import annotations

import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.element_types import PACKED, torch_dtype
from onward.trainer.onnx_import.ops.cast import INT_BITS, behind, is_float8, mark, stored_as, to_float4, to_float8
from onward.trainer.onnx_import.ops.conv import conv
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Traced, Value

Tensor = torch.Tensor
SINCE = (10, 13, 19, 21, 23, 24, 25, 28)

# -- to integers


@lower("QuantizeLinear", since=SINCE)
def quantize_linear(c: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    c.attr("precision")  # halves are computed in fp32
    target = c.attr("output_dtype", 0) or (TensorProto.UINT8 if zero is None else c.element_type(zero))
    where = _where(c, x)
    if target in FLOATS:
        found = c(float_levels, x, scale, zero, where, c.dtype(target), bool(c.attr("saturate", 1)))
    else:
        c.attr("saturate")  # integers always do
        found = c(levels, x, scale, zero, where, limits(target))
    return store(c, found, target)


FLOATS = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
    TensorProto.FLOAT4E2M1,
)


def limits(target: int) -> tuple[int, int]:
    """The least and the greatest integer of an element type."""
    if target in INT_BITS:
        half = 2 ** (INT_BITS[target] - 1)
        return (-half, half - 1) if target in (TensorProto.INT4, TensorProto.INT2) else (0, 2 * half - 1)
    dtype = torch_dtype(target)
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def store(c: Call, found: Value, target: int) -> Value:
    """Levels as the integers they are."""
    value = c(stored_as, found, c.dtype(target), found.dtype)
    return mark(value, target) if target in PACKED else value


Where = tuple[int, int]
"""The axis along which scales differ, and how many elements share one (0: each has its own)."""


def _where(c: Call, x: Value) -> Where:
    axis = c.attr("axis", 1)
    return (c.axis(x, axis) if -x.ndim <= axis < x.ndim else 0), c.attr("block_size", 0)


def spread(of: Tensor, x: Tensor, where: Where) -> Tensor:
    """Scales or zero points in a shape that fits x: of the tensor, of an axis, or of blocks along it."""
    axis, block = where
    if of.numel() == 1:
        return of.reshape(())
    if of.ndim == x.ndim and block:
        return of.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return of.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)])


def straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """`rounded`, with the gradient of x."""
    return rounded.detach() + (x - x.detach()) if x.requires_grad else rounded


def snap(x: Tensor, zero: Tensor | float, within: tuple[int, int]) -> Tensor:
    """The integer nearest to x (half to even), plus zero, within the limits; a gradient where they are not felt."""
    least, greatest = (torch.as_tensor(bound - zero, dtype=x.dtype, device=x.device) for bound in within)
    nearest = torch.round(x)
    found = torch.clamp(nearest, least, greatest)
    return straight_through(found, torch.where(found == nearest, x, x.detach())) + zero


def levels(x: Tensor, scale: Tensor, zero: Tensor | None, where: Where, within: tuple[int, int]) -> Tensor:
    """x / scale + zero, rounded and clamped."""
    start = 0.0 if zero is None else spread(zero, x, where).to(scale.dtype)
    return snap(x.to(scale.dtype) / spread(scale, x, where), start, within)


def float_levels(
    x: Tensor, scale: Tensor, zero: Tensor | None, where: Where, dtype: torch.dtype, saturate: bool
) -> Tensor:
    """x / scale, rounded to what 8 or 4 bits of floating point hold."""
    x = x.to(scale.dtype) / spread(scale, x, where)
    if zero is not None:
        x = x + spread(zero.to(scale.dtype), x, where)
    rounded = to_float8(x, dtype, saturate).to(x.dtype) if is_float8(dtype) else to_float4(x).to(x.dtype)
    if not x.requires_grad:
        return rounded
    greatest = torch.finfo(dtype).max if is_float8(dtype) else 6.0
    return straight_through(rounded, torch.clamp(x, -greatest, greatest))


@lower("DynamicQuantizeLinear", since=(11,))
def dynamic_quantize_linear(c: Call, x: Value) -> Value:
    found, scale, zero = c(dynamic_levels, x)
    return store(c, found, TensorProto.UINT8), scale, store(c, zero, TensorProto.UINT8)


def dynamic_levels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels of 0 to 255 over the range of x and zero, their scale, and the level of zero."""
    with torch.no_grad():
        least, greatest = x.amin().clamp(max=0), x.amax().clamp(min=0)
        scale = (greatest - least) / 255
        scale = torch.where(scale == 0, 1.0, scale).to(x.dtype)
        zero = torch.round(torch.clamp(-least / scale, 0, 255))
    return snap(x / scale, zero, (0, 255)), scale, zero


# -- from integers


@lower("DequantizeLinear", since=SINCE)
def dequantize_linear(c: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    target = c.attr("output_dtype", 0)
    y = c(dequantize, behind(c, x), scale, zero, _where(c, x))
    return c("to", y, c.dtype(target)) if target and y.dtype != c.dtype(target) else y


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None, where: Where) -> Tensor:
    """(x - zero) scale; x may be levels, too."""
    if zero is not None:
        computed_in = x.dtype if x.dtype.is_floating_point and x.dtype.itemsize > 1 else scale.dtype
        if not x.dtype.is_floating_point:
            computed_in = torch.int64 if x.dtype in (torch.int32, torch.int64) else torch.int32
        x = x.to(computed_in) - spread(zero, x, where).to(computed_in)
    return x.to(scale.dtype) * spread(scale, x, where)


# -- arithmetic of integers


def exact(num_terms: Value) -> torch.dtype:
    """A floating-point type in which sums of so many products of 8-bit differences are exact."""
    fits = not isinstance(num_terms, Traced) and num_terms * 255 * 255 <= 2**24
    return torch.float32 if fits else torch.float64


def centred(x: Tensor, zero: Tensor | None, dtype: torch.dtype, axis: int) -> Tensor:
    """x - zero, whose zero points, if there are several, are those of an axis."""
    return x.to(dtype) if zero is None else x.to(dtype) - along(zero, x, axis).to(dtype)


def along(of: Tensor, x: Tensor, axis: int) -> Tensor:
    """Of several scales or zero points in a row: in a shape that fits x."""
    if of.numel() == 1:
        return of.reshape(())
    return of if of.ndim > 1 else of.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])


@lower("MatMulInteger", since=(10,))
def matmul_integer(c: Call, a: Value, b: Value, a_zero: Value = None, b_zero: Value = None) -> Value:
    product = _product(c, (a, a_zero), (b, b_zero))
    return c(stored_as, product, torch.int32, product.dtype)


def _product(c: Call, left: tuple[Value, Value], right: tuple[Value, Value]) -> Value:
    """The matrix product of differences from zero points: of rows of the left, of columns of the right."""
    (a, a_zero), (b, b_zero) = left, right
    dtype = exact(c.size(a, -1))
    a = c(centred, behind(c, a), a_zero, dtype, -2)
    return c(torch.matmul, a, c(centred, behind(c, b), b_zero, dtype, -1))


@lower("ConvInteger", since=(10,))
def conv_integer(c: Call, x: Value, w: Value, x_zero: Value = None, w_zero: Value = None) -> Value:
    found = _convolved(c, (x, x_zero), (w, w_zero))
    return c(stored_as, found, torch.int32, found.dtype)


def _convolved(c: Call, data: tuple[Value, Value], weight: tuple[Value, Value], bias: Value = None) -> Value:
    (x, x_zero), (w, w_zero) = data, weight
    num_terms = 1
    for dim in range(1, w.ndim):
        num_terms = num_terms * c.size(w, dim)
    dtype = exact(num_terms) if bias is None else torch.float64
    x = c(centred, behind(c, x), x_zero, dtype, 1)  # padded with zeros afterwards, which are its zero points
    w = c(centred, w, w_zero, dtype, 0)
    return conv(c, x, w, None if bias is None else c("to", bias, dtype))


@lower("QLinearMatMul", since=(10, 21))
def qlinear_matmul(
    c: Call,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value,
) -> Value:
    product = _product(c, (a, a_zero), (b, b_zero))
    target = c.element_type(y_zero)
    if target in FLOATS:
        scaled = c(rescaled, product, (a_scale, -2), (b_scale, -1), y_scale)
        one = c(torch.ones_like, y_scale)
        return store(c, c(float_levels, scaled, one, y_zero, (0, 0), c.dtype(target), True), target)
    return store(c, c(requantized, product, (a_scale, -2), (b_scale, -1), (y_scale, y_zero), limits(target)), target)


@lower("QLinearConv", since=(10,))
def qlinear_conv(
    c: Call,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    y_scale: Value,
    y_zero: Value,
    bias: Value = None,
) -> Value:
    found, target = _convolved(c, (x, x_zero), (w, w_zero), bias), c.element_type(y_zero)
    return store(c, c(requantized, found, (x_scale, 1), (w_scale, 1), (y_scale, y_zero), limits(target)), target)


Scale = tuple[Tensor, int]
"""Scales, and of several in a row the axis they are those of."""


def rescaled(x: Tensor, left: Scale, right: Scale, scale: Tensor) -> Tensor:
    """A product of integers, times the scales of both sides, over the scale of the result."""
    factor = along(left[0], x, left[1]) * along(right[0], x, right[1]) / along(scale, x, -2)
    return x.to(factor.dtype) * factor


def requantized(x: Tensor, left: Scale, right: Scale, result: tuple[Tensor, Tensor], within: tuple[int, int]) -> Tensor:
    """The same as levels of the result's scale and zero point."""
    scale, zero = result
    return snap(rescaled(x, left, right, scale), along(zero, x, -2).to(scale.dtype), within)
