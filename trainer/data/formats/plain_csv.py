"""Read plain rows of CSV with pyarrow, which splits and converts several times as fast as pandas and Python's csv.

What is read is what tables.py reads with care, bit for bit, because only that is read here for which both agree:

    rows      every line has the fields of the header; quotes stand around whole cells; no control characters
    numbers   digits, sign, point and exponent, or nothing: both read the nearest int64 or float64
    texts     any UTF-8

Everything else is left to tables.py: a piece of the file with a doubtful row as a whole, and doubtful columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onward.trainer.data.formats.csv_cells import cells_of
from onward.trainer.data.formats.csv_dialect import Dialect
from onward.trainer.data.schema.columns import Array, Cells

CHUNK_BYTES = 1 << 16
"""Looked at together."""
MOST_BYTES = 1 << 30
"""A larger piece, of one endless row, has no offsets of 32 bits."""
MOST_COLUMNS = 4096
"""A table of more columns has few rows in a piece, and takes more time here than it saves."""
MINUS = ord("-")
OTHERS = 12
"""The characters - . / 0 ... 9 follow each other; `/` is in no number, which pyarrow finds."""
NEWLINE = ord("\n")
RETURN = ord("\r")
EXPONENT = ord("e")
LOWER = 32
NO_INTEGER = 2.0**63
"""From here on integers are no int64: pandas reads them as uint64, or as texts."""
NUMBERS = (pa.int64(), pa.float64(), pa.null())
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd".encode()


@dataclass
class PlainColumns:
    """Reads the plain columns of one file, piece by piece."""

    header: Sequence[str]
    names: Sequence[str]
    """The columns to read."""
    text: Collection[str]
    """Those of them that are read as text."""
    dialect: Dialect
    doubtful: set[str] = field(default_factory=set)
    """Columns of numbers that were not plain in some piece, and are not tried again."""

    def read(self, piece: bytes, lines: int, *, quoted: bool) -> tuple[dict[str, Cells], Array] | None:
        """Return (cells of the plain columns, the line of each row, from 0); None for a piece that is not plain.

        piece: complete rows, without the header. lines: the line ends in it. quoted: whether there are quotes in it.
        """
        wanted = list(self.names)
        if not quoted:
            wanted = [name for name in self.names if name not in self.doubtful]
        separator = self.dialect.separator
        # a character that may be part of a number, or ends a row, needs the reader that takes care
        in_numbers = separator.isalnum() or separator in "-./+ \r\n"
        is_usual = len(separator) == 1 and separator.isascii() and not in_numbers
        if not wanted or not is_usual or self.dialect.is_localised:
            return None
        if len(self.header) > MOST_COLUMNS or len(piece) > MOST_BYTES or b"\0" in piece:
            return None
        # pandas and pyarrow read these texts differently
        if not piece.isascii() and (piece.startswith(BYTE_ORDER_MARK) or REPLACEMENT in piece):
            return None
        # a carriage return alone is part of a cell for one reader, and a line end for the other
        if b"\r" in piece and piece.count(b"\r") != piece.count(b"\r\n"):
            return None
        if not piece.endswith(b"\n"):
            # the last line of a file may have no end
            piece += b"\n"
            lines += 1
        starts = _row_starts(piece, self.dialect) if quoted else np.arange(lines)
        if starts is None:
            return None
        cells = None
        has_text = any(name in self.text for name in wanted)
        if not quoted and not self.doubtful and not has_text:
            cells = self._numbers_only(piece, lines, wanted)
        if cells is None:
            cells = self._by_column(piece, len(starts), wanted, quoted=quoted)
        return None if cells is None else (cells, starts)

    def _numbers_only(self, piece: bytes, rows: int, names: Sequence[str]) -> dict[str, Cells] | None:
        """Read a piece of which every cell, also of other columns, is a number or empty."""
        # in a piece of numbers only, all other characters are separators and line ends: one behind each cell
        between = rows * len(self.header) + (piece.count(b"\r") if b"\r" in piece else 0)
        if _count_others(piece) != between or (table := self._table(piece, names, {})) is None:
            return None
        if table.num_rows != rows or not all(column.type in NUMBERS for column in table.columns):
            return None
        found: dict[str, Cells] = {}
        for name, column in zip(names, table.columns, strict=True):
            numbers = _as_pandas(column.chunk(0))
            # may be an integer that pandas reads as uint64: its column is looked at by itself
            if numbers.dtype.kind == "f" and (abs(numbers) >= NO_INTEGER).any():
                return None
            found[name] = numbers
        return found

    def _by_column(self, piece: bytes, rows: int, names: Sequence[str], *, quoted: bool) -> dict[str, Cells] | None:
        """Split a piece into texts, and convert those of each column."""
        table = self._table(piece, names, dict.fromkeys(names, pa.string()), quoted=quoted)
        if table is None or table.num_rows != rows:
            return None
        found: dict[str, Cells] = {}
        for name, column in zip(names, table.columns, strict=True):
            cells = column.chunk(0)
            if name in self.text:
                found[name] = cells.to_numpy(zero_copy_only=False).tolist()
            elif (numbers := _numbers(cells, gaps=not quoted)) is not None:
                found[name] = numbers
            elif quoted:
                found[name] = cells_of(column.to_pandas(), self.dialect)
            else:
                # the column is left to the slower reader in this piece, and in those that follow
                self.doubtful.add(name)
        return found

    def _table(
        self, piece: bytes, names: Sequence[str], types: Mapping[str, pa.DataType], *, quoted: bool = False
    ) -> Any:
        """Return pyarrow's table of a piece; None if it refuses a row or a text."""
        from pyarrow import csv  # imported here: ranks read shards, for which they need no CSV

        # columns are converted side by side on free cores
        read = csv.ReadOptions(column_names=list(self.header), use_threads=True, block_size=len(piece) + 1)
        quote = self.dialect.quote if quoted else False
        parse = csv.ParseOptions(delimiter=self.dialect.separator, quote_char=quote, newlines_in_values=quoted)
        convert = csv.ConvertOptions(
            include_columns=list(names), column_types=types, null_values=[""], true_values=[], false_values=[]
        )
        # The threads of pyarrow may drop the piece last. If it is an object of Python they need its lock for that,
        # and abort a process that ends just then: they get a copy that Arrow owns.
        copy = pa.allocate_buffer(len(piece))
        np.frombuffer(copy, np.uint8)[:] = np.frombuffer(piece, np.uint8)
        try:
            return csv.read_csv(pa.BufferReader(copy), read, parse, convert)
        except pa.ArrowException:
            return None


