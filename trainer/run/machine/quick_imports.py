"""Import many modules without collections of garbage, which take a fifth of the time of importing torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside: nothing is collected there, and what exists at the end is left out by all later collections.

    Each collection would look at all objects of the modules so far, of which hardly one is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
