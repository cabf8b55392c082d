"""Sharding rules of the calls that move, split and join dimensions.

Reshapes are followed by the strides of the sharded elements. Over 2 ranks, with 0 and 1 the rank of each element:

    [b, s, 8]        0 0 0 0 1 1 1 1              dim 2, blocks (8,), inner 1
    -> [b, s, 2, 4]  [0 0 0 0] [1 1 1 1]          dim 2, blocks (2,), inner 1: each rank has one head
    -> [b, s, 8]     0 0 0 0 1 1 1 1              dim 2, blocks (2,), inner 4: a head is never separated

One weight for query, key and value. Its output is split into three, so that the propagation begins again with blocks
(NeedsFinerBlocks):

    [b, s, 12]       0 0 0 0 0 0 1 1 1 1 1 1      blocks (12,): the first rank has no value, the second no query
    [b, s, 12]       0 0 1 1 0 0 1 1 0 0 1 1      blocks (4, 4, 4)
    -> 3 [b, s, 4]   0 0 1 1                      blocks (4,) of each
"""

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
from onward.trainer.parallel.tensor.propagation import Propagation, called, dim_of, rule, unary_rule
from onward.trainer.parallel.tensor.tensor_shardings import (
    CannotShard,
    Problem,
    Replicated,
    Result,
    Sharding,
)

# -- moving dimensions


@unary_rule("size")
def size(p: Propagation, node: Any, x: Sharding) -> Result:
    """Make `size` return the full length on every rank, so that all ranks compute the same shapes."""
    operand, dim = node.args
    # the other dimensions have the same length on all ranks
    if dim % p.rank(operand) == x.dim:
        p.edits.size_calls.append((node.name, x))
    return Replicated()


