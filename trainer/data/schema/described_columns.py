"""Describe columns from their cells: type, shape and extremes; merge descriptions; choose the type that is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from onward.trainer.data.schema.columns import (
    BOXES,
    BYTES,
    TEXT,
    WORDS,
    Array,
    Cells,
    Column,
    ColumnType,
    Values,
    numbers,
)

PART_VALUES = 1 << 20
"""Values that are looked at together."""


def infer(name: str, cells: Cells) -> Column:
    """Infer type and shape from some rows. Text or bytes, unless at least half of the cells are numbers."""
    array = numbers(cells)
    if array is not None:
        return Column(name=name, dtype=_type(array), shape=array.shape[1:], extremes=extremes(array))
    # cells of mixed kinds or lengths, one by one
    there = [cell for cell in cells if cell is not None]
    rows = [row[0] for cell in there if (row := numbers([cell])) is not None]
    # a column of text may have cells that look like numbers
    if not rows or len(rows) * 2 < len(there):
        encoded = sum(map(_is_encoded, cells))
        return Column(name=name, dtype=BYTES if encoded * 2 > len(cells) else TEXT)
    shapes = Counter(row.shape for row in rows)
    # an empty list says nothing of the type
    filled = [row.ravel() for row in rows if row.size]
    flat = np.concatenate(filled or rows[:1])
    varies = len(shapes) > 1 and all(len(shape) == 1 for shape in shapes)
    # of lists the longest; else the usual shape, so that the others are bad cells
    shape = max(shapes) if varies else shapes.most_common(1)[0][0]
    return Column(name=name, dtype=_type(flat, gaps=True), shape=shape, variable=varies, extremes=extremes(flat))


def _is_encoded(cell: Any) -> bool:
    return isinstance(cell, bytes) or (isinstance(cell, dict) and cell.keys() <= {"bytes", "path"})


def _type(array: Array, *, gaps: bool = False) -> str:
    """Return the type. Whole numbers with missing ones between them are integers, which tables store as floats."""
    if array.dtype.kind == "f":
        finite = array[np.isfinite(array)]
        has_gaps = gaps or finite.size < array.size
        if has_gaps and finite.size and (finite == np.floor(finite)).all():
            return "int64"
    return array.dtype.name


def extremes(values: Values) -> tuple[int | float, ...]:
    """Return `Column.extremes` of the finite values; of text, nothing."""
    found = set[int | float]()
    dtype = "float64"
    for flat in _parts(values):
        if flat.dtype.kind == "O":
            return ()
        if not flat.size:
            continue
        finite = flat
        least = flat.min()
        most = flat.max()
        # a NaN is the least and the greatest of all
        if not (np.isfinite(least) and np.isfinite(most)):
            finite = flat[np.isfinite(flat)]
            if not finite.size:
                continue
            least = finite.min()
            most = finite.max()
        found |= {least.item(), most.item()}
        dtype = flat.dtype.name
        if flat.dtype.kind in "iu":
            # the second least and second greatest, in case the least or greatest is model.ignore_index
            inner = finite[(finite > least) & (finite < most)]
            found |= {inner.min().item(), inner.max().item()} if inner.size else set()
    return outermost(tuple(found), (), dtype)


def _parts(values: Values) -> Iterator[Array]:
    """Yield all values in flat arrays of about PART_VALUES: copies of whole columns would double their memory."""
    if not isinstance(values, list):
        flat = values.ravel()
        yield from (flat[start : start + PART_VALUES] for start in range(0, flat.size, PART_VALUES))
        return
    joined = list[Array]()
    size = 0
    for each in values:
        if each.size >= PART_VALUES:
            yield from _parts(each)
            continue
        # many short rows are looked at in one array: a call for each would take longer than the look
        joined.append(each.ravel())
        size += each.size
        if size >= PART_VALUES:
            yield np.concatenate(joined)
            joined = []
            size = 0
    if joined:
        yield np.concatenate(joined)


def merge(one: Column, other: Column) -> Column:
    """Describe the rows of two columns as one. If either holds numbers, text counts as bad cells of it."""
    if not (one.holds_numbers and other.holds_numbers):
        # numbers win over text or bytes, and bytes over text
        return other if one.dtype == TEXT or other.holds_numbers else one
    # a later block may hold larger numbers or floats
    if (0,) in (one.shape, other.shape):  # rows that are all empty say nothing of the type
        dtype = np.dtype(other.dtype if one.shape == (0,) else one.dtype)
    else:
        dtype = np.promote_types(one.dtype, other.dtype)
    are_lists = len(one.shape) == len(other.shape) == 1
    lengths_differ = are_lists and one.shape != other.shape
    varies = one.variable or other.variable or lengths_differ
    return Column(
        name=one.name,
        dtype=dtype.name,
        shape=max(one.shape, other.shape) if varies else one.shape,
        variable=varies,
        extremes=outermost(one.extremes, other.extremes, dtype.name),
    )


def outermost(one: tuple[int | float, ...], other: tuple[int | float, ...], dtype: str) -> tuple[int | float, ...]:
    """Return `Column.extremes` of the rows of both."""
    values = sorted({*one, *other})
    ends = 2 if np.dtype(dtype).kind in "iu" else 1
    # distinct values in order, the outer ones on either side
    return tuple(values if len(values) <= 2 * ends else (*values[:ends], *values[-ends:]))


def stored_column(column: Column, kind: ColumnType | None, *, ragged: bool) -> Column:
    """Return the column as it is stored: as it will be read, in the smallest type that loses nothing.

    ragged: rows of the source are lists, so
    that later rows may be longer than those seen, which is allowed where the reader does not fix the length.
    """
    # without a reader, such as for columns that are only looked at, nothing is converted
    if kind is None:
        return column.model_copy(update={"extremes": ()})
    if kind.dtype in (TEXT, WORDS, BOXES, BYTES):
        return Column(name=column.name, dtype=kind.dtype, gaps=kind.gaps)
    # NaN marks a missing number, so that the type is the reader's, which has one
    if kind.gaps:
        return Column(name=column.name, dtype=kind.dtype, shape=column.shape, gaps=True)
    shape = column.shape
    variable = column.variable
    takes_any_length = kind.shape is None or None in kind.shape
    if kind.shape is not None and None not in kind.shape and variable:
        shape = tuple(dim for dim in kind.shape if dim is not None)
        variable = False
    elif ragged and len(shape) == 1 and takes_any_length:
        variable = True
    source = np.dtype(column.dtype)
    target = np.dtype(kind.dtype)
    is_smaller = source.itemsize < target.itemsize and np.can_cast(source, target) and source.kind != "b"
    # pixels of uint8, for example, are stored as such, and converted when a batch is made
    dtype = source if is_smaller else target
    return Column(name=column.name, dtype=dtype.name, shape=shape, variable=variable)
