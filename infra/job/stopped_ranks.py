"""Notice ranks of this host that a signal has stopped, and let them go on before the others give them up.

    rank 1    SIGSTOP .................... SIGCONT        after STOPPED_S
    rank 0    waits for rank 1 in a collective            would fail after 5/6 of launch.heartbeat_timeout_s

Nothing is lost then but the time. A rank of another host fails by the time-out of the collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from typing import NamedTuple

import psutil

from onward.infra.job.job_guard import is_suspended

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
    """The ranks below the launcher that are stopped (SIGSTOP, SIGTSTP; not by a debugger).

    Where all of them are stopped, the job was suspended on purpose, as some schedulers do, and nobody waits.
    """

    def __init__(self, launcher: int, rank_variable: str) -> None:
        """launcher: its process. rank_variable: the environment variable with the number of a rank."""
        self._launcher = launcher
        self._rank_variable = rank_variable
        self._stops: dict[int, _Stop] = {}
        self._ranks: dict[int, int] = {}
        """Rank -> process, of this host."""
        self._looked_at = self._scanned_at = 0.0

    def look(self) -> None:
        """Look at the ranks, not more often than every LOOK_S; send SIGCONT to those that are stopped for too long."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            if now - self._scanned_at >= SCAN_S:
                self._ranks = _ranks_below(self._launcher, self._rank_variable)
                self._scanned_at = now
            ranks = self._ranks
            stopped = {rank: pid for rank, pid in ranks.items() if is_suspended(pid)}
            # where all ranks are stopped, a scheduler has suspended the job on purpose
            if len(stopped) < max(2, len(ranks)):
                for rank, pid in stopped.items():
                    before = self._stops.get(rank)
                    # a rank that ran in between begins a new stop
                    since = before.since if before and before.until == self._looked_at else now
                    self._stops[rank] = _Stop(pid, since, now)
                    if now - since >= STOPPED_S:
                        log.warning(
                            "rank %d (process %d) has been stopped by a signal (SIGSTOP) for %.0f s, and the others "
                            "wait for it; it is sent SIGCONT",
                            *(rank, pid, now - since),
                        )
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGCONT)
            self._looked_at = now

    def describe(self) -> dict[int, str]:
        """Return rank -> a clause about it, for every rank that was stopped when the job ended.

        mpirun lets stopped ranks go on before it ends them, so the last seconds count.
        """
        clauses = {}
        for rank, stop in self._stops.items():
            # a stop that one look has seen may have lasted a moment
            lasted_s = stop.until - stop.since
            if lasted_s >= LOOK_S and self._looked_at - stop.until < RECENT_S:
                clauses[rank] = f"its process {stop.pid} was stopped by a signal (SIGSTOP) for {lasted_s:.0f} s"
        return clauses


class _Stop(NamedTuple):
    pid: int
    since: float
    until: float
    """When it was last seen stopped."""


def _ranks_below(launcher: int, rank_variable: str) -> dict[int, int]:
    """Return rank -> process, of the children of the launcher."""
    ranks = {}
    with contextlib.suppress(psutil.Error):  # the launcher has ended
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):  # no rank, or one that has ended
                ranks[int(child.environ()[rank_variable])] = child.pid
    return ranks
