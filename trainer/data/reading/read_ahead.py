"""Read in a thread, so that the next rows are parsed while those before are converted, written and hashed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
END: Any = object()


def read_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items in their order. While one is used, the thread makes the next one, and no other.

    What the iterator raises is raised in the place of the item that it did not make. numpy, pyarrow, pandas and hashlib
    let other threads run while they compute; readers in Python only take turns with the caller.
    """
    with ThreadPoolExecutor(1, "reader") as thread:
        coming = thread.submit(next, items, END)
        try:
            while (item := coming.result()) is not END:
                coming = thread.submit(next, items, END)
                yield item
                # else the caller's last item and the two of this function would be in memory
                del item
        finally:
            # of a generator that is left before its end, the files are closed now; not in the thread, which may have
            # ended where the garbage collector leaves this one
            wait([coming])
            if (close := getattr(items, "close", None)) is not None:
                close()
