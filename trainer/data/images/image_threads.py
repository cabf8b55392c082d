"""Run a function on many images in threads: Pillow releases the interpreter's lock while it decodes and resizes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
