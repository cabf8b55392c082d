"""Rules for shape arithmetic: integers computed from Shape and Size, and floats computed from those.

The values are Python numbers and traced ints in a ShapeArray (a NumPy array of objects); they become a tensor only
where an operator needs one. For x [batch, 8, 16]:

    Shape(x) -> [size(x, 0), 8, 16]    Gather 0 -> size(x, 0)    Mul 2 -> size(x, 0) * 2    Reshape(x, [.., 64])

The fx graph then holds `x.size(0) * 2` in place of tensors, and a dynamic length stays visible to later passes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import fx

from onward.trainer.onnx_import.lowering.converter_table import Call, Rule, lower, shape_rule
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, ShapeArray, Traced, Value

SHAPE_VERSIONS = (1, 13, 15, 19, 21, 23, 24, 25)


@lower("Shape", since=SHAPE_VERSIONS)
def shape(c: Call, x: Value) -> Value:
    sizes = c.sizes(x)
    return _array(sizes[c.attr("start", 0) : c.attr("end", len(sizes))])


@lower("Size", since=(1, 13, 19, 21, 23, 24, 25))
def size(c: Call, x: Value) -> Value:
    return _array(math.prod(c.sizes(x)))


def _array(values: Any) -> ShapeArray:
    # np.array(values) would make numpy choose a type for the traced integers
    array = np.empty(np.shape(values), dtype=object)
    array[...] = values
    return array


def _elementwise(function: Callable[..., Any]) -> Callable[..., ShapeArray]:
    def rule(c: Call, *arrays: ShapeArray) -> ShapeArray:
        return _array(np.frompyfunc(function, len(arrays), 1)(*arrays))

    return rule


def _is_float(value: Value) -> bool:
    return isinstance(value.probes[0] if isinstance(value, Traced) else value, float)


def _never_negative(node: object) -> bool:
    """Whether an int or traced int is a length, or a sum, product or quotient of lengths: it cannot be negative."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int) and node >= 0
    if node.target in (operator.add, operator.mul, operator.floordiv):
        return all(map(_never_negative, node.args))
    return node.target == "size"


def truncated_quotient(a: int, b: int) -> int:
    """Return a / b, rounded towards zero."""
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def _integer_division(c: Call, a: Value, b: Value) -> Value:
    """Divide as ONNX does, towards zero. Python's // rounds down, which is the same where nothing is negative."""
    # // of traced ints stays in the form that passes and torch.compile recognise
    lengths = [_never_negative(value.node if isinstance(value, Traced) else value) for value in (a, b)]
    return a // b if all(lengths) else c(truncated_quotient, a, b)


def _comparison(compare: Callable[[Any, Any], bool]) -> Rule:
    """Return the rule of a comparison. Its result must be the same at both trial sizes; the graph checks it again."""

    def decide(c: Call, a: Value, b: Value) -> bool:
        result = c(compare, a, b)
        # the result differs at the two trial sizes: the branch can only be chosen at run time
        if isinstance(result, Traced):
            raise NeedsRuntimeValues("a choice depends on a dynamic dimension")
        return bool(result)

    return lambda c, *arrays: _array(np.frompyfunc(functools.partial(decide, c), 2, 1)(*arrays))


# -- Python's builtins as functions of this module: fx retraces a graph when it unpickles it, and records no builtins


def absolute(x: float) -> float:
    """Return |x|."""
    return abs(x)


def maximum(a: int, b: int) -> int:
    """Return the larger number."""
    return max(a, b)


def minimum(a: int, b: int) -> int:
    """Return the smaller number."""
    return min(a, b)


def truncate(x: float) -> int:
    """Round towards zero."""
    return int(x)


def to_float(x: int) -> float:
    """Convert an integer."""
    return float(x)


# -- arithmetic: Python's on ints; floats are rounded to fp32, since the file computes them in fp32 tensors


def round_to_fp32(x: float) -> float:
    """Round to the nearest fp32 number."""
    return float(np.float32(x))


def float_sum(a: float, b: float) -> float:
    """Return a + b in fp32."""
    return round_to_fp32(a + b)


