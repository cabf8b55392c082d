"""Rules for operators as they were before opset 7: broadcasting by attributes, memory hints, is_test."""

from __future__ import annotations

import torch
from onnx import TensorProto

from onward.trainer.onnx_import.lowering.converter_table import RULES, Call, Rule, lower
from onward.trainer.onnx_import.ops.elementwise import scaled_elu
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.tracing.values import Value


def _legacy_broadcast(c: Call, a: Value, b: Value) -> Value:
    """Add trailing dimensions to b, so that its first dimension meets dimension `axis` of a."""
    axis = c.attr("axis")
    c.attr("consumed_inputs")
    if not c.attr("broadcast", 0) or axis is None:
        return b
    # broadcasting aligns last dimensions: trailing ones of length 1 move b to `axis`
    for _ in range(a.ndim - c.axis(a, axis) - b.ndim):
        b = c(torch.unsqueeze, b, -1)
    return b


def _binary(rule: Rule) -> Rule:
    return lambda c, a, b: rule(c, a, _legacy_broadcast(c, a, b))


BINARY = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), (1, 6)),
    **dict.fromkeys(("And", "Or", "Xor", "Equal", "Greater", "Less", "Pow"), (1,)),
}
for _name, _since in BINARY.items():
    lower(_name, since=_since)(_binary(RULES[_name, 7]))


def _without_hint(rule: Rule) -> Rule:
    def without_hint(c: Call, *operands: Value) -> Value:
        c.attr("consumed_inputs")
        return rule(c, *operands)

    return without_hint


# fmt: off
HINTED = (
    "Abs", "Ceil", "Clip", "Elu", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Log", "Max", "Mean", "Min", "Neg",
    "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sum", "Tanh",
)
# fmt: on
"""Operators whose version 1 differs from version 6 only by a memory hint, consumed_inputs."""

for _name in HINTED:
    lower(_name, since=(1,))(_without_hint(RULES[_name, 6]))


@lower("Selu", since=(1,))
def selu(c: Call, x: Value) -> Value:
    c.attr("consumed_inputs")
    return c(scaled_elu, x, c.attr("alpha", 1.6732), c.attr("gamma", 1.0507))


@lower("PRelu", since=(1, 6))
def prelu(c: Call, x: Value, slope: Value) -> Value:
    """Apply one slope, or one for each channel, which is dimension 1."""
    c.attr("consumed_inputs")
    if slope.ndim == 1:
        for _ in range(x.ndim - 2):
            slope = c(torch.unsqueeze, slope, -1)
    return RULES["PRelu", 7](c, x, slope)


@lower("Gemm", since=(1, 6))
def gemm(c: Call, a: Value, b: Value, bias: Value) -> Value:
    c.attr("broadcast")
    return RULES["Gemm", 7](c, a, b, bias)


@lower("Dropout", since=(1, 6))
def dropout(c: Call, x: Value) -> Value:
    c.attr("is_test"), c.attr("consumed_inputs")
    return c.module(Dropout(c.attr("ratio", 0.5), with_mask=c.wants(1)), x)


@lower("Concat", since=(1,))
def concat(c: Call, *parts: Value) -> Value:
    return c(torch.cat, list(parts), c.attr("axis", 1))


@lower("Reshape", since=(1,))
def reshape(c: Call, x: Value) -> Value:
    c.attr("consumed_inputs")
    return RULES["Reshape", 5](c, x, torch.tensor(c.attr("shape", [])))


@lower("Cast", since=(1,))
def cast(c: Call, x: Value) -> Value:
    """Convert to a type that is given by its name."""
    return c("to", x, c.dtype(int(TensorProto.DataType.Value(c.attr("to")))))


@lower("Split", since=(1,))
def split(c: Call, x: Value, sizes: Value = None) -> Value:
    return RULES["Split", 2](c, x) if sizes is None else RULES["Split", 13](c, x, sizes)


@lower("AveragePool", since=(1,))
def average_pool(c: Call, x: Value) -> Value:
    return RULES["AveragePool", 7](c, x)
