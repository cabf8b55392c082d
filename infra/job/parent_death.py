"""Start a process that the kernel signals when its parent ends, however that ends, from its first moment on."""

from __future__ import annotations

import os
import signal
import sys

# PR_SET_PDEATHSIG, which exec keeps. The parent may have ended before the call, and then no signal comes.
_PROGRAM = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    sys.exit(70)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def signalled_with_parent(words: list[str], number: signal.Signals) -> list[str]:
    """Return the command line that runs `words` in a process to which the kernel sends a signal when this one ends.

    Start it from a thread that lives as long as it does: the kernel counts the end of that thread as the parent's.
    """
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(int(number)), str(os.getpid()), *words]