def float_difference(a: float, b: float) -> float:
    """Return a - b in fp32."""
    return round_to_fp32(a - b)


def float_product(a: float, b: float) -> float:
    """Return a b in fp32."""
    return round_to_fp32(a * b)


def float_quotient(a: float, b: float) -> float:
    """Return a / b in fp32; a division by zero gives an infinity or NaN, as in a tensor."""
    if b:
        return float(np.float32(a) / np.float32(b))
    return math.copysign(math.inf, a) if a else math.nan


def float_root(x: float) -> float:
    """Return the square root in fp32."""
    return round_to_fp32(math.sqrt(x)) if x >= 0 else math.nan


def float_floor(x: float) -> float:
    """Round down."""
    return float(math.floor(x)) if math.isfinite(x) else x


def float_ceil(x: float) -> float:
    """Round up."""
    return float(math.ceil(x)) if math.isfinite(x) else x


def float_round(x: float) -> float:
    """Round to the nearest integer; halves to the even one."""
    return float(round(x)) if math.isfinite(x) else x


ARITHMETIC: dict[str, tuple[Callable[..., Any] | None, Callable[..., float]]] = {
    "Add": (lambda c, a, b: a + b, float_sum),
    "Sub": (lambda c, a, b: a - b, float_difference),
    "Mul": (lambda c, a, b: a * b, float_product),
    "Div": (_integer_division, float_quotient),
    "Neg": (lambda c, a: -a, operator.neg),
    "Abs": (lambda c, a: c(absolute, a), absolute),
    "Sqrt": (None, float_root),
    "Floor": (None, float_floor),
    "Ceil": (None, float_ceil),
    "Round": (None, float_round),
}
"""Operator -> (its function for ints, for floats); None if it does not accept ints."""


def _arithmetic(on_ints: Callable[..., Any] | None, on_floats: Callable[..., float]) -> Callable[..., Any]:
    def rule(c: Call, *arrays: ShapeArray) -> Value:
        floats = any(_is_float(value) for array in arrays for value in array.reshape(-1))
        # the ordinary rule makes a tensor of them
        if not floats and on_ints is None:
            return NotImplemented
        function = functools.partial(c, on_floats) if floats or on_ints is None else functools.partial(on_ints, c)
        return _array(np.frompyfunc(function, len(arrays), 1)(*arrays))

    return rule


for _name, _functions in ARITHMETIC.items():
    shape_rule(_name)(_arithmetic(*_functions))

HOST: dict[str, Rule] = {
    "Equal": _comparison(operator.eq),
    "Less": _comparison(operator.lt),
    "Greater": _comparison(operator.gt),
    "LessOrEqual": _comparison(operator.le),
    "GreaterOrEqual": _comparison(operator.ge),
    "And": _elementwise(lambda a, b: bool(a and b)),
    "Or": _elementwise(lambda a, b: bool(a or b)),
    "Not": _elementwise(operator.not_),
}
for _name, _rule in HOST.items():
    shape_rule(_name)(_rule)


@shape_rule("Max", "Min")
def max_or_min(c: Call, *arrays: ShapeArray) -> ShapeArray:
    """Record a call where a dynamic length takes part, so that it is compared when the graph runs."""
    function = functools.partial(c, maximum if c.op == "Max" else minimum)
    best = arrays[0]
    for array in arrays[1:]:
        best = _array(np.frompyfunc(function, 2, 1)(best, array))
    return best


@shape_rule("Mod")
def mod(c: Call, a: ShapeArray, b: ShapeArray) -> Value:
    # Python's % has the sign of the divisor, as ONNX's Mod of integers; fmod has that of the dividend
    numbers = [*a.reshape(-1), *b.reshape(-1)]
    if c.attr("fmod", 0) or any(_is_float(number) for number in numbers):
        return NotImplemented
    return _array(np.frompyfunc(lambda x, y: x % y, 2, 1)(a, b))


@shape_rule("Where")
def where(c: Call, condition: ShapeArray, yes: ShapeArray, no: ShapeArray) -> ShapeArray:
    return _elementwise(lambda chosen, a, b: a if chosen else b)(c, condition, yes, no)


