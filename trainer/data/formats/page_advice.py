"""Tell the kernel which pages of a mapped file will be read, so that it reads these at once, and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from onward.trainer.bounds import opened
from onward.trainer.data.schema.columns import Array

MADVISE = ctypes.CDLL(None).madvise
STEP_BYTES = 128 << 10
"""In one call the kernel reads this much at most, by default."""


def advise_range(part: Array) -> None:
    """Let the kernel read a part of a mapped file; it need not begin at a page."""
    address = part.ctypes.data
    for start in range(address - address % mmap.PAGESIZE, address + part.nbytes, STEP_BYTES):
        advise(start, min(STEP_BYTES, address + part.nbytes - start), mmap.MADV_WILLNEED)


def advise_file(path: Path, is_over: Callable[[], bool]) -> None:
    """Let the kernel read a file from its beginning to its end, until `is_over`. Raises OSError."""
    with opened(path) as file:
        for start in range(0, path.stat().st_size, STEP_BYTES):
            if is_over():
                return
            os.posix_fadvise(file.fileno(), start, STEP_BYTES, os.POSIX_FADV_WILLNEED)


def advise(address: int, size: int, advice: int) -> None:
    """Give advice on pages of a mapped file. It changes nothing where the kernel does not take it."""
    MADVISE(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
