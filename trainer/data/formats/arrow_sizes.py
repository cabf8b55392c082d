"""What Arrow and Parquet files take in memory, by what they state, before any value is decompressed.

    magic | schema message | dictionary batches | record batches | footer: place of each batch     a file
            schema message | dictionary batches | record batches | end                             a stream

    message    metadata, a flatbuffer: offset and length of each buffer | body: the buffers
    buffer     of a compressed body: 8 bytes with its size in memory, or -1 for one as it is | its bytes

pyarrow takes the memory that a buffer states, and a kilobyte of zstd may be gigabytes. In Parquet a column has each of
its different texts once, in a page of their own, and rows are numbers of these.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from onward.trainer.bounds import ARROW_BATCH_BYTES, check_regular, opened
from onward.trainer.errors import DataError

MOST_COMPRESSED = 100
"""A batch above the limit is read nevertheless if it takes at most so many times its bytes in the file."""
DICTIONARY_BATCH = 2
RECORD_BATCH = 3
"""The kinds of messages that have buffers."""
HEADER = re.compile(rb"\x15[\x80-\xff]*[\0-\x7f]\x15([\x80-\xff]*[\0-\x7f])", re.DOTALL)
"""The first two fields of the header of a Parquet page, in Thrift's compact protocol: type and size in memory."""
BUFFERS = 2
COMPRESSION = 3
"""Fields of a record batch."""


def check_sizes(path: Path, mapped: pa.MemoryMappedFile, *, has_footer: bool) -> None:
    """Raise DataError for a batch that takes far more memory than its bytes in the file. Moves the file's position."""
    for message in _messages_of_footer(mapped) if has_footer else pa.ipc.MessageReader.open_stream(mapped):
        stored = message.body.size if message.body is not None else 0
        found = _bytes_in_memory(message)
        if found > ARROW_BATCH_BYTES.most and found > MOST_COMPRESSED * stored:
            raise DataError(
                f"{path}: a record batch of {stored:,} bytes has {ARROW_BATCH_BYTES.exceeded(found)}; write it in "
                "smaller record batches, or without compression"
            )


def _messages_of_footer(mapped: pa.MemoryMappedFile) -> Iterator[Any]:
    size = mapped.size()
    # the file ends with the length of the footer, 4 bytes, and the magic, 6 bytes
    mapped.seek(max(0, size - 10))
    (length,) = struct.unpack("<i", mapped.read(4))
    mapped.seek(max(0, size - 10 - length))
    footer = mapped.read(length)
    root = _at("<I", footer, 0)
    for field in (2, 3):  # dictionaries, record batches
        for block in _vector(footer, root, field, 24):
            mapped.seek(_at("<q", footer, block))
            yield pa.ipc.read_message(mapped)


def _bytes_in_memory(message: Any) -> int:
    """Return how many bytes the compressed buffers of a message have once decompressed."""
    metadata = memoryview(message.metadata)
    body = message.body
    root = _at("<I", metadata, 0)
    kind = _field(metadata, root, 1)
    header = _field(metadata, root, 2)
    if not kind or not header or metadata[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return 0
    batch = header + _at("<I", metadata, header)
    # a dictionary batch has its values as a record batch inside
    if metadata[kind] == DICTIONARY_BATCH:
        values = _field(metadata, batch, 1)
        batch = values + _at("<I", metadata, values)
    if not _field(metadata, batch, COMPRESSION):
        return 0
    content = memoryview(body)
    total = 0
    for buffer in _vector(metadata, batch, BUFFERS, 16):
        # a buffer of the message: where it begins in the body, and how long it is
        start, length = struct.unpack_from("<qq", metadata, buffer)
        # a buffer begins with its size in memory; -1 marks one that is stored as it is
        if length >= 8:
            total += max(0, _at("<q", content, start))
    return total


# -- flatbuffers, whose offsets pyarrow has checked


def _at(kind: str, content: Any, place: int) -> int:
    return int(struct.unpack_from(kind, content, place)[0])


def _field(content: Any, table: int, number: int) -> int:
    """Return the place of a field of a table; 0 if the table lacks it."""
    # a table begins with the distance back to its list of offsets, by which fields may be left out
    offsets = table - _at("<i", content, table)
    entry = 4 + 2 * number
    offset = _at("<H", content, offsets + entry) if entry < _at("<H", content, offsets) else 0
    return table + offset if offset else 0


def _vector(content: Any, table: int, number: int, size: int) -> range:
    """Return the places of the structs, of `size` bytes each, of a field that is a vector of them."""
    if not (place := _field(content, table, number)):
        return range(0)
    start = place + _at("<I", content, place)
    return range(start + 4, start + 4 + size * _at("<I", content, start), size)


# -- Parquet


def dictionary_bytes(path: Path, group: Any) -> int:
    """Return how many bytes the different texts of a column of a row group have, of the column with the most.

    No text of a row is longer. The header of the page begins with its type and its size, numbers of 7 bits a byte.
    """
    most = 0
    with opened(path) as file:
        for number in range(group.num_columns):
            column = group.column(number)
            if column.physical_type != "BYTE_ARRAY" or not column.has_dictionary_page:
                continue
            file.seek(max(0, column.dictionary_page_offset))
            fields = HEADER.match(file.read(20))
            # Thrift writes a signed integer n as 2n or -2n - 1 (zigzag): half of it is the size
            size = sum((byte & 127) << 7 * place for place, byte in enumerate(fields[1])) // 2 if fields else None
            most = max(most, column.total_uncompressed_size if size is None else size)
    return most


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Convert Arrow's errors to DataError with the path."""
    try:
        if not check_regular(path):
            raise DataError(f"{path} is empty (0 bytes)")
        yield
    # ValueError: text that is not UTF-8; OverflowError: dates beyond Python's; struct.error: places beyond the file
    except (pa.ArrowException, OSError, ValueError, OverflowError, struct.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
