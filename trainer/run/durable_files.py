"""Files that are complete or absent: written under a temporary name, fsynced and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; on leaving it is fsynced and renamed to `path`.

    After an exception nothing is left: neither a partial `path` nor the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: whole or not at all, also across a power cut."""
    with durable_file(path) as partial:
        partial.write_bytes(content)


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
