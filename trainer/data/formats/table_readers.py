"""Read CSV and JSON Lines in blocks, with the line number of each bad row.

A block ends at a line end. Memory depends on the size of a block, not of the file.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.bounds import CSV_COLUMNS, CSV_ROW_BYTES, JSON_CELLS, JSON_ROW_BYTES, Limit
from onward.trainer.bounds import opened as opened_file
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.data.formats.csv_cells import cells_of, of_numbers, texts_of
from onward.trainer.data.formats.csv_dialect import Bytes, Dialect, dialect_of, opened
from onward.trainer.data.formats.plain_csv import BYTE_ORDER_MARK, PlainColumns, count_lines
from onward.trainer.data.schema.columns import BLOCK_BYTES, Array, Block, Cells
from onward.trainer.data.schema.file_parts import FilePart, opened_part
from onward.trainer.errors import DataError, few

SAMPLE_BYTES = 1 << 16
"""The first lines, whose mean length is taken."""
NEWLINE, RETURN = b"\n\r"
DEFAULT = TableConfig()


def csv_blocks(
    path: Path,
    names: Sequence[str] | None,
    text: Collection[str] = (),
    table: TableConfig = DEFAULT,
    part: FilePart | None = None,
) -> Iterator[Block]:
    """Yield the rows of a CSV file, by default with a header line; `names`: the columns to read, None for all.

    How it is written, `table` says or csv_dialect.py finds out; blank lines are ignored. The cells of the columns in
    `text` are read as they are: spaces, empty cells and digits are text there. Columns of a file without a header are
    c0, c1, c2, ... part: as `csv_parts` yields it; None for all of the file.
    """
    dialect = dialect_of(path, table)
    header: list[str] = []
    # a set: with 10^5 columns, a search through a list for each would take minutes
    wanted = None if names is None else frozenset(names)
    text = frozenset(text)
    plain: PlainColumns | None = None
    if part and part.begin:
        with opened_file(path) as whole:
            first = whole.readline(CSV_ROW_BYTES.most).removeprefix(BYTE_ORDER_MARK).removesuffix(b"\n")
        header = _header(path, first, dialect)
        plain = PlainColumns(header, _chosen(header, wanted), text, dialect)
    with opened(path, dialect) if part is None or part.is_whole else opened_part(path, part) as file:
        for line, lines, piece in _pieces(path, file, quote=dialect.quote, limit=CSV_ROW_BYTES, part=part):
            before = line
            # Excel writes a UTF-8 byte order mark, which would become part of the first column's name
            rows = piece if header else piece.removeprefix(BYTE_ORDER_MARK)
            if not header:
                first, _, rest = rows.partition(b"\n")
                header = _header(path, first, dialect)
                # without a header line the first line is a row
                rows, before = (rest, line + 1) if dialect.header else (rows, line)
                plain = PlainColumns(header, _chosen(header, wanted), text, dialect)
            block = _csv_block(path, rows, before, lines - (before - line), plain) if rows and plain else None
            # else the text would be in memory as long as its rows
            del piece, rows
            if block is not None:
                yield block
            del block


def estimated_rows(path: Path) -> int:
    """Return about the number of lines of a file, by the mean length of the first ones; 0 for a compressed file."""
    if path.suffix.lower() == ".gz":
        return 0
    with path.open("rb") as lines:
        sample = lines.read(SAMPLE_BYTES)
    return path.stat().st_size * sample.count(b"\n") // max(1, len(sample))


def csv_parts(path: Path, data: DataConfig, part_bytes: int) -> Iterator[FilePart]:
    """Yield parts of about this size, between which the blocks of a CSV file are divided."""
    if path.suffix.lower() == ".gz" or data.table.encoding != "utf-8":
        return iter([FilePart()])
    return _parts(path, dialect_of(path, data.table), CSV_ROW_BYTES, part_bytes)


def json_parts(path: Path, data: DataConfig, part_bytes: int) -> Iterator[FilePart]:
    """Yield parts of about this size, between which the blocks of a JSON Lines file are divided."""
    if path.suffix.lower() == ".gz":
        return iter([FilePart()])
    return _parts(path, Dialect(quote=""), JSON_ROW_BYTES, part_bytes)


def _parts(path: Path, dialect: Dialect, limit: Limit, part_bytes: int) -> Iterator[FilePart]:
    size = path.stat().st_size
    # equal parts, of which none is a small rest
    part_bytes = size // max(1, size // part_bytes) + 1
    at = 0
    part = FilePart()
    with opened(path, dialect) as file:
        # whether a line end divides two rows depends on all quotes before it
        for line, _, piece in _pieces(path, file, quote=dialect.quote, limit=limit):
            if at - part.begin >= part_bytes:
                yield part.model_copy(update={"end": at})
                part = FilePart(begin=at, line=line)
            at += len(piece)
    yield part


def json_blocks(path: Path, names: Sequence[str] | None, part: FilePart | None = None) -> Iterator[Block]:
    """Yield the rows of a JSON Lines file, one object per line; `names`: the keys to read, None for all.

    part: as `json_parts` yields it; None for all of the file.
    """
    with opened(path, Dialect()) if part is None or part.is_whole else opened_part(path, part) as file:
        yield from _json_blocks(path, file, names, part)


def _json_blocks(path: Path, file: Bytes, names: Sequence[str] | None, part: FilePart | None) -> Iterator[Block]:
    for first, _, piece in _pieces(path, file, quote="", limit=JSON_ROW_BYTES, part=part):
        rows: list[dict[str, Any]] = []
        index = []
        bad = {}
        for number, line in enumerate(piece.split(b"\n"), start=first):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8, and of deep brackets
                bad[number] = f"is not JSON: {error}"
                continue
            if isinstance(row, dict):
                rows.append(row)
                index.append(number)
            else:
                bad[number] = f"is not a JSON object but {str(row)[:40]!r}"
        # an ordered set: columns are in the order in which their keys appear
        keys = dict.fromkeys(key for row in rows for key in row)
        chosen = list(keys)
        if names is not None:
            chosen = [name for name in names if name in keys]
        if (number := len(chosen) * len(rows)) > JSON_CELLS.most:  # each row may have keys of its own
            raise DataError(
                f"{path}, lines {index[0] + 1} to {index[-1] + 1}: {len(rows):,} rows have {len(chosen):,} different "
                f"keys, which make {JSON_CELLS.exceeded(number)}; store what varies as values, not as keys"
            )
        cells: dict[str, Cells] = {key: [row.get(key) for row in rows] for key in chosen}
        yield Block(str(path), np.array(index, np.int64), cells, bad, unit="line")


def _pieces(
    path: Path, file: Bytes, *, quote: str, limit: Limit, part: FilePart | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number of lines before it, its line ends, some complete rows) to the end; between quotes, rows may hold
    line ends."""
    line = part.line if part else 0
    rest = b""
    mark = quote.encode()
    while data := file.read(BLOCK_BYTES):
        # whether a line end is inside quotes depends on all quotes of the row, so that its beginning is needed, too
        if mark and (mark in data or mark in rest):
            data = rest + data
            rest = b""
        # what follows the last complete row waits for more data
        end = _cut(data, mark)
        if len(data) - end + (0 if end else len(rest)) > limit.most:
            raise DataError(
                f"{path}, line {line + data.count(NEWLINE, 0, end) + 1}: the row does not end within "
                f"{limit.most >> 20} MB{'; is a quote not closed?' if quote else ''}"
            )
        # in one step: a copy of a few megabytes takes as long as its digest
        piece = b"".join((rest, memoryview(data)[:end])) if end else b""
        rest = data[end:] if end else rest + data
        del data
        if piece:
            lines = count_lines(piece)
            yield line, lines, piece
            line += lines
        del piece
    if rest:
        yield line, count_lines(rest), rest


