"""Store what a teacher computes of each row: files that are complete or absent, read by the number of the row.

    RUN_DIR/teacher/train-00000.json      SoftLabelChunk: shapes and SHA-256 digests; written last
    RUN_DIR/teacher/train-00000-0.npy     the first 1,024 rows of the training split, for soft loss 0
    RUN_DIR/teacher/evaluation-00000-0.npy

model/teacher/teacher_labels.py computes them. Rows have the numbers that they have in the split, whatever the order of
the epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.errors import DataError
from onward.trainer.run.durable_files import durable_file, sha256
from onward.trainer.run.records import Record, read_record, write_record

CHUNK_ROWS = 1024
"""Rows in one file."""


class SoftLabelChunk(Record):
    """The files of consecutive rows of a split."""

    rows: int
    shapes: Mapping[str, tuple[int, ...]]
    """Name of the output -> shape of one row."""
    sha256: Mapping[str, str]
    """Name of the output -> digest of its file."""


class SoftLabelFiles:
    """The soft labels of one split in a directory. names: those of the outputs; dtype: float16 or float32."""

    def __init__(self, folder: Path, split: str, num_rows: int, names: tuple[str, ...], dtype: str) -> None:
        self._folder = folder
        self._split = split
        self._num_rows = num_rows
        self.names = names
        self._dtype = np.dtype(dtype)
        self._open: dict[tuple[int, str], Array] = {}

    def chunks(self) -> Iterator[tuple[int, Array]]:
        """Yield the number of each chunk, and its rows, int64 [up to CHUNK_ROWS]."""
        for number, first in enumerate(range(0, self._num_rows, CHUNK_ROWS)):
            yield number, np.arange(first, min(first + CHUNK_ROWS, self._num_rows))

    def is_complete(self, number: int) -> bool:
        """Return whether a chunk has been written. Raises DataError if a file of it has changed since."""
        if not (path := self._record(number)).exists():
            return False
        for name, digest in read_record(path, SoftLabelChunk).sha256.items():
            file = self._file(number, name)
            if not file.is_file() or sha256(file) != digest:
                raise DataError(
                    f"{file} is missing or does not have the content that was written; remove {self._folder}, so that "
                    "the teacher computes it again"
                )
        return True

    def write(self, number: int, values: Mapping[str, Array]) -> None:
        """Write a chunk: name of the output -> [rows, ...]."""
        for name, array in values.items():
            with durable_file(self._file(number, name)) as partial, partial.open("wb") as file:
                np.save(file, array.astype(self._dtype))
        # the record is written last: a chunk without it is computed again
        chunk = SoftLabelChunk(
            rows=len(next(iter(values.values()))),
            shapes={name: array.shape[1:] for name, array in values.items()},
            sha256={name: sha256(self._file(number, name)) for name in values},
        )
        write_record(self._record(number), chunk)

    def shapes(self) -> Iterator[Mapping[str, tuple[int, ...]]]:
        """Yield the shapes of one row in each chunk."""
        for number, _ in self.chunks():
            yield read_record(self._record(number), SoftLabelChunk).shapes

    def read(self, rows: Array) -> dict[str, Values]:
        """Read rows [n], in this order: name of the output -> fp32 [n, ...]."""
        places = [divmod(row, CHUNK_ROWS) for row in rows.tolist()]
        found: dict[str, Values] = {}
        for name in self.names:
            values = [self._array(number, name)[row] for number, row in places]
            found[name] = np.stack(values).astype(np.float32)
        return found

    def _array(self, number: int, name: str) -> Array:
        if (number, name) not in self._open:
            self._open[number, name] = np.load(self._file(number, name), mmap_mode="r")
        return self._open[number, name]

    def _record(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:05}.json"

    def _file(self, number: int, name: str) -> Path:
        return self._folder / f"{self._split}-{number:05}-{self.names.index(name)}.npy"