@unary_rule("permute", torch.permute, "transpose", torch.transpose, "t", torch.t)
def permute(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, *rest = node.args
    rank = p.rank(operand)
    # order[i]: the dimension of the operand that becomes dimension i
    order = list(range(rank))
    if called(node) == "permute":
        order = [dim % rank for dim in _listed(rest)]
    else:
        # `t` takes no arguments and exchanges the two axes of a matrix
        one, other = rest or (0, rank - 1)
        order[one], order[other] = order[other], order[one]
    return x.on_dim(order.index(x.dim))


@unary_rule(torch.unsqueeze, "unsqueeze")
def unsqueeze(p: Propagation, node: Any, x: Sharding) -> Result:
    # a new axis in front of the sharded one moves it by one
    return x.on_dim(x.dim + (node.args[1] % p.rank(node) <= x.dim))


@unary_rule(torch.squeeze, "squeeze")
def squeeze(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, *rest = node.args
    if not rest:
        return CannotShard(f"{node.name} does not name the dimensions it removes")
    dims = [dim % p.rank(operand) for dim in _listed(rest)]
    # torch ignores dimensions of another length
    removed = [dim for dim in dims if p.shapes(operand)[dim] == (1, 1)]
    # an axis that is removed in front of the sharded one moves it back by one
    return x.on_dim(x.dim - sum(dim < x.dim for dim in removed))


def _listed(args: Sequence[Any]) -> Sequence[Any]:
    """Return dimensions or lengths that are given as one list or as single arguments."""
    listed: Sequence[Any] = args[0] if isinstance(args[0], list | tuple) else args
    return listed


@unary_rule("reshape", "view", torch.reshape, "flatten", torch.flatten)
def reshape(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, *rest = node.args
    result = reshaped(p.shapes(operand), p.shapes(node), x, p.size, node.name)
    # `flatten` has no lengths that would have to be those of this rank
    if isinstance(result, Sharding) and called(node) != "flatten":
        p.set_local_shape(node, rest, result.dim, result)
    return result


Pairs = Sequence[tuple[int, int]]
MAX_SPLIT = 8
"""Units of a sharded dimension that may turn out to be blocks, as query, key and value are three."""


def reshaped(before: Pairs, after: Pairs, x: Sharding, size: int, name: str) -> Sharding | Problem:
    """Return where a sharded dimension is after a reshape.

    before, after: both traced lengths of each dimension. A unit of the sharding is a run of elements in memory, of
    `unit_stride` elements, and a period of `period_stride`; the reshape does not move elements, so that the sharded
    dimension is the one whose stride is below a period and whose extent (stride x length) is not.

    [.., 64] -> [.., 4, 16]     unit_stride 1, of the 4 heads 16: 16 units become one; 4 must divide evenly over ranks
    [.., 4, 16] -> [.., 64]     unit_stride 16, of the features 1: a unit has 16 elements
    """
    # both traced lengths of each dimension: what holds for both is taken to hold for every length
    sides = (0, 1)
    # elements between the beginnings of two units, and of two periods
    unit_stride = [x.inner * math.prod(length[side] for length in before[x.dim + 1 :]) for side in sides]
    period_stride = [stride * x.num_units for stride in unit_stride]
    found = []
    for dim, length in enumerate(after):
        stride = [math.prod(inner[side] for inner in after[dim + 1 :]) for side in sides]
        extent = [stride[side] * length[side] for side in sides]
        if all(stride[side] < period_stride[side] <= extent[side] for side in sides):
            found.append((dim, stride, extent))
    if not found:
        return CannotShard(f"{name} merges the sharded dimension in a way that depends on dynamic lengths")
    # strides shrink from dimension to dimension, so at most one contains the end of a period
    [(dim, stride, extent)] = found
    # the dimension must end where a period does, else a rank's elements would not be a part of it
    if any(m % n for n, m in zip(period_stride, extent, strict=True)):
        return CannotShard(f"{name} splits the sharded dimension across its periods")
    if all(n % s == 0 for s, n in zip(stride, unit_stride, strict=True)):
        # a unit is one or more elements of the new dimension
        elements = {n // s for s, n in zip(stride, unit_stride, strict=True)}
        if len(elements) > 1:
            return CannotShard(f"{name} merges the sharded dimension with a dynamic length behind it")
        # a unit spans so many elements of the new axis
        return replace(x, dim=dim, inner=elements.pop())
    cuts_units = any(s % n for s, n in zip(stride, unit_stride, strict=True))
    if cuts_units or any(n % s for s, n in zip(stride, period_stride, strict=True)):
        return CannotShard(f"{name} splits the sharded dimension across its units")
    # several units become one element of the new dimension, as 16 features become one head
    merged = stride[0] // unit_stride[0]
    count = x.num_units // merged
    # e.g. [.., 192] -> [.., 3, 64] with blocks of 64: the sharded dimension is the one behind
    if len(x.blocks) == count > 1 and set(x.blocks) == {merged}:
        # the blocks are a dimension of their own now ([.., 3 x 64] -> [.., 3, 64]): follow the units of one block
        return reshaped(before, after, replace(x, blocks=(merged,), columns_per_unit=0), size, name)
    heads = replace(
        x,
        dim=dim,
        blocks=tuple(block // merged for block in x.blocks),
        columns_per_unit=x.columns_per_unit * merged,
    )
    if all(block % merged == 0 for block in x.blocks) and heads.is_even(size):
        return heads
    uneven = f"{name} makes {count} heads of {merged} each, which do not divide evenly over {size} ranks"
    # few heads that do not divide evenly may be blocks (query, key, value) of heads that do
    if len(x.blocks) > 1 or merged < size or count > MAX_SPLIT:
        return CannotShard(uneven)
    return x.with_block_ends([merged * i * x.inner for i in range(1, count)], name, uneven)


@unary_rule(expand, "expand")
def expand_(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, *rest = node.args
    result = x.on_dim(x.dim + p.rank(node) - p.rank(operand))
    # the shape may be shorter than the result: it broadcasts, too
    position = result.dim - (p.rank(node) - len(_listed(rest)))
    if position >= 0:
        p.set_local_shape(node, rest, position, result)
    return result


@unary_rule("repeat")
def repeat(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, *_ = node.args
    # Along the sharded dimension, too: each rank repeats its part, and the repeats are periods of the pattern. So
    # DeBERTa repeats its heads for each sample, [heads, positions, features] -> [samples x heads, ..].
    return x.on_dim(x.dim + p.rank(node) - p.rank(operand))


@unary_rule(torch.repeat_interleave, "repeat_interleave")
def repeat_interleave(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, count = node.args[:2]
    dim = dim_of(node, 2, None)
    if not isinstance(dim, int) or not isinstance(count, int):
        return CannotShard(f"{node.name} repeats a number of times that is known only at run time")
    if dim % p.rank(operand) != x.dim:
        return x
    # each element is followed by its copies, so that a unit grows and stays where it is
    result = replace(x, inner=x.inner * count)
    if "output_size" in node.kwargs:
        p.set_local_length(node, ("output_size",), result)
    return result


# -- splitting and joining


@rule(operator.getitem)
def getitem(p: Propagation, node: Any) -> Result:
    outputs, index = node.args
    shardings = p.shardings.get(outputs)
    if not isinstance(shardings, list) or not isinstance(index, int):
        return CannotShard(f"{node.name} indexes a sharded tensor")
    sharding: Sharding = shardings[index]
    return sharding


@unary_rule(torch.split, "split", torch.chunk, "chunk")
def split(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, lengths = node.args[:2]
    dim = dim_of(node, 2) % p.rank(operand)
    total = p.shapes(operand)[dim]
    # the number of outputs that are read; each is a getitem
    count = max((int(user.args[1]) for user in node.users if user.target is operator.getitem), default=0) + 1
    if dim != x.dim:
        return [x] * count
    if total != (x.period, x.period):
        return CannotShard(f"{node.name} splits a dimension of dynamic length")
    # torch.split takes one length for all parts or a list, torch.chunk the number of parts
    is_one_length = isinstance(lengths, int)
    if is_one_length:
        # torch.chunk rounds the length of a part up, and makes the last one shorter
        each = -(-total[0] // lengths) if called(node) == "chunk" else lengths
        lengths = [min(each, total[0] - start) for start in range(0, total[0], each)]
    # the split must be between blocks: each part then has its own units on every rank
    ends = list(itertools.accumulate(lengths))
    ranges = [_block_range(p, x, start, end, node) for start, end in itertools.pairwise([0, *ends])]
    if is_one_length:  # one argument is the length of all of them, on each rank
        p.require(
            len({each.blocks for each in ranges}) == 1,
            f"{node.name} splits into parts of {lengths}, which are not sharded alike",
        )
    if called(node) != "chunk":
        for i, each in enumerate(ranges[:1] if is_one_length else ranges):
            p.set_local_length(node, (1,) if is_one_length else (1, i), each)
    return ranges


def _block_range(p: Propagation, x: Sharding, start: int, end: int, node: fx.Node) -> Sharding:
    """Return the sharding of the elements from `start` to `end`; requires that blocks begin and end there."""
    ends = [0, *(end * x.inner for end in itertools.accumulate(x.blocks))]
    if missing := [place for place in (start, end) if place not in ends]:
        p.add_problem(x.with_block_ends(missing, called(node)))
        return x
    # the part has the blocks between the two places, and begins at another column of the weight
    blocks = x.blocks[ends.index(start) : ends.index(end)]
    return replace(x, blocks=blocks, first_column=x.first_column + start // x.inner * x.columns_per_unit)


@unary_rule(strided)
def slice_(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, axis, start, end, step = node.args
    if axis % p.rank(operand) != x.dim:
        return x
    total = p.shapes(operand)[x.dim]
    is_known = total == (x.period, x.period) and all(isinstance(number, int) for number in (start, end, step))
    if not is_known or step < 1:
        return CannotShard(f"{node.name} slices the sharded dimension backwards, or by dynamic numbers")
    if step > 1:
        return _every(node, x, slice(start, end, step), p.size)
    start, end, _ = slice(start, end).indices(x.period)
    result = _block_range(p, x, start, end, node)
    # start and end become numbers of this rank's elements: those of the blocks up to each
    if start:
        p.set_local_length(node, (2,), _block_range(p, x, 0, start, node))
    p.set_local_length(node, (3,), _block_range(p, x, 0, end, node))
    return result


def _every(node: fx.Node, x: Sharding, of: slice, size: int) -> Sharding | CannotShard:
    """Take every second column, as of a gate and an up-projection that are interleaved in one weight.

    The call itself stays as it is, where every rank begins with a first of `step` columns and ends with a last one.
    """
    start, end, step = of.indices(x.period)
    takes_of_all = start < step and end >= x.period
    is_uneven = any(block % (step * size) for block in x.blocks)
    if not takes_of_all or x.inner > 1 or is_uneven:
        taken = f"{node.name} takes one of {step} elements, {start} to {end} of {x.period}"
        return CannotShard(f"{taken}, which do not divide evenly over {size} ranks")
    columns = x.columns_per_unit * step
    return replace(x, blocks=tuple(block // step for block in x.blocks), columns_per_unit=columns)


@unary_rule(torch.unbind, "unbind")
def unbind(p: Propagation, node: Any, x: Sharding) -> Result:
    operand = node.args[0]
    dim = dim_of(node, 1) % p.rank(operand)
    _require_not_selected(p, node, x, dim)
    return [x.on_dim(x.dim - (dim < x.dim))] * p.shapes(operand)[dim][0]


@unary_rule(torch.select, "select")
def select(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, dim, _ = node.args
    dim %= p.rank(operand)
    _require_not_selected(p, node, x, dim)
    return x.on_dim(x.dim - (dim < x.dim))


def _require_not_selected(p: Propagation, node: fx.Node, x: Sharding, dim: int) -> None:
    """Require that no single element of the sharded dimension be selected: a few of them may be blocks instead."""
    if dim == x.dim and x.num_units > MAX_SPLIT:
        p.require(False, f"{node.name} selects one of {x.num_units} sharded elements")
    elif dim == x.dim:
        p.add_problem(x.with_block_ends([i * x.inner for i in range(1, x.num_units)], called(node)))


@rule(torch.cat)
def cat(p: Propagation, node: Any) -> Result:
    operands = list(node.args[0])
    rank = p.rank(node)
    dim = dim_of(node, 1) % rank
    shardings = [p.sharding(operand) for operand in operands]
    # where it is another axis that is joined, all parts are combined like operands
    first = next(sharding for sharding in shardings if sharding is not None)
    if first.dim != dim:
        return p.broadcast(node, operands, rank, joined=True)
    blocks: list[int] = []
    for operand, x in zip(operands, shardings, strict=True):
        lengths = p.shapes(operand)[dim]
        if x is None and lengths[0] == lengths[1] >= p.size:
            # a block of its own, of which each rank takes its part
            p.shard_operand(node, operand, dim - rank, Sharding(dim, lengths[:1]), joined=True)
            blocks.append(lengths[0])
            continue
        if x is None or x.dim != dim or lengths != (x.period, x.period):
            return CannotShard(f"{node.name} joins {_described(lengths, x)} with others along the sharded dimension")
        if x.inner > 1 and not x.is_even(p.size):
            return CannotShard(f"{node.name} joins {x.num_units} x {x.inner} elements, over {p.size} ranks")
        # behind each other, the parts are blocks in units of single elements
        blocks += [block * x.inner for block in x.blocks]
    return Sharding(dim, tuple(blocks))


def _described(lengths: tuple[int, int], x: Sharding | None) -> str:
    if lengths[0] != lengths[1]:
        return "elements whose number is dynamic"
    if x is None:
        return f"{lengths[0]} replicated elements, fewer than there are ranks,"
    return f"values sharded along dimension {x.dim}, or in periods of {x.period} elements,"


@rule(torch.stack)
def stack(p: Propagation, node: Any) -> Result:
    rank = p.rank(node)
    dim = dim_of(node, 1) % rank
    # the parts have one axis fewer than the result
    x = p.broadcast(node, list(node.args[0]), rank - 1, joined=True)
    return x.on_dim(x.dim + (dim <= x.dim))


@unary_rule(F.glu)
def glu(p: Propagation, node: Any, x: Sharding) -> Result:
    dim = dim_of(node, 1, -1) % p.rank(node.args[0])
    if dim != x.dim:
        return x
    # gate and value must be blocks of their own, so that a rank has both of each feature
    half = x.period // 2
    # F.glu takes the first half as the value, and the second as the gate
    value = _block_range(p, x, 0, half, node)
    gate = _block_range(p, x, half, x.period, node)
    p.require_alike(value, gate, node)
    return value
