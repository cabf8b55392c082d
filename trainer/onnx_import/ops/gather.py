"""Rules for reading and writing by index (Gather, Scatter, Compress, OneHot), and for slices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.fixed_batch.batch_constants import fit_indices, fit_parts
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value


def non_negative_indices(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Return indices [...] with length added to negative ones, which count from the end in ONNX."""
    return torch.where(indices < 0, indices + length, indices).to(torch.int64)


def gather_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return table[indices] for a matrix [rows, width]: indices [...] -> [..., width].

    By the embedding kernel, whose backward pass sums rows.
    """
    # the kernel takes no negative indices, which ONNX allows
    return F.embedding(non_negative_indices(indices, table.shape[0]), table)


def gather_along(x: torch.Tensor, axis: int, indices: torch.Tensor) -> torch.Tensor:
    """Replace dimension `axis` of `x` by the dimensions of `indices`: [a, n, b] and [i, j] -> [a, i, j, b]."""
    # one flat list of indices, whose dimensions are put back afterwards: index_select takes no others
    flat = x.index_select(axis, non_negative_indices(indices, x.shape[axis]).reshape(-1))
    return flat.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@lower("Gather", since=(1, 11, 13))
def gather(c: Call, x: Value, indices: Value) -> Value:
    axis = c.axis(x, c.attr("axis", 0))
    # in a file of fixed batch, constant indices of equal rows become one row, which broadcasts
    indices = fit_indices(c, x, indices)
    # one constant index removes the dimension, as torch.select does
    if indices.ndim == 0 and (known := c.tracer.shape_ints(indices)) is not None:
        return c(torch.select, x, axis, known.item())
    # an embedding: passes, adapters and vocabulary parallelism look for gather_rows
    if axis == 0 and x.ndim == 2 and x.dtype.is_floating_point:
        return c(gather_rows, x, indices)
    return c(gather_along, x, axis, indices)


def gather_elements(x: torch.Tensor, axis: int, indices: torch.Tensor) -> torch.Tensor:
    """Return one element of `x` along `axis` for each index, in the shape of `indices`."""
    return torch.gather(x, axis, non_negative_indices(indices, x.shape[axis]))


@lower("GatherElements", since=(11, 13))
def gather_elements_(c: Call, x: Value, indices: Value) -> Value:
    return c(gather_elements, x, c.axis(x, c.attr("axis", 0)), indices)


def gather_nd(x: torch.Tensor, indices: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """Return x[index tuple]: the last dimension of `indices` holds indices of the dimensions after `batch_dims`."""
    # each index tuple names a place in `depth` dimensions; the dimensions behind them are read whole
    depth = indices.shape[-1]
    where: list[torch.Tensor] = []
    for dim in range(batch_dims):
        shape = [1] * (indices.ndim - 1)
        shape[dim] = x.shape[dim]
        # along a batch dimension each sample reads its own slice
        where.append(torch.arange(x.shape[dim], device=x.device).reshape(shape))
    where += [non_negative_indices(indices[..., i], x.shape[batch_dims + i]) for i in range(depth)]
    # the index tensors broadcast against each other, to the shape of `indices` without its last dimension
    return x[tuple(where)]


@lower("GatherND", since=(11, 12, 13))
def gather_nd_(c: Call, x: Value, indices: Value) -> Value:
    return c(gather_nd, x, indices, c.attr("batch_dims", 0))


REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def to_one_type(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both, of any shape, in the wider of their types: scatter refuses two, as they are under autocast."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def scatter(x: torch.Tensor, axis: int, indices: torch.Tensor, updates: torch.Tensor, reduction: str) -> torch.Tensor:
    """Write one update at each index along `axis`, or combine it with what is there, in a copy of x.

    indices, updates: of one shape, with as many dimensions as x.
    """
    indices = non_negative_indices(indices, x.shape[axis])
    x, updates = to_one_type(x, updates)
    # without a reduction ONNX gives no meaning to an index that occurs twice
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, REDUCE[reduction], include_self=True)


@lower("ScatterElements", "Scatter", since=(11,))
@lower("ScatterElements", since=(13, 16, 18))
@lower("Scatter", since=(9,))
def scatter_elements(c: Call, x: Value, indices: Value, updates: Value) -> Value:
    axis = c.axis(x, c.attr("axis", 0))
    # parts of one row, or of the declared batch of equal rows, are expanded to the batch that runs
    x, indices, updates = fit_parts(c, (x, indices, updates), axis)
    return c(scatter, x, axis, indices, updates, c.attr("reduction", "none"))


def scatter_nd(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, reduction: str) -> torch.Tensor:
    """Write one slice of `x` at each index tuple, or combine it with what is there, in a copy of x [*indexed, *slice].

    indices: [..., number of indexed dimensions]; updates: [..., *slice].
    """
    depth = indices.shape[-1]
    # flat index of each slice, by Horner's rule over the indexed dimensions
    rows = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for i in range(depth):
        rows = rows * x.shape[i] + non_negative_indices(indices[..., i], x.shape[i])
    tail = x.shape[depth:]
    # as a matrix of slices, of which whole rows are written
    flat = x.reshape(-1, tail.numel())
    values = updates.reshape(-1, tail.numel())
    # the index of a row stands for each of its elements: torch's scatter takes an index for each of them
    where = rows.reshape(-1, 1).expand(-1, tail.numel())
    return scatter(flat, 0, where, values, reduction).reshape(x.shape)


@lower("ScatterND", since=(11, 13, 16, 18))
def scatter_nd_(c: Call, x: Value, indices: Value, updates: Value) -> Value:
    return c(scatter_nd, x, indices, updates, c.attr("reduction", "none"))


def tensor_scatter(
    cache: torch.Tensor, update: torch.Tensor, starts: torch.Tensor | None, axis: int, circular: bool
) -> torch.Tensor:
    """Write `update` into each sample of `cache` from its start along `axis` on, wrapping around if circular.

    cache: [batch, ...]; update: the same but for `axis`, of which it has the new steps; starts: [batch].
    """
    steps = torch.arange(update.shape[axis], device=cache.device)
    first = steps.new_zeros(cache.shape[0]) if starts is None else starts.to(torch.int64)
    positions = first[:, None] + steps  # [batch, steps]
    positions = positions % cache.shape[axis] if circular else positions
    # the positions differ between samples alone, and broadcast over all other axes
    shape = [cache.shape[0]] + [1] * (cache.ndim - 1)
    shape[axis] = update.shape[axis]
    cache, update = to_one_type(cache, update)
    return cache.scatter(axis, positions.reshape(shape).expand(update.shape), update)


@lower("TensorScatter", since=(24,))
def tensor_scatter_(c: Call, cache: Value, update: Value, starts: Value = None) -> Value:
    c.require("mode", "linear", "circular")
    circular = c.attr("mode", "linear") == "circular"
    return c(tensor_scatter, cache, update, starts, c.axis(cache, c.attr("axis", -2)), circular)


def compress(x: torch.Tensor, chosen: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return the slices along `axis` (or the elements) that are chosen; none beyond the end of `chosen` [n]."""
    x, dim = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(dim, torch.nonzero(chosen).reshape(-1))


