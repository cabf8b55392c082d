"""Rules for the operators on 8-bit integers that onnxruntime's quantizers and optimisers write (com.microsoft).

    QLinearAdd(A, a_scale, a_zero, B, b_scale, b_zero, y_scale, y_zero)

    A --- dequantize ---.
                        Add --- quantized_values --- store_as --- y
    B --- dequantize ---'

Every operator is computed on floats between `dequantize` and `quantized_values`, with their gradients
(onnx_import/scaled_values.py).
QLinearConv is ONNX's own, in the domain of onnxruntime also with channels last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.lowering.integer_storage import before_storage, move_before_storage
from onward.trainer.onnx_import.ops.contributed.contrib import attend_packed
from onward.trainer.onnx_import.ops.matmul import gemm
from onward.trainer.onnx_import.ops.norm import over_trailing_axes
from onward.trainer.onnx_import.ops.pool import average_pool_
from onward.trainer.onnx_import.ops.quantized.quant import (
    dequantize_linear,
    dynamic_quantized_values,
    integer_range,
    qlinear_conv,
    quantize_linear,
    store_integers,
)
from onward.trainer.onnx_import.scaled_values import dequantize, quantized_values
from onward.trainer.onnx_import.tracing.values import Value

ONE_SCALE = (0, 0)
"""The layout of a scale for all elements."""


def _real(c: Call, x: Value, scale: Value, zero: Value, axis: int = 0) -> Value:
    """Return what integers mean. axis: that along which scales differ, if there are several."""
    return c(dequantize, before_storage(x), scale, zero, (axis, 0))


def _stored(c: Call, y: Value, scale: Value, zero: Value, like: Value) -> Value:
    """Quantize a result to the type of its zero point; without one, to that of the operand `like`."""
    target = c.element_type(like if zero is None else zero)
    return store_integers(c, c(quantized_values, y, scale, zero, ONE_SCALE, integer_range(target)), target)


def _channels_first(c: Call, x: Value) -> Value:
    return _permuted(c, x, [0, x.ndim - 1, *range(1, x.ndim - 1)])


def _channels_last(c: Call, x: Value) -> Value:
    return _permuted(c, x, [0, *range(2, x.ndim), 1])


def _permuted(c: Call, x: Value, dims: list[int]) -> Value:
    """Permute dimensions, of integers before they are stored."""
    # so that gradients pass: a permutation of integers would end them
    moved = move_before_storage(lambda levels: c("permute", levels, dims), [x])
    return c("permute", x, dims) if moved is NotImplemented else moved


lower("com.microsoft.QuantizeLinear", since=(1,))(quantize_linear)
lower("com.microsoft.DequantizeLinear", since=(1,))(dequantize_linear)

# -- elementwise


@lower("com.microsoft.QLinearAdd", "com.microsoft.QLinearMul", since=(1,))
def qlinear_add(
    c: Call,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value = None,
) -> Value:
    left = _real(c, a, a_scale, a_zero)
    right = _real(c, b, b_scale, b_zero)
    y = c(torch.add if c.op == "QLinearAdd" else torch.mul, left, right)
    return _stored(c, y, y_scale, y_zero, a)


@lower("com.microsoft.QLinearSigmoid", "com.microsoft.QLinearLeakyRelu", since=(1,))
def qlinear_sigmoid(c: Call, x: Value, scale: Value, zero: Value, y_scale: Value, y_zero: Value = None) -> Value:
    real = _real(c, x, scale, zero)
    y = c(torch.sigmoid, real) if c.op == "QLinearSigmoid" else c(F.leaky_relu, real, c.attr("alpha", 0.01))
    return _stored(c, y, y_scale, y_zero, x)


@lower("com.microsoft.QLinearSoftmax", since=(1,))
def qlinear_softmax(c: Call, x: Value, scale: Value, zero: Value, y_scale: Value, y_zero: Value = None) -> Value:
    """Apply softmax along `axis`; as before opset 13 of ONNX, over all dimensions from `axis` on together."""
    axis = c.axis(x, c.attr("axis", -1))
    real = _real(c, x, scale, zero)
    # the operator names the opset whose Softmax it stands for
    flattens = c.attr("opset") < 13
    y = over_trailing_axes(c, F.softmax, real, axis) if flattens else c(F.softmax, real, dim=axis)
    return _stored(c, y, y_scale, y_zero, x)


@lower("com.microsoft.QLinearConcat", since=(1,))
def qlinear_concat(c: Call, y_scale: Value, y_zero: Value, *operands: Value) -> Value:
    """operands: (integers, scale, zero point) of each part, one after the other."""
    parts = [_real(c, *operands[first : first + 3]) for first in range(0, len(operands), 3)]
    return _stored(c, c(torch.cat, parts, c.attr("axis")), y_scale, y_zero, operands[0])


@lower("com.microsoft.QLinearWhere", since=(1,))
def qlinear_where(
    c: Call,
    condition: Value,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    y: Value,
    y_scale: Value,
    y_zero: Value,
    z_scale: Value,
    z_zero: Value,
) -> Value:
    z = c(torch.where, condition, _real(c, x, x_scale, x_zero), _real(c, y, y_scale, y_zero))
    return _stored(c, z, z_scale, z_zero, x)


# -- means


@lower("com.microsoft.QLinearAveragePool", since=(1,))
def qlinear_average_pool(c: Call, x: Value, scale: Value, zero: Value, y_scale: Value, y_zero: Value = None) -> Value:
    real = _real(c, x, scale, zero)
    last = bool(c.attr("channels_last", 0))
    y = average_pool_(c, _channels_first(c, real) if last else real)
    return _stored(c, _channels_last(c, y) if last else y, y_scale, y_zero, x)


@lower("com.microsoft.QLinearGlobalAveragePool", since=(1,))
def qlinear_global_average_pool(
    c: Call, x: Value, scale: Value, zero: Value, y_scale: Value, y_zero: Value = None
) -> Value:
    # the axes of the image: between batch and channels, or behind both
    first = 1 if c.attr("channels_last", 0) else 2
    y = c(torch.mean, _real(c, x, scale, zero), list(range(first, first + x.ndim - 2)), keepdim=True)
    return _stored(c, y, y_scale, y_zero, x)


# -- products


@lower("com.microsoft.QGemm", since=(1,))
def qgemm(
    c: Call,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    bias: Value = None,
    y_scale: Value = None,
    y_zero: Value = None,
) -> Value:
    """Return alpha a b + bias; bias: int32 in units of alpha a_scale b_scale. Without y_scale the result is a float."""
    # scales of b differ along its outputs
    columns = 0 if c.attr("transB", 0) else 1
    real_a = _real(c, a, a_scale, a_zero)
    real_b = _real(c, b, b_scale, b_zero, columns)
    if bias is not None:
        # the bias is added to the product of the integers, and counts in units of both scales
        unit = c(torch.mul, c(torch.mul, a_scale, b_scale), c.attr("alpha", 1.0))
        bias = c(torch.mul, c("to", before_storage(bias), real_a.dtype), unit)
    y = gemm(c, real_a, real_b, bias)
    return y if y_scale is None else _stored(c, y, y_scale, y_zero, a)


@lower("com.microsoft.MatMulIntegerToFloat", since=(1,))
def matmul_integer_to_float(
    c: Call,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero: Value = None,
    b_zero: Value = None,
    bias: Value = None,
) -> Value:
    # several scales of a are one for each row, several of b one for each column
    rows = max(a.ndim - 2, 0)
    y = c(torch.matmul, _real(c, a, a_scale, a_zero, rows), _real(c, b, b_scale, b_zero, b.ndim - 1))
    return y if bias is None else c(torch.add, y, bias)


@lower("com.microsoft.DynamicQuantizeMatMul", since=(1,))
def dynamic_quantize_matmul(
    c: Call, a: Value, b: Value, b_scale: Value, b_zero: Value = None, bias: Value = None
) -> Value:
    """Quantize a over its range, as DynamicQuantizeLinear does, and multiply."""
    # the scale is made of the operand itself, in each pass anew
    levels, scale, zero = c(dynamic_quantized_values, a)
    real = c(dequantize, levels, scale, zero, ONE_SCALE)
    y = c(torch.matmul, real, _real(c, b, b_scale, b_zero, b.ndim - 1))
    return y if bias is None else c(torch.add, y, bias)


@lower("com.microsoft.QLinearConv", since=(1,))
def qlinear_conv_(c: Call, x: Value, *operands: Value) -> Value:
    """Lower as ONNX's QLinearConv; channels_last: x and the result are [batch, ..., channels]."""
    if not c.attr("channels_last", 0):
        return qlinear_conv(c, x, *operands)
    # a permutation of fewer axes has no image to move
    if x.ndim < 3:
        raise UnsupportedNode(f"its input has {x.ndim} dimensions; 3 to 5 are implemented")
    return _channels_last(c, qlinear_conv(c, _channels_first(c, x), *operands))


@lower("com.microsoft.QAttention", since=(1,))
def qattention(
    c: Call,
    x: Value,
    weight: Value,
    bias: Value,
    x_scale: Value,
    w_scale: Value,
    mask: Value = None,
    x_zero: Value = None,
    w_zero: Value = None,
    past: Value = None,
) -> Value:
    """Lower as Attention, whose projection alone is computed on integers; scores and results are floats."""
    projected = c(torch.matmul, _real(c, x, x_scale, x_zero), _real(c, weight, w_scale, w_zero, 1))
    return attend_packed(c, c(torch.add, projected, bias), mask, past, None)
