"""Run a function on many images in threads: Pillow releases the interpreter's lock while it decodes and resizes."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from onward.trainer.bounds import IMAGE_BYTES
from onward.trainer.data.images.image_decoding import memory_of
from onward.trainer.run.machine.this_machine import release_free_memory

LARGE_BYTES = 256 << 20
"""Images above give their memory back at once."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> list[Result]:
    """Return the results in order; the number of threads changes none of them. workers: 0 = one for each core."""
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        return list(map(function, items))
    return list(_threads(workers).map(function, items))


@functools.cache
def _threads(workers: int) -> ThreadPoolExecutor:
    # kept for the life of the process: each evaluation would start its own otherwise
    return ThreadPoolExecutor(workers, thread_name_prefix="images")


_change = threading.Condition()
_used = [0]


@contextlib.contextmanager
def room_for(contents: Iterable[bytes]) -> Iterator[None]:
    """Wait until encoded images fit beside those that other threads decode; together they take IMAGE_BYTES at most."""
    size = sum(map(memory_of, contents))
    with _change:
        # an image above the limit waits until no other is decoded, and then goes alone
        _change.wait_for(lambda: not _used[0] or _used[0] + size <= IMAGE_BYTES.most)
        _used[0] += size
    try:
        yield
    finally:
        if size > LARGE_BYTES:
            release_free_memory()
        with _change:
            _used[0] -= size
            _change.notify_all()
