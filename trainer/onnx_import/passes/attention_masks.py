"""Recognise causal attention masks, and bound the values of other masks.

Exporters compute the causal mask in the graph, from positions. It is recognised by computing a pattern for each value
on the way, which gives an element from its row and column:

    before                                                  pattern

    arange(n) --- unsqueeze(1) ---+    [n, 1]               AxisIndex(axis=2)   the row number
                                 ge    [n, n]               Triangular(True, False)
    arange(n) --- unsqueeze(0) ---+    [1, n]               AxisIndex(axis=1)   the column number
                                  |
                where(_, 0, -3.4e38)   [n, n]               Triangular(0, -3.4e38)
                                  |
                   scores --- add --- softmax

    after

                   Attention(causal=True); the nodes of the mask are removed

A mask that depends on data, such as a padding mask, has no pattern: it is kept as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onward.trainer.onnx_import.ops.gather import gather_rows, strided
from onward.trainer.onnx_import.ops.shape import arange, expand, full
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, is_call

MASKED = -1e9
"""A score at or below this has no weight after softmax beside a score that is not masked."""


@dataclass(frozen=True)
class Uniform:
    """All elements are equal."""

    value: torch.Tensor


@dataclass(frozen=True)
class AxisIndex:
    """An element is its index along one dimension, plus `first`."""

    axis: int
    """Counted from the last dimension, which is 1."""
    first: int


@dataclass(frozen=True)
class Triangular:
    """Over the last two dimensions: `lower` where column <= row, `upper` elsewhere."""

    lower: torch.Tensor
    upper: torch.Tensor


Pattern = Uniform | AxisIndex | Triangular

ELEMENTWISE = (
    torch.add, torch.sub, torch.mul, torch.div, torch.eq, torch.ne, torch.gt, torch.lt, torch.ge, torch.le, torch.where,
    torch.logical_not, torch.logical_and, torch.logical_or, torch.neg, torch.maximum, torch.minimum, torch.zeros_like,
    torch.ones_like, "to", "clone", "contiguous", operator.add, operator.sub, operator.mul,
)  # fmt: skip
KEEPS_LAST_AXES = (torch.unsqueeze, expand, strided, "unsqueeze", "expand", "reshape", "view", "repeat")
VALUE_UP_TO_DIAGONAL = {torch.ge: True, torch.lt: False}
"""Comparison of row with column -> its result where column <= row."""
SWAPPED = {torch.le: torch.ge, torch.gt: torch.lt}


def is_causal_mask(r: Rewriter, mask: Any) -> bool:
    """Return whether a mask added to the scores is causal: 0 up to the diagonal, at most MASKED above it."""
    pattern = pattern_of(r, mask)
    return isinstance(pattern, Triangular) and float(pattern.lower) == 0.0 and float(pattern.upper) <= MASKED


def triangular_condition(r: Rewriter, condition: Any) -> bool | None:
    """Return the value of a condition up to the diagonal if it has the opposite value above it, else None."""
    pattern = pattern_of(r, condition)
    if not isinstance(pattern, Triangular) or pattern.lower.dtype != torch.bool:
        return None
    return bool(pattern.lower) if bool(pattern.lower) != bool(pattern.upper) else None


def pattern_of(r: Rewriter, value: Any) -> Pattern | None:
    """Return the pattern of a value, or None."""
    try:
        return _pattern_of(r, value)
    # elementary functions are run on single elements, whose types torch may refuse to combine; then there is no pattern
    except (NoMatch, RuntimeError, TypeError):
        return None


def _pattern_of(r: Rewriter, value: Any) -> Pattern | None:
    if isinstance(value, bool | int | float):
        return Uniform(torch.tensor(value))
    if not isinstance(value, fx.Node):
        return None
    # patterns count dimensions from the last one, which a value of fewer dimensions does not have
    pattern = _stored_pattern(r, value) if value.op == "get_attr" else _call_pattern(r, value)
    return pattern if pattern is None or _has_pattern_dims(r, value, pattern) else None


def _has_pattern_dims(r: Rewriter, node: Any, pattern: Pattern) -> bool:
    """Return whether a value has the dimensions that its pattern describes."""
    return isinstance(pattern, Uniform) or r.rank(node) >= (2 if isinstance(pattern, Triangular) else pattern.axis)


def _stored_pattern(r: Rewriter, node: Any) -> Pattern | None:
    """Return the pattern of a stored constant, from its elements."""
    tensor = r.constant(node)
    if tensor is None or not tensor.numel():
        return None
    if tensor.numel() == 1:
        return Uniform(tensor.reshape(()))
    # is_causal is the same for every batch entry and head
    if any(length != 1 for length in tensor.shape[:-2]):
        return None
    rows = tensor.shape[-2] if tensor.ndim > 1 else 1
    columns = tensor.shape[-1]
    values = tensor.reshape(rows, columns)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and 1 in (rows, columns):
        # positions that the exporter folded into a constant
        first = int(values[0, 0])
        is_range = torch.equal(values.reshape(-1).long(), torch.arange(first, first + values.numel()))
        return AxisIndex(1 if rows == 1 else 2, first) if is_range else None
    if rows == 1 or columns == 1:
        return None
    # two elements decide the pattern, and all others are compared with it
    below = torch.ones(rows, columns, dtype=torch.bool).tril()
    expected = torch.where(below, values[0, 0], values[0, 1])
    return Triangular(values[0, 0], values[0, 1]) if torch.equal(values, expected) else None


def _call_pattern(r: Rewriter, node: Any) -> Pattern | None:
    if is_call(node, full):
        return Uniform(torch.tensor(node.args[2], dtype=node.args[3]))
    if is_call(node, arange):
        _, start, _, step, _ = node.args
        return AxisIndex(1, start) if isinstance(start, int) and step == 1 else None
    if is_call(node, torch.tril, torch.triu):
        return _triangle_pattern(r, node)
    if is_call(node, *KEEPS_LAST_AXES):
        return _reshaped_pattern(r, node)
    if is_call(node, *ELEMENTWISE):
        return _elementwise(r, node)
    return None


def _triangle_pattern(r: Rewriter, node: Any) -> Pattern | None:
    pattern = _pattern_of(r, node.args[0])
    diagonal = node.args[1] if len(node.args) > 1 else 0
    # other diagonals give a triangle that is_causal does not describe
    if not isinstance(pattern, Uniform | Triangular) or diagonal != (0 if node.target is torch.tril else 1):
        return None
    lower, upper = (pattern.value, pattern.value) if isinstance(pattern, Uniform) else (pattern.lower, pattern.upper)
    nothing = torch.zeros_like(lower)
    return Triangular(lower, nothing) if node.target is torch.tril else Triangular(nothing, upper)


def _reshaped_pattern(r: Rewriter, node: Any) -> Pattern | None:
    """Return the pattern after new dimensions, reshapes, broadcasts and slices from the first element."""
    source = node.args[0]
    pattern = _pattern_of(r, source)
    if pattern is None or isinstance(pattern, Uniform):
        return pattern
    before = r.shapes(source)
    after = r.shapes(node)
    if is_call(node, strided):
        _, _, start, _, step = node.args
        # a slice of the stored mask of the longest sequence, [:n, :n]: rows and columns keep their numbers
        return pattern if start == 0 and step == 1 else None
    if is_call(node, torch.unsqueeze, "unsqueeze"):
        place = int(node.args[1]) % len(after[0])
        behind = len(after[0]) - 1 - place  # number of dimensions after the new one
        # axes count from the last one, so that a new dimension moves only those in front of it
        if isinstance(pattern, AxisIndex):
            return AxisIndex(pattern.axis + 1, pattern.first) if behind < pattern.axis else pattern
        return pattern if behind >= 2 else None
    # rows and columns must stay the last two dimensions; a reshape keeps them there only if nothing is in front
    if isinstance(pattern, Triangular):
        same = all(b[-2:] == a[-2:] for b, a in zip(before, after, strict=True))
        flat = all(math.prod(b[:-2]) == 1 for b in before) or is_call(node, expand, "expand")
        return pattern if same and flat else None
    if is_call(node, expand, "expand"):
        same = all(b[-pattern.axis] == a[-pattern.axis] for b, a in zip(before, after, strict=True))
        return pattern if same else None
    # a reshaped row of indices is found again as the only dimension of more than one element, at both trial sizes
    if is_call(node, "reshape", "view") and all(math.prod(b) == b[-pattern.axis] > 1 for b in before):
        axes, axes_of_second = (_long_axes(lengths) for lengths in after)
        return AxisIndex(axes[0], pattern.first) if axes == axes_of_second and len(axes) == 1 else None
    return None


def _long_axes(shape: Sequence[int]) -> list[int]:
    """Return the dimensions of more than one element, counted from the last, which is 1."""
    return [len(shape) - i for i, length in enumerate(shape) if length > 1]


def _elementwise(r: Rewriter, node: Any) -> Pattern | None:
    # the type of a cast is no operand with a pattern of its own
    operands = [arg for arg in node.args if not isinstance(arg, torch.dtype)]
    patterns = [_pattern_of(r, operand) for operand in operands]
    if any(pattern is None for pattern in patterns):
        return None
    if any(_is_broadcast(r, operand, pattern, node) for operand, pattern in zip(operands, patterns, strict=True)):
        return None
    # an index differs from element to element, so two elements cannot stand for all: only a few calls are known
    if any(isinstance(pattern, AxisIndex) for pattern in patterns):
        return _index_arithmetic(node, patterns)

    def run(part: str) -> torch.Tensor:
        values: list[Any] = [
            pattern.value if isinstance(pattern, Uniform) else getattr(pattern, part) for pattern in patterns
        ]
        function: Callable[..., Any] = node.target
        if isinstance(node.target, str):
            result: torch.Tensor = getattr(values[0], node.target)(*node.args[1:], **node.kwargs)
        else:
            result = function(*values, **node.kwargs)
        return torch.as_tensor(result)

    # one element stands for all on and below the diagonal, another one for all above it
    lower = run("lower")
    upper = run("upper")
    return Triangular(lower, upper) if any(isinstance(pattern, Triangular) for pattern in patterns) else Uniform(lower)


def _is_broadcast(r: Rewriter, operand: Any, pattern: Pattern | None, result: fx.Node) -> bool:
    """Return whether a dimension that the operand's pattern describes is broadcast in the result."""
    if pattern is None or isinstance(pattern, Uniform):
        return False
    axes = (1, 2) if isinstance(pattern, Triangular) else (pattern.axis,)
    pairs = zip(r.shapes(operand), r.shapes(result), strict=True)
    return any(before[-axis] != after[-axis] for before, after in pairs for axis in axes)


