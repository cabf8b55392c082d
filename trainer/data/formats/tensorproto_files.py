"""Read the shard files of ONNX Runtime's trainer: length-prefixed samples of ONNX TensorProtos.

    sample  := u32 size of all its features with their prefixes, feature*
    feature := u32 size, serialized onnx.TensorProto (its name is the column; no batch dimension)

Integers are little-endian; there is no header, no count and no checksum, so a reader must walk the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper

from onward.trainer.bounds import opened
from onward.trainer.data.schema.columns import BLOCK_BYTES, TEXT, Array, Block, Column, Values
from onward.trainer.errors import DataError
from onward.trainer.onnx_graph.files.model_files import TYPES, tensor_problems

PREFIX = struct.Struct("<I")


class ProtoReader:
    """Samples of one shard file by their number; opening it walks the file once."""

    def __init__(self, path: Path, columns: Sequence[Column], *, around: bool = True) -> None:
        self._path = path
        self.columns = columns
        self._data = _map(path)
        # the format has no index, so the samples are found once and read at random afterwards
        self._starts = list(_walk(path, self._data))
        self.num_rows = len(self._starts)

    def sample(self, row: int) -> dict[str, Array]:
        """Return every tensor of one sample, by name."""
        return _parse(self._path, self._data, self._starts[row])

    def read_ahead_of(self, first: int, end: int) -> None:
        """Do nothing: rows are found in the order of the file."""

    def lengths(self, name: str) -> Array:
        """Return the length of each row of a column of varying length: int64 [rows]."""
        return np.array([len(self.sample(row)[name]) for row in range(self.num_rows)], np.int64)

    def value(self, sample: Mapping[str, Array], column: Column, row: int) -> Array:
        """Return a column of the sample of a row. Raises DataError if it is not there, or of another shape."""
        place = f"{self._path}, sample {row + 1} (byte {self._starts[row]})"
        if column.name not in sample:
            raise DataError(f"{place}: there is no tensor {column.name!r}, only {', '.join(sample)}")
        value = sample[column.name]
        if not column.variable and value.shape != column.shape:
            raise DataError(f"{place}: {column.name} has shape {list(value.shape)}, not {list(column.shape)}")
        return value.astype(object if column.dtype == TEXT else column.dtype, copy=False)


class ProtoFiles:
    """Rows of several shard files by their numbers. firsts: first row of each file, int64 [files], increasing."""

    def __init__(self, readers: Sequence[ProtoReader], firsts: Array) -> None:
        self._readers = readers
        self._firsts = firsts

    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows [n], in the order asked for: arrays [n, *shape], or lists of n arrays."""
        files = np.searchsorted(self._firsts, rows, side="right") - 1
        inside = (rows - self._firsts[files]).tolist()
        places = [(self._readers[file], row) for file, row in zip(files.tolist(), inside, strict=True)]
        samples = [reader.sample(row) for reader, row in places]
        result: dict[str, Values] = {}
        for column in self._readers[0].columns:
            cells = [reader.value(sample, column, row) for sample, (reader, row) in zip(samples, places, strict=True)]
            empty = np.empty((0, *column.shape), object if column.dtype == TEXT else column.dtype)
            result[column.name] = cells if column.variable else np.stack(cells) if cells else empty
        return result


def proto_blocks(path: Path, names: Sequence[str] | None) -> Iterator[Block]:
    """Yield the samples of a shard file; `names`: the columns to keep, None for all."""
    # mapped, not read: the file may be larger than memory
    data = _map(path)
    samples: list[dict[str, Array]] = []
    first = size = 0
    for number, start in enumerate(_walk(path, data)):
        samples.append(_parse(path, data, start))
        size += sum(value.nbytes for value in samples[-1].values())
        if size >= BLOCK_BYTES:
            yield _block(path, samples, first, names)
            samples = []
            first = number + 1
            size = 0
    if samples:
        yield _block(path, samples, first, names)


def _block(path: Path, samples: list[dict[str, Array]], first: int, names: Sequence[str] | None) -> Block:
    # not every sample has every tensor: the block has a column for each name that occurs
    chosen = list(dict.fromkeys(name for sample in samples for name in sample))
    if names is not None:
        chosen = [name for name in chosen if name in names]
    cells = {name: [sample.get(name) for sample in samples] for name in chosen}
    return Block(str(path), np.arange(first, first + len(samples)), cells, unit="sample")


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with opened(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _walk(path: Path, data: mmap.mmap | bytes) -> Iterator[int]:
    """Yield the byte at which each sample begins. Raises DataError where the file is cut off."""
    at = 0
    end = len(data)
    while at < end:
        # a prefix that is cut off counts as 0 bytes, which the next line refuses as well
        size = PREFIX.unpack_from(data, at)[0] if at + 4 <= end else 0
        if at + 4 + size > end:
            wanted = f"its {size} bytes end at byte {at + 4 + size}" if at + 4 <= end else "its length takes 4 bytes"
            raise DataError(f"{path} is cut off: the sample at byte {at} is not whole; {wanted}, the file at {end}")
        yield at
        at += 4 + size


def _parse(path: Path, data: mmap.mmap | bytes, start: int) -> dict[str, Array]:
    """Return every tensor of the sample that begins at byte `start`, by name."""
    tensors: dict[str, Array] = {}
    at = start + 4
    end = start + 4 + PREFIX.unpack_from(data, start)[0]
    while at < end:
        # a prefix that is cut off counts as too large, and is refused below
        size = PREFIX.unpack_from(data, at)[0] if at + 4 <= end else end
        if at + 4 + size > end:
            raise DataError(f"{path}: the tensor at byte {at} reaches beyond its sample, which ends at byte {end}")
        try:
            tensor = onnx.TensorProto.FromString(data[at + 4 : at + 4 + size])
            # before it is read: onnx would open the named file, whatever it is, from the working directory
            if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
                raise ValueError(f"tensor {tensor.name!r} names another file for its data; a shard holds its own")
            if tensor.data_type not in TYPES:
                raise ValueError(f"tensor {tensor.name!r} has data_type {tensor.data_type}, which is no type of ONNX")
            if problems := list(tensor_problems(tensor)):
                raise ValueError("; ".join(problems))
            tensors[tensor.name] = numpy_helper.to_array(tensor)
        except (DecodeError, ValueError, TypeError) as error:
            raise DataError(f"{path}: byte {at + 4} does not begin a tensor of {size} bytes: {error}") from error
        at += 4 + size
    return tensors
