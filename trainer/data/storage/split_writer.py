"""Write the rows of one split into files of a fixed number of rows, with the extremes of each column.

blocks of rows    |   0   |       1       |   2   |
files             |  train-00000  |  train-00001  |      a block may end in the middle of a file, and a file in a block
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Self

from onward.trainer.data.formats.arrow_shards import ArrowWriter, record_batch
from onward.trainer.data.schema.column_computers import RowPacker
from onward.trainer.data.schema.columns import Column, Values
from onward.trainer.data.schema.described_columns import extremes, outermost
from onward.trainer.data.storage.shards import ShardFile
from onward.trainer.run.durable_files import fsync


class ShardFiles:
    """Consecutive files of `rows_per_file` rows each, of which the last may have fewer.

    first: the number of the first file. disk: its threads wait until a file is on the disk; None = the files are read
    once and removed, and have no digests.
    """

    def __init__(
        self, directory: Path, split: str, *, rows_per_file: int, disk: Executor | None, first: int = 0
    ) -> None:
        self._directory = directory
        self._split = split
        self._rows_per_file = rows_per_file
        self._disk = disk
        self._first = first
        self._file: ArrowWriter | None = None
        self._rows = 0
        self._done: list[ShardFile] = []
        self._synced: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # after an error; `close` leaves none open
        if self._file is not None:
            self._file.abandon()

    def add(self, rows: Any) -> None:
        """Append rows, a pa.RecordBatch of the columns of all others."""
        at = 0
        while at < rows.num_rows:
            if self._file is None:
                self._file = ArrowWriter(self._path, rows.schema, hashed=self._disk is not None)
            count = min(rows.num_rows - at, self._rows_per_file - self._rows)
            self._file.write(rows.slice(at, count))
            self._rows += count
            at += count
            if self._rows == self._rows_per_file:
                self._end_file()

    def close(self) -> list[ShardFile]:
        """End the last file and return all of them, which are on the disk."""
        self._end_file()
        self._wait_for_disk()
        return self._done

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{self._first + len(self._done):05d}.arrow"

    def _end_file(self) -> None:
        if self._file is None:
            return
        digest = self._file.close()
        path = self._path
        self._done.append(ShardFile(name=path.name, rows=self._rows, bytes=path.stat().st_size, sha256=digest))
        # a thread waits for the disk; of the file before, so that no more than two are not on the disk yet
        self._wait_for_disk()
        if self._disk is not None:
            self._synced = self._disk.submit(fsync, path)
        self._file = None
        self._rows = 0

    def _wait_for_disk(self) -> None:
        """Raise OSError if a file could not be written to the disk."""
        if self._synced is not None:
            self._synced.result()


class SplitWriter:
    """Write a stream of rows of one split into files, and take note of what its columns hold."""

    def __init__(self, split: str, files: ShardFiles, *, packer: RowPacker | None) -> None:
        self._packer = packer
        self._split = split
        self._files = files
        self.num_rows = 0
        """Of all files so far."""
        self._columns: dict[str, Column] = {}
        self._extremes: dict[str, tuple[int | float, ...]] = {}
        self._longest: dict[str, int] = {}

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
        if not count:
            return
        for column in columns:
            self._observe(column, values[column.name])
        self.num_rows += count
        self._files.add(record_batch(values, columns))

    def close(self) -> list[ShardFile]:
        """End the last file and return all of them, which are on the disk."""
        return self._files.close()

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

    def _observe(self, column: Column, values: Values) -> None:
        name = column.name
        self._columns[name] = column
        self._extremes[name] = outermost(self._extremes.get(name, ()), extremes(values), column.dtype)
        if column.variable:
            self._longest[name] = max(self._longest.get(name, 0), max(map(len, values)))
