"""What the import can tell of an attention mask: whether it is the causal one, and whether it may hold -inf.

A mask that no data goes into is followed as a rule that gives each of its elements from its row and column:
the same number everywhere, the number of its row or column, or one number up to the diagonal and one beyond.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onward.trainer.onnx_import.ops.gather import gather_rows, strided
from onward.trainer.onnx_import.ops.shape import arange, expand, full
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, is_call

MASKED = -1e9
"""Scores at or below this have no weight after softmax beside one that is not masked."""


@dataclass(frozen=True)
class Uniform:
    """The same everywhere."""

    value: torch.Tensor


@dataclass(frozen=True)
class AxisIndex:
    """The place along one dimension, counted from the last, plus a number."""

    axis: int
    first: int


@dataclass(frozen=True)
class Triangular:
    """`lower` where the column is at most the row, `upper` beyond; over the last two dimensions."""

    lower: torch.Tensor
    upper: torch.Tensor


Pattern = Uniform | AxisIndex | Triangular

ELEMENTWISE = (
    torch.add, torch.sub, torch.mul, torch.div, torch.eq, torch.ne, torch.gt, torch.lt, torch.ge, torch.le, torch.where,
    torch.logical_not, torch.logical_and, torch.logical_or, torch.neg, torch.maximum, torch.minimum, torch.zeros_like,
    torch.ones_like, "to", "clone", "contiguous", operator.add, operator.sub, operator.mul,
)  # fmt: skip
KEEPS_LAST_AXES = (torch.unsqueeze, expand, strided, "unsqueeze", "expand", "reshape", "view", "repeat")
UP_TO_DIAGONAL = {torch.ge: True, torch.lt: False}
"""What comparing the row with the column gives where the column is at most the row."""
MIRRORED = {torch.le: torch.ge, torch.gt: torch.lt}


def is_causal_mask(r: Rewriter, mask: Any) -> bool:
    """Whether a mask added to the scores is: nothing up to the diagonal, and what leaves no weight beyond."""
    rule = pattern_of(r, mask)
    return isinstance(rule, Triangular) and float(rule.lower) == 0.0 and float(rule.upper) <= MASKED


def triangular_condition(r: Rewriter, condition: Any) -> bool | None:
    """What a condition is up to the diagonal, if it is the opposite everywhere beyond; else None."""
    rule = pattern_of(r, condition)
    if not isinstance(rule, Triangular) or rule.lower.dtype != torch.bool or bool(rule.lower) == bool(rule.upper):
        return None
    return bool(rule.lower)


def pattern_of(r: Rewriter, value: Any) -> Pattern | None:
    """The rule of a value's elements; None if none is known."""
    try:
        return _rule_of(r, value)
    except (NoMatch, RuntimeError, TypeError):
        return None


def _rule_of(r: Rewriter, value: Any) -> Pattern | None:
    if isinstance(value, bool | int | float):
        return Uniform(torch.tensor(value))
    if not isinstance(value, fx.Node):
        return None
    rule = _of_stored(r, value) if value.op == "get_attr" else _of_call(r, value)
    return rule if rule is None or _reaches(r, value, rule) else None


def _reaches(r: Rewriter, node: Any, rule: Pattern) -> bool:
    """Whether the dimensions a rule is about are there, and none is a single element stretched over a longer one."""
    return isinstance(rule, Uniform) or r.rank(node) >= (2 if isinstance(rule, Triangular) else rule.axis)


def _of_stored(r: Rewriter, node: Any) -> Pattern | None:
    """A small table, told by its values."""
    tensor = r.constant(node)
    if tensor is None or not tensor.numel():
        return None
    if tensor.numel() == 1:
        return Uniform(tensor.reshape(()))
    if any(length != 1 for length in tensor.shape[:-2]):
        return None
    rows, columns = tensor.shape[-2] if tensor.ndim > 1 else 1, tensor.shape[-1]
    values = tensor.reshape(rows, columns)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and 1 in (rows, columns):
        first = int(values[0, 0])
        ramp = torch.equal(values.reshape(-1).long(), torch.arange(first, first + values.numel()))
        return AxisIndex(1 if rows == 1 else 2, first) if ramp else None
    if rows == 1 or columns == 1:
        return None
    below = torch.ones(rows, columns, dtype=torch.bool).tril()
    expected = torch.where(below, values[0, 0], values[0, 1])
    return Triangular(values[0, 0], values[0, 1]) if torch.equal(values, expected) else None


def _of_call(r: Rewriter, node: Any) -> Pattern | None:
    if is_call(node, full):
        return Uniform(torch.tensor(node.args[2], dtype=node.args[3]))
    if is_call(node, arange):
        _, start, _, step, _ = node.args
        return AxisIndex(1, start) if isinstance(start, int) and step == 1 else None
    if is_call(node, torch.tril, torch.triu):
        return _cut(r, node)
    if is_call(node, *KEEPS_LAST_AXES):
        return _moved(r, node)
    if is_call(node, *ELEMENTWISE):
        return _elementwise(r, node)
    return None


def _cut(r: Rewriter, node: Any) -> Pattern | None:
    rule, diagonal = _rule_of(r, node.args[0]), node.args[1] if len(node.args) > 1 else 0
    if not isinstance(rule, Uniform | Triangular) or diagonal != (0 if node.target is torch.tril else 1):
        return None
    lower, upper = (rule.value, rule.value) if isinstance(rule, Uniform) else (rule.lower, rule.upper)
    nothing = torch.zeros_like(lower)
    return Triangular(lower, nothing) if node.target is torch.tril else Triangular(nothing, upper)


