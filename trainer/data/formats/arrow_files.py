"""Read files in Arrow's IPC format and Parquet files, and convert Arrow columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onward.trainer.bounds import ROW_BYTES
from onward.trainer.data.formats.arrow_sizes import check_sizes, dictionary_bytes, refusing
from onward.trainer.data.schema.columns import BLOCK_BYTES, Block, Cells
from onward.trainer.data.schema.file_parts import FilePart
from onward.trainer.errors import DataError

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


def arrow_blocks(path: Path, names: Sequence[str] | None) -> Iterator[Block]:
    """Yield the rows of a file in Arrow's IPC format, with a footer or as a stream; `names`: the columns to read."""
    with refusing(path):
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
    """Return the number of rows that the footer of a Parquet file states. Raises DataError if it cannot be read."""
    import pyarrow.parquet as pq  # imported here: ranks never need it

    with refusing(path):
        return int(pq.read_metadata(path).num_rows)


def parquet_parts(path: Path, data: object, part_bytes: int) -> Iterator[FilePart]:
    """Yield parts of about this size, between which the blocks of a Parquet file are divided."""
    import pyarrow.parquet as pq  # imported here: ranks never need it

    with refusing(path):
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
    with refusing(path), pq.ParquetFile(path, pre_buffer=False, buffer_size=STREAM_BYTES) as file:
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