def _index_arithmetic(node: Any, patterns: list[Pattern | None]) -> Pattern | None:
    """Return the pattern of a comparison of row and column indices, or of an index plus a number."""
    if is_call(node, "to", "clone", "contiguous"):
        # as floats or small integers, large indices would no longer be exact
        exact = not node.args[1:] or node.args[1] in (torch.int32, torch.int64)
        return patterns[0] if exact else None
    if len(patterns) != 2:
        return None
    one, other = patterns
    if isinstance(one, AxisIndex) and isinstance(other, AxisIndex):
        function = node.target
        if one.axis == 1:
            one, other, function = other, one, SWAPPED.get(function)
        # with different first numbers the triangle is shifted off the diagonal (a sequence after cached keys, for
        # example)
        if (one.axis, other.axis) != (2, 1) or one.first != other.first or function not in VALUE_UP_TO_DIAGONAL:
            return None
        lower = VALUE_UP_TO_DIAGONAL[function]
        return Triangular(torch.tensor(lower), torch.tensor(not lower))
    index, number = (one, other) if isinstance(one, AxisIndex) else (other, one)
    if not isinstance(index, AxisIndex) or not isinstance(number, Uniform) or number.value.is_floating_point():
        return None
    if is_call(node, torch.add) or (is_call(node, torch.sub) and index is one):
        # a number minus an index runs backwards, and is no index
        shift = int(number.value)
        return AxisIndex(index.axis, index.first + (shift if node.target is torch.add else -shift))
    return None