def _moved(r: Rewriter, node: Any) -> Pattern | None:
    """Dimensions added in front, or (to a ramp) behind; slices from the first element on."""
    source = node.args[0]
    rule = _rule_of(r, source)
    if rule is None or isinstance(rule, Uniform):
        return rule
    before, after = r.shapes(source), r.shapes(node)
    if is_call(node, strided):
        _, _, start, _, step = node.args
        return rule if start == 0 and step == 1 else None
    if is_call(node, torch.unsqueeze, "unsqueeze"):
        place = int(node.args[1]) % len(after[0])
        behind = len(after[0]) - 1 - place  # dimensions that stay behind the new one
        if isinstance(rule, AxisIndex):
            return AxisIndex(rule.axis + 1, rule.first) if behind < rule.axis else rule
        return rule if behind >= 2 else None
    if isinstance(rule, Triangular):
        same = all(b[-2:] == a[-2:] for b, a in zip(before, after, strict=True))
        flat = all(math.prod(b[:-2]) == 1 for b in before) or is_call(node, expand, "expand")
        return rule if same and flat else None
    if is_call(node, expand, "expand"):
        same = all(b[-rule.axis] == a[-rule.axis] for b, a in zip(before, after, strict=True))
        return rule if same else None
    if is_call(node, "reshape", "view") and all(math.prod(b) == b[-rule.axis] > 1 for b in before):
        axes = [[len(a) - i for i, length in enumerate(a) if length > 1] for a in after]
        return AxisIndex(axes[0][0], rule.first) if axes[0] == axes[1] and len(axes[0]) == 1 else None
    return None


def _elementwise(r: Rewriter, node: Any) -> Pattern | None:
    operands = [arg for arg in node.args if not isinstance(arg, torch.dtype)]
    rules = [_rule_of(r, operand) for operand in operands]
    if any(rule is None for rule in rules):
        return None
    if any(_is_stretched(r, operand, rule, node) for operand, rule in zip(operands, rules, strict=True)):
        return None
    if any(isinstance(rule, AxisIndex) for rule in rules):
        return _of_ramps(node, rules)

    def run(part: str) -> torch.Tensor:
        values: list[Any] = [rule.value if isinstance(rule, Uniform) else getattr(rule, part) for rule in rules]
        function: Callable[..., Any] = node.target
        if isinstance(node.target, str):
            result: torch.Tensor = getattr(values[0], node.target)(*node.args[1:], **node.kwargs)
        else:
            result = function(*values, **node.kwargs)
        return torch.as_tensor(result)

    lower, upper = run("lower"), run("upper")
    return Triangular(lower, upper) if any(isinstance(rule, Triangular) for rule in rules) else Uniform(lower)


def _is_stretched(r: Rewriter, operand: Any, rule: Pattern | None, result: fx.Node) -> bool:
    """Whether a dimension that the operand's rule is about is one element, broadcast over a longer one."""
    if rule is None or isinstance(rule, Uniform):
        return False
    axes = (1, 2) if isinstance(rule, Triangular) else (rule.axis,)
    pairs = zip(r.shapes(operand), r.shapes(result), strict=True)
    return any(before[-axis] != after[-axis] for before, after in pairs for axis in axes)


def _of_ramps(node: Any, rules: list[Pattern | None]) -> Pattern | None:
    """Ramps compared, or moved by a number."""
    if is_call(node, "to", "clone", "contiguous"):
        exact = not node.args[1:] or node.args[1] in (torch.int32, torch.int64)
        return rules[0] if exact else None
    if len(rules) != 2:
        return None
    one, other = rules
    if isinstance(one, AxisIndex) and isinstance(other, AxisIndex):
        function = node.target
        if one.axis == 1:
            one, other, function = other, one, MIRRORED.get(function)
        if (one.axis, other.axis) != (2, 1) or one.first != other.first or function not in UP_TO_DIAGONAL:
            return None
        lower = UP_TO_DIAGONAL[function]
        return Triangular(torch.tensor(lower), torch.tensor(not lower))
    ramp, number = (one, other) if isinstance(one, AxisIndex) else (other, one)
    if not isinstance(ramp, AxisIndex) or not isinstance(number, Uniform) or number.value.is_floating_point():
        return None
    if is_call(node, torch.add) or (is_call(node, torch.sub) and ramp is one):
        shift = int(number.value)
        return AxisIndex(ramp.axis, ramp.first + (shift if node.target is torch.add else -shift))
    return None


# -- infinities

FREE = (
    torch.unsqueeze, torch.squeeze, expand, strided, gather_rows, torch.neg, "to", "clone", "permute", "reshape",
    "view", "transpose", "unsqueeze", "expand", "repeat", "contiguous", torch.tril, torch.triu,
)  # fmt: skip
LARGE = 1e30


def magnitude(r: Rewriter, value: Any) -> float:
    """A bound for the elements, as orders go: of weights and counted things 1, of masks LARGE; inf if there is none."""
    if (number := r.number(value)) is not None:
        return math.inf if math.isinf(number) or math.isnan(number) else (LARGE if abs(number) > 1e6 else 1.0)
    if not isinstance(value, fx.Node):
        return math.inf
    if value.op == "get_attr":
        tensor = r.constant(value)
        return 1.0 if tensor is None or bool((tensor.abs() < 1e6).all()) else math.inf
    first = r.probes(value)[0]
    if isinstance(first, torch.Tensor) and not first.is_floating_point():
        return 1.0
    if is_call(value, *FREE):
        return magnitude(r, value.args[0])
    if is_call(value, torch.where):
        return max(magnitude(r, value.args[1]), magnitude(r, value.args[2]))
    if is_call(value, torch.mul, torch.add, torch.sub) and not value.kwargs:
        bounds = [magnitude(r, arg) for arg in value.args]
        return math.inf if bounds.count(LARGE) == 2 or math.inf in bounds else max(bounds)
    return math.inf
