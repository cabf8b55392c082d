"""Read and write shard files in Arrow's IPC format (memory-mapped), read Parquet files, convert Arrow columns."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onward.trainer.bounds import ROW_BYTES, check_regular
from onward.trainer.data.formats.arrow_sizes import check_sizes, dictionary_bytes
from onward.trainer.data.formats.page_advice import advise_random, advise_range
from onward.trainer.data.schema.columns import BLOCK_BYTES, BYTES, TEXT, Array, Block, Cells, Column, Values
from onward.trainer.data.schema.file_parts import FilePart
from onward.trainer.errors import DataError
from onward.trainer.run.durable_files import HashedFile

FOOTER_MAGIC = b"ARROW1"
"""The first bytes of a file that has a footer."""
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a stream that is complete."""
STREAM_BYTES = 1 << 20
"""Read ahead in each column of a Parquet file, whose row groups may be as large as the file."""
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
MOST_ROWS = 65536
"""Rows of a block."""
MOST_TEXTS = 128 << 20
"""Bytes that rows read at once may have, if all had the longest text that the file can hold."""


RUN_BYTES = 64 << 20
"""Row groups of a Parquet file that follow each other are read together up to about this size."""
FEW_ROWS = 8
"""With fewer rows of each record batch they are faster copied one by one."""


# -- shard files


def record_batch(values: Mapping[str, Values], columns: Sequence[Column]) -> pa.RecordBatch:
    """Return rows, column name -> its values, as they are stored."""
    schema = pa.schema([pa.field(column.name, _arrow_type(column), nullable=False) for column in columns])
    return pa.record_batch([_to_arrow(values[column.name], column) for column in columns], schema=schema)


def record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file that ArrowWriter wrote, mapped. Raises DataError."""
    with _refusing(path), pa.ipc.open_file(pa.memory_map(str(path))) as file:
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
    """Rows of one shard file by their number; the file is mapped, so ranks of a host share its memory."""

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self._kinds = [(column.name, column.dtype, column.shape, column.variable) for column in columns]
        with _refusing(path):
            mapped = pa.memory_map(str(path))
            content = np.frombuffer(mapped.read_buffer(), np.uint8)
            self._place, self._size_bytes = content.ctypes.data, content.nbytes
            file = pa.ipc.open_file(mapped)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
            for batch in batches:
                batch.validate()  # one that states more values than it has would be read behind the mapping
                _check_stored(batch.schema, columns)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.num_rows = int(self._starts[-1])
        self._views = {column.name: [_views(batch[column.name], column) for batch in batches] for column in columns}
        # column of numbers of one shape -> its rows by the byte of the file that they begin at
        self._rows: dict[str, tuple[Array, Array]] = {}
        for column in columns:
            if column.holds_numbers and not column.variable:
                self._rows[column.name] = _rows_by_place(
                    content, column, [rows for (rows,) in self._views[column.name]]
                )

    def read(self, rows: Array) -> dict[str, Values]:
        """Return the rows [n] with these numbers, in this order: arrays [n, *shape], or lists of n arrays."""
        # the batch that each row is in, and its place there
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        offsets = rows - self._starts[batches]
        result: dict[str, Values] = {}
        for name, dtype, shape, variable in self._kinds:
            if name in self._rows:
                # one copy for all record batches: small rows of many would take longer to sort than to read
                at_byte, starts = self._rows[name]
                found = at_byte[starts[batches] + offsets * at_byte.itemsize]
                result[name] = found.view(dtype).reshape(len(rows), *shape)
                continue
            views = self._views[name]
            each = list(zip(batches.tolist(), offsets.tolist(), strict=True))
            if variable:
                result[name] = [_row(views[batch], at) for batch, at in each]
                continue
            gathered = result[name] = np.empty(len(rows), object)
            used = {batch for batch, _ in each}
            if dtype == TEXT and len(rows) >= FEW_ROWS * len(used):
                for batch in used:
                    places = np.flatnonzero(batches == batch)
                    gathered[places] = views[batch][0].take(pa.array(offsets[places])).to_numpy(zero_copy_only=False)
            else:
                # contents may be large: none is copied twice
                gathered[:] = [views[batch][0][at].as_py() for batch, at in each]
        return result

    def read_nothing_around(self) -> None:
        """Let the kernel read only the pages of the rows that are read, and none around them."""
        advise_random(self._place, self._size_bytes)

    def read_ahead_of(self, first: int, end: int) -> None:
        """Let the kernel read the rows from `first` to the one before `end`."""
        for number, (start, stop) in enumerate(pairwise(self._starts.tolist())):
            if start < end and stop > first:
                wanted = slice(max(first, start) - start, min(end, stop) - start)
                for views in self._views.values():
                    for address, size in _extents(views[number], wanted):
                        advise_range(address, size)

    def lengths(self, name: str) -> Array:
        """Return the length of each row of a column of varying length: int64 [rows]."""
        found: Array = np.concatenate([np.diff(offsets) for _, offsets in self._views[name]]).astype(np.int64)
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
    if column.variable:
        return array.values.to_numpy().view(column.dtype), array.offsets.to_numpy()
    return ((array.to_numpy_ndarray() if column.shape else array.to_numpy()).view(column.dtype),)


def _rows_by_place(content: Array, column: Column, batches: Sequence[Array]) -> tuple[Array, Array]:
    """Return the rows of a column by their first byte in a file, as V[row bytes], and where each batch begins.

        content   |..|row 0|row 1|.....|row 0|row 1|         at_byte[starts[1] + 1 * 4] is row 1 of batch 1,
                     ^ starts[0]       ^ starts[1]           where a row has 4 bytes

    content: the mapped file, uint8 [bytes]. batches: [n, *shape] each, in that mapping.
    """
    row_bytes = column.row_bytes
    # each element begins one byte behind the one before it
    at_byte = np.ndarray(max(0, content.nbytes - row_bytes + 1), f"V{row_bytes}", content, strides=(1,))
    return at_byte, np.array([values.ctypes.data for values in batches]) - content.ctypes.data


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


# -- sources


def arrow_blocks(path: Path, names: Sequence[str] | None) -> Iterator[Block]:
    """Yield the rows of a file in Arrow's IPC format, with a footer or as a stream; `names`: the columns to read."""
    with _refusing(path):
        first = 0
        for whole in _record_batches(path):
            batch = _chosen(whole, names)
            # offsets and indices beyond the data would be read without a check
            batch.validate(full=True)
            yield from _blocks(path, batch, first)
            first += batch.num_rows


