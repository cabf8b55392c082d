"""Write the rows of one split into files of data.rows_per_shard rows, with the extremes of each column."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Self

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.arrow_files import ArrowWriter
from onward.trainer.data.schema.column_computers import RowPacker
from onward.trainer.data.schema.columns import Column, Values
from onward.trainer.data.schema.described_columns import extremes, outermost
from onward.trainer.data.storage.shards import ShardFile
from onward.trainer.run.durable_files import fsync


class SplitWriter:
    """Write a stream of rows into files of rows_per_shard rows. disk: its threads wait until a file is on the disk."""

    def __init__(
        self, directory: Path, split: str, *, data: DataConfig, packer: RowPacker | None, disk: Executor
    ) -> None:
        self._packer = packer
        self._directory = directory
        self._split = split
        self._data = data
        self._file: ArrowWriter | None = None
        self._rows = 0
        self._done: list[ShardFile] = []
        self._disk = disk
        self._synced: Future[None] | None = None
        self.num_rows = 0
        """Of all files so far."""
        self._columns: dict[str, Column] = {}
        self._extremes: dict[str, tuple[int | float, ...]] = {}
        self._longest: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # after an error; `close` leaves none open
        if self._file is not None:
            self._file.abandon()

    def add(self, values: dict[str, Values], columns: Sequence[Column]) -> None:
        """Append rows of these columns, the same in each call."""
        if self._packer:
            values = self._packer.pack(values, self._split)
            columns = self._packer.packed_columns
        self._append(values, columns)

    def end_source(self) -> None:
        """Close the open window: windows never mix two sources."""
        if self._packer:
            self._append(self._packer.rest(self._split), self._packer.packed_columns)

    def _append(self, values: dict[str, Values], columns: Sequence[Column]) -> None:
        count = len(next(iter(values.values())))
        values = {column.name: values[column.name] for column in columns}
        if count:
            for column in columns:
                self._observe(column, values[column.name])
        at = 0
        self.num_rows += count
        while at < count:
            if self._file is None:
                self._file = ArrowWriter(self._path, columns)
            # a block may end in the middle of a file, and a file in the middle of a block
            rows = min(count - at, self._data.rows_per_shard - self._rows)
            self._file.write({name: cells[at : at + rows] for name, cells in values.items()})
            self._rows += rows
            at += rows
            if self._rows == self._data.rows_per_shard:
                self._end_file()

    def close(self) -> list[ShardFile]:
        """End the last file and return all of them, which are on the disk."""
        self._end_file()
        self._wait_for_disk()
        return self._done

    @property
    def observed(self) -> dict[str, Column]:
        """Return the columns with the extremes and the longest row so far, by name."""
        return {
            name: column.model_copy(
                update={"extremes": self._extremes[name]}
                | ({"shape": (self._longest[name],)} if column.variable else {})
            )
            for name, column in self._columns.items()
        }

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self._done):05d}.arrow"

    def _end_file(self) -> None:
        if self._file is None:
            return
        digest = self._file.close()
        path = self._path
        self._done.append(ShardFile(name=path.name, rows=self._rows, bytes=path.stat().st_size, sha256=digest))
        # a thread waits for the disk; of the file before, so that no more than two are not on the disk yet
        self._wait_for_disk()
        self._synced = self._disk.submit(fsync, path)
        self._file = None
        self._rows = 0

    def _wait_for_disk(self) -> None:
        """Raise OSError if a file could not be written to the disk."""
        if self._synced is not None:
            self._synced.result()

    def _observe(self, column: Column, values: Values) -> None:
        name = column.name
        self._columns[name] = column
        self._extremes[name] = outermost(self._extremes.get(name, ()), extremes(values), column.dtype)
        if column.variable:
            self._longest[name] = max(self._longest.get(name, 0), max(map(len, values)))