def count_lines(rows: bytes) -> int:
    """Return the number of line ends."""
    return sum(int(np.count_nonzero(chunk == NEWLINE)) for chunk in _chunks(rows))


def _count_others(rows: bytes) -> int:
    """Return how many characters are none of a number."""
    total = sum(int(np.count_nonzero(_are_others(chunk))) for chunk in _chunks(rows))
    # a plus sign stands in exponents only: pandas reads +5 as an integer, pyarrow does not
    return total - (rows.count(b"e+") + rows.count(b"E+") if b"+" in rows else 0)


def _chunks(rows: bytes) -> Iterator[Array]:
    """Yield the characters in parts that stay in the cache of a core."""
    characters = np.frombuffer(rows, np.uint8)
    return (characters[start : start + CHUNK_BYTES] for start in range(0, len(characters), CHUNK_BYTES))


def _are_others(characters: Array) -> Array:
    """Return which characters are none of a number: bool [n]."""
    # of unsigned bytes the difference is large for those in front of the minus sign, too
    return np.asarray(((characters - MINUS) > OTHERS) & ((characters | LOWER) != EXPONENT))


def _numbers(cells: pa.Array, *, gaps: bool) -> Array | None:
    """Return texts as numbers, NaN where they are missing; None if one is not plain, or (without `gaps`) missing."""
    offsets = np.frombuffer(cells.buffers()[1], np.int32)[: len(cells) + 1]
    characters = np.frombuffer(cells.buffers()[2] or b"", np.uint8)[: offsets[-1]]
    missing = np.diff(offsets) == 0
    # a plus sign behind an exponent is the only other character that a number may have
    others = np.flatnonzero(_are_others(characters))
    signs = characters[others] == ord("+")
    if others.size and not (signs & ((characters[others - 1] | LOWER) == EXPONENT) & (others > 0)).all():
        return None
    if missing.any():
        if not gaps:
            return None
        # an empty text is no number for Arrow's cast, a null stays one
        cells = pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), cells)
    # pandas makes integers of a column only if no cell has a point or an exponent
    is_whole = not ((characters == ord(".")) | ((characters | LOWER) == EXPONENT)).any()
    try:
        return _as_pandas(cells.cast(pa.int64() if is_whole else pa.float64()))
    except pa.ArrowException:
        return None


def _as_pandas(numbers: pa.Array) -> Array:
    """Return int64, or float64 if some are missing."""
    if numbers.null_count and not pa.types.is_float64(numbers.type):
        # safe: integers above 2^53 would be refused, which pandas rounds, too
        numbers = numbers.cast(pa.float64(), safe=False)
    return np.asarray(numbers.to_numpy(zero_copy_only=False))


def _row_starts(piece: bytes, dialect: Dialect) -> Array | None:
    """Return the line of each row of a piece with quotes, from 0: int64 [rows]; None if a quote stands inside a cell.

    a,"b "" c",d        quotes open and close in turn; one that opens is at the start of a cell or behind one that
      1    23 4         closes, one that closes is at the end of a cell or before one that opens
    """
    data = np.frombuffer(piece, np.uint8)
    quote = ord(dialect.quote)
    separator = ord(dialect.separator)
    places = np.flatnonzero(data == quote)
    # the piece ends inside of a quoted cell, or has a stray quote
    if len(places) % 2:
        return None
    opening = places[::2]
    closing = places[1::2]
    # "" inside quotes: one closes and the next opens at once
    doubled = opening[1:] == closing[:-1] + 1
    # the character in front of each opening quote, and below the one behind each closing quote
    before = data[np.maximum(opening - 1, 0)]
    starts = (before == separator) | (before == NEWLINE) | (opening == 0)
    starts[1:] |= doubled
    after = data[np.minimum(closing + 1, len(data) - 1)]
    ends = (after == separator) | (after == NEWLINE) | (after == RETURN)
    ends[:-1] |= doubled
    if not (starts & ends).all():
        return None
    line_ends = np.flatnonzero(data == NEWLINE)
    # a line end behind an odd number of quotes is inside a cell
    rows = np.flatnonzero(np.searchsorted(places, line_ends) % 2 == 0)
    return np.concatenate([[0], rows[:-1] + 1])
