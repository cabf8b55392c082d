"""Infer the columns of a source from its first rows."""

from __future__ import annotations

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.columns import MAX_NAMED_ROWS, Column, Schema
from onward.trainer.data.schema.described_columns import infer, merge
from onward.trainer.errors import DataError

MAX_ROWS = 10_000
SAMPLE_BYTES = 8 << 20
"""`infer_schema` stops after so many rows of a source, or about this many bytes."""


def infer_schema(data: DataConfig) -> Schema:
    """Infer the columns from the first rows of the source, or of each of several. Raises DataError."""
    schemas = [_infer_schema(data, number) for number in range(len(data.mixture))]
    found = schemas[0]
    for number, other in enumerate(schemas[1:], start=1):
        # rows of all sources are stored in the same columns
        if different := sorted(found.keys() ^ other.keys()):
            names = [data.mixture[0].source, data.mixture[number].source]
            raise DataError(f"{names[0]} and {names[1]} do not both have column {', '.join(different)}")
        found = {name: merge(column, other[name]) for name, column in found.items()}
    return found


def _infer_schema(data: DataConfig, number: int) -> dict[str, Column]:
    source = data.mixture[number].source
    if stated := sources.locate(source, data).data_format.columns:
        return dict(stated(data))
    found: dict[str, Column] = {}
    rows = 0
    size = 0
    bad = list[str]()
    for block in sources.first_blocks(data, number=number):
        bad += [f"{block.where(row)}: {why}" for row, why in block.bad.items()]
        if len(block.index):
            for name, cells in block.cells.items():
                column = infer(name, cells[: MAX_ROWS - rows])
                found[name] = merge(found[name], column) if name in found else column
        rows += len(block.index)
        # rows may be large images of numbers: bytes are a limit, too
        size += len(block.index) * sum(column.row_bytes for column in found.values())
        if rows >= MAX_ROWS or size >= SAMPLE_BYTES:
            break
    if not rows:
        raise DataError([f"{source} holds no row that can be read", *bad[:MAX_NAMED_ROWS]])
    return found
