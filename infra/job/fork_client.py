"""Run `python -m MODULE ARGUMENTS` as a fork of a fork server (forks.py), and stand for it towards the parent process.

    mpirun --- client --- socket --- fork server
                                         +--- fork: the module runs here, with the client's environment and output

Signals to the client are passed on to the fork, its end ends the fork, and it ends as the fork has ended: with its exit
status, or by its signal. Without a server that answers, the client becomes the module itself.

Run as a program, this file is the client; therefore it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
    # at these, the fork writes where it is
    *(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
)
"""SIGKILL and SIGSTOP cannot be caught: the server carries them over to the fork."""


def run(path: str, words: list[str]) -> int:
    """Ask the server at `path` for a fork that runs `words` (-m MODULE ARGUMENTS); return its exit status."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: as a rank, it does not outlive mpirun
    if os.getppid() != parent:
        return 70
    connection, fork = socket.socket(socket.AF_UNIX), b""
    with contextlib.suppress(OSError):  # on another host, or the server has ended
        connection.connect(path)
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps([words, dict(os.environ), str(Path.cwd())]).encode() + b"\n")
        answers = connection.makefile("rb")
        fork = answers.readline()
    if not fork:  # or the environment is one that only a new process can have
        os.execv(sys.executable, [sys.executable, *words])
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: _send(int(fork), number))
    # without an answer the server was killed, and its forks with it
    status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork has left its own
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _send(fork: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
