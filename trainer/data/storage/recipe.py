"""What is read of the data, what is computed of it, and which columns of both are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.computations import read_and_computed
from onward.trainer.data.formats.finished_shards import shards_at
from onward.trainer.data.formats.format_table import Request
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.reading.read_ahead import read_ahead
from onward.trainer.data.schema.column_computers import ColumnComputer, RowPacker, packer_of
from onward.trainer.data.schema.columns import BOXES, BYTES, TEXT, WORDS, Column, ColumnType, Schema
from onward.trainer.data.schema.described_columns import stored_column
from onward.trainer.data.schema.fitted import columns_to_fit, fit_computers
from onward.trainer.data.schema.signature import Signature
from onward.trainer.errors import DataError


@dataclass(frozen=True)
class Recipe:
    """What is read of the sources, what is computed of it, and which columns of both are stored."""

    data: DataConfig
    columns: Sequence[Column]
    """The columns that are read."""
    computers: Sequence[ColumnComputer]
    config: RunConfig | None = None
    """What another process makes the same computers of."""

    @property
    def request(self) -> Request:
        """Return what is read of the files."""
        return Request.of_columns(self.data, self.columns)

    @property
    def packer(self) -> RowPacker | None:
        """Return the computer that packs rows, or None."""
        return packer_of(self.computers)

    @cached_property
    def source_columns(self) -> list[Column]:
        """Return the columns that are read and stored as they are, to evaluate on."""
        consumed = frozenset[str]().union(*(computer.consumed for computer in self.computers))
        return [column for column in self.columns if column.name not in consumed]

    @cached_property
    def trained_columns(self) -> list[Column]:
        """Return those that are stored to train on, too: not the columns that only the whole file reads."""
        file_only = frozenset[str]().union(*(computer.file_only for computer in self.computers))
        return [column for column in self.source_columns if column.name not in file_only]

    @property
    def pad_values(self) -> dict[str, float]:
        """Return computed column of varying length -> the value that pads it."""
        return {name: value for computer in self.computers for name, value in computer.pad_values.items()}

    def fit(self, *, most_blocks: int | None = None) -> None:
        """Fit the computers that have to be fitted, to all rows or to the first blocks. Raises DataError."""
        columns = columns_to_fit(self.computers, self.columns, skips_rows=self.data.bad_rows == "skip")
        if not columns:
            return
        request = Request.of_columns(self.data, columns)
        blocks = sources.read(self.data, request.names, request.text)
        if most_blocks is not None:
            fit_computers(self.computers, islice(blocks, most_blocks), columns)
            return
        # the thread that reads ahead ends here, also after an error
        with closing(read_ahead(blocks)) as ahead:
            fit_computers(self.computers, ahead, columns)


def recipe_of(config: RunConfig, signature: Signature, schema: Schema | None = None) -> Recipe:
    """Return what a configuration reads, computes and stores. schema: the columns of the source, if they are known.

    Raises DataError as `stored_columns` and for finished shards, and the errors of `read_and_computed`.
    """
    if shards_at(config.data):
        raise DataError(f"{config.data.source} holds finished shards, and what they were made of is not known")
    schema = schema or infer_schema(config.data)
    columns, computers = read_and_computed(config, signature, schema)
    return Recipe(config.data, stored_columns(config.data, columns, schema), computers, config)


def stored_columns(
    data: DataConfig, columns: Mapping[str, ColumnType] | None, schema: Schema | None = None
) -> list[Column]:
    """Return the columns as they are stored. Raises DataError for those that are missing or hold no numbers.

    schema: the columns of the source, if they are known.
    """
    schema = schema or infer_schema(data)
    types: Mapping[str, ColumnType | None] | None = columns
    if types is None:
        types = {column.name: None for column in schema.values() if column.holds_numbers}
    problems = [f"there is no column {name!r}, only {', '.join(schema)}" for name in types if name not in schema]
    for name, column_type in types.items():
        if name not in schema or schema[name].holds_numbers:
            continue
        if column_type is None or column_type.dtype not in (TEXT, WORDS, BOXES, BYTES):
            problems.append(f"column {name!r} holds {schema[name].kind}, not numbers")
    if problems or not types:
        raise DataError(f"{data.source}: {problem}" for problem in problems or ["there is no column of numbers"])
    ragged = any(sources.locate(each.source, data).data_format.rows_vary for each in data.mixture)
    return [stored_column(schema[name], kind, ragged=ragged) for name, kind in types.items()]
