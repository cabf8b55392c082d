"""Find out how the first rank of a job ended, from the output of mpirun, when the rank could not write it itself.

A rank that is killed by a signal writes no error record: SIGKILL ends it at once, and abort(), which NCCL's watchdog
calls, skips every exception hook. mpirun names the first process that ended and how, in one of two sentences:

    prterun noticed that process rank 1 with PID 6074 on node h0 exited on signal 6 (Aborted).
    ... The first process to do so was:   Process name: [prterun-h0-6106@1,1]   Exit code:    1
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

_BY_SIGNAL = re.compile(
    r"noticed\s+that\s+process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"
)
_BY_STATUS = re.compile(r"Process\s+name:\s+\[\S+,(\d+)\]\s+Exit\s+code:\s+(\d+)")
_HOST_LOST = re.compile(
    r"lost communication with a remote daemon|unable to reliably start one or more daemons|ssh: connect to host|"
    r"daemon has unexpectedly failed|daemon failed to report back|unable to establish a communication connection|"
    r"Connection closed by \S+ port \d+"
)
"""What mpirun and ssh print when a host, its network or its daemon is gone."""
_HOST_NAME = re.compile(r"Remote (?:host|daemon)\s*:\s+(?:\[\S+\] on node )?(?P<host>\S+)")


@dataclass(frozen=True)
class RankEnding:
    """How a rank ended."""

    rank: int
    host: str
    """Empty where mpirun does not say it: for an exit status."""
    signal: str
    """Name of the signal that killed it, such as "SIGABRT"; empty if it exited by itself."""
    status: int
    """Its exit status; 128 + the signal's number for a signal."""


def first_ending(output: str) -> RankEnding | None:
    """Return how the rank ended that ended first, from the output of mpirun; None if mpirun does not say it."""
    if found := _BY_SIGNAL.search(output):
        number = int(found[3])
        return RankEnding(int(found[1]), found[2], signal_name(number), 128 + number)
    if found := _BY_STATUS.search(output):
        return RankEnding(int(found[1]), "", "", int(found[2]))
    return None


def lost_host(output: str) -> str | None:
    """Return the host that mpirun could not reach or has lost, "" if it names none; None if it lost no host."""
    if not _HOST_LOST.search(output):
        return None
    named = _HOST_NAME.search(output)
    return named["host"] if named else ""


def launcher_signal(returncode: int | None, output: str) -> str:
    """Return the signal that ended mpirun itself, by its exit status and its output; "" if none has."""
    if returncode is not None and returncode < 0:
        return signal_name(-returncode)
    # Asked to end, it ends its ranks and says nothing; of a rank that ended by itself it always names the status.
    said_why = first_ending(output) is not None or "\n-----" in f"\n{output}"
    return "SIGTERM, SIGINT or SIGHUP" if returncode == 1 and not said_why else ""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def num_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this host since it started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
