"""What Ctrl-C and SIGTERM do in a command that runs a flow: they raise an exception in the main thread, and say so."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from onward.trainer.errors import RuntimeUnavailable


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit inside. Raises RuntimeUnavailable outside of the main thread.

    Prefect stops the job, which saves a checkpoint, and then passes the signal to the handler that it found.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeUnavailable(
            f"a run must be started from the main thread, not from {threading.current_thread().name!r}: only the main "
            "thread receives Ctrl-C and SIGTERM, which end a run with a saved checkpoint; call it there, or start "
            "`onward run` as a process of its own"
        )
    # the default action of SIGTERM would end the process without running the `finally` blocks that stop the job
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def acknowledged_interrupt(grace_s: float, *, say: Callable[[str], object]) -> Iterator[None]:
    """Say at once what follows on Ctrl-C inside: the first one saves, the next one does not wait for that.

    say: prints a line, and may be called in a signal handler.
    """
    before = signal.getsignal(signal.SIGINT)
    number = 0

    def interrupt(signum: int, frame: object) -> None:
        nonlocal number
        number += 1
        said = (
            "stopping: while ranks train they finish their step and save a checkpoint, for which they have "
            f"{grace_s:g} s and two steps; Ctrl-C again stops at once, without saving"
            if number == 1
            else "stopping at once, without saving"
        )
        say(f"onward: {said}")
        raise KeyboardInterrupt

    if before is not signal.default_int_handler:  # ignored, or handled by a program that calls this one
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
