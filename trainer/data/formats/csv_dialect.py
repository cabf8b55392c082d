"""Say how a CSV file is written: separator, quote, decimal mark, encoding; and open it as UTF-8.

A separator that is not given is taken from the header line, and only if it is certain:

    a;b;c      only ";" divides it          ->  ;
    a,b        only "," divides it          ->  ,
    a;b,c      both do; the lines below     ->  the one by which every line has as many fields as the header,
                                                refused where that holds for both
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from onward.trainer.bounds import NotAFile, check_regular
from onward.trainer.bounds import opened as opened_file
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.errors import DataError

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_BYTES = 1 << 16
"""Of a file, from which the separator is found."""
SAMPLE_LINES = 50
MISSING = frozenset(
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"}
    | {"NULL", "NaN", "None", "n/a", "nan", "null"}
)
"""What pandas reads as a missing number."""


@dataclass(frozen=True)
class Dialect:
    """How the rows of a CSV file are written."""

    separator: str = ","
    quote: str = '"'
    """Around cells that hold separators and line ends; "" = none."""
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"
    header: bool = True

    @property
    def is_localised(self) -> bool:
        """Whether numbers are written in another way than Python's."""
        return self.decimal != "." or bool(self.thousands)

    @property
    def number(self) -> str:
        """Return the regular expression of a number: groups of three digits only, so that no date is taken for one."""
        mark = re.escape(self.decimal)
        group = re.escape(self.thousands)
        whole = rf"\d{{1,3}}(?:{group}\d{{3}})+|\d+" if self.thousands else r"\d+"
        return rf"[+-]?(?:(?:{whole})(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?"

    def rows(self, text: str) -> Any:
        """Return csv's reader of the rows of a text: an iterator over lists of fields, with `line_num`."""
        file = io.StringIO(text, newline="")
        if not self.quote:
            return csv.reader(file, delimiter=self.separator, quoting=csv.QUOTE_NONE)
        return csv.reader(file, delimiter=self.separator, quotechar=self.quote)


class Bytes(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


def dialect_of(path: Path, table: TableConfig) -> Dialect:
    """Return how a file is written, with what the settings leave open. Raises DataError where that is ambiguous."""
    quote = "" if table.quote == "none" else table.quote
    decimal = "." if table.decimal == "auto" else table.decimal
    given = Dialect(",", quote, decimal, table.thousands, table.encoding, table.header)
    with opened(path, given) as file:
        sample = file.read(SAMPLE_BYTES).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    # the first lines suffice, and a separator is tried on each of them
    lines = [line for line in sample.splitlines() if line.strip()][:SAMPLE_LINES]
    # the last may be cut off
    lines = lines[:-1] if len(sample) >= SAMPLE_BYTES // 4 and len(lines) > 1 else lines
    separator = table.separator or ("\t" if _suffix(path) in (".tsv", ".tab") else _found(path, lines, given))
    found = replace(given, separator=separator)
    # with another separator 1,5 may be a number: the user has to say which
    if table.decimal == "auto" and separator != "," and not table.thousands:
        _refuse_commas(path, lines, found)
    return found


def _found(path: Path, lines: Sequence[str], dialect: Dialect) -> str:
    if not lines:
        return ","
    fields: dict[str, list[int]] = {}
    dividing = []
    for mark in SEPARATORS:
        fields[mark] = [len(row) for row in _rows(lines, replace(dialect, separator=mark))]
        # a table of a single column has rows of one field, whatever the mark
        if fields[mark] and fields[mark][0] > 1:
            dividing.append(mark)
    if len(dividing) > 1:
        # a mark inside the cells, such as a decimal comma, gives rows of different numbers of fields
        even = [mark for mark in dividing if len(set(fields[mark])) == 1]
        dividing = even if len(even) == 1 else dividing
    if len(dividing) > 1:
        choices = " or ".join(f"{mark!r} ({SEPARATORS[mark]}, {fields[mark][0]} columns)" for mark in dividing)
        raise DataError(f"{path}: the separator may be {choices}; set data.table.separator")
    return dividing[0] if dividing else ","


def _refuse_commas(path: Path, lines: Sequence[str], dialect: Dialect) -> None:
    for number, row in enumerate(_rows(lines, dialect), start=1):
        for cell in row:
            if re.fullmatch(r"[+-]?\d+,\d+", cell.strip()):
                raise DataError(
                    f"{path}, row {number}: {cell.strip()!r} may be a decimal number or have a comma between thousands"
                    "; set data.table.decimal = ',' or data.table.thousands = ',' (or decimal = '.', if it is text)"
                )


def _rows(lines: Sequence[str], dialect: Dialect) -> list[list[str]]:
    try:
        # parsed as CSV, because separators inside of quotes divide nothing
        return [row for row in dialect.rows("\n".join(lines)) if row]
    except csv.Error:  # a quote that is not closed, in another dialect
        return []


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextmanager
def opened(path: Path, dialect: Dialect) -> Iterator[Bytes]:
    """Open a file as bytes of UTF-8, uncompressed. Raises DataError for a damaged file or another encoding."""
    try:
        with _uncompressed(path) as file:
            # a byte order mark of UTF-16; a file of UTF-8 never begins with these bytes
            start = file.read(2)
            file.seek(0)
            if start in (b"\xff\xfe", b"\xfe\xff") and "16" not in dialect.encoding:
                raise DataError(f"{path} is UTF-16, not {dialect.encoding}; set data.table.encoding = 'utf-16'")
            yield file if dialect.encoding == "utf-8" else _Recoded(file, dialect.encoding)
    except (gzip.BadGzipFile, zlib.error, EOFError, NotAFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except UnicodeError as error:
        raise DataError(f"{path} is not written in data.table.encoding {dialect.encoding!r}: {error}") from error


def _uncompressed(path: Path) -> IO[bytes]:
    if path.suffix.lower() != ".gz":
        return opened_file(path)
    check_regular(path)
    return gzip.open(path, "rb")  # type: ignore[return-value]


class _Recoded:
    """Read text of another encoding as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="")

    def read(self, size: int, /) -> bytes:
        return self._text.read(size).encode()
