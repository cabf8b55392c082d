"""Write the rows of one split into files of data.rows_per_shard rows, with the extremes of each column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.column_computers import RowPacker
from onward.trainer.data.columns import Column, Values
from onward.trainer.data.storage.arrow_files import ArrowWriter
from onward.trainer.data.storage.described_columns import extremes, merge
from onward.trainer.data.storage.shards import ShardFile
from onward.trainer.data.storage.tensorproto_files import ProtoWriter
from onward.trainer.run.durable_files import fsync, sha256


class _Writer(Protocol):
    def write(self, values: Mapping[str, Values]) -> None: ...
    def close(self) -> None: ...


WRITERS: dict[str, Callable[[Path, Sequence[Column]], _Writer]] = {"arrow": ArrowWriter, "pb": ProtoWriter}


class SplitWriter:
    """Write a stream of rows into files of rows_per_shard rows."""

    def __init__(self, directory: Path, split: str, *, data: DataConfig, packer: RowPacker | None) -> None:
        self._packer = packer
        self._directory = directory
        self._split = split
        self._data = data
        self._file: _Writer | None = None
        self._rows = 0
        self._done: list[ShardFile] = []
        self.num_rows = 0
        """Of all files so far."""
        self.observed: dict[str, Column] = {}
        """Extremes and longest row so far, by column."""

    def add(self, values: dict[str, Values], columns: Sequence[Column]) -> None:
        """Append rows of these columns, the same in each call."""
        if self._packer:
            values, columns = self._packer.pack(values, self._split), self._packer.packed_columns
        self._append(values, columns)

    def end_source(self) -> None:
        """Take note that the next rows are those of another source, with which none are packed."""
        if self._packer:
            self._append(self._packer.rest(self._split), self._packer.packed_columns)

    def _append(self, values: dict[str, Values], columns: Sequence[Column]) -> None:
        count = len(next(iter(values.values())))
        values = {column.name: values[column.name] for column in columns}
        for column in columns if count else ():
            self._observe(column, values[column.name])
        at = 0
        self.num_rows += count
        while at < count:
            if self._file is None:
                self._file = WRITERS[self._data.shard_format](self._path, columns)
            rows = min(count - at, self._data.rows_per_shard - self._rows)
            self._file.write({name: cells[at : at + rows] for name, cells in values.items()})
            self._rows += rows
            at += rows
            if self._rows == self._data.rows_per_shard:
                self._end_file()

    def close(self) -> list[ShardFile]:
        """End the last file and return all of them."""
        self._end_file()
        return self._done

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self._done):05d}.{self._data.shard_format}"

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        path = self._path
        fsync(path)
        size = path.stat().st_size
        self._done.append(ShardFile(name=path.name, rows=self._rows, bytes=size, sha256=sha256(path)))
        self._file, self._rows = None, 0

    def _observe(self, column: Column, values: Values) -> None:
        shape = (max(map(len, values)),) if column.variable else column.shape
        now = column.model_copy(update={"extremes": extremes(values), "shape": shape})
        before = self.observed.get(column.name)
        self.observed[column.name] = merge(before, now) if before else now
