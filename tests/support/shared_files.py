"""Files that are costly to make: made by the first process of a pytest-xdist session that needs them, read by all."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(name: str, write: Callable[[Path], None]) -> Path:
    """Return the file of this name; `write(path)` makes it, if no process of the session has made it."""
    final = _folder() / name
    partial = final.with_name(f"{os.getpid()}-{name}")
    if not final.exists():
        final.parent.mkdir(exist_ok=True)
        write(partial)
        partial.rename(final)
    return final


@functools.cache
def _folder() -> Path:
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    folder = Path(tempfile.gettempdir()) / f"onward-tests-{session}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # a process that still needs a file makes it again
    return folder
