"""Shape arithmetic on host integers: what Shape feeds never becomes a tensor unless a tensor asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from trainer.ops.table import Call, lower, on_host
from trainer.ops.tracing import Traced
from trainer.ops.values import HostInts, Unsupported, Value

SHAPE_VERSIONS = (1, 13, 15, 19, 21, 23, 24, 25)


@lower("Shape", since=SHAPE_VERSIONS)
def shape(c: Call, x: Value) -> Value:
    sizes = c.sizes(x)
    return _array(sizes[c.attr("start", 0) : c.attr("end", len(sizes))])


@lower("Size", since=(1, 13, 19, 21, 23, 24, 25))
def size(c: Call, x: Value) -> Value:
    total: Value = 1
    for length in c.sizes(x):
        total = total * length
    return _array(total)


def _array(values: Any) -> HostInts:
    array = np.empty(np.shape(values), dtype=object)
    array[...] = values
    return array


def _elementwise(function: Callable[..., Any]) -> Callable[..., HostInts]:
    def rule(c: Call, *arrays: HostInts) -> HostInts:
        return _array(np.frompyfunc(function, len(arrays), 1)(*arrays))

    return rule


def _truncated(a: Value, b: Value) -> Value:
    """Integer division towards zero. Traced lengths are never negative."""
    if isinstance(a, Traced) or isinstance(b, Traced):
        return a // b
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _decided(compare: Callable[[int, int], bool]) -> Callable[..., bool]:
    """A comparison that must come out the same for every size of the dynamic dimensions."""

    def decide(a: Value, b: Value) -> bool:
        sides = [[value.probes[i] if isinstance(value, Traced) else value for value in (a, b)] for i in (0, 1)]
        first, second = (bool(compare(*side)) for side in sides)
        if first != second:
            raise Unsupported("a choice depends on a dynamic dimension")
        return first

    return decide


HOST: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _truncated,
    "Neg": lambda a: -a,
    "Equal": _decided(lambda a, b: a == b),
    "Less": _decided(lambda a, b: a < b),
    "Greater": _decided(lambda a, b: a > b),
    "LessOrEqual": _decided(lambda a, b: a <= b),
    "GreaterOrEqual": _decided(lambda a, b: a >= b),
    "And": _decided(lambda a, b: bool(a and b)),
    "Or": _decided(lambda a, b: bool(a or b)),
    "Not": lambda a: not a,
    "Max": lambda *xs: _greatest(xs, 1),
    "Min": lambda *xs: _greatest(xs, -1),
}
for _name, _function in HOST.items():
    on_host(_name)(_elementwise(_function))


def _greatest(values: tuple[Value, ...], sign: int) -> Value:
    best = values[0]
    for value in values[1:]:
        if _decided(lambda a, b: sign * a > sign * b)(value, best):
            best = value
    return best


@on_host("Where")
def where(c: Call, condition: HostInts, yes: HostInts, no: HostInts) -> HostInts:
    return _elementwise(lambda chosen, a, b: a if chosen else b)(c, condition, yes, no)


@on_host("Cast")
def cast(c: Call, x: HostInts) -> Value:
    if c.attr("to") not in (TensorProto.INT64, TensorProto.INT32):
        return NotImplemented
    return _elementwise(lambda value: int(value) if isinstance(value, bool) else value)(c, x)


@on_host("Identity")
def identity(c: Call, x: HostInts) -> HostInts:
    return x


@on_host("Gather")
def gather(c: Call, x: HostInts, indices: HostInts) -> HostInts:
    return _array(np.take(x, indices.astype(np.int64), axis=c.attr("axis", 0)))


@on_host("Slice")
def slice_(c: Call, x: HostInts, *bounds: HostInts | None) -> Value:
    if not bounds:  # before opset 10 the bounds are attributes
        starts, ends = c.attr("starts"), c.attr("ends")
        axes, steps = c.attr("axes") or range(len(starts)), [1] * len(starts)
    else:
        given = [None if bound is None else list(bound.reshape(-1)) for bound in (*bounds, None, None)]
        starts, ends = given[0] or [], given[1] or []
        axes, steps = given[2] or range(len(starts)), given[3] or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if any(isinstance(bound, Traced) for bound in (start, end, step)):
            return NotImplemented
        x = x[(slice(None),) * (axis % x.ndim) + (_python_slice(start, end, step),)]
    return x


def _python_slice(start: int, end: int, step: int) -> slice:
    """INT_MIN as the end of a backward slice means: past the first element."""
    return slice(start, None if step < 0 and end < -(2**30) else end, step)


@on_host("Concat")
def concat(c: Call, *arrays: HostInts) -> HostInts:
    return _array(np.concatenate(arrays, axis=c.attr("axis")))


@on_host("Unsqueeze")
def unsqueeze(c: Call, x: HostInts, axes: HostInts | None = None) -> HostInts:
    where_to = c.axes(axes) or []
    return _array(np.expand_dims(x, tuple(where_to)))


@on_host("Squeeze")
def squeeze(c: Call, x: HostInts, axes: HostInts | None = None) -> HostInts:
    chosen = c.axes(axes)
    return _array(np.squeeze(x, None if chosen is None else tuple(chosen)))


@on_host("Reshape")
def reshape(c: Call, x: HostInts, to: HostInts) -> Value:
    if any(isinstance(length, Traced) for length in to.reshape(-1)):
        return NotImplemented
    return x.reshape([int(length) for length in to.reshape(-1)])


@on_host("ReduceProd")
def reduce_prod(c: Call, x: HostInts, axes: HostInts | None = None) -> Value:
    if x.ndim != 1:
        return NotImplemented
    chosen = c.axes(axes)
    if not chosen and c.attr("noop_with_empty_axes", 0):
        return x
    total: Value = 1
    for value in x:
        total = total * value
    return _array([total] if c.attr("keepdims", 1) else total)


@on_host("Split")
def split(c: Call, x: HostInts, sizes: HostInts | None = None) -> Value:
    if x.ndim != 1:
        return NotImplemented
    lengths = c.attr("split") if sizes is None else [int(size) for size in sizes]
    if lengths is None:
        piece = -(-len(x) // c.num_outputs)
        lengths = [piece] * (c.num_outputs - 1) + [len(x) - piece * (c.num_outputs - 1)]
    return tuple(np.split(x, np.cumsum(lengths)[:-1]))
