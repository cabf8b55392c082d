"""Start ranks and other processes of a test as forks of one process that has imported torch: the product's fork server.

One import of 4 CPU seconds is enough for hundreds of ranks. Tests of starting and ending real processes (tests/infra,
tests/tasks, tests/flows) start a server of their own, as a run does, or none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os

from onward.infra.job import forks
from onward.infra.job.child_program import python_of

SHARED = "ONWARD_RANK_SERVER"
"""Environment: the socket of a server that a parent process has started."""


@functools.cache
def command() -> tuple[str, ...]:
    """Return the words that run `-m MODULE ARGUMENTS` in a fork of the server; starts the server at the first call.

    A process with SHARED in its environment starts none: it uses the server that is named there.
    """
    if shared := os.environ.get(SHARED):
        return tuple(python_of(shared))
    kept = contextlib.ExitStack()
    server = kept.enter_context(forks.started())
    assert server is not None, "a fork server cannot be started"
    atexit.register(kept.close)
    return tuple(server.python())