def _cut(data: bytes, quote: bytes) -> int:
    """Return the offset just after the last line end that ends a row."""
    end = data.rfind(b"\n") + 1
    if not quote or quote not in data:
        return end
    # an odd number of quotes before a line end means that it is inside a quoted field: go back before that field
    while end and data.count(quote, 0, end) % 2:
        end = data.rfind(b"\n", 0, data.rfind(quote, 0, end)) + 1
    return end


def _header(path: Path, line: bytes, dialect: Dialect) -> list[str]:
    if (columns := line.count(dialect.separator.encode()) + 1) > CSV_COLUMNS.most:
        raise DataError(f"{path}, line 1 has {CSV_COLUMNS.exceeded(columns)}; is data.table.separator right?")
    csv.field_size_limit(sys.maxsize)
    try:
        first: list[str] = next(dialect.rows(line.decode("utf-8", "replace").rstrip("\r")), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1 is not CSV: {error}") from None
    if not dialect.header:
        return [f"c{number}" for number in range(len(first))]
    names = [name.strip() for name in first]
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(f"{path}, line 1: column {few(map(repr, repeated))} is there more than once")
    # a first line of numbers is probably a row, which would be lost as names
    if not names or all(_is_number(name) for name in names):
        raise DataError(
            f"{path}, line 1: {','.join(names)[:60]!r} are not column names; add a header line, or set "
            "data.table.header = false"
        )
    return names


def _chosen(header: Sequence[str], wanted: Collection[str] | None) -> Sequence[str]:
    if wanted is None:
        return header
    return [name for name in header if name in wanted]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _csv_block(path: Path, piece: bytes, line: int, lines: int, plain: PlainColumns) -> Block:
    """Return the rows of a piece that has `line` lines before it, and `lines` line ends in it."""
    header = plain.header
    dialect = plain.dialect
    quoted = bool(dialect.quote) and dialect.quote.encode() in piece
    cells = dict[str, Cells]()
    index = np.empty(0, np.int64)
    bad = dict[int, str]()
    left = plain.names
    if rows_read := plain.read(piece, lines, quoted=quoted):
        cells, index = rows_read
        left = [name for name in plain.names if name not in cells]
    try:
        if not rows_read or left:
            # with care, and why a row or a cell is wrong
            reader = _quoted if quoted else _plain
            more, index, bad = reader(piece, header, left, plain.text, dialect)
            cells = {name: more[name] if name in more else cells[name] for name in plain.names}
    except ValueError as error:  # pandas' own, such as of control characters that it takes for line ends
        raise DataError(f"{path}, after line {line}: the rows cannot be read as CSV: {error}") from error
    # index 0 is line 2, the first under the header
    first = 1 + dialect.header
    return Block(
        str(path),
        index + (line + 1 - first),
        cells,
        {row + line + 1 - first: why for row, why in bad.items()},
        first=first,
        unit="line",
    )


Parsed = tuple[dict[str, Cells], Array, dict[int, str]]


def _plain(
    piece: bytes, header: Sequence[str], names: Sequence[str], text: Collection[str], dialect: Dialect
) -> Parsed:
    """Parse rows without quotes: one per line, with one field more than separators."""
    import pandas as pd  # imported here: ranks read shards, for which they need no pandas

    data = np.frombuffer(piece if piece.endswith(b"\n") else piece + b"\n", np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    # the bytes of each line with its line end
    sizes = np.diff(ends, prepend=-1)
    # differences of cumulative counts at line ends: the separators of each line, without a loop in Python
    found = np.flatnonzero(data == ord(dialect.separator))
    commas = np.diff(np.searchsorted(found, ends), prepend=0)
    # a line of nothing but its end, in Unix's or in Windows' form
    blank = (sizes == 1) | ((sizes == 2) & (data[ends - 1] == RETURN))
    ragged = ~blank & (commas != len(header) - 1)
    good = ~blank & ~ragged
    # pandas accepts lines with too few fields, so it gets the good lines only
    if not good.all():
        data = data[np.repeat(good, sizes)]
    bad = {int(row): _ragged(int(commas[row]) + 1, header) for row in np.flatnonzero(ragged)}
    if not data.size:
        return dict.fromkeys(names, ()), np.flatnonzero(good), bad
    common: dict[str, Any] = {"names": header, "index_col": False, "skip_blank_lines": False, "low_memory": False}
    common |= {"sep": dialect.separator, "quoting": csv.QUOTE_NONE, "encoding_errors": "replace"}
    # pandas would take a carriage return alone, which is part of a cell, for the end of a line
    common |= {"lineterminator": "\n"}
    rows = data.tobytes().replace(b"\r\n", b"\n")
    cells = dict[str, Cells]()
    if numeric := [name for name in names if name not in text]:
        kind: dict[str, Any] = {"dtype": str, "na_filter": False} if dialect.is_localised else {}
        frame = pd.read_csv(io.BytesIO(rows), usecols=numeric, skipinitialspace=True, **kind, **common)
        known = of_numbers(frame)
        cells |= {name: known[name] if name in known else cells_of(frame[name], dialect) for name in numeric}
    if texts := [name for name in names if name in text]:
        # texts are read apart: spaces in front of them count
        frame = pd.read_csv(io.BytesIO(rows), usecols=texts, dtype=str, na_filter=False, **common)
        cells |= {name: texts_of(frame[name]) for name in texts}
    return cells, np.flatnonzero(good), bad


def _quoted(
    piece: bytes, header: Sequence[str], names: Sequence[str], text: Collection[str], dialect: Dialect
) -> Parsed:
    """Parse rows that may hold separators and line ends in quotes, one by one."""
    import pandas as pd

    csv.field_size_limit(sys.maxsize)
    reader = dialect.rows(piece.decode("utf-8", "replace"))
    rows = []
    index = []
    bad = dict[int, str]()
    line = 0
    # after an error of csv the next line is taken for the beginning of a row
    for row in _rows_until_error(reader, bad):
        if row and len(row) == len(header):
            rows.append(row)
            index.append(line)
        elif row:
            bad[line] = _ragged(len(row), header)
        # a quoted row may span lines: its number is that of its first line
        line = reader.line_num
    frame = pd.DataFrame(rows, columns=list(header), dtype="str")
    cells = {name: texts_of(frame[name]) if name in text else cells_of(frame[name], dialect) for name in names}
    return cells, np.array(index, np.int64), bad


def _rows_until_error(reader: Any, bad: dict[int, str]) -> Iterator[list[str]]:
    """Yield the rows of a block, and note in `bad` why one of them cannot be read."""
    while True:
        line = reader.line_num
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad[line] = f"is not CSV: {error}"


def _ragged(found: int, header: Sequence[str]) -> str:
    return f"has {found} field{'s' * (found != 1)}, not {len(header)}"
