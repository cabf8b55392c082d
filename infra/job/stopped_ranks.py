"""Notice ranks of this host that a signal has stopped, and let them go on before the others give them up.

    rank 1    SIGSTOP .................... SIGCONT        after STOPPED_S
    rank 0    waits for rank 1 in a collective            would fail after launch.collective_timeout_s

Nothing is lost then but the time. A rank of another host fails by the time-out of the collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

STOPPED_S = 10.0
"""How long a rank may be stopped. A shorter stop, such as for a look with a tool, ends as it began."""
LOOK_S = 0.5
"""Seconds between two looks at the ranks."""
SCAN_S = 5.0
"""Seconds between two searches for the processes of the ranks, which read the whole process table."""
RECENT_S = 5.0
"""How long before the end of the job a rank may have been seen stopped last."""


class StoppedRanks:
    """The ranks below mpirun that are stopped (SIGSTOP, SIGTSTP; not by a debugger).

    Where all of them are stopped, the job was suspended on purpose, as some schedulers do, and nobody waits.
    """

    def __init__(self, mpirun: int) -> None:
        self._mpirun = mpirun
        self._stops: dict[int, _Stop] = {}
        self._ranks: dict[int, int] = {}
        """Rank -> process, of this host."""
        self._looked_at = self._scanned_at = 0.0

    def look(self) -> None:
        """Look at the ranks, not more often than every LOOK_S; send SIGCONT to those that are stopped for too long."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            if now - self._scanned_at >= SCAN_S:
                self._ranks, self._scanned_at = _ranks_below(self._mpirun), now
            ranks = self._ranks
            stopped = {rank: pid for rank, pid in ranks.items() if _is_stopped(pid)}
            for rank, pid in stopped.items() if len(stopped) < max(2, len(ranks)) else ():
                before = self._stops.get(rank)
                since = before.since if before and before.until == self._looked_at else now
                self._stops[rank] = _Stop(pid, since, now)
                if now - since >= STOPPED_S:
                    log.warning(
                        "rank %d (process %d) has been stopped by a signal (SIGSTOP) for %.0f s, and the others wait "
                        "for it; it is sent SIGCONT",
                        *(rank, pid, now - since),
                    )
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGCONT)
            self._looked_at = now

    def describe(self) -> dict[int, str]:
        """Return rank -> a clause about it, for every rank that was stopped when the job ended.

        mpirun lets stopped ranks go on before it ends them, so the last seconds count.
        """
        return {
            rank: f"its process {each.pid} was stopped by a signal (SIGSTOP) for {each.until - each.since:.0f} s"
            for rank, each in self._stops.items()
            if each.until - each.since >= LOOK_S and self._looked_at - each.until < RECENT_S
        }


class _Stop(NamedTuple):
    pid: int
    since: float
    until: float
    """When it was last seen stopped."""


def _ranks_below(mpirun: int) -> dict[int, int]:
    children = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    children = [pid for pid in children if (fields := _stat(pid)) and fields[1] == str(mpirun)]
    return {rank: pid for pid in children if (rank := _rank(pid)) is not None}


def _rank(pid: int) -> int | None:
    """Return the rank that mpirun has given to a process; None for other processes."""
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"PMIX_RANK="):
                return int(entry.partition(b"=")[2])
    return None


def _is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]  # "t" is a debugger


def _stat(pid: int) -> list[str]:
    """Return the state, the parent and more of a process; [] if it is gone."""
    with contextlib.suppress(OSError):
        # after the name in brackets, which may hold anything
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
