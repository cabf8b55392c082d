"""Rules for elementwise operators: arithmetic, activations, comparisons, logic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, Rule, lower, lower_each
from onward.trainer.onnx_import.tracing.values import Traced, Value

Functions = dict[str, tuple[Callable[..., Any], tuple[int, ...]]]
"""Operator -> the function of torch, and the versions of ONNX."""

# -- one operand, no attributes

UNARY: Functions = {
    "Abs": (torch.abs, (6, 13)),
    "Acos": (torch.acos, (7, 22)),
    "Acosh": (torch.acosh, (9, 22)),
    "Asin": (torch.asin, (7, 22)),
    "Asinh": (torch.asinh, (9, 22)),
    "Atan": (torch.atan, (7, 22)),
    "Atanh": (torch.atanh, (9, 22)),
    "BitwiseNot": (torch.bitwise_not, (18,)),
    "Ceil": (torch.ceil, (6, 13)),
    "Cos": (torch.cos, (7, 22)),
    "Cosh": (torch.cosh, (9, 22)),
    "Det": (torch.linalg.det, (11, 22)),
    "Erf": (torch.erf, (9, 13)),
    "Exp": (torch.exp, (6, 13)),
    "Floor": (torch.floor, (6, 13)),
    "HardSwish": (F.hardswish, (14, 22)),
    "IsNaN": (torch.isnan, (9, 13, 20)),
    "Log": (torch.log, (6, 13)),
    "Mish": (F.mish, (18, 22)),
    "Neg": (torch.neg, (6, 13)),
    "Not": (torch.logical_not, (1,)),
    "Reciprocal": (torch.reciprocal, (6, 13)),
    "Relu": (torch.relu, (6, 13, 14)),
    "Round": (torch.round, (11, 22)),
    "Sigmoid": (torch.sigmoid, (6, 13)),
    "Sign": (torch.sign, (9, 13)),
    "Sin": (torch.sin, (7, 22)),
    "Sinh": (torch.sinh, (9, 22)),
    "Softplus": (F.softplus, (1, 22)),
    "Softsign": (F.softsign, (1, 22)),
    "Sqrt": (torch.sqrt, (6, 13)),
    "Tan": (torch.tan, (7, 22)),
    "Tanh": (torch.tanh, (6, 13)),
}


def _unary(function: Callable[..., Any]) -> Rule:
    # a function of its own for each operator: a loop variable would be the last one for all
    return lambda c, x: c(function, x)


lower_each(UNARY, _unary)


# -- two operands, broadcast against each other


def as_number(x: Value, other: Value) -> Value:
    """Return a constant of one element as a Python number, where shape and type of the result stay the same."""
    # a number needs no buffer in the module, and does not appear as a constant of its own
    if not isinstance(x, torch.Tensor) or not isinstance(other, Traced):
        return x
    # a constant of more dimensions broadcasts the other operand, one of another type promotes it
    changes_result = x.ndim > other.ndim or x.dtype != other.dtype
    return x if x.numel() != 1 or changes_result else x.item()


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a / b, which broadcast; of integers, rounded towards zero: the least one by -1 is the least one again."""
    if a.is_floating_point():
        return torch.div(a, b)
    # unsigned integers have no negative divisor to look out for
    if not a.dtype.is_signed:
        return torch.div(a, b, rounding_mode="trunc")
    # torch leaves the least integer by -1 to the processor, which ends the process
    minus = b == -1
    # -a wraps around for the least integer, as two's complement does; the divisor 1 keeps its place harmless
    return torch.where(minus, -a, torch.div(a, torch.where(minus, 1, b), rounding_mode="trunc"))


def refuse_division(c: Call, a: Value, b: Value) -> None:
    """Refuse what no integer is the quotient of: onnxruntime rejects a divisor of 0 and dies of the least integer."""
    if not isinstance(b, torch.Tensor) or c.eager or b.is_floating_point():
        return
    if (b == 0).any():
        raise UnsupportedNode("it divides integers by the constant 0")
    least = torch.iinfo(b.dtype).min
    if isinstance(a, torch.Tensor) and least < 0 and ((a == least) & (b == -1)).any():
        raise UnsupportedNode(f"it divides the integer constant {least} by -1, whose quotient {b.dtype} does not have")


