"""Convert the cells of any source to columns of numbers or of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.bounds import CONTENT_BYTES, read_bounded
from onward.trainer.data.schema.allowed_files import AllowedFiles, content_of, named_path
from onward.trainer.data.schema.box_cells import boxes_of
from onward.trainer.run.records import Record

Array = np.ndarray[Any, np.dtype[Any]]
Cells = Array | Sequence[Any]
"""One column of some rows as read from a source: an array [n, ...], or n cells of any kind (None: missing)."""
Values = Array | list[Array]
"""One column of some rows: an array [n, *shape], or (variable length) n one-dimensional arrays."""

BLOCK_BYTES = 4 << 20
"""About this much of a source file is in memory at a time."""
PART_ROWS = 256
"""Rows of which the content is read from files of their own at a time."""
MAX_NAMED_ROWS = 20
"""Bad rows that a message names; the others are counted."""
TEXT = "str"
"""The dtype of a column of text; its values are an array of Python strings."""
WORDS = "words"
"""The dtype of a column of words, which is not stored; its values are an array of lists of Python strings."""
BOXES = "boxes"
"""The dtype of a column of boxes, which is not stored; its values are an array of lists of Box (box_cells.py)."""
BYTES = "bytes"
"""The dtype of a column of encoded content, such as JPEG images; its values are an array of Python bytes."""

NOT_UTF8 = "bytes that are not UTF-8"
"""What a cell of text holds in a table of another encoding."""


class Column(Record):
    """Type and shape of the rows of one column."""

    name: str
    dtype: str
    """numpy's name of the type; `str` or `bytes` if the cells are not numbers."""
    shape: tuple[int, ...] = ()
    """Of one row; of the longest row if the length varies."""
    variable: bool = False
    """Whether rows are one-dimensional, each of its own length."""
    extremes: tuple[int | float, ...] = ()
    """Of floats: the least and the greatest value. Of integers: the two least and the two greatest, distinct
    and in order, because one of them may be `model.ignore_index`."""
    gaps: bool = False
    """Whether missing cells are read, as NaN or as empty text, and are not bad."""

    @property
    def holds_numbers(self) -> bool:
        """Whether the cells are numbers, and not text or bytes."""
        return self.dtype not in (TEXT, BYTES, WORDS, BOXES)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row of numbers, of the longest one if the length varies; 0 for other cells."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.holds_numbers else 0

    @property
    def has_one_size(self) -> bool:
        """Whether all rows are numbers of one shape."""
        return self.holds_numbers and not self.variable

    @property
    def kind(self) -> str:
        """Return the type and shape in words, for messages."""
        if not self.holds_numbers:
            return "text" if self.dtype == TEXT else "bytes"
        if self.variable:
            return f"{self.dtype} of varying length, {self.shape[0]} at most"
        return f"{self.dtype} {list(self.shape)}" if self.shape else self.dtype


Schema = Mapping[str, Column]


class LeftOut(str):
    """Why a row is left out that is not bad: the configuration says so."""


@dataclass(frozen=True)
class ColumnType:
    """The type that a column is read as, and the shape of a row (None where it is not known)."""

    dtype: str
    shape: tuple[int | None, ...] | None = None
    gaps: bool = False
    """Whether missing cells are read, as NaN or as empty text, and are not bad."""


@dataclass(frozen=True)
class Block:
    """Some rows of one file, before their conversion to numbers."""

    file: str
    index: Array
    """int64 [n], increasing: the index of each row in its file, from 0; bad rows and blank lines are counted."""
    cells: Mapping[str, Cells]
    bad: dict[int, str] = field(default_factory=dict)
    """Index -> why the row could not be split into cells; such rows are in neither `index` nor `cells`."""
    first: int = 1
    unit: str = "row"
    """The number that messages give to index 0, and its unit."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Index -> what messages call the row, such as the file that it is; without an entry, its number."""
    allowed: AllowedFiles | None = None
    """Which files its cells may name; None = those in the folder of `file`."""

    @property
    def allowed_files(self) -> AllowedFiles:
        """Which files its cells may name."""
        return self.allowed or AllowedFiles([Path(self.file).parent])

    def where(self, index: int) -> str:
        """Return the position of a row, for messages."""
        if index in self.names:
            return self.names[index]
        return f"{self.file}, {self.unit} {index + self.first}"


