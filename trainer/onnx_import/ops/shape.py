"""Rules that reshape, join, split, pad and fill tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.tensor_protos import read_tensor
from onward.trainer.onnx_import.fixed_batch.batch_constants import (
    expand_lengths,
    fit_parts,
    reshape_lengths,
    tile_repeats,
)
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.roles.tensor_contents import without_repetition
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value

LAYOUT = (19, 21, 23, 24, 25)
"""Versions in which most of these operators only added element types."""


@lower("Identity", since=(1, 13, 14, 16, *LAYOUT))
def identity(c: Call, x: Value) -> Value:
    return x


@lower("Reshape", since=(5, 13, 14, *LAYOUT))
def reshape(c: Call, x: Value, shape: Value) -> Value:
    """Reshape; a length of 0 is copied from the input, -1 is computed from the others."""
    zero_is_zero = c.attr("allowzero", 0)
    lengths = c.ints(shape)
    # before the rule of -1, because a copied length takes part in the product
    if not zero_is_zero:
        lengths = [c.size(x, i) if length == 0 else length for i, length in enumerate(lengths)]
    return c("reshape", x, reshape_lengths(c, x, lengths))


@lower("Flatten", since=(1, 9, 11, 13, 21, 23, 24, 25))
def flatten(c: Call, x: Value) -> Value:
    """Flatten to two dimensions, the second from `axis` on."""
    axis = c.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    # torch.flatten keeps the batch dimension dynamic without computing the other length
    if axis == 1 and x.ndim > 1:
        return c(torch.flatten, x, 1)
    # the axis may equal the rank: all lengths then come before it, and the second one is 1
    leading = math.prod(c.sizes(x)[:axis])
    return c("reshape", x, [leading, math.prod(c.sizes(x)[axis:])])


@lower("Transpose", since=(1, 13, 21, 23, 24, 25))
def transpose(c: Call, x: Value) -> Value:
    order = c.attr("perm", list(range(x.ndim))[::-1])
    # the identity needs no node in the graph
    return x if order == list(range(x.ndim)) else c("permute", x, list(order))


@lower("Squeeze", since=(1, 11, 13, 21, 23, 24, 25))
def squeeze(c: Call, x: Value, given: Value = None) -> Value:
    axes = c.axes(given)
    if axes is None:
        lengths = dict(enumerate(c.sizes(x)))
        axes = [i for i, length in lengths.items() if length == 1]  # a dynamic length equals no number
        # the file squeezes a dynamic dimension as well if its length is 1 when the graph runs
        c.tracer.check_kept({i: length for i, length in lengths.items() if isinstance(length, Traced)}, c.name)
    axes = [c.axis(x, axis) for axis in axes]
    for axis in axes:
        # torch.squeeze would silently keep such a dimension
        if isinstance(n := c.size(x, axis), Traced) or n != 1:
            raise UnsupportedNode(f"dimension {axis} is {'dynamic' if isinstance(n, Traced) else n}, not 1")
    return c(torch.squeeze, x, axes) if axes else x


@lower("Unsqueeze", since=(1, 11, 13, 21, 23, 24, 25))
def unsqueeze(c: Call, x: Value, given: Value = None) -> Value:
    axes = c.axes(given) or []
    # axes count in the result, whose rank has the new dimensions, too
    rank = x.ndim + len(axes)
    # in increasing order: each axis counts in the result
    for axis in sorted(axis % rank for axis in axes):
        x = c(torch.unsqueeze, x, axis)
    return x


@lower("Concat", since=(4, 11, 13))
def concat(c: Call, *parts: Value) -> Value:
    axis = c.attr("axis")
    return parts[0] if len(parts) == 1 else c(torch.cat, fit_parts(c, parts, axis), axis)


@lower("Split", since=(2, 11, 13, 18))
def split(c: Call, x: Value, sizes: Value = None) -> Value:
    axis = c.axis(x, c.attr("axis", 0))
    num_outputs = c.attr("num_outputs", c.num_outputs)
    # up to version 11 the lengths are an attribute; since 13 they are an operand
    lengths = c.attr("split") if sizes is None else c.ints(sizes)
    if lengths is None:
        length = c.size(x, axis)
        if isinstance(length, Traced):
            raise NeedsRuntimeValues("it splits a dynamic dimension into equal parts")
        # parts of equal length, rounded up, of which the last one is shorter
        piece = -(-length // num_outputs)
        lengths = [piece] * (num_outputs - 1) + [length - piece * (num_outputs - 1)]
    return c(torch.split, x, lengths, axis)


def expand(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Broadcast x and a shape against each other, as ONNX does: a length in the shape may be 1 where x has more."""
    shape = torch.broadcast_shapes(x.shape, tuple(lengths))  # type: ignore[no-untyped-call]
    return x.expand(shape)