def _blocks(path: Path, batch: pa.RecordBatch, first: int) -> Iterator[Block]:
    """Yield the rows of a record batch, which may be as large as its file: those of nulls take no bytes in it."""
    # as many rows as make about BLOCK_BYTES once decoded
    rows = max(1, min(MOST_ROWS, batch.num_rows * BLOCK_BYTES // max(_plain_bytes(batch), 1)))
    for start in range(0, batch.num_rows, rows):
        yield _block(path, batch.slice(start, rows), first + start)


def _plain_bytes(batch: pa.RecordBatch) -> int:
    """Return about how many bytes a record batch takes once no value of it is an index into a dictionary."""
    total = int(batch.nbytes)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            values = column.dictionary
            if any(test(values.type) for test in TEXTS):
                # each row may have the longest text of the dictionary
                total += len(column) * (pc.max(pc.binary_length(values)).as_py() or 0)
            else:
                # numbers have one size: the dictionary's mean is that of each row
                total += len(column) * values.nbytes // max(1, len(values))
    return total


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file; `datasets` of Hugging Face writes streams, which have no footer."""
    mapped = pa.memory_map(str(path))
    if mapped.read(len(FOOTER_MAGIC)) == FOOTER_MAGIC:
        file = pa.ipc.open_file(mapped)
        check_sizes(path, mapped, has_footer=True)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        mapped.seek(max(0, mapped.size() - len(STREAM_END)))
        if mapped.read() != STREAM_END:
            # pyarrow would take an end between two batches for the end of the rows
            raise DataError(f"{path} ends in the middle, or is not in Arrow's IPC format")
        mapped.seek(0)
        check_sizes(path, mapped, has_footer=False)
        mapped.seek(0)
        yield from pa.ipc.open_stream(mapped)


def parquet_rows(path: Path) -> int:
    """Return the number of rows that the footer of a Parquet file states."""
    import pyarrow.parquet as pq  # imported here: ranks never need it

    return int(pq.read_metadata(path).num_rows)


def parquet_parts(path: Path, part_bytes: int) -> Iterator[FilePart]:
    """Yield parts of about this size, between which the blocks of a Parquet file are divided."""
    import pyarrow.parquet as pq  # imported here: ranks never need it

    with _refusing(path):
        metadata = pq.read_metadata(path)
        runs = _runs([metadata.row_group(number) for number in range(metadata.num_row_groups)])
    begin = size = 0
    for number, run in enumerate(runs):
        if size >= part_bytes:
            yield FilePart(begin=begin, end=number)
            begin = number
            size = 0
        size += run.size_bytes
    yield FilePart(begin=begin)


class _Run(NamedTuple):
    """Row groups that are read together."""

    groups: list[int]
    first_row: int
    size_bytes: int


def _runs(groups: Sequence[Any]) -> list[_Run]:
    """Return the row groups of a file in runs: blocks begin anew with each, so that a part of a file has the blocks of
    the whole. Of a file with many small row groups, some make a run."""
    runs: list[_Run] = []
    first = 0
    for number, group in enumerate(groups):
        if not runs or runs[-1].size_bytes >= RUN_BYTES:
            runs.append(_Run([], first, 0))
        run = runs[-1]
        runs[-1] = _Run([*run.groups, number], run.first_row, run.size_bytes + group.total_byte_size)
        first += group.num_rows
    return runs


def parquet_blocks(path: Path, names: Sequence[str] | None, part: FilePart | None = None) -> Iterator[Block]:
    """Yield the rows of a Parquet file, some of a row group at a time; `names`: the columns to read, None for all.

    part: as `parquet_parts` yields it; None for all of the file.
    """
    import pyarrow.parquet as pq  # imported here: ranks never need it

    # pre_buffer would read whole row groups ahead, which may be as large as the file
    with _refusing(path), pq.ParquetFile(path, pre_buffer=False, buffer_size=STREAM_BYTES) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        # equal values are stored once, so that a file of some kilobytes may have rows of gigabytes
        row_bytes = max(1, max((_row_bytes(group) for group in groups), default=0))
        if row_bytes > ROW_BYTES.most:
            raise DataError(f"{path}: a row has about {ROW_BYTES.exceeded(row_bytes)}")
        texts = max(1, max((dictionary_bytes(path, group) for group in groups), default=0))
        rows = max(1, min(MOST_ROWS, BLOCK_BYTES // row_bytes, MOST_TEXTS // texts))
        columns = None
        if names is not None:
            stored = set(file.schema_arrow.names)
            columns = [name for name in names if name in stored]
        part = part or FilePart()
        for run in _runs(groups)[part.begin : part.stop]:
            first = run.first_row
            for batch in file.iter_batches(rows, row_groups=run.groups, columns=columns, use_threads=False):
                yield from _blocks(path, batch, first)
                first += batch.num_rows


def _row_bytes(group: Any) -> int:
    """Return about how many bytes a row of a row group takes in memory."""
    columns = [group.column(number) for number in range(group.num_columns)]
    # more values than rows: a column of lists, whose values take up to 8 bytes each, however few the file needs
    values = sum(column.num_values for column in columns if column.num_values > group.num_rows)
    return int(max(group.total_byte_size, 8 * values) // max(1, group.num_rows))


def _chosen(batch: pa.RecordBatch, names: Sequence[str] | None) -> pa.RecordBatch:
    if names is None:
        return batch
    known = set(batch.schema.names)
    return batch.select([name for name in names if name in known])


def _block(path: Path, batch: pa.RecordBatch, first: int) -> Block:
    cells = {name: _cells(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    return Block(str(path), np.arange(first, first + batch.num_rows), cells)


def _cells(array: pa.Array) -> Cells:
    """Return an Arrow column as an array if it holds numbers of one shape, else as Python objects."""
    kind = array.type
    # to_numpy would turn missing integers into NaN floats; as objects they stay None, and are reported as missing
    if array.null_count:
        return list(array.to_pylist())
    if isinstance(kind, pa.FixedShapeTensorType):
        return np.asarray(array.to_numpy_ndarray())
    if pa.types.is_dictionary(kind):
        return _cells(array.dictionary_decode())
    if pa.types.is_decimal(kind):
        return _cells(array.cast(pa.float64()))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(array)
    return list(array.to_pylist())


def _lists(array: pa.Array) -> Cells:
    """Return lists of one length as an array [n, length, ...], others as n arrays."""
    fixed = pa.types.is_fixed_size_list(array.type)
    # flatten() leaves out the values of a slice's neighbours, which .values would include
    lengths = np.full(len(array), array.type.list_size) if fixed else array.value_lengths().to_numpy()
    # lists of lists are resolved from the inside
    inner: Any = _cells(array.flatten())
    if not isinstance(inner, np.ndarray):
        return list(array.to_pylist())
    # rows of one length are one array; without rows there is no length to take
    if len(lengths) and (lengths == lengths[0]).all():
        return inner.reshape(len(lengths), lengths[0], *inner.shape[1:])
    return np.split(inner, np.cumsum(lengths)[:-1])


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Convert Arrow's errors to DataError with the path."""
    try:
        if not check_regular(path):
            raise DataError(f"{path} is empty (0 bytes)")
        yield
    # ValueError: text that is not UTF-8; OverflowError: dates beyond Python's; struct.error: places beyond the file
    except (pa.ArrowException, OSError, ValueError, OverflowError, struct.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