# -- from cells to numbers


def numbers(cells: Cells) -> Array | None:
    """Return the cells as one array [n, ...] of numbers or booleans; None if they are not, or differ in shape."""
    try:
        array = np.asarray(cells)
    except (ValueError, OverflowError):  # ragged
        return None
    return array if array.dtype.kind in "biuf" else None


def fit(cells: Cells, column: Column, block: Block | None = None) -> tuple[Values, dict[int, str]]:
    """Convert cells to the type of a column; return the values and what is wrong with bad cells (position -> why).

    Values of bad cells are arbitrary. NaN counts as missing, since tables write it for missing cells; infinities are
    refused as well. Text is read exactly as it is. Of a column of bytes a cell may be the path of a file, relative to
    that of its `block`.
    """
    # missing cells are taken out before the conversion, which would report them
    if column.gaps:
        return _fit_gaps(cells, column)
    if column.dtype == TEXT:
        return _fit_text(cells)
    if column.dtype == WORDS:
        return _fit_words(cells)
    if column.dtype == BOXES:
        return _fit_boxes(cells)
    if column.dtype == BYTES:
        return _fit_bytes(cells, block)
    if column.variable:
        return _fit_variable(cells, column)
    array = numbers(cells)
    # at least one cell is bad or the shape is another one: find out which, cell by cell
    if array is None or array.shape[1:] != column.shape:
        return _fit_each(cells, column)
    values, wrong = _cast(array, column.dtype)
    return values, {at: _why(cells[at], column.dtype) for at in np.flatnonzero(wrong).tolist()}


def _fit_gaps(cells: Cells, column: Column) -> tuple[Values, dict[int, str]]:
    """Convert cells of which some may be missing: None, NaN, or an empty text in a column of text."""
    plain = column.model_copy(update={"gaps": False})
    if column.dtype == TEXT:
        return fit(["" if cell is None else cell for cell in cells], plain)
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "f":
        missing = np.isnan(cells)
        values, bad = fit(np.where(missing, 0.0, cells), plain)
    else:
        # NaN is the only value that differs from itself
        missing = np.array([cell is None or cell != cell for cell in cells], bool)
        # any number will do in place of a gap, which becomes NaN below
        there = [0.0 if gap else cell for cell, gap in zip(cells, missing, strict=True)]
        values, bad = fit(there, plain)
    array = np.asarray(values)
    array[missing] = np.nan
    return array, bad


def _fit_each(cells: Cells, column: Column) -> tuple[Array, dict[int, str]]:
    """Convert cell by cell, which is slow, for a block with bad cells."""
    values = np.zeros((len(cells), *column.shape), column.dtype)
    bad = {}
    for at, cell in enumerate(cells):
        array = numbers([cell])
        # a list of one cell, so that the cell gets a dimension of rows like a block
        if array is not None and array.shape[1:] == column.shape:
            value, wrong = _cast(array, column.dtype)
            values[at] = value[0]
            if wrong[0]:
                bad[at] = _why(cell, column.dtype)
        else:
            bad[at] = _why(cell, column.dtype, column.shape)
    return values, bad


def _fit_text(cells: Cells) -> tuple[Array, dict[int, str]]:
    """Return the texts as an array of objects [n]."""
    values = np.full(len(cells), "", object)
    bad = dict[int, str]()
    # most often all are texts, which takes two loops without Python's
    if set(map(type, cells)) <= {str} and all(map(str.isascii, cells)):
        values[:] = cells
        return values, bad
    for at, cell in enumerate(cells):
        if isinstance(cell, str) and is_unicode(cell):
            values[at] = str(cell)  # numpy's own strings are other types
        elif isinstance(cell, str):
            bad[at] = "holds half of a surrogate pair, which is no character of Unicode"
        else:
            what = NOT_UTF8 if isinstance(cell, bytes) else f"{str(cell)[:40]}, not text"
            bad[at] = "is missing" if cell is None else f"holds {what}"
    return values, bad