def power(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return the power of what broadcasts, in the type of the base; torch would promote it to that of the exponent."""
    return torch.pow(base, exponent).to(base.dtype)


BINARY: Functions = {
    "Add": (torch.add, (7, 13, 14)),
    "Sub": (torch.sub, (7, 13, 14)),
    "Mul": (torch.mul, (7, 13, 14)),
    "BitwiseAnd": (torch.bitwise_and, (18,)),
    "BitwiseOr": (torch.bitwise_or, (18,)),
    "BitwiseXor": (torch.bitwise_xor, (18,)),
    "And": (torch.logical_and, (7,)),
    "Or": (torch.logical_or, (7,)),
    "Xor": (torch.logical_xor, (7,)),
    "Equal": (torch.eq, (7, 11, 13, 19)),
    "Greater": (torch.gt, (7, 9, 13)),
    "Less": (torch.lt, (7, 9, 13)),
    "GreaterOrEqual": (torch.ge, (12, 16)),
    "LessOrEqual": (torch.le, (12, 16)),
}

NEEDS_TENSORS = ("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor")


def _binary(function: Callable[..., Any]) -> Rule:
    def rule(c: Call, a: Value, b: Value) -> Value:
        # torch has no logical_and of a tensor and a number
        if c.op in NEEDS_TENSORS:
            return c(function, a, b)
        if isinstance(number := as_number(a, b), int | float) and c.op in ("Add", "Mul"):
            return c(function, b, number)  # commutative, and torch wants the tensor first
        return c(function, a, as_number(b, a))

    return rule


lower_each(BINARY, _binary)


@lower("Div", since=(7, 13, 14))
def div(c: Call, a: Value, b: Value) -> Value:
    refuse_division(c, a, b)
    return c(torch.div, a, as_number(b, a)) if a.dtype.is_floating_point else c(divide, a, b)


@lower("Pow", since=(7, 12, 13, 15))
def pow_(c: Call, base: Value, exponent: Value) -> Value:
    number = isinstance(exponent, torch.Tensor) and exponent.numel() == 1 and exponent.ndim <= base.ndim
    # a constant exponent: torch has faster kernels for squares and roots, with exact gradients
    if number and base.dtype.is_floating_point:
        return c(torch.pow, base, exponent.item())
    return c(power, base, exponent)


@lower("Mod", since=(10, 13, 28))
def mod(c: Call, a: Value, b: Value) -> Value:
    """Return the remainder: with fmod=1 it has the sign of the dividend, else that of the divisor."""
    refuse_division(c, a, b)
    return c(torch.fmod if c.attr("fmod", 0) else torch.remainder, a, b)


@lower("BitShift", since=(11, 28))
def bit_shift(c: Call, x: Value, by: Value) -> Value:
    # of unsigned integers, where a shift to the right fills up with zeros
    left = c.attr("direction") == "LEFT"
    return c(torch.bitwise_left_shift if left else torch.bitwise_right_shift, x, by)


@lower("PRelu", since=(7, 9, 16))
def prelu(c: Call, x: Value, slope: Value) -> Value:
    # F.prelu takes a slope for each channel alone; ONNX lets the slope broadcast
    return c(torch.where, c(torch.ge, x, 0), x, c(torch.mul, x, slope))


# -- any number of operands

VARIADIC: Functions = {
    "Max": (torch.maximum, (6, 8, 12, 13)),
    "Min": (torch.minimum, (6, 8, 12, 13)),
    "Sum": (torch.add, (6, 8, 13)),
}


def _variadic(function: Callable[..., Any]) -> Rule:
    def rule(c: Call, first: Value, *others: Value) -> Value:
        # pairwise, since each pair broadcasts and torch's operators take two
        for other in others:
            first = c(function, first, other)
        return first

    return rule


lower_each(VARIADIC, _variadic)


@lower("Mean", since=(6, 8, 13))
def mean(c: Call, first: Value, *others: Value) -> Value:
    return c(torch.div, _variadic(torch.add)(c, first, *others), 1 + len(others))


# -- activations with attributes


@lower("Gelu", since=(20,))
def gelu(c: Call, x: Value) -> Value:
    return c(F.gelu, x, approximate=c.attr("approximate", "none"))


@lower("Elu", since=(6, 22))
def elu(c: Call, x: Value) -> Value:
    return c(F.elu, x, alpha=c.attr("alpha", 1.0))


@lower("Celu", since=(12, 28))
def celu(c: Call, x: Value) -> Value:
    return c(F.celu, x, alpha=c.attr("alpha", 1.0))


def scaled_elu(x: torch.Tensor, alpha: float, gamma: float) -> torch.Tensor:
    """Return gamma x for positive x, else gamma alpha (exp(x) - 1)."""
    return gamma * F.elu(x, alpha=alpha)


@lower("Selu", since=(6, 22))
def selu(c: Call, x: Value) -> Value:
    # the defaults are fp32 numbers of the operator's text, and are rounded to fp32 before use
    alpha = c.attr("alpha", float(np.float32(1.67326319217681884765625)))
    return c(scaled_elu, x, alpha, c.attr("gamma", float(np.float32(1.05070102214813232421875))))


@lower("LeakyRelu", since=(6, 16))
def leaky_relu(c: Call, x: Value) -> Value:
    return c(F.leaky_relu, x, c.attr("alpha", 0.01))


@lower("ThresholdedRelu", since=(10, 22))
def thresholded_relu(c: Call, x: Value) -> Value:
    return c(F.threshold, x, c.attr("alpha", 1.0), 0.0)


def hard_sigmoid(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """Return alpha x + beta, clamped to [0, 1]."""
    return torch.clamp(alpha * x + beta, 0, 1)


@lower("HardSigmoid", since=(6, 22))
def hard_sigmoid_(c: Call, x: Value) -> Value:
    return c(hard_sigmoid, x, c.attr("alpha", 0.2), c.attr("beta", 0.5))


def swish(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return x sigmoid(alpha x)."""
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@lower("Swish", since=(24,))
def swish_(c: Call, x: Value) -> Value:
    return c(swish, x, c.attr("alpha", 1.0))


def shrink(x: torch.Tensor, bias: float, threshold: float) -> torch.Tensor:
    """Return x + bias below -threshold, x - bias above threshold, 0 between; integers are truncated."""
    zero = torch.zeros_like(x)
    # x + bias may be a float for integers, which the operator truncates
    return torch.where(x < -threshold, x + bias, torch.where(x > threshold, x - bias, zero)).to(x.dtype)


@lower("Shrink", since=(9,))
def shrink_(c: Call, x: Value) -> Value:
    return c(shrink, x, c.attr("bias", 0.0), c.attr("lambd", 0.5))


@lower("Clip", since=(6, 11, 12, 13))
def clip(c: Call, x: Value, minimum: Value = None, maximum: Value = None) -> Value:
    if c.version < 11:
        minimum = c.attr("min")
        maximum = c.attr("max")
    bounds = [_bound(c, bound) for bound in (minimum, maximum)]
    # the lower bound first: where it exceeds the upper one, ONNX returns the upper one
    if bounds[0] is not None:
        x = c(torch.clamp_min, x, bounds[0])
    return x if bounds[1] is None else c(torch.clamp_max, x, bounds[1])


def _bound(c: Call, bound: Value) -> Value:
    if bound is None or isinstance(bound, float):
        return bound
    if isinstance(bound, torch.Tensor):
        return bound.item()
    # a bound that is computed may be [1]; clamping by a scalar keeps the shape of x
    return c("reshape", bound, []) if bound.ndim else bound


# -- choice


@lower("Where", since=(9, 16))
def where(c: Call, condition: Value, yes: Value, no: Value) -> Value:
    return c(torch.where, condition, as_number(yes, no), as_number(no, yes))


@lower("IsInf", since=(10, 20))
def is_inf(c: Call, x: Value) -> Value:
    negative = c.attr("detect_negative", 1)
    positive = c.attr("detect_positive", 1)
    if negative and positive:
        return c(torch.isinf, x)
    # neither sign is asked for: false everywhere
    if not negative and not positive:
        return c(torch.zeros_like, x, dtype=torch.bool)
    return c(torch.eq, x, math.inf if positive else -math.inf)