@lower("Expand", since=(8, 13))
def expand_(c: Call, x: Value, shape: Value) -> Value:
    """Expand; in a file of fixed batch size, a constant of that many equal rows expands to any batch size.

    The legacy exporter writes the zero state of a recurrent layer so: zeros [1, 2, 6] -> Expand to [1, batch, 6].
    """
    lengths = c.ints(shape)
    # rows that are all equal are kept once, and broadcast to whatever batch runs
    if c.batch is not None and isinstance(x, torch.Tensor):
        for dim, n in enumerate(lengths[len(lengths) - x.ndim :] if len(lengths) >= x.ndim else []):
            if isinstance(n, Traced) and x.shape[dim] == c.batch.declared:
                x = without_repetition(x, dim)
    return c(expand, x, expand_lengths(c, x, lengths))


@lower("Tile", since=(6, 13))
def tile(c: Call, x: Value, repeats: Value) -> Value:
    return c("repeat", x, tile_repeats(c, x, c.ints(repeats)))


# -- constants and ranges. `anchor` is an empty buffer of the module: what a graph creates is put on its device


@lower("Constant", since=(1, 9, 11, 12, 13, *LAYOUT))
def constant(c: Call) -> Value:
    if (proto := c.attr("value")) is not None:
        tensor = read_tensor(proto)
        # in a runtime node the constants go where the node computes; while a graph is recorded they stay on the host
        if (device := c.tracer.constants_device) is None:
            return tensor
        placed = tensor.to(device)
        vars(placed).update(vars(tensor))  # its type, if of less than a byte
        return placed
    # value_float and value_int are scalars, value_floats and value_ints vectors
    for name, dtype in (("float", torch.float32), ("int", torch.int64)):
        for key in (f"value_{name}", f"value_{name}s"):
            if (value := c.attr(key)) is not None:
                return torch.tensor(value, dtype=dtype)
    raise UnsupportedNode("its value is a string or a sparse tensor")


