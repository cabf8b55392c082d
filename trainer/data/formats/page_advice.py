"""Tell the kernel which pages of a mapped file will be read, so that it reads these at once, and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from onward.trainer.bounds import opened

STEP_BYTES = 128 << 10
"""In one call the kernel reads this much at most, by default."""


def advise_range(address: int, size: int) -> None:
    """Let the kernel read a range of a mapped file; it need not begin at a page."""
    first = address - address % mmap.PAGESIZE
    for start in range(first, address + size, STEP_BYTES):
        _advise(start, min(STEP_BYTES, address + size - start), mmap.MADV_WILLNEED)


def advise_random(address: int, size: int) -> None:
    """Let the kernel read only the page that is asked for, and none around it. address: where the mapping begins."""
    _advise(address, size, mmap.MADV_RANDOM)


def advise_file(path: Path, is_over: Callable[[], bool]) -> None:
    """Let the kernel read a file from its beginning to its end, until `is_over`. Raises OSError."""
    with opened(path) as file:
        for start in range(0, path.stat().st_size, STEP_BYTES):
            if is_over():
                return
            os.posix_fadvise(file.fileno(), start, STEP_BYTES, os.POSIX_FADV_WILLNEED)


def _advise(address: int, size: int, advice: int) -> None:
    # advice that the kernel does not take, as of a file system without pages, changes nothing
    _madvise()(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


@cache
def _madvise() -> Any:
    return ctypes.CDLL(None).madvise
