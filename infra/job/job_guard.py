"""The guard of an MPI job: ends every process of the job after the flow that started it was killed.

    flow ---pipe---> guard ---+      the pipe is closed when the flow ends, however it ends
     ^                |  fork |
     +--- replaces ---+       v
                   second guard ---+      reads the same pipe; the first one replaces it
                                   v
                              third guard

Each of the four may be killed, and so may three of them at the same moment: one that is left ends the job, or starts
what is missing. When all four are killed at once, the kernel asks the job to save and end (PR_SET_PDEATHSIG of
mpirun); a rank that does not react to that is ended by its own watchdog (launch.heartbeat_timeout_s). The processes of
a job are found by TAG in their environment, whichever process is their parent.

Run as a program, this file is the guard; therefore it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TAG = "ONWARD_RUN_TAG"
_TAGGED = f"{TAG}=".encode()
_TAG_FILE = f"/memfd:{TAG}="
NO_TAG = "none"
"""The tag of a fork server, whose forks hold theirs in a file."""
GRACE_S = 10.0
"""Longest time a job gets to save after its flow process was killed."""
RENEW_S = 1.0
"""Least time between two starts of a guard; a machine without memory ends each of them at once."""
SPARES = 2
"""Guards below the first one. With one, killing both guards and the flow within a second left ranks that ignore
signals."""


class Guard:
    """A process that stops the job if this one is killed."""

    def __init__(self, tag: str, grace_s: float) -> None:
        self._words = [sys.executable, "-I", "-S", __file__, tag, str(grace_s)]
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_at = 0.0
        self._start()

    def renew(self) -> None:
        """Start another guard if this one was killed. Call it often."""
        if self._processes[-1].poll() is not None and time.monotonic() - self._started_at > RENEW_S:
            with contextlib.suppress(OSError):  # no memory or no process id is left just now
                self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        # its stdin is a pipe from here: the end of this process closes it, however that comes about
        self._processes.append(subprocess.Popen(self._words, stdin=subprocess.PIPE, start_new_session=True))

    def close(self) -> None:
        """End the guards; what is left of the job is killed."""
        # also the pipes of killed guards, from which the guards below them read
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s + 10.0)


# -- the processes of a job


def kill_job(tag: str) -> None:
    """Send SIGKILL to every process of the job on this host, wait at most 5 s for their end, delete their files."""
    signal_until_gone(tag, signal.SIGKILL, limit_s=5.0)
    shutil.rmtree(temporary_directory(tag), ignore_errors=True)


def temporary_directory(tag: str) -> Path:
    """Return the directory of the job's temporary files."""
    return Path(tempfile.gettempdir()) / f"onward-{tag}"


def signal_until_gone(
    tag: str, number: int, *, limit_s: float, which: Callable[[int], bool] = lambda pid: True
) -> None:
    """Send a signal once to each process of the job for which `which` is true, until all of them have ended."""
    deadline = time.monotonic() + limit_s
    signalled = set[int]()
    # in rounds, because a process may start another one before the signal reaches it
    while (found := set(members(tag))) and time.monotonic() < deadline:
        for pid in filter(which, found - signalled):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= found
        time.sleep(0.02)


def members(tag: str) -> list[int]:
    """Return the job's processes on this host, found by their tag. Zombies have none."""
    return living_tags().get(tag, [])


def living_tags() -> dict[str, list[int]]:
    """Return tag -> the processes of that job on this host, for all jobs of this user."""
    found: dict[str, list[int]] = {}
    # one walk finds the processes of all jobs, because reading each environment is what takes time
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if tag := _tag_of(entry):
                    found.setdefault(tag, []).append(int(entry.name))
    return found


def _tag_of(process: Path) -> str:
    """Return the tag of a process, given by its directory in /proc; "" without one."""
    # the environment is inherited, also by processes that left the process group or changed their parent
    words = (process / "environ").read_bytes().split(b"\0")
    tags = [os.fsdecode(word.removeprefix(_TAGGED)) for word in words if word.startswith(_TAGGED)]
    if tags != [NO_TAG]:
        return tags[0] if tags else ""
    # a fork has the environment with which its server began, and holds a file that is named after its tag
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed just now
            file = str(link.readlink())
            if file.startswith(_TAG_FILE):
                return file.removeprefix(_TAG_FILE).partition(" ")[0]
    return NO_TAG


def is_suspended(pid: int) -> bool:
    """Return whether a process was stopped by SIGSTOP."""
    with contextlib.suppress(OSError):
        # after the name, which is in parentheses and may contain anything
        return (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


# -- the program


def _run(tag: str, grace_s: float) -> None:
    """Wait for the end of the flow process; let what is left of the job save for `grace_s`, then kill it."""
    spares = SPARES
    below = 0
    while True:
        # the flow replaces the first guard, and each guard the one below it
        while spares and not below:
            below = os.fork()
            spares -= not below
        # readable means closed: nobody writes into the pipe
        if select.select([sys.stdin], [], [], RENEW_S if below else None)[0]:
            break
        if below and os.waitpid(below, os.WNOHANG)[0]:
            below = 0
    # only mpirun is asked, which asks the ranks in order; then all that is left is killed
    signal_until_gone(tag, signal.SIGUSR1, limit_s=grace_s, which=_ask)
    kill_job(tag)
    if below:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(below, 0)


def _ask(pid: int) -> bool:
    """Return whether a process is mpirun, which passes SIGUSR1 on to the ranks; let it run if it was suspended."""
    try:
        if os.getsid(pid) != pid:
            return False
    except ProcessLookupError:
        return False
    if is_suspended(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return True


if __name__ == "__main__":
    _run(sys.argv[1], float(sys.argv[2]))
