"""Start a program that the kernel signals when its parent ends, however that ends, from its first moment on.

Where a fork server runs (forks.py), the program is a fork of it, and this process stands for it towards the parent:

    mpirun --- client --- socket --- fork server
                                         +--- fork: the module runs here, with the client's environment and output

Signals to the client are passed on to the fork, its end ends the fork, and it ends as the fork has ended: with its exit
status, or by its signal. Without a server that answers, the client becomes the program itself.

Run as a program, this file is the client: `SIGNAL PARENT SOCKET PROGRAM ARGUMENTS ...`, where PARENT 0 is the process
that has started it, and SOCKET "" is no server. Therefore it imports only the standard library, and little of that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
    # at these, the fork writes where it is
    *(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
)
"""SIGKILL and SIGSTOP cannot be caught: the server carries them over to the fork."""


def signalled_with_parent(words: list[str], number: signal.Signals) -> list[str]:
    """Return the command line that runs `words` in a process to which the kernel sends a signal when this one ends.

    Start it from a thread that lives as long as it does: the kernel counts the end of that thread as the parent's.
    """
    return [sys.executable, "-I", "-S", __file__, str(int(number)), str(os.getpid()), "", *words]


def python_of(server: str) -> list[str]:
    """Return the words that run Python as a fork of the server with that socket, and end it with its parent."""
    return [sys.executable, "-I", "-S", __file__, str(int(signal.SIGKILL)), "0", server, sys.executable]


def _run(number: int, parent: int, server: str, words: list[str]) -> int:
    """Run `words` in this process or in a fork; return the exit status of the fork."""
    parent = parent or os.getppid()
    # The trainer has a call of its own (trainer/distributed/launched.py): its ranks may be started by a bare mpirun,
    # and a fork begins without what its parent has set. This file is run where neither package can be imported (-I -S).
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, which exec keeps
    # the parent may have ended before the call, and then no signal comes
    if os.getppid() != parent:
        return 70
    status = _run_as_fork(server, words[1:]) if server else None
    if status is None:
        os.execvp(words[0], words)
    return status


def _run_as_fork(server: str, arguments: list[str]) -> int | None:
    """Ask the server for a fork that runs `-m MODULE ARGUMENTS`; return its exit status, or None where none answers."""
    import contextlib
    import json
    import resource
    import socket

    connection = socket.socket(socket.AF_UNIX)
    fork = b""
    with contextlib.suppress(OSError):  # on another host, or the server has ended
        connection.connect(server)
        # stdin, stdout and stderr of this process become those of the fork
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n")  # noqa: PTH109
        answers = connection.makefile("rb")
        fork = answers.readline()
    if not fork:  # or the environment is one that only a new process can have
        return None

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(fork), number)

    # from here on this process stands for the fork: what is sent to it goes there
    for number in FORWARDED:
        signal.signal(number, forward)
    # without an answer the server was killed, and its forks with it
    status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork has left its own
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        # it ends by the same signal, so that who waits for it sees no difference
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
