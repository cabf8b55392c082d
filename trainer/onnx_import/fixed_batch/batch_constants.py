"""Rewrite the constants in which a file of fixed batch holds that batch, so that its graph runs at any batch size.

An exporter that is given 2 example rows, and no dynamic dimension, writes the 2 into the file wherever the module
computed a shape. While the graph is traced with a dynamic batch (tracing.py: 3 and 5 rows), each operator that reads
such a constant gets the batch size of the run instead. For attention with 4 heads of width 8 and 7 positions:

    the file (declared batch 2)                              rewritten (batch n)
    x [2, 7, 32] -> Reshape [2, 7, 4, 8]                     reshape [n, 7, 4, 8]
      -> Transpose -> Reshape [8, 7, 8]                      reshape [n * 4, 7, 8]
    Expand(token [1, 1, 32], [2, 1, 32]) -> Concat           expand [n, 1, 32]
    Add(x, a constant [2, 7, 32] of 2 equal rows)            add a constant [1, 7, 32]

These are readings of numbers that mean the batch in all likelihood. Whether the result computes what the file does is
proved afterwards (fixed_batch.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onward.trainer.onnx_import.roles.tensor_contents import without_repetition
from onward.trainer.onnx_import.tracing.values import FreedBatch, Traced, Value

if TYPE_CHECKING:
    from onward.trainer.onnx_import.imported_graph import ImportedGraph
    from onward.trainer.onnx_import.lowering.converter_table import Call

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu", "MatMul")
LOGIC = ("And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
BROADCASTING = frozenset((*ARITHMETIC, *LOGIC, "BitwiseAnd", "BitwiseOr", "BitwiseXor"))
"""Operators whose operands broadcast; of MatMul all but the last two dimensions."""


def reshape_lengths(c: Call, x: Value, lengths: Sequence[Value]) -> list[Value]:
    """Return the lengths of a Reshape with the batch of the run in place of the declared one.

    The batch dimension of x lies behind `before` elements of the other dimensions, and it lies there in the result too:

        declared batch 2     x [5, 2, 12]   before = 5      [5, 2, 3, 4]    dimension 1 is the batch
                                                            [5, 6, 4]       dimension 1 is batch x 3
                                                            [10, 12]        dimension 0 is 5 x batch
    """
    batch = c.batch
    wanted = list(lengths)
    if batch is None or not _has_known_shape(x):
        return wanted
    batch_dims = [(dim, times) for dim in range(x.ndim) if (times := batch.multiple(c.size(x, dim)))]
    if len(batch_dims) != 1:
        # such as [batch x steps, width] -> [batch, -1, width]
        begins_with_batch = bool(wanted) and wanted[0] == batch.declared
        if begins_with_batch and x.ndim and isinstance(c.size(x, 0), Traced):
            wanted[0] = batch.length
        return wanted
    (dim, times) = batch_dims[0]
    # the dimension is looked for with plain numbers, those of the declared batch, as the exporter computed them
    sizes = [_as_declared(batch, c.size(x, i)) for i in range(x.ndim)]
    result = _resolved([_as_declared(batch, length) for length in wanted], math.prod(sizes))
    place = _place(sizes, dim, times, result, batch.declared)
    if place is None or not isinstance(wanted[place], int):
        return wanted
    # -1 is computed from the other lengths, which must be right then
    if wanted[place] != -1:
        factor = result[place] // batch.declared
        rows = c.size(x, dim)
        # from the length of x itself, unless that is a multiple of the batch other than the one that is wanted
        if factor == times:
            wanted[place] = rows
        elif times == 1:
            wanted[place] = rows * factor
        else:
            wanted[place] = batch.length * factor
    return wanted


def _has_known_shape(x: Value) -> bool:
    """Return whether a value is traced and has a known shape: only then its lengths show where the batch is."""
    return isinstance(x, Traced) and x.known


def _as_declared(batch: FreedBatch, length: Value) -> int:
    """Return a length at the declared batch and the first trial size of other dynamic dimensions."""
    if isinstance(length, Traced):
        return batch.multiple(length) * batch.declared or int(length.probes[0])
    return int(length)


def _resolved(lengths: list[int], total: int) -> list[int]:
    """Return the lengths of a tensor of `total` elements with the number that a -1 stands for."""
    others = math.prod(length for length in lengths if length != -1)
    if not others:  # a length of 0 leaves open what -1 stands for
        return lengths
    return [total // others if length == -1 else length for length in lengths]


def _place(sizes: Sequence[int], dim: int, times: int, result: Sequence[int], declared: int) -> int | None:
    """Return which dimension of a reshaped tensor holds the batch, at the declared batch size; None if none can.

    sizes: those of the operand, of which dimension `dim` is `times` x batch.
    """
    before = math.prod(sizes[:dim])
    # the batch is the first, the last or a middle factor of its dimension
    starts = [before * inner for inner in range(1, times + 1) if times % inner == 0]
    ahead = [math.prod(result[:i]) for i in range(len(result))]
    # a dimension that is the batch alone is preferred to every one that has it as a factor
    for i, length in enumerate(result):
        if length == declared and ahead[i] in starts:
            return i
    for start in starts:
        possible = []
        for i, length in enumerate(result):
            # the elements ahead and those of this dimension before the batch make up `start`
            if not ahead[i] or start % ahead[i] != 0:
                continue
            if length and length % (start // ahead[i] * declared) == 0:
                possible.append(i)
        if possible:
            # of two neighbours: the right one where it is split, as [L, B, heads x width] -> [L, B x heads, width]
            right = possible[-1]
            rest = math.prod(sizes) // (start * declared)
            split = math.prod(result[:right]) == start and result[right] < rest * declared
            return right if split else possible[0]
    return None


def expand_lengths(c: Call, x: Value, lengths: Sequence[Value]) -> list[Value]:
    """Return the lengths of an Expand: the batch of the run where a declared one repeats x, or fits its batch."""
    batch = c.batch
    wanted = list(lengths)
    if batch is None or not _has_known_shape(x):
        return wanted
    has_batch = False
    for dim in range(x.ndim):
        # Expand aligns shapes at their last dimensions
        place = len(wanted) - x.ndim + dim
        times = batch.multiple(c.size(x, dim))
        if times and place >= 0:
            has_batch = True
            if wanted[place] == times * batch.declared:
                wanted[place] = 1  # Expand leaves a length where the shape says 1
    # a declared batch of 1 needs nothing: Expand leaves the length of x where the shape says 1
    if has_batch or batch.declared <= 1:
        return wanted
    # the first or the second dimension: rows come first, or behind the layers or the steps
    for place in range(min(2, len(wanted))):
        dim = place - (len(wanted) - x.ndim)
        if wanted[place] == batch.declared and (dim < 0 or c.size(x, dim) == 1):
            wanted[place] = batch.length
            break
    return wanted


def tile_repeats(c: Call, x: Value, repeats: Sequence[Value]) -> list[Value]:
    """Return the repeats of a Tile: the batch of the run where the declared one repeats a single row."""
    batch = c.batch
    wanted = list(repeats)
    if batch is None or batch.declared == 1 or not _has_known_shape(x):
        return wanted
    # where x has the batch already, the number is a factor that happens to equal it
    if wanted and wanted[0] == batch.declared and not batch.multiple(c.size(x, 0)):
        wanted[0] = batch.length
    return wanted


def kept_lengths(c: Call, x: Value, axes: Sequence[int], lengths: Sequence[Value]) -> list[Value]:
    """Return the lengths that axes are resized to, with that of x where it is the batch and was to stay."""
    batch = c.batch
    if batch is None or not _has_known_shape(x):
        return list(lengths)
    kept = []
    for axis, length in zip(axes, lengths, strict=True):
        present = c.size(x, axis)
        times = batch.multiple(present)
        stays = times and length == times * batch.declared
        kept.append(present if stays else length)
    return kept


def fit_operands(c: Call, operands: Sequence[Value]) -> list[Value]:
    """Fit constants that repeat one row for the declared batch to operands that have the dynamic batch.

    Of an operator that broadcasts. A constant of equal rows becomes one row; one of repeated blocks, such as a bias
    [batch x heads, ...], is repeated for the batch of the run.
    """
    batch = c.batch
    fitted = list(operands)
    if batch is None or c.op not in BROADCASTING:
        return fitted
    matrix_dims = 2 if c.op == "MatMul" else 0
    traced = [x for x in operands if isinstance(x, Traced)]
    traced = [x for x in traced if x.is_tensor]
    for number, x in enumerate(operands):
        is_tensor = isinstance(x, torch.Tensor) or (isinstance(x, Traced) and x.is_tensor)
        if not is_tensor:
            continue
        # dimensions are counted from the last, by which operands are aligned
        for back in range(matrix_dims + 1, x.ndim + 1):
            times = max((batch.multiple(c.size(y, y.ndim - back)) for y in traced if y.ndim >= back), default=0)
            if times and c.size(x, x.ndim - back) == times * batch.declared > 1:
                fitted[number] = _for_any_batch(c, x, x.ndim - back, times)
                break
    return fitted


def _for_any_batch(c: Call, x: Value, dim: int, times: int) -> Value:
    """Return a tensor of length 1 or (times x batch of the run) in a dimension, or x itself if its rows differ."""
    assert c.batch is not None
    if times == 1:
        return one_row(c, x, dim)
    if not isinstance(x, torch.Tensor):
        return x
    # [batch x times] -> [batch, times], of which all rows must be one block of `times`
    blocks = x.reshape(*x.shape[:dim], c.batch.declared, times, *x.shape[dim + 1 :])
    if (block := without_repetition(blocks, dim)) is blocks:
        return x
    block = block.squeeze(dim)
    # a block of equal rows broadcasts as one row, which needs no repetition at run time
    if (row := without_repetition(block, dim)) is not block:
        return row
    return c("repeat", block, [c.batch.length if i == dim else 1 for i in range(x.ndim)])


def one_row(c: Call, x: Value, dim: int) -> Value:
    """Return one row of a stored tensor whose rows along `dim` are equal, one for each of the batch; else x itself.

    An exporter that folds constants stores an expanded weight so, such as a class token [1, 1, 32] as [2, 1, 32]. Its
    rows are one weight then, and stay equal.
    """
    if isinstance(x, torch.Tensor):
        return without_repetition(x, dim)
    if x.node.op != "get_attr" or c.size(x, dim) == 1:
        return x
    weight = operator.attrgetter(str(x.node.target))(c.tracer.root).detach()
    return x if without_repetition(weight, dim) is weight else c(shared_row, x, dim)


def shared_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return one of equal rows, [..., rows, ...] -> [..., 1, ...].

    Every row gets its gradient, so that an update leaves them equal.
    """
    constant = x.detach()
    return constant.narrow(dim, 0, 1) + (x - constant).sum(dim, keepdim=True)