# -- bounds: may a mask hold -inf?

KEEPS_MAGNITUDE = (
    torch.unsqueeze, torch.squeeze, expand, strided, gather_rows, torch.neg, "to", "clone", "permute", "reshape",
    "view", "transpose", "unsqueeze", "expand", "repeat", "contiguous", torch.tril, torch.triu,
)  # fmt: skip
MASK_MAGNITUDE = 1e30


def magnitude(r: Rewriter, value: Any) -> float:
    """Return a rough bound of a mask's elements: 1 for weights and integers, MASK_MAGNITUDE for finite mask values.

    inf means that elements may be infinite, or that nothing is known.
    """
    if (number := r.number(value)) is not None:
        if not math.isfinite(number):
            return math.inf
        return MASK_MAGNITUDE if abs(number) > 1e6 else 1.0
    if not isinstance(value, fx.Node):
        return math.inf
    if value.op == "get_attr":
        tensor = r.constant(value)
        # a weight is assumed to stay below the magnitude of a mask value
        return 1.0 if tensor is None or bool((tensor.abs() < 1e6).all()) else math.inf
    first = r.probes(value)[0]
    if isinstance(first, torch.Tensor) and not first.is_floating_point():
        return 1.0
    if is_call(value, *KEEPS_MAGNITUDE):
        return magnitude(r, value.args[0])
    if is_call(value, torch.where):
        return max(magnitude(r, value.args[1]), magnitude(r, value.args[2]))
    if is_call(value, torch.mul, torch.add, torch.sub) and not value.kwargs:
        bounds = [magnitude(r, arg) for arg in value.args]
        # the sum or the product of two mask values may overflow to -inf
        may_overflow = bounds.count(MASK_MAGNITUDE) == 2
        return math.inf if may_overflow or math.inf in bounds else max(bounds)
    return math.inf
