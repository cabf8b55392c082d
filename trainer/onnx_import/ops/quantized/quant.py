"""Rules for quantized arithmetic, computed exactly; gradients pass as if nothing had been rounded.

    x --- QuantizeLinear --- DequantizeLinear --- y                      the file

    x --- quantized_values (float) --- dequantize --- y                  the graph; backward: the gradient of x
                      `--- store_as (uint8) --- other readers

A quantized value is computed as a floating-point number (`quantized_values`) and only then stored as an integer
(`store_as`). An operator that makes a float of it again reads the first (integer_storage.py), so that
gradients reach x, except where it was clamped. Weights that the file stores as integers: quantized_weights.py.
"""

from __future__ import annotations

import math

import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.files.element_types import PACKED, torch_dtype
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.lowering.integer_storage import before_storage, store_as
from onward.trainer.onnx_import.ops.cast import (
    INT_BITS,
    is_float8,
    mark_packed,
    to_float4,
    to_float8,
)
from onward.trainer.onnx_import.ops.conv import conv
from onward.trainer.onnx_import.scaled_values import (
    ScaleLayout,
    broadcast_scale,
    dequantize,
    integer_bounds,
    quantized_values,
    round_and_clamp,
    scale_axis,
    straight_through,
)
from onward.trainer.onnx_import.tracing.values import Traced, Value

Tensor = torch.Tensor
SINCE = (10, 13, 19, 21, 23, 24, 25, 28)

# -- to integers


@lower("QuantizeLinear", since=SINCE)
def quantize_linear(c: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    c.attr("precision")  # half precision is computed in fp32
    target = c.attr("output_dtype", 0) or (TensorProto.UINT8 if zero is None else c.element_type(zero))
    # where the scales differ: along an axis, in blocks along it, or nowhere
    layout = _scale_layout(c, x)
    if target in SMALL_FLOATS:
        levels = c(float_quantized_values, x, scale, zero, layout, c.dtype(target), bool(c.attr("saturate", 1)))
    else:
        c.attr("saturate")  # integers always do
        levels = c(quantized_values, x, scale, zero, layout, integer_range(target))
    return store_integers(c, levels, target)


SMALL_FLOATS = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
    TensorProto.FLOAT4E2M1,
)


def integer_range(target: int) -> tuple[int, int]:
    """Return the smallest and the largest integer of an element type."""
    if target in INT_BITS:
        half = 2 ** (INT_BITS[target] - 1)
        return (-half, half - 1) if target in (TensorProto.INT4, TensorProto.INT2) else (0, 2 * half - 1)
    return integer_bounds(torch_dtype(target))


def store_integers(c: Call, found: Value, target: int) -> Value:
    """Convert quantized values to the integer type of the file."""
    value = c(store_as, found, c.dtype(target), found.dtype)
    return mark_packed(value, target) if target in PACKED else value


def _scale_layout(c: Call, x: Value) -> ScaleLayout:
    return scale_axis(c.attr("axis", 1), x.ndim), c.attr("block_size", 0)


def float_quantized_values(
    x: Tensor, scale: Tensor, zero: Tensor | None, layout: ScaleLayout, dtype: torch.dtype, saturate: bool
) -> Tensor:
    """Return x / scale, rounded to a floating-point type of 8 or 4 bits, in the shape of x."""
    x = x.to(scale.dtype) / broadcast_scale(scale, x, layout)
    if zero is not None:
        x = x + broadcast_scale(zero.to(scale.dtype), x, layout)
    # rounded as the type does, and kept as a float: gradients pass it
    rounded = to_float8(x, dtype, saturate).to(x.dtype) if is_float8(dtype) else to_float4(x).to(x.dtype)
    if not x.requires_grad:
        return rounded
    # clamped for its gradient, which is 0 beyond the greatest value
    greatest = torch.finfo(dtype).max if is_float8(dtype) else 6.0
    return straight_through(rounded, torch.clamp(x, -greatest, greatest))


@lower("DynamicQuantizeLinear", since=(11,))
def dynamic_quantize_linear(c: Call, x: Value) -> Value:
    found, scale, zero = c(dynamic_quantized_values, x)
    return store_integers(c, found, TensorProto.UINT8), scale, store_integers(c, zero, TensorProto.UINT8)


