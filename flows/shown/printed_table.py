"""Print rows in columns. It loads nothing but the standard library and the errors."""

from __future__ import annotations

from collections.abc import Iterable

from onward.trainer.errors import printable


def table(rows: Iterable[tuple[str, ...]], *, heads: tuple[str, ...] = ()) -> None:
    """Print rows in columns on stdout. No cell is shortened or wrapped, so that paths can be copied."""
    # a line end in a name would begin a row
    lines = [tuple(map(printable, line)) for line in (*([heads] if heads else []), *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
