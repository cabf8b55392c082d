"""Read .npz files: arrays of one row per sample, as streams; sizes are compared with the file before they are used.

`npz_content` makes one.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from onward.trainer.bounds import ROW_BYTES, TENSOR_DIMS, opened
from onward.trainer.data.schema.columns import BLOCK_BYTES, Array, Block
from onward.trainer.errors import DataError

NO_HEADER = (RuntimeError, NotImplementedError, SyntaxError, TypeError, KeyError, RecursionError, tokenize.TokenError)
MOST_DEFLATED = 1032
"""Deflate makes a byte of at most so many."""


def npz_content(arrays: Mapping[str, Array]) -> bytes:
    """Return the content of an .npz file of these arrays; objects are written as text."""
    content = io.BytesIO()
    # not np.savez, which cannot store an array named as one of its own parameters, such as `file`
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                text = array.astype(str) if array.dtype == object else array
                np.lib.format.write_array(file, text, allow_pickle=False)
    return content.getvalue()


def npz_blocks(path: Path, names: Sequence[str] | None) -> Iterator[Block]:
    """Yield the rows of an .npz file, whose arrays have one row per sample; read as a stream."""
    with (
        _refusing(path),
        opened(path) as content,
        zipfile.ZipFile(content) as archive,
        contextlib.ExitStack() as members_open,
    ):
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        chosen = list(members)
        if names is not None:
            chosen = [name for name in members if name in names]
        files = {name: members_open.enter_context(archive.open(members[name])) for name in chosen}
        sizes_of = {name: _member_bytes(f"{path}: {name}", archive.getinfo(members[name])) for name in chosen}
        arrays = {name: _Stream(f"{path}: {name}", file, sizes_of[name]) for name, file in files.items()}
        counts = {name: array.num_rows for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DataError(f"{path}: its arrays have different numbers of rows: {sizes}")
        total = max(counts.values(), default=0)
        row_bytes = sum(array.row_bytes for array in arrays.values())
        if row_bytes > ROW_BYTES.most:
            raise DataError(f"{path}: a row of all arrays has {ROW_BYTES.exceeded(row_bytes)}")
        # all arrays advance together, so a block holds the same rows of each
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for first in range(0, total, step):
            count = min(step, total - first)
            cells = {name: array.take(count) for name, array in arrays.items()}
            yield Block(str(path), np.arange(first, first + count), cells)


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Convert the errors of a damaged file to DataError with the path."""
    try:
        yield
    # of zipfile: a password, an unknown compression; of numpy: a header that is no Python
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, *NO_HEADER) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def npz_rows(path: Path) -> int:
    """Return the number of rows that the first array of an .npz file states. Raises DataError as `npz_blocks`."""
    with _refusing(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if not names:
            return 0
        with archive.open(names[0]) as file:
            shape, _, _ = _header(file)
        return int(shape[0]) if shape else 0


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array: its shape, whether it is in column order, its type."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0}.get(version, np.lib.format.read_array_header_2_0)
    return read(file)


def _member_bytes(name: str, member: zipfile.ZipInfo) -> int:
    """Return the size of a member of an archive. Raises DataError for a size that its compressed bytes cannot have."""
    # other compressions have no known limit: their size is believed
    most = member.compress_size * {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: MOST_DEFLATED}.get(
        member.compress_type, member.file_size + 1
    )
    if member.file_size > most:
        raise DataError(f"{name} states {member.file_size:,} bytes, but its {member.compress_size:,} can be {most:,}")
    return member.file_size


class _Stream:
    """Read one array of an .npz file in order of rows; only the rows asked for are in memory, compressed or not."""

    def __init__(self, name: str, file: IO[bytes], size: int) -> None:
        self._file = file
        self._name = name
        shape, column_major, self._dtype = _header(self._file)
        refused = ""
        if self._dtype.hasobject:
            refused = "Python objects"
        elif not shape:
            refused = "a single number"
        elif column_major and len(shape) > 1:
            # the values of a row are not beside each other, so that a stream cannot give rows
            refused = "in column order"
        if refused:
            raise DataError(f"{name} is {refused}; save it as a plain array with a row for each sample")
        self.num_rows, *row = shape
        self._row = tuple(row)
        self.row_bytes = math.prod(row) * self._dtype.itemsize
        # the header comes from the file, and may state anything
        if min(shape) < 0 or self._dtype.kind not in "biufSUmM" or len(shape) > TENSOR_DIMS.most:
            raise DataError(f"{name} is an array {list(shape)} of {self._dtype}, which is none of numbers")
        if self.num_rows and not self.row_bytes:
            raise DataError(f"{name} has shape {list(shape)}, of which a row holds nothing")
        if self.row_bytes > ROW_BYTES.most:
            raise DataError(f"{name}: a row has {ROW_BYTES.exceeded(self.row_bytes)}")
        if (wanted := self.num_rows * self.row_bytes) > size:
            raise DataError(f"{name} has shape {list(shape)}, which takes {wanted:,} bytes, but it holds {size:,}")

    def take(self, count: int) -> Array:
        """Return the next rows: [count, ...]."""
        data = self._file.read(count * self.row_bytes)
        if len(data) < count * self.row_bytes:
            raise DataError(f"{self._name} is cut off")
        return np.frombuffer(data, self._dtype).reshape(count, *self._row)
