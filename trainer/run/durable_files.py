"""Files that are complete or absent: written under a temporary name, fsynced and renamed."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from onward.trainer.bounds import opened


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends, fsync it and rename it to `path`.

    After an exception `path` is as it was before, and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        # before the rename: otherwise a power cut could leave the final name on a file without content
        fsync(partial)
        partial.replace(path)
        # the rename itself is in the directory, which has a cache of its own
        fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Replace the content of `path`. After a crash or a power cut it has the old content or the new one."""
    with durable_file(path) as partial:
        partial.write_bytes(content)


def remove_partials(path: Path) -> None:
    """Remove what killed processes of this host have left of `path`, under its temporary names."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        # the process that writes it is in the name; one that lives may still be writing
        process = partial.name.removesuffix(".partial").rpartition(".")[2]
        if process.isascii() and process.isdigit() and not Path("/proc", process).exists():
            partial.unlink(missing_ok=True)


class HashedFile:
    """A new file that is written from its beginning to its end, with the SHA-256 of what was written.

    What Python and pyarrow need of a file to write to. hashed: whether the digest is wanted.
    """

    def __init__(self, path: Path, *, hashed: bool = True) -> None:
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._hashed = hashed

    @property
    def closed(self) -> bool:
        return self._file.closed

    @property
    def sha256(self) -> str:
        """The SHA-256 of what was written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        """Append bytes; return how many."""
        if self._hashed:
            self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Pass what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(file: IO[bytes]) -> None:
    """Flush what was written to an open file to the disk."""
    # flush only hands the bytes to the kernel; after fsync they are on the disk
    file.flush()
    os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, reading it in blocks."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