@lower("Compress", since=(9, 11, 28))
def compress_(c: Call, x: Value, chosen: Value) -> Value:
    axis = c.attr("axis")
    if not isinstance(chosen, torch.Tensor):
        raise NeedsRuntimeValues("how many elements are chosen is known only at run time")
    return c(compress, x, chosen, None if axis is None else c.axis(x, axis))


def reverse_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_axis: int, time_axis: int) -> torch.Tensor:
    """Reverse the first `lengths[i]` steps of each sample i, in the shape of x. lengths: [batch]."""
    steps = torch.arange(x.shape[time_axis], device=x.device)
    ends = lengths.to(torch.int64)[:, None]
    # steps behind the end of a sample stay where they are, as the operator's text says
    positions = torch.where(steps < ends, ends - 1 - steps, steps)  # [batch, time]
    # the matrix has the batch first; it is turned where the time axis comes first in x
    positions = positions if batch_axis < time_axis else positions.t()
    shape = [n if i in (batch_axis, time_axis) else 1 for i, n in enumerate(x.shape)]
    return x.gather(time_axis, positions.reshape(shape).expand(x.shape))


@lower("ReverseSequence", since=(10, 28))
def reverse_sequence_(c: Call, x: Value, lengths: Value) -> Value:
    return c(reverse_sequence, x, lengths, c.attr("batch_axis", 1), c.attr("time_axis", 0))


# -- slices


def strided(x: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
    """Return x[start:end:step] along one axis of [...], with ONNX's clamping; the step may be negative."""
    if step > 0:
        return x[(slice(None),) * axis + (slice(start, end, step),)]
    # torch has no negative steps: the positions are listed
    end = max(end, -x.shape[axis] - 1)
    chosen = range(*slice(start, None if end < -x.shape[axis] else end, step).indices(x.shape[axis]))
    if not len(chosen):
        return x.narrow(axis, 0, 0)
    return x.index_select(axis, torch.arange(chosen.start, chosen.stop, chosen.step, device=x.device))


@lower("Slice", since=(1, 10, 11, 13))
def slice_(c: Call, x: Value, start: Value = None, end: Value = None, axes: Value = None, steps: Value = None) -> Value:
    # up to version 9 they are attributes; since then operands, which may be computed
    starts, ends = (c.attr("starts"), c.attr("ends")) if start is None else (c.ints(start), c.ints(end))
    chosen = c.axes(axes) or list(range(len(starts)))
    by = [1] * len(starts) if steps is None else c.ints(steps)
    # one axis after the other: each slice leaves the other axes as they are
    for axis, first, last, step in zip(chosen, starts, ends, by, strict=True):
        if isinstance(step, Traced):
            raise UnsupportedNode("its step is a dynamic dimension")
        x = c(strided, x, c.axis(x, axis), first, last, step)
    return x


def one_hot(indices: torch.Tensor, depth: int, axis: int, values: torch.Tensor) -> torch.Tensor:
    """Return values[1] where the new dimension `axis` equals the index, values[0] elsewhere: [..] -> [.., depth ..]."""
    # indices may be floating-point numbers in ONNX, and count from the end if they are negative
    wrapped = non_negative_indices(indices.to(torch.int64), depth).unsqueeze(axis)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = depth
    # an index outside of the range equals no position: its row is `off` everywhere, as ONNX defines it
    hot = wrapped == torch.arange(depth, device=indices.device).reshape(shape)
    return torch.where(hot, values[1], values[0])


@lower("OneHot", since=(9, 11, 28))
def one_hot_(c: Call, indices: Value, depth: Value, values: Value) -> Value:
    axis = c.attr("axis", -1)
    length = c.ints(depth)[0] if not depth.dtype.is_floating_point else int(c.number(depth))
    return c(one_hot, indices, length, axis % (indices.ndim + 1), values)
