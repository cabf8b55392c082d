"""Write shard files in Arrow's IPC format, and read rows of any number of them, which are mapped, in one copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onward.trainer.data.formats.arrow_sizes import refusing
from onward.trainer.data.formats.page_advice import advise, advise_range
from onward.trainer.data.schema.columns import BYTES, TEXT, Array, Column, Values
from onward.trainer.run.durable_files import HashedFile

FEW_ROWS = 8
"""With fewer rows of each record batch, texts are faster copied one by one."""
LARGE_ROW = 64 << 10
"""Bytes. Larger rows are copied one by one."""


def record_batch(values: Mapping[str, Values], columns: Sequence[Column]) -> pa.RecordBatch:
    """Return rows, column name -> its values, as they are stored."""
    schema = pa.schema([pa.field(column.name, _arrow_type(column), nullable=False) for column in columns])
    return pa.record_batch([_to_arrow(values[column.name], column) for column in columns], schema=schema)


def record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file that ArrowWriter wrote, mapped. Raises DataError."""
    with refusing(path), pa.ipc.open_file(pa.memory_map(str(path))) as file:
        for number in range(file.num_record_batches):
            yield file.get_batch(number)


class ArrowWriter:
    """Writes one shard file."""

    def __init__(self, path: Path, schema: pa.Schema, *, hashed: bool = True) -> None:
        self._content = HashedFile(path, hashed=hashed)
        self._file = pa.ipc.new_file(self._content, schema)

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows."""
        self._file.write_batch(rows)

    def close(self) -> str:
        """Write the footer, without which the file is not readable; return the SHA-256 of the file."""
        self._file.close()
        self._content.close()
        return self._content.sha256

    def abandon(self) -> None:
        """Close the file as it is, without its footer."""
        self._content.close()


class ArrowReader:
    """One shard file, mapped, so that ranks of a host share its memory.

    around: whether the kernel may read more than the pages of the rows that are read, and of the heads of the file.
    """

    def __init__(self, path: Path, columns: Sequence[Column], *, around: bool = True) -> None:
        self.columns = columns
        with refusing(path):
            mapped = pa.memory_map(str(path))
            # of each buffer that Arrow is asked for, it would let the kernel read all at once
            first = mapped.read_buffer(1)
            content = pa.foreign_buffer(first.address, mapped.size(), first)
            if not around:
                advise(content.address, content.size, mmap.MADV_RANDOM)
            file = pa.ipc.open_file(content)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
            for batch in batches:
                batch.validate()  # one that states more values than it has would be read behind the mapping
                _check_stored(batch.schema, columns)
        self.starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        """The first row of each record batch, and the number of all rows: int64 [batches + 1]."""
        self.num_rows = int(self.starts[-1])
        self.views = {column.name: [_views(batch[column.name], column) for batch in batches] for column in columns}
        """Column -> its values in each record batch, as `_views` returns them."""
        fixed = [column.name for column in columns if column.has_one_size]
        self.addresses = {name: np.array([views[0].ctypes.data for views in self.views[name]], int) for name in fixed}
        """Column of numbers of one shape -> where its first row of each record batch is in memory: int64 [batches]."""

    def read_ahead_of(self, first: int, end: int) -> None:
        """Let the kernel read the rows from `first` to the one before `end`."""
        for number, (start, stop) in enumerate(pairwise(self.starts.tolist())):
            if start < end and stop > first:
                wanted = slice(max(first, start) - start, min(end, stop) - start)
                for views in self.views.values():
                    for part in _extents(views[number], wanted):
                        advise_range(part)

    def lengths(self, name: str) -> Array:
        """Return the length of each row of a column of varying length: int64 [rows]."""
        found: Array = np.concatenate([np.diff(offsets) for _, offsets in self.views[name]]).astype(np.int64)
        return found


class ArrowFiles:
    """Rows of several shard files by their numbers, as if all record batches stood one behind the other.

    firsts: the number of the first row of each file, int64 [files], increasing.
    """

    def __init__(self, readers: Sequence[ArrowReader], firsts: Array) -> None:
        self._columns = readers[0].columns
        self._readers = readers  # they keep the files mapped
        # of each record batch
        counts = np.concatenate([np.diff(reader.starts) for reader in readers])
        self._begins = np.concatenate([at + reader.starts[:-1] for at, reader in zip(firsts, readers, strict=True)])
        self._ends = self._begins + counts
        self._bucket = 1 + (self._ends[-1] - self._begins[0]) // (16 * len(self._ends))
        buckets = np.arange(self._begins[0], self._ends[-1], self._bucket)
        self._batch_of_bucket = np.searchsorted(self._ends, buckets, side="right")
        self._views: dict[str, list[tuple[Any, ...]]] = {}
        self._memory: dict[str, tuple[Array, Array]] = {}
        for column in self._columns:
            name = column.name
            if column.has_one_size:
                addresses = np.concatenate([reader.addresses[name] for reader in readers])
                self._memory[name] = _memory(addresses, counts, column.row_bytes)
            else:
                self._views[name] = [views for reader in readers for views in reader.views[name]]

    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows [n], in the order asked for: arrays [n, *shape], or lists of n arrays.

        Raises IndexError for a row that is in no file.
        """
        # as searchsorted does, which takes several times as long
        batches = self._batch_of_bucket[(rows - self._begins[0]) // self._bucket]
        later = np.flatnonzero(rows >= self._ends[batches])
        batches[later] = np.searchsorted(self._ends, rows[later], side="right")
        offsets = rows - self._begins[batches]
        # memory between two files may be of anything
        if (offsets < 0).any():
            raise IndexError("a row is in none of these files")
        result: dict[str, Values] = {}
        for column in self._columns:
            name = column.name
            if column.has_one_size:
                memory, firsts = self._memory[name]
                found = _copied(memory, firsts[batches], offsets, column.row_bytes)
                result[name] = found.view(column.dtype).reshape(len(rows), *column.shape)
                continue
            views = self._views[name]
            places = [(views[batch], at) for batch, at in zip(batches.tolist(), offsets.tolist(), strict=True)]
            if column.variable:
                result[name] = [flat[bounds[at] : bounds[at + 1]] for (flat, bounds), at in places]
                continue
            gathered = result[name] = np.empty(len(rows), object)
            used = set(batches.tolist())
            if column.dtype == TEXT and len(rows) >= FEW_ROWS * len(used):
                for batch in used:
                    here = np.flatnonzero(batches == batch)
                    gathered[here] = views[batch][0].take(pa.array(offsets[here])).to_numpy(zero_copy_only=False)
            else:
                # contents may be large: none is copied twice
                gathered[:] = [cells[at].as_py() for (cells,), at in places]
        return result


def _memory(addresses: Array, counts: Array, row_bytes: int) -> tuple[Array, Array]:
    """Return the rows of one size in several files as one array over the memory between the first and the last.

        memory   |..|row|row|.....|..|row|row|      of two files, which are mapped somewhere
                    ^ lowest         ^ addresses[1]

    addresses: of the first row of each record batch; counts: its rows. Returns the array, and where each batch begins
    in it. int64 [batches] each.
    """
    lowest = int(addresses.min())
    offsets = addresses - lowest
    size = int((offsets + counts * row_bytes).max())
    # a column begins at a multiple of 8 bytes, so labels make a plain array; other rows overlap, one at each byte
    content = np.frombuffer(pa.foreign_buffer(lowest, size), np.uint8)
    if row_bytes > LARGE_ROW:
        return content, offsets
    step = 1 if (offsets % row_bytes).any() else row_bytes
    memory: Array = np.ndarray((size - row_bytes) // step + 1, f"V{row_bytes}", content, strides=(step,))
    return memory, offsets // step


def _copied(memory: Array, firsts: Array, offsets: Array, row_bytes: int) -> Array:
    """Copy rows of the array that `_memory` returns: of batches that begin there, rows behind that, int64 [n] each.

    Small rows of many files are one copy of numpy's: to sort them by their files would take longer than to read them.
    """
    step = memory.strides[0]
    places = firsts + offsets * (row_bytes // step)
    if row_bytes > LARGE_ROW:
        return np.array([memory[at : at + row_bytes] for at in places.tolist()], np.uint8).reshape(-1, row_bytes)
    # of rows that overlap, `take` would copy all first
    found: Array = memory.take(places) if step == row_bytes else memory[places]
    return found


def _check_stored(schema: pa.Schema, columns: Sequence[Column]) -> None:
    """Raise ArrowException for numbers of another type than the manifest says, which would be read as its type."""
    for column in columns:
        if column.name not in schema.names:
            raise pa.ArrowInvalid(f"there is no column {column.name}")
        found = schema.field(column.name).type
        if column.holds_numbers and found != _arrow_type(column):
            raise pa.ArrowTypeError(f"{column.name} is {found}, and the manifest says {_arrow_type(column)}")


def _arrow_type(column: Column) -> pa.DataType:
    if not column.holds_numbers:
        return pa.large_binary() if column.dtype == BYTES else pa.large_string()
    # Arrow packs booleans into bits, which cannot be mapped as an array
    value = pa.from_numpy_dtype(np.uint8 if column.dtype == "bool" else column.dtype)
    if column.variable:
        return pa.list_(value)
    return pa.fixed_shape_tensor(value, column.shape) if column.shape else value


def _to_arrow(values: Values, column: Column) -> pa.Array:
    if isinstance(values, list):
        # Arrow's plain list type has 32-bit offsets
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        # a row of hours of sound is not copied
        joined = values[0].ravel() if len(values) == 1 else np.concatenate(values)
        return pa.ListArray.from_arrays(offsets, pa.array(_bytes(joined)))
    if not column.holds_numbers:
        return pa.array(values, _arrow_type(column))
    values = _bytes(np.ascontiguousarray(values))
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values) if column.shape else pa.array(values)


def _bytes(array: Array) -> Array:
    return array.view(np.uint8) if array.dtype == bool else array


def _views(array: pa.Array, column: Column) -> tuple[Any, ...]:
    """Return (values [n, *shape],) or (flat values, offsets [n + 1]) of one record batch, without a copy.

    Of text and of bytes the values are the Arrow array.
    """
    if not column.holds_numbers:
        return (array,)
    # to_numpy would import pandas, which takes half a second
    if column.variable:
        return np.from_dlpack(array.values).view(column.dtype), np.from_dlpack(array.offsets)
    values = np.from_dlpack(array.storage.flatten() if column.shape else array)
    return (values.view(column.dtype).reshape(len(array), *column.shape),)


def _extents(views: tuple[Any, ...], rows: slice) -> list[Array]:
    """Return what the rows of one record batch take in a column."""
    if isinstance(views[0], pa.Array):
        _, offsets, values = views[0].buffers()
        views = np.frombuffer(values, np.uint8), np.frombuffer(offsets, np.int64)
    if len(views) == 1:
        return [views[0][rows]]
    flat, offsets = views
    bounds = offsets[rows.start : rows.stop + 1]
    return [bounds, flat[bounds[0] : bounds[-1]]]
