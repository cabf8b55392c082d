"""Find Parquet files whose footer ends the process that reads it, before this process reads it.

pyarrow (25 and before) calls std::terminate in `RowGroupMetaData.column` where the size statistics of a column chunk
contradict its schema, as they do in a file that was damaged; nothing in Python can catch that. Another process looks
at the footers first, and names each file before it does:

    this process      starts it ───────── reads the names ──── it was ended by SIGABRT: the last name is the file
    parquet_look.py         a.parquet, b.parquet, ...

It is a new interpreter and no fork: a fork of a process with threads may wait for ever for a lock that one of them
held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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
    looker = [sys.executable, "-P", str(Path(__file__).with_name("parquet_look.py"))]
    paths = b"\0".join(os.fsencode(path) for path, _, _ in states)
    try:
        look = subprocess.run(looker, input=paths, capture_output=True, timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        return ""
    # the name that was written last is that of the file whose footer ended the process
    *_, last = [b"", *look.stdout.split(b"\0")[:-1]]
    return os.fsdecode(last) if look.returncode == -signal.SIGABRT else ""