def _fit_words(cells: Cells) -> tuple[Array, dict[int, str]]:
    """Return the words of each cell as an array of lists [n], of: a list of texts or of integers, or a text in which
    spaces divide the words."""
    values = np.empty(len(cells), object)
    bad = {}
    for at, cell in enumerate(cells):
        found = cell.split() if isinstance(cell, str) else cell
        found = found if isinstance(found, list | tuple | np.ndarray) else [found]
        values[at] = [str(word) for word in found if isinstance(word, str | int | np.integer)]
        if cell is None or len(values[at]) != len(found):
            bad[at] = "is missing" if cell is None else f"holds {str(cell)[:40]}, not a list of words"
        elif not all(map(is_unicode, values[at])):
            bad[at] = "holds half of a surrogate pair, which is no character of Unicode"
    return values, bad


def _fit_boxes(cells: Cells) -> tuple[Array, dict[int, str]]:
    """Return the boxes of each cell as an array of lists [n]."""
    values = np.empty(len(cells), object)
    bad = {}
    for at, cell in enumerate(cells):
        found = boxes_of(cell)
        values[at] = found
        if isinstance(found, str):
            values[at] = []
            bad[at] = found
    return values, bad


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded; JSON may have escapes of one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fit_bytes(cells: Cells, block: Block | None) -> tuple[Array, dict[int, str]]:
    """Return the contents as an array of objects [n], of: bytes, the path of a file, or `{bytes, path}` with one of
    the two, as the libraries of Hugging Face write images."""
    values = np.full(len(cells), b"", object)
    bad = {}
    folder = Path(block.file).parent if block else Path()
    allowed = block.allowed_files if block else AllowedFiles([folder])
    for at, cell in enumerate(cells):
        given = content_of(cell)
        if name := named_path(cell):
            try:
                if why := allowed.refusal_of_cell(folder, name):
                    bad[at] = f"names {why}"
                    continue
                given = read_bounded(folder / name, CONTENT_BYTES)
                if not given:
                    bad[at] = "names an empty file"
                    continue
            except (OSError, ValueError) as error:  # ValueError: a null character in the path
                bad[at] = f"names a file that cannot be read: {error}"
                continue
        if isinstance(given, bytes) and given:
            values[at] = bytes(given)
        else:
            bad[at] = f"holds {str(given)[:40]}, not bytes or the path of a file" if given else "is missing"
    return values, bad


def _fit_variable(cells: Cells, column: Column) -> tuple[list[Array], dict[int, str]]:
    """Return the rows; an empty one is a row like any other, such as the boxes of an image that has none."""
    rows = []
    bad = {}
    for at, cell in enumerate(cells):
        array = cell if isinstance(cell, np.ndarray) else numbers(cell) if isinstance(cell, list | tuple) else None
        if array is not None and array.shape == (0,):
            # of this type, whatever that of an empty list is: the others would be converted with it
            array = np.zeros(0, column.dtype)
        elif array is None or array.ndim != 1:
            bad[at] = _why(cell, column.dtype, (-1,))
            # a placeholder, so that the following cells keep their positions
            array = np.zeros(1, column.dtype)
        rows.append(array)
    # all rows are converted in one call, and divided again afterwards
    lengths = [len(row) for row in rows]
    flat, wrong = _cast(np.concatenate(rows), column.dtype)
    # the row that each value of the flat array belongs to
    for at in np.unique(np.repeat(np.arange(len(rows)), lengths)[wrong]).tolist():
        bad.setdefault(at, _why(cells[at], column.dtype))
    return np.split(flat, np.cumsum(lengths)[:-1]), bad