def full(anchor: torch.Tensor, shape: Sequence[int], value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [*shape] of one value, on the anchor's device."""
    return torch.full(tuple(shape), value, dtype=dtype, device=anchor.device)


@lower("ConstantOfShape", since=(9, 20, 21, 23, 24, 25))
def constant_of_shape(c: Call, shape: Value) -> Value:
    proto = c.attr("value")
    # without the attribute it is zeros in fp32, as the operator's text says
    fill = read_tensor(proto) if proto is not None else torch.zeros(1)
    lengths = c.ints(shape)
    # a constant if all lengths are known: then it can be folded
    if any(isinstance(n, Traced) for n in lengths):
        return c(full, c.tracer.anchor, lengths, fill.item(), fill.dtype)
    return torch.full(lengths, fill.item(), dtype=fill.dtype)


def arange(anchor: torch.Tensor, start: int, stop: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return evenly spaced integers [n], on the anchor's device."""
    return torch.arange(start, stop, step, dtype=dtype, device=anchor.device)


@lower("Range", since=(11, 27))
def range_(c: Call, start: Value, limit: Value, delta: Value) -> Value:
    c.require("stash_type", 1)
    bounds = (start, limit, delta)
    dtype = next((x.dtype for x in bounds if isinstance(x, torch.Tensor)), torch.int64)
    # the formula of ONNX, max(ceil((limit - start) / delta), 0) elements, of which each is start + i delta
    if dtype.is_floating_point:
        first, last, step = (c.constant(x).item() for x in bounds)
        return first + step * torch.arange(max(math.ceil((last - first) / step), 0), dtype=dtype)
    first, last, step = (c.ints(x)[0] for x in bounds)
    if any(isinstance(x, Traced) for x in (first, last, step)):
        return c(arange, c.tracer.anchor, first, last, step, dtype)
    # torch refuses bounds that the step does not lead towards; in ONNX that range is empty
    return torch.arange(first, last, step, dtype=dtype) if (last - first) * step > 0 else torch.empty(0, dtype=dtype)


@lower("Trilu", since=(14,))
def trilu(c: Call, x: Value, k: Value = None) -> Value:
    diagonal = 0 if k is None else c.ints(k)[0]
    return c(torch.triu if c.attr("upper", 1) else torch.tril, x, diagonal)


def eye_like(x: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ones on the k-th diagonal, in the shape of `x`."""
    # column - row is k on the k-th diagonal, above the main one for positive k
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return (columns[None] - rows[:, None] == k).to(dtype)


@lower("EyeLike", since=(9, 22))
def eye_like_(c: Call, x: Value) -> Value:
    element_type = c.attr("dtype")
    return c(eye_like, x, c.attr("k", 0), x.dtype if element_type is None else c.dtype(element_type))


# -- borders and blocks


@lower("Pad", since=(2, 11, 13, 18, *LAYOUT))
def pad(c: Call, x: Value, given: Value = None, fill: Value = None, on_axes: Value = None) -> Value:
    """Pad by all starts, then all ends, of every axis or of `on_axes`; negative pads crop."""
    mode = c.attr("mode", "constant")
    pads = c.attr("pads") if given is None else c.ints(given)
    value = c.attr("value", 0.0) if fill is None else c.number(fill)
    # pads list all starts, then all ends, of these axes
    axes = list(range(x.ndim)) if on_axes is None else [c.axis(x, axis) for axis in c.ints(on_axes)]
    borders = {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    # F.pad wants pairs (start, end) from the last axis on
    if mode == "constant":
        flat = [n for axis in reversed(range(x.ndim)) for n in borders.get(axis, (0, 0))]
        return c(F.pad, x, flat, "constant", value)
    # the other modes of F.pad take a few ranks and pads below the length: an index serves all of them
    for axis, border in borders.items():
        if border != (0, 0):
            x = c(pad_by_index, x, axis, list(border), mode)
    return x


def pad_by_index(x: torch.Tensor, axis: int, border: Sequence[int], mode: str) -> torch.Tensor:
    """Pad one axis by its own elements: mirrored (reflect), repeated (edge), or from the opposite end (wrap).

    border: the numbers of elements in front and behind, by which the axis gets longer; the other dimensions of x stay.
    """
    length = x.shape[axis]
    where = torch.arange(-border[0], length + border[1], device=x.device)
    # each position outside is replaced by the one whose element belongs there
    if mode == "edge":
        where = where.clamp(0, length - 1)
    elif mode == "wrap":
        where = where.remainder(length)
    # a mirrored axis repeats after 2 (length - 1) positions; within one period the distance to its middle decides
    elif mode == "reflect":
        where = (length - 1) - ((where.remainder(max(2 * (length - 1), 1))) - (length - 1)).abs()
    else:
        raise NotImplementedError(f"padding mode {mode}")
    return x.index_select(axis, where)


@lower("DepthToSpace", since=(1, 11, 13, 28))
def depth_to_space(c: Call, x: Value) -> Value:
    block = c.attr("blocksize")
    mode = c.attr("mode", "DCR")
    n, depth, height, width = c.sizes(x)
    # DCR: the channels are [block, block, depth], so that the depth varies fastest
    split = [n, block, block, depth // block**2, height, width]
    order = [0, 3, 4, 1, 5, 2]
    # CRD: the channels are [depth, block, block], as torch.pixel_shuffle has them
    if mode == "CRD":
        split = [n, depth // block**2, block, block, height, width]
        order = [0, 1, 4, 2, 5, 3]
    x = c("permute", c("reshape", x, split), order)
    return c("reshape", x, [n, depth // block**2, height * block, width * block])


@lower("SpaceToDepth", since=(1, 13, 28))
def space_to_depth(c: Call, x: Value) -> Value:
    c.require("mode", "DCR", "CRD")
    block = c.attr("blocksize")
    # the two orders are the inverses of those of DepthToSpace
    order = [0, 3, 5, 1, 2, 4] if c.attr("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    n, depth, height, width = c.sizes(x)
    x = c("reshape", x, [n, depth, height // block, block, width // block, block])
    return c("reshape", c("permute", x, order), [n, depth * block**2, height // block, width // block])
