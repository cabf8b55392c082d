"""Say of which kind the ending of an attempt is, and why: one table over everything that an attempt leaves behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from onward.infra.job.launcher import LauncherEnding
from onward.trainer.run.attempt_endings import EndingKind
from onward.trainer.run.records import AttemptResult, RankError
from onward.trainer.run.storage import says_storage

KILLED_FROM_OUTSIDE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU")
"""Signals by which a scheduler or a person asks a process to end."""

SERVER = re.compile(r"(ConnectionError|ConnectionRefusedError|ConnectTimeout|ReadTimeout|HTTPError|URLError)\b")
HANG = re.compile(r"it made no progress for|a collective timed out|[Tt]imed out (waiting|after)|[Ww]ait timeout")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an attempt has left behind."""

    result: AttemptResult | None
    """What rank 0 wrote at its end."""
    reason: Literal["exited", "stopped", "silent", "start_timeout"]
    """How the launcher saw the end; `stopped`: the flow has asked for it."""
    returncode: int | None
    """Exit status of the launcher, negative for a signal."""
    error: RankError | None
    """The error of the rank that failed first, written by the rank, or by the flow if a signal ended it."""
    oom_kills: int
    """Processes that the kernel's out-of-memory killer ended meanwhile."""
    said: LauncherEnding
    """What the launcher says about the end."""
    ending: str
    """How the job ended, in words."""
    disk: str = ""
    """Why the run directory cannot be written; "" if it can."""
    hosts: str = ""
    """Which hosts of the hostfile do not answer; "" if all do, or if the error of a rank says enough."""
    answered: tuple[int, ...] = ()
    """Ranks that wrote an error."""
    world_size: int = 0

    @property
    def error_class(self) -> str:
        """The class of the error, such as "ConfigError", or the signal that ended the rank; "" without an error."""
        found = re.match(r"\w+", self.error.cause) if self.error else None
        return found[0] if found else ""

    @property
    def cause(self) -> str:
        """What that error says."""
        return self.error.cause if self.error else ""

    @property
    def launcher_signal(self) -> str:
        """The signal that ended the launcher, if no rank has failed by itself; else ""."""
        if self.error is not None and not self.error.secondary:
            return ""
        killed = self.returncode is not None and self.returncode < 0
        # the watch of the job asks it to end in other cases
        return self.said.signal if killed or self.reason == "exited" else ""


Rule = tuple[EndingKind, Callable[[Evidence], object]]

RULES: Sequence[Rule] = (
    # in this order: the first that holds decides. What a rank wrote is better evidence than what its launcher says.
    ("done", lambda e: e.result and e.result.status == "done"),
    ("stopped", lambda e: e.reason == "stopped" or e.error_class in ("Stopped", "Fenced")),
    # ranks that saved and left although this flow has not asked for it
    ("preempted", lambda e: e.result is not None),
    ("data_error", lambda e: e.error_class in ("DataError", "DeviceAssertion")),
    ("storage", lambda e: e.error_class == "StorageUnavailable"),
    ("user_error", lambda e: e.error_class in ("ConfigError", "UnsupportedModel", "RuntimeUnavailable", "Refused")),
    ("non_finite", lambda e: e.error_class == "Diverged"),
    ("out_of_memory", lambda e: e.error_class in ("OutOfMemory", "MemoryError")),
    ("out_of_memory", lambda e: e.error_class == "SIGKILL" and e.oom_kills),
    ("host_lost", lambda e: e.hosts),
    ("hang", lambda e: e.error_class == "Hang"),
    ("rank_lost", lambda e: e.error_class == "ReplicasDiffer"),
    ("storage", lambda e: says_storage(e.cause) or e.disk),
    ("user_error", lambda e: e.error_class == "CheckpointError"),
    ("hang", lambda e: e.reason in ("silent", "start_timeout")),
    ("preempted", lambda e: e.error_class in KILLED_FROM_OUTSIDE or e.launcher_signal.startswith(KILLED_FROM_OUTSIDE)),
    ("hang", lambda e: HANG.search(e.cause)),
    ("rank_lost", lambda e: e.error_class.startswith("SIG")),
    ("host_lost", lambda e: (e.error is None or e.error.secondary) and e.said.lost_host is not None),
    ("server", lambda e: SERVER.match(e.cause)),
    # of the ranks that are left, each has only lost its connection to another one
    ("rank_lost", lambda e: e.error is not None and e.error.secondary),
    ("rank_lost", lambda e: e.launcher_signal),
)


def classify(evidence: Evidence) -> EndingKind:
    """Return the kind of an ending."""
    return next((kind for kind, holds in RULES if holds(evidence)), "unknown")


def sentence_of(evidence: Evidence) -> str:
    """Return what happened in one line, for a person."""
    result, error = evidence.result, evidence.error
    if result is not None and result.status == "done":
        return f"the run is done{f' before its last step: {result.ended_early}' if result.ended_early else ''}"
    if evidence.reason == "stopped":
        return "it was stopped as asked" if result else "it was stopped as asked, and did not save in time"
    if result is not None:
        return "a signal that this flow had not sent (SIGTERM or SIGUSR1) asked the ranks to end; they saved first"
    if evidence.hosts or evidence.disk:
        return evidence.hosts or evidence.disk
    if evidence.launcher_signal:
        return f"{evidence.said.launcher} was ended by {evidence.launcher_signal}"
    if error is None:
        said = evidence.said
        lost = f"{said.launcher} cannot reach host {said.lost_host}, or has lost it; " if said.lost_host else ""
        return f"{lost}{evidence.ending}"
    silent = sorted({*range(evidence.world_size)} - {*evidence.answered})
    if error.secondary and HANG.search(error.cause) and silent:
        named = ", ".join(map(str, silent))
        return f"rank{'s' * (len(silent) > 1)} {named} did not answer: {' '.join(error.cause.split())}"
    how = re.match(r"(SIG\w+|status \d+): ", error.cause)
    cause = " ".join(error.cause.split())
    where = f"rank {error.rank} on {error.host}"
    return f"{where} was ended by {cause}" if how and how[1].startswith("SIG") else f"{where} failed: {cause}"