def _cast(array: Array, dtype: str) -> tuple[Array, Array]:
    """Return the array in another type, and bool [n]: the rows with a value that the type cannot represent."""
    target = np.dtype(dtype)
    with np.errstate(all="ignore"):
        values = array.astype(target, copy=False)
        if target.kind == "f":
            # also values that are finite in the source, and too large for the target
            wrong = ~np.isfinite(values)
        elif array.dtype == target or np.can_cast(array.dtype, target):
            return values, np.zeros(len(array), bool)
        else:
            low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
            # bounds are compared in the array's own type, because a cast of 2^63 to int64 overflows silently
            # the cast back finds fractions, which the cast to integers has cut off
            wrong = ~((array >= low) & (array <= high)) | (values.astype(array.dtype) != array)
    return values, wrong.any(axis=tuple(range(1, wrong.ndim)))


def _why(cell: Any, dtype: str, shape: tuple[int, ...] | None = None) -> str:
    """Return what is wrong with a cell that is not of type `dtype` or not of `shape`."""
    array = None if cell is None else numbers([cell])
    if array is None and isinstance(cell, str):
        return f"is {cell[:40]!r}, not a number"
    if array is None or (array.ndim == 1 and np.isnan(array.astype(float)[0])):
        return "is missing" if cell is None or array is not None else "is not a list of numbers of one shape"
    if shape is not None and array.shape[1:] != shape:
        return f"has shape {list(array.shape[1:])}, not " + ("a list" if shape == (-1,) else f"{list(shape)}")
    # the first value that does not fit is named
    wrong = next(value for value in array.flat if _cast(np.asarray([value]), dtype)[1][0])
    if not np.isfinite(wrong):
        return f"holds {wrong}"
    return f"holds {wrong}, which is not of type {dtype}"


def fit_block(block: Block, columns: Sequence[Column]) -> tuple[dict[str, Values], Array, dict[int, str]]:
    """Return (values of every column, bool [n]: which rows are good, what is wrong with the others by index)."""
    bad = dict(block.bad)
    values = {}
    good = np.ones(len(block.index), bool)
    for column in columns:
        # a JSON key that no row of this block has; in other formats every row lacks it
        cells = block.cells.get(column.name, [None] * len(block.index))
        values[column.name], wrong = fit(cells, column, block) if len(block.index) else ([], {})
        for at, why in wrong.items():
            good[at] = False
            # the first reason of a row is kept
            bad.setdefault(int(block.index[at]), f"{column.name} {why}")
    return values, good, bad


def in_parts(blocks: Iterable[tuple[Block, Array]], columns: Sequence[Column]) -> Iterator[tuple[Block, Array]]:
    """Yield blocks in parts of a few rows if their cells may be paths, whose files are read with the part; else whole.

    blocks: each with bool [n], which of its rows are held out; each part gets its own.
    """
    may_be_paths = any(column.dtype == BYTES for column in columns)
    for block, held_out in blocks:
        rows = PART_ROWS if may_be_paths else max(len(block.index), 1)
        for first in range(0, max(len(block.index), 1), rows):
            part = slice(first, first + rows)
            cells = {name: column[part] for name, column in block.cells.items()}
            # those that have no cells are reported with the first part
            bad = {} if first else block.bad
            yield replace(block, index=block.index[part], cells=cells, bad=bad), held_out[part]


def select(values: Mapping[str, Values], chosen: Array) -> dict[str, Values]:
    """Return the rows where `chosen`, bool [n], is true; without a copy if it is for all."""
    if chosen.all():
        return dict(values)
    where = np.flatnonzero(chosen)
    return {name: rows_at(rows, where) for name, rows in values.items()}


def joined(parts: Sequence[Values]) -> Values:
    """Return rows of one column, one part behind the other."""
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    return np.concatenate(parts)


def rows_at(rows: Values, where: Array) -> Values:
    """Return the rows at positions, int64 [m], of which one may occur several times."""
    if isinstance(rows, list):
        return [rows[at] for at in where]
    return rows[where]