@shape_rule("Cast")
def cast(c: Call, x: ShapeArray) -> Value:
    c.attr("saturate"), c.attr("round_mode")  # both are about 8-bit floats
    to = c.attr("to")
    if to == TensorProto.FLOAT:
        return _array(np.frompyfunc(functools.partial(c, to_float), 1, 1)(x))
    if to not in (TensorProto.INT64, TensorProto.INT32):
        return NotImplemented
    return _elementwise(lambda value: c(truncate, value) if _is_float(value) or isinstance(value, bool) else value)(
        c, x
    )


@shape_rule("Identity")
def identity(c: Call, x: ShapeArray) -> ShapeArray:
    return x


@shape_rule("Gather")
def gather(c: Call, x: ShapeArray, indices: ShapeArray) -> Value:
    # a row of a stored table that a dynamic length chooses is data
    if any(isinstance(index, Traced) for index in indices.reshape(-1)):
        return NotImplemented
    return _array(np.take(x, indices.astype(np.int64), axis=c.attr("axis", 0)))


@shape_rule("Slice")
def slice_(c: Call, x: ShapeArray, *bounds: ShapeArray | None) -> Value:
    if not bounds:  # before opset 10 the bounds are attributes
        starts = c.attr("starts")
        ends = c.attr("ends")
        axes = c.attr("axes") or range(len(starts))
        steps = [1] * len(starts)
    else:
        given = [None if bound is None else list(bound.reshape(-1)) for bound in (*bounds, None, None)]
        starts = given[0] or []
        ends = given[1] or []
        axes = given[2] or range(len(starts))
        steps = given[3] or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if any(isinstance(bound, Traced) for bound in (start, end, step)):
            return NotImplemented
        # numpy clamps the bounds of a slice as ONNX does
        x = x[(slice(None),) * (axis % x.ndim) + (_python_slice(start, end, step),)]
    return x


def _python_slice(start: int, end: int, step: int) -> slice:
    """Return a Python slice. INT_MIN as the end of a backward slice means: past the first element."""
    return slice(start, None if step < 0 and end < -(2**30) else end, step)


@shape_rule("Concat")
def concat(c: Call, *arrays: ShapeArray) -> ShapeArray:
    return _array(np.concatenate(arrays, axis=c.attr("axis")))


@shape_rule("Unsqueeze")
def unsqueeze(c: Call, x: ShapeArray, axes: ShapeArray | None = None) -> ShapeArray:
    where_to = c.axes(axes) or []
    return _array(np.expand_dims(x, tuple(where_to)))


@shape_rule("Squeeze")
def squeeze(c: Call, x: ShapeArray, axes: ShapeArray | None = None) -> ShapeArray:
    chosen = c.axes(axes)
    return _array(np.squeeze(x, None if chosen is None else tuple(chosen)))


@shape_rule("Reshape")
def reshape(c: Call, x: ShapeArray, to: ShapeArray) -> Value:
    if any(isinstance(length, Traced) for length in to.reshape(-1)):
        return NotImplemented
    return x.reshape([int(length) for length in to.reshape(-1)])


@shape_rule("ReduceProd")
def reduce_prod(c: Call, x: ShapeArray, axes: ShapeArray | None = None) -> Value:
    if x.ndim != 1:
        return NotImplemented
    chosen = c.axes(axes)
    if not chosen and c.attr("noop_with_empty_axes", 0):
        return x
    total: Value = math.prod(x)
    return _array([total] if c.attr("keepdims", 1) else total)


@shape_rule("Split")
def split(c: Call, x: ShapeArray, sizes: ShapeArray | None = None) -> Value:
    if x.ndim != 1:
        return NotImplemented
    lengths = c.attr("split") if sizes is None else [int(size) for size in sizes]
    if lengths is None:
        piece = -(-len(x) // c.num_outputs)
        lengths = [piece] * (c.num_outputs - 1) + [len(x) - piece * (c.num_outputs - 1)]
    return tuple(np.split(x, np.cumsum(lengths)[:-1]))
