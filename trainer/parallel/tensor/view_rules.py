"""How a divided dimension goes through calls that move, cut and join dimensions; see compute_rules.py."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.gather import strided
from onward.trainer.onnx_import.ops.shape import expand
from onward.trainer.parallel.tensor.graph_analysis import Division, Whole
from onward.trainer.parallel.tensor.propagation import Attempt, called, rule

# -- moving dimensions


@rule("size")
def size(t: Attempt, node: Any) -> None:
    """All numbers of the graph stay those of whole values."""
    x, dim = node.args
    division = t.division(x)
    if division is not None and dim % t.rank(x) == division.dim:
        t.work.measured.append((node.name, division))


@rule("permute", torch.permute, "transpose", torch.transpose, "t", torch.t)
def permute(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division, rank = t.first(node), t.rank(x)
    order = list(range(rank))
    if called(node) == "permute":
        order = [dim % rank for dim in (rest[0] if isinstance(rest[0], list | tuple) else rest)]
    else:
        one, other = rest or (0, rank - 1)
        order[one], order[other] = order[other], order[one]
    return division.moved(order.index(division.dim))


@rule(torch.unsqueeze, "unsqueeze")
def unsqueeze(t: Attempt, node: Any) -> Division:
    dim = node.args[1]
    division = t.first(node)
    return division.moved(division.dim + (dim % t.rank(node) <= division.dim))


@rule(torch.squeeze, "squeeze")
def squeeze(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.division(x)
    if division is None or not rest:
        raise Whole(f"{node.name} does not say which dimensions it takes away")
    dims = [dim % t.rank(x) for dim in (rest[0] if isinstance(rest[0], list | tuple) else rest)]
    gone = [dim for dim in dims if t.shapes(x)[dim] == (1, 1)]
    return division.moved(division.dim - sum(dim < division.dim for dim in gone))


@rule("reshape", "view", torch.reshape, "flatten", torch.flatten)
def reshape(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.first(node)
    result = regroup(t.shapes(x), t.shapes(node), division, t.size, node.name)
    if called(node) != "flatten":
        t.reached(node, rest, result.dim, result)
    return result


Pairs = Sequence[tuple[int, int]]
FEW = 8
"""So many elements of a divided dimension may turn out to be blocks, as query, key and value are."""


def regroup(before: Pairs, after: Pairs, division: Division, size: int, name: str) -> Division:
    """Where a divided dimension is after a reshape, by the strides of its elements (at both sizes of the inputs).

    [.., 64] -> [.., 4, 16]     4 heads are divided: they must divide evenly
    [.., 4, 16] -> [.., 64]     blocks of 16 elements each
    """
    sides = (0, 1)
    behind = [division.inner * math.prod(length[side] for length in before[division.dim + 1 :]) for side in sides]
    top = [n * division.length for n in behind]  # stride of what is outside the divided factor
    strides = [[math.prod(length[side] for length in after[dim + 1 :]) for side in sides] for dim in range(len(after))]
    spans = [[stride[side] * length[side] for side in sides] for stride, length in zip(strides, after, strict=True)]
    dims = [
        dim for dim in range(len(after)) if all(strides[dim][side] < top[side] <= spans[dim][side] for side in sides)
    ]
    if not dims:
        raise Whole(f"{name} merges the divided dimension in two ways")
    [dim] = dims
    stride, span = strides[dim], spans[dim]
    if any(m % n for n, m in zip(top, span, strict=True)):
        raise Whole(f"{name} cuts the divided dimension across")
    if all(n % s == 0 for s, n in zip(stride, behind, strict=True)):
        inner = {n // s for s, n in zip(stride, behind, strict=True)}
        if len(inner) > 1:
            raise Whole(f"{name} merges the divided dimension with one of dynamic length behind it")
        return replace(division, dim=dim, inner=inner.pop())
    if any(s % n for s, n in zip(stride, behind, strict=True)) or any(n % s for s, n in zip(stride, top, strict=True)):
        raise Whole(f"{name} cuts the divided dimension across")
    unit = stride[0] // behind[0]
    blocks = division.blocks
    count = division.length // unit
    if len(blocks) == count > 1 and set(blocks) == {unit}:  # the blocks are a dimension of their own now
        inside = replace(division, blocks=(unit,), unit=0)
        return regroup(before, after, inside, size, name)
    finer = replace(division, dim=dim, blocks=tuple(block // unit for block in blocks), unit=division.unit * unit)
    if all(block % unit == 0 for block in blocks) and finer.even(size):
        return finer
    broken = f"{name} makes {count} heads of {unit} each; {count} do not divide evenly over {size} ranks"
    if len(blocks) > 1 or unit < size or count > FEW:
        raise Whole(broken)
    raise division.finer([unit * i * division.inner for i in range(1, count)], name, broken)


@rule(expand, "expand")
def expand_(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.first(node)
    result = division.moved(division.dim + t.rank(node) - t.rank(x))
    lengths = rest[0] if isinstance(rest[0], list | tuple) else rest
    place = result.dim - (t.rank(node) - len(lengths))
    if place >= 0:
        t.reached(node, rest, place, result)
    return result


@rule("repeat")
def repeat(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.first(node)
    counts = rest[0] if isinstance(rest[0], list | tuple) else rest
    result = division.moved(division.dim + t.rank(node) - t.rank(x))
    if counts[result.dim] != 1:
        raise Whole(f"{node.name} repeats the divided dimension")
    return result


@rule(torch.repeat_interleave, "repeat_interleave")
def repeat_interleave(t: Attempt, node: Any) -> Division:
    x, count, *rest = node.args
    dim = rest[0] if rest else node.kwargs.get("dim")
    division = t.division(x)
    if division is None or not isinstance(dim, int) or not isinstance(count, int):
        raise Whole(f"{node.name} repeats by a value")
    if dim % t.rank(x) != division.dim:
        return division
    result = replace(division, inner=division.inner * count)
    if "output_size" in node.kwargs:
        t.length(node, ("output_size",), result)
    return result


# -- cutting and joining


@rule(operator.getitem)
def getitem(t: Attempt, node: Any) -> Division:
    parts, index = node.args
    states = t.states[parts]
    if not isinstance(states, list) or not isinstance(index, int):
        raise Whole(f"{node.name} indexes a divided value")
    part: Division = states[index]
    return part


@rule(torch.split, "split", torch.chunk, "chunk")
def split(t: Attempt, node: Any) -> list[Division]:
    x, lengths = node.args[:2]
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % t.rank(x)
    division, total = t.first(node), t.shapes(x)[dim]
    count = max((int(user.args[1]) for user in node.users if user.target is operator.getitem), default=0) + 1
    if dim != division.dim:
        return [division] * count
    if total != (division.period, division.period):
        raise Whole(f"{node.name} cuts a dimension of dynamic length")
    alike = isinstance(lengths, int)
    if alike:
        each = -(-total[0] // lengths) if called(node) == "chunk" else lengths
        lengths = [min(each, total[0] - start) for start in range(0, total[0], each)]
    ends = list(itertools.accumulate(lengths))
    pieces = [_piece(division, start, end, node) for start, end in itertools.pairwise([0, *ends])]
    if alike and len({piece.blocks for piece in pieces}) > 1:
        raise Whole(f"{node.name} cuts into pieces of {lengths}, which are not divided alike")
    if called(node) != "chunk":
        for i, piece in enumerate(pieces[:1] if alike else pieces):
            t.length(node, (1,) if alike else (1, i), piece)
    return pieces


def _piece(division: Division, start: int, end: int, node: fx.Node) -> Division:
    """The elements from start to end of a divided dimension; asks for blocks that end there."""
    ends = [0, *(end * division.inner for end in itertools.accumulate(division.blocks))]
    if start not in ends or end not in ends:
        raise division.finer([place for place in (start, end) if place not in ends], called(node))
    blocks = division.blocks[ends.index(start) : ends.index(end)]
    return replace(division, blocks=blocks, start=division.start + start // division.inner * division.unit)


@rule(strided)
def slice_(t: Attempt, node: Any) -> Division:
    x, axis, start, end, step = node.args
    division, rank = t.first(node), t.rank(x)
    if axis % rank != division.dim:
        return division
    total = t.shapes(x)[division.dim]
    if step != 1 or total != (division.period,) * 2 or not isinstance(start, int) or not isinstance(end, int):
        raise Whole(f"{node.name} cuts the divided dimension across")
    start, end, _ = slice(start, end).indices(division.period)
    piece = _piece(division, start, end, node)
    if start:
        t.length(node, (2,), _piece(division, 0, start, node))
    t.length(node, (3,), _piece(division, 0, end, node))
    return piece


@rule(torch.unbind, "unbind")
def unbind(t: Attempt, node: Any) -> list[Division]:
    x, *rest = node.args
    dim = (rest[0] if rest else node.kwargs.get("dim", 0)) % t.rank(x)
    division = t.first(node)
    count = t.shapes(x)[dim][0]
    _not_picked(t, node, division, dim)
    return [division.moved(division.dim - (dim < division.dim))] * count


@rule(torch.select, "select")
def select(t: Attempt, node: Any) -> Division:
    x, dim, _ = node.args
    division = t.first(node)
    _not_picked(t, node, division, dim % t.rank(x))
    return division.moved(division.dim - (dim % t.rank(x) < division.dim))


def _not_picked(t: Attempt, node: fx.Node, division: Division, dim: int) -> None:
    """Raises if single elements of the divided dimension are picked: few of them may be blocks of their own."""
    if dim != division.dim:
        return
    if division.length > FEW:
        raise Whole(f"{node.name} picks one of {division.length} divided elements")
    raise division.finer([i * division.inner for i in range(1, division.length)], called(node))


@rule(torch.cat)
def cat(t: Attempt, node: Any) -> Division:
    parts = list(node.args[0])
    rank = t.rank(node)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank
    divisions = [t.division(part) for part in parts]
    first = next(own for own in divisions if own is not None)
    if first.dim != dim:
        return t.aligned(node, parts, rank)
    blocks: list[int] = []
    for part, own in zip(parts, divisions, strict=True):
        if own is None or own.dim != dim or t.shapes(part)[dim] != (own.period,) * 2:
            raise Whole(f"{node.name} joins divided and whole values along the divided dimension")
        if own.inner > 1 and not own.even(t.size):
            raise Whole(f"{node.name} joins {own.length} x {own.inner} elements, over {t.size} ranks")
        blocks += [block * own.inner for block in own.blocks]
    return Division(dim, tuple(blocks))


@rule(torch.stack)
def stack(t: Attempt, node: Any) -> Division:
    parts, rank = list(node.args[0]), t.rank(node)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank
    division = t.aligned(node, parts, rank - 1)
    return division.moved(division.dim + (dim <= division.dim))


@rule(F.glu)
def glu(t: Attempt, node: Any) -> Division:
    x = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % t.rank(x)
    division = t.first(node)
    if dim != division.dim:
        return division
    half = division.period // 2
    first, second = _piece(division, 0, half, node), _piece(division, half, division.period, node)
    t.same(first, second, node)
    return first