def dynamic_quantized_values(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [...] quantized to 0..255 over the range of x and 0, the scale, and the zero point: both scalars."""
    # the range is data, not a function to differentiate
    with torch.no_grad():
        # the range contains 0, so that 0 is stored exactly: padding and ReLU give it often
        least = x.amin().clamp(max=0)
        greatest = x.amax().clamp(min=0)
        scale = (greatest - least) / 255
        scale = torch.where(scale == 0, 1.0, scale).to(x.dtype)
        zero = torch.round(torch.clamp(-least / scale, 0, 255))
    return round_and_clamp(x / scale, zero, (0, 255)), scale, zero


# -- from integers


@lower("DequantizeLinear", since=SINCE)
def dequantize_linear(c: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    target = c.attr("output_dtype", 0)
    # the value before it was stored as an integer, through which gradients pass
    y = c(dequantize, before_storage(x), scale, zero, _scale_layout(c, x))
    return c("to", y, c.dtype(target)) if target and y.dtype != c.dtype(target) else y


# -- arithmetic of integers


def exact_dtype(num_terms: Value) -> torch.dtype:
    """Return a floating-point type in which sums of so many products of 8-bit differences are exact.

    fp32 represents every integer up to 2^24, fp64 up to 2^53.
    """
    fits = not isinstance(num_terms, Traced) and num_terms * 255 * 255 <= 2**24
    return torch.float32 if fits else torch.float64


def subtract_zero_point(x: Tensor, zero: Tensor | None, dtype: torch.dtype, axis: int) -> Tensor:
    """Return x - zero, in the shape of x; several zero points are one for each index of an axis."""
    return x.to(dtype) if zero is None else x.to(dtype) - broadcast_along(zero, x, axis).to(dtype)


def broadcast_along(of: Tensor, x: Tensor, axis: int) -> Tensor:
    """Reshape one scale or zero point for each index of an axis to broadcast with x."""
    if of.numel() == 1:
        return of.reshape(())
    if of.ndim > 1:  # it broadcasts as it is
        return of
    return of.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])


@lower("MatMulInteger", since=(10,))
def matmul_integer(c: Call, a: Value, b: Value, a_zero: Value = None, b_zero: Value = None) -> Value:
    product = _product(c, (a, a_zero), (b, b_zero))
    return c(store_as, product, torch.int32, product.dtype)


def _product(c: Call, left: tuple[Value, Value], right: tuple[Value, Value]) -> Value:
    """Multiply (a - a_zero) by (b - b_zero): zero points for each row of a, for each column of b."""
    (a, a_zero), (b, b_zero) = left, right
    # each element of the product is a sum over the last axis of a
    dtype = exact_dtype(c.size(a, -1))
    a = c(subtract_zero_point, before_storage(a), a_zero, dtype, -2)
    return c(torch.matmul, a, c(subtract_zero_point, before_storage(b), b_zero, dtype, -1))


@lower("ConvInteger", since=(10,))
def conv_integer(c: Call, x: Value, w: Value, x_zero: Value = None, w_zero: Value = None) -> Value:
    found = _convolved(c, (x, x_zero), (w, w_zero))
    return c(store_as, found, torch.int32, found.dtype)


def _convolved(c: Call, data: tuple[Value, Value], weight: tuple[Value, Value], bias: Value = None) -> Value:
    (x, x_zero), (w, w_zero) = data, weight
    # each output is a sum over the channels of a group and the taps of the kernel
    num_terms = math.prod(c.sizes(w)[1:])
    # a bias is int32, of which fp32 represents only those up to 2^24
    dtype = exact_dtype(num_terms) if bias is None else torch.float64
    x = c(subtract_zero_point, before_storage(x), x_zero, dtype, 1)  # before padding: 0 is the zero point then
    w = c(subtract_zero_point, before_storage(w), w_zero, dtype, 0)
    return conv(c, x, w, None if bias is None else c("to", before_storage(bias), dtype))


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
    if target in SMALL_FLOATS:
        scaled = c(rescale, product, (a_scale, -2), (b_scale, -1), y_scale)
        # the product is scaled already: the result is rounded with the scale 1
        one = c(torch.ones_like, y_scale)
        return store_integers(c, c(float_quantized_values, scaled, one, y_zero, (0, 0), c.dtype(target), True), target)
    return store_integers(
        c, c(requantize, product, (a_scale, -2), (b_scale, -1), (y_scale, y_zero), integer_range(target)), target
    )


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
    products = _convolved(c, (x, x_zero), (w, w_zero), bias)
    target = c.element_type(y_zero)
    return store_integers(
        c, c(requantize, products, (x_scale, 1), (w_scale, 1), (y_scale, y_zero), integer_range(target)), target
    )


Scale = tuple[Tensor, int]
"""Scales, and their axis if there are several."""


def rescale(x: Tensor, left: Scale, right: Scale, scale: Tensor) -> Tensor:
    """Multiply a product of integers [...] by the scales of both factors, and divide it by that of the result."""
    factor = (
        broadcast_along(left[0], x, left[1]) * broadcast_along(right[0], x, right[1]) / broadcast_along(scale, x, -2)
    )
    return x.to(factor.dtype) * factor


def requantize(x: Tensor, left: Scale, right: Scale, result: tuple[Tensor, Tensor], bounds: tuple[int, int]) -> Tensor:
    """Rescale a product of integers [...], and round and clamp it to the result's type."""
    scale, zero = result
    return round_and_clamp(rescale(x, left, right, scale), broadcast_along(zero, x, -2).to(scale.dtype), bounds)
