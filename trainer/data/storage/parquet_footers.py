"""Find Parquet files whose footer ends the process that reads it, before this process reads it.

pyarrow (25 and before) calls std::terminate in `RowGroupMetaData.column` where the size statistics of a column chunk
contradict its schema, as they do in a file that was damaged; nothing in Python can catch that. A forked process looks
at the footers first, and names each file before it does:

    this process    fork ─────────── reads the names ──── the child was ended by SIGABRT: the last name is the file
    child                 a.parquet, b.parquet, ...
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from onward.trainer.errors import DataError

LOOK_S = 60
"""A look that takes longer is ended, and the reader reads the files as they are."""


def check_footers(paths: Sequence[Path]) -> None:
    """Raise DataError for a file whose footer cannot be read without ending the process; other errors are left to its
    reader. Files that have not changed since are not looked at again."""
    states = []
    for path in paths:
        with contextlib.suppress(OSError):  # the reader says why
            found = path.stat()
            states.append((str(path), found.st_size, found.st_mtime_ns))
    if fatal := _fatal(tuple(states)):
        raise DataError(f"{fatal}: its footer is damaged: the statistics of a column contradict its schema")


@lru_cache(maxsize=16)
def _fatal(states: tuple[tuple[str, int, int], ...]) -> str:
    """Return the first file that ends a process which looks at its footer; "" if there is none."""
    if not states:
        return ""
    import pyarrow.parquet as pq  # before the fork

    read, write = os.pipe()
    with warnings.catch_warnings():
        # of Python 3.12 on, for forks of processes with threads: the child takes no lock that another thread may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.close(read)
            faulthandler.disable()
            signal.alarm(LOOK_S)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # std::terminate writes there
            for number, (path, _, _) in enumerate(states):
                os.write(write, number.to_bytes(8, "little"))
                _look(pq, path)
        finally:
            os._exit(0)
    os.close(write)
    named = b""
    with os.fdopen(read, "rb") as pipe:
        while part := pipe.read1(1 << 16):
            named = (named + part)[-8:]
    _, status = os.waitpid(child, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return states[int.from_bytes(named, "little")][0] if ended_by == signal.SIGABRT and len(named) == 8 else ""


def _look(pq: object, path: str) -> None:
    with contextlib.suppress(Exception), pq.ParquetFile(path) as file:  # type: ignore[attr-defined]
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            for column in range(group.num_columns):
                group.column(column)
