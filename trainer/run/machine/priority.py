"""Work beside training with a low priority, so that the processor's time goes to the training first.

Linux has a nice value for each thread (https://man7.org/linux/man-pages/man2/setpriority.2.html, "C library/kernel
differences"), and a thread passes its own on to those that it starts. Without privileges it can only be raised, so work
of low priority has a thread of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 10
"""What is added to the nice value. A thread that computes beside it then gets ten times as much of the processor. With
19 it would be seventy times as much, and a checkpoint of a gigabyte would not be written before the next one is due."""


def lower_priority() -> None:
    """Add NICENESS to the nice value of this thread. For good: it cannot be taken back.

    A sandbox may forbid it. The work is done with the usual priority then, which costs time and nothing else.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
