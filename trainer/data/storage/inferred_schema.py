"""Infer the columns of a source from its first rows."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, field

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.columns import Column, Schema
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.digits import digits_schema
from onward.trainer.data.storage.described_columns import infer, merge
from onward.trainer.errors import DataError

SAMPLE_BYTES = 8 << 20
"""`infer_schema` stops after about this many bytes."""
MAX_NAMED_ROWS = 20
"""Bad rows that a message names."""
MOST_FILES = 64
"""Of a source with more files the columns are not kept: to ask for the state of each would take longer."""
NS = 10**9
TICK_NS, COARSE_TICK_NS = NS // 20, 2 * NS
"""A file that was written within this time may be written once more and have the same time of change. File systems
that count whole seconds, such as FAT, have the coarse one."""


@dataclass(frozen=True)
class _State:
    """What the columns of a source depend on: equal states have the same columns."""

    settings: str
    files: tuple[tuple[str, int, int, int], ...]
    max_rows: int
    data: DataConfig = field(compare=False)


def infer_schema(data: DataConfig, max_rows: int = 10_000) -> Schema:
    """Infer the columns from the first rows of the source, or of each of several. Raises DataError.

    Several steps of a command ask for them, so that they are kept while the files are as they were.
    """
    state = _state(data, max_rows)
    return _infer(data, max_rows) if state is None else dict(_inferred(state))


@functools.lru_cache(maxsize=4)
def _inferred(state: _State) -> dict[str, Column]:
    return _infer(state.data, state.max_rows)


def _state(data: DataConfig, max_rows: int) -> _State | None:
    """Return what the columns depend on: settings and the state of the files; None if that is not known surely."""
    located = [sources.locate(each.source, data) for each in data.mixture]
    files = [path for source in located for _, path in source.files[: MOST_FILES + 1]]
    if len(files) > MOST_FILES:
        return None
    states = []
    for path in files:
        try:
            found = path.stat()
        except OSError:  # the reader says why
            return None
        age_ns = abs(time.time_ns() - found.st_mtime_ns)
        if age_ns < (TICK_NS if found.st_mtime_ns % NS else COARSE_TICK_NS):
            return None
        states.append((str(path), found.st_ino, found.st_size, found.st_mtime_ns))
    return _State(repr(data.model_copy(update={"inputs": {}, "label": ""})), tuple(states), max_rows, data)


def _infer(data: DataConfig, max_rows: int) -> dict[str, Column]:
    schemas = [_infer_schema(data, number, max_rows) for number in range(len(data.mixture))]
    found = schemas[0]
    for number, other in enumerate(schemas[1:], start=1):
        if different := sorted(found.keys() ^ other.keys()):
            names = [data.mixture[0].source, data.mixture[number].source]
            raise DataError(f"{names[0]} and {names[1]} do not both have column {', '.join(different)}")
        found = {name: merge(column, other[name]) for name, column in found.items()}
    return found


def _infer_schema(data: DataConfig, number: int, max_rows: int) -> dict[str, Column]:
    source = data.mixture[number].source
    if sources.locate(source, data).format == "digits":
        return digits_schema(data)
    found: dict[str, Column] = {}
    rows, size, bad = 0, 0, list[str]()
    for block in sources.first_blocks(data, number=number):
        bad += [f"{block.where(row)}: {why}" for row, why in block.bad.items()]
        for name, cells in block.cells.items() if len(block.index) else ():
            column = infer(name, cells[: max_rows - rows])
            found[name] = merge(found[name], column) if name in found else column
        rows += len(block.index)
        size += len(block.index) * sum(_row_bytes(column) for column in found.values())
        if rows >= max_rows or size >= SAMPLE_BYTES:
            break
    if not rows:
        raise DataError([f"{source} holds no row that can be read", *bad[:MAX_NAMED_ROWS]])
    return found


def _row_bytes(column: Column) -> int:
    return 0 if not column.holds_numbers else math.prod(column.shape) * np.dtype(column.dtype).itemsize
