"""Write shard files in Arrow's IPC format, and read rows of any number of them, which are mapped, in one copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onward.trainer.data.formats.arrow_sizes import refusing
from onward.trainer.data.formats.page_advice import advise_random, advise_range
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
    """One shard file, mapped, so that ranks of a host share its memory."""

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.columns = columns
        with refusing(path):
            mapped = pa.memory_map(str(path))
            content = np.frombuffer(mapped.read_buffer(), np.uint8)
            self._place, self._size_bytes = content.ctypes.data, content.nbytes
            file = pa.ipc.open_file(mapped)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
            for batch in batches:
                batch.validate()  # one that states more values than it has would be read behind the mapping
                _check_stored(batch.schema, columns)
        self.starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        """The first row of each record batch, and the number of all rows: int64 [batches + 1]."""
        self.num_rows = int(self.starts[-1])
        self.views = {column.name: [_views(batch[column.name], column) for batch in batches] for column in columns}
        """Column -> its values in each record batch, as `_views` returns them."""
        self.addresses: dict[str, Array] = {}
        """Column of numbers of one shape -> where its first row of each record batch is in memory: int64 [batches]."""
        for column in columns:
            if column.has_one_size:
                places = [views[0].ctypes.data for views in self.views[column.name]]
                self.addresses[column.name] = np.array(places, np.int64)

    def read_nothing_around(self) -> None:
        """Let the kernel read only the pages of the rows that are read, and none around them."""
        advise_random(self._place, self._size_bytes)

    def read_ahead_of(self, first: int, end: int) -> None:
        """Let the kernel read the rows from `first` to the one before `end`."""
        for number, (start, stop) in enumerate(pairwise(self.starts.tolist())):
            if start < end and stop > first:
                wanted = slice(max(first, start) - start, min(end, stop) - start)
                for views in self.views.values():
                    for address, size in _extents(views[number], wanted):
                        advise_range(address, size)

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
        pairs = list(zip(firsts, readers, strict=True))
        # of each record batch
        self._begins = np.concatenate([first + reader.starts[:-1] for first, reader in pairs])
        self._ends = np.concatenate([first + reader.starts[1:] for first, reader in pairs])
        self._views: dict[str, list[tuple[Any, ...]]] = {}
        self._addresses: dict[str, Array] = {}
        for column in self._columns:
            name = column.name
            if column.has_one_size:
                self._addresses[name] = np.concatenate([reader.addresses[name] for reader in readers])
            else:
                self._views[name] = list(chain.from_iterable(reader.views[name] for reader in readers))

    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows [n], in the order asked for: arrays [n, *shape], or lists of n arrays.

        Raises IndexError for a row that is in no file.
        """
        # `side="right"`: a row that starts a batch belongs to it, also behind batches without rows
        batches = np.searchsorted(self._begins, rows, side="right") - 1
        # memory between two files may be of anything
        if not ((rows >= self._begins[0]) & (rows < self._ends[batches])).all():
            raise IndexError("a row is in none of these files")
        offsets = rows - self._begins[batches]
        result: dict[str, Values] = {}
        for column in self._columns:
            name = column.name
            if column.has_one_size:
                found = _copied(self._addresses[name][batches] + offsets * column.row_bytes, column.row_bytes)
                result[name] = found.view(column.dtype).reshape(len(rows), *column.shape)
                continue
            views = self._views[name]
            places = list(zip(batches.tolist(), offsets.tolist(), strict=True))
            if column.variable:
                result[name] = [_row(views[batch], at) for batch, at in places]
                continue
            gathered = result[name] = np.empty(len(rows), object)
            used = {batch for batch, _ in places}
            if column.dtype == TEXT and len(rows) >= FEW_ROWS * len(used):
                for batch in used:
                    here = np.flatnonzero(batches == batch)
                    gathered[here] = views[batch][0].take(pa.array(offsets[here])).to_numpy(zero_copy_only=False)
            else:
                # contents may be large: none is copied twice
                gathered[:] = [views[batch][0][at].as_py() for batch, at in places]
        return result


def _copied(addresses: Array, row_bytes: int) -> Array:
    """Copy rows from where they are in memory, int64 [n]: V[row bytes] [n]. The views keep it mapped.

        memory   |..|row|row|.....|..|row|row|          of two files, which are mapped somewhere
                    ^ lowest          ^ addresses[i]    at_byte[addresses[i] - lowest] is row i

    Small rows of many files are one copy of numpy's: to sort them by their files would take longer than to read them.
    """
    if row_bytes > LARGE_ROW or not len(addresses):
        found = np.empty(len(addresses), f"V{row_bytes}")
        for number, address in enumerate(addresses.tolist()):
            ctypes.memmove(found.ctypes.data + number * row_bytes, address, row_bytes)
        return found
    lowest = int(addresses.min())
    span = int(addresses.max()) - lowest + row_bytes
    memory = pa.foreign_buffer(lowest, span)
    # each element begins one byte behind the one before it
    at_byte: Array = np.ndarray(span - row_bytes + 1, f"V{row_bytes}", memory, strides=(1,))
    copied: Array = at_byte[addresses - lowest]
    return copied


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
    if column.variable:
        return array.values.to_numpy().view(column.dtype), array.offsets.to_numpy()
    return ((array.to_numpy_ndarray() if column.shape else array.to_numpy()).view(column.dtype),)


def _extents(views: tuple[Any, ...], rows: slice) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of what the rows of one record batch take in a column."""
    if isinstance(views[0], pa.Array):
        _, offsets, values = views[0].buffers()
        bounds = np.frombuffer(offsets, np.int64)[rows.start : rows.stop + 1]
        yield bounds.ctypes.data, bounds.nbytes
        yield values.address + int(bounds[0]), int(bounds[-1] - bounds[0])
        return
    parts = [views[0][rows]]
    if len(views) > 1:
        flat, offsets = views
        bounds = offsets[rows.start : rows.stop + 1]
        parts = [bounds, flat[bounds[0] : bounds[-1]]]
    for part in parts:
        yield part.ctypes.data, part.nbytes


def _row(views: tuple[Array, ...], at: int) -> Array:
    flat, offsets = views
    return flat[offsets[at] : offsets[at + 1]]
