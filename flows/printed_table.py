"""Print rows in columns. Importing this module loads the standard library alone."""

from __future__ import annotations

from collections.abc import Iterable


def table(rows: Iterable[tuple[str, ...]], *, heads: tuple[str, ...] = ()) -> None:
    """Print rows in columns on stdout. No cell is shortened or wrapped, so that paths can be copied."""
    lines = [*([heads] if heads else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