def dims_of_equal_rows(module: ImportedGraph) -> dict[str, int]:
    """Return {initializer name: the dimension of its equal rows} of the weights that `shared_row` reads."""
    reads = [node.args for node in module.graph.find_nodes(op="call_function", target=shared_row)]
    return {module.onnx_names[weight.target]: dim for weight, dim in reads if weight.target in module.onnx_names}


def fit_parts(c: Call, parts: Sequence[Value], axis: int) -> list[Value]:
    """Expand tensors that have one row, or the declared batch of equal rows, to the dynamic batch of the others.

    The parts of a Concat, or the operands of a ScatterElements: equal in all dimensions but `axis`.
    """
    batch = c.batch
    fitted = list(parts)
    known = all(isinstance(x, torch.Tensor) or _has_known_shape(x) for x in parts)
    if batch is None or not known:
        return fitted
    # all parts have the same number of dimensions, and the same lengths in all but `axis`
    rank = parts[0].ndim
    for dim in (dim for dim in range(rank) if dim != axis % rank):
        times = max(batch.multiple(c.size(x, dim)) for x in parts)
        if times != 1:
            continue
        for number, x in enumerate(fitted):
            if batch.multiple(c.size(x, dim)):
                continue
            if c.size(x, dim) == batch.declared:
                x = one_row(c, x, dim)
            if c.size(x, dim) == 1:
                fitted[number] = c("expand", x, [batch.length if i == dim else -1 for i in range(rank)])
    return fitted


def fit_indices(c: Call, x: Value, indices: Value) -> Value:
    """Return the indices of a Gather; of a constant [batch, ...] of equal rows, one row.

    What is gathered from a table has then one row as well, which broadcasts.
    """
    batch = c.batch
    if batch is None or batch.declared == 1:
        return indices
    if not isinstance(indices, torch.Tensor) or indices.ndim < 2:
        return indices
    # rows that are gathered from data of the batch have to stay one for each sample
    has_batch = _has_known_shape(x) and any(batch.multiple(c.size(x, dim)) for dim in range(x.ndim))
    if has_batch or indices.shape[0] != batch.declared:
        return indices
    return without_repetition(indices, 0)
