"""Decide of which kind the ending of an attempt is, and why, from all that the attempt has left behind.

What a rank wrote is better evidence than how the launcher saw its end; the texts and classes of errors are those of
trainer/run/outcomes/ending_kinds.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from onward.infra.job.job import Outcome
from onward.infra.job.launcher import LauncherEnding
from onward.trainer.run.outcomes.ending_kinds import TIMED_OUT, EndingKind, has_own_cause, kind_of_rank_error
from onward.trainer.run.outcomes.storage import says_storage
from onward.trainer.run.records import AttemptResult, RankError

KILLED_FROM_OUTSIDE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU")
"""Signals by which a scheduler or a person asks a process to end."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an attempt has left behind."""

    result: AttemptResult | None
    """What rank 0 wrote at its end."""
    outcome: Outcome
    """How the launcher saw the end; `stopped`: the flow has asked for it."""
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

    peer: str = ""
    """The host that the rank has lost, if its error only says that it lost another rank; "" if it is not known."""

    asked: str = ""
    """Why this flow asked the ranks to save and exit, so that another attempt follows; "" if it did not."""

    @property
    def error_class(self) -> str:
        """The class of the error, such as "ConfigError", or the signal that ended the rank; "" without an error."""
        found = re.match(r"\w+", self.error.cause) if self.error else None
        return found[0] if found else ""

    @property
    def launcher_signal(self) -> str:
        """The signal that ended the launcher, if no rank has failed by itself; else ""."""
        failed = self.error is not None and not self.error.secondary
        return self.said.signal if self.outcome.reason == "exited" and not failed else ""


def classify(evidence: Evidence) -> EndingKind:
    """Return the kind of an ending: the first that holds."""
    error = evidence.error
    reason = evidence.outcome.reason
    name = evidence.error_class
    if evidence.result and evidence.result.status == "done":
        return "done"
    # whatever else was noticed: the ranks ended because they were asked to
    if reason == "stopped":
        return "stopped"
    if evidence.result or reason == "out_of_time":
        return "preempted"  # ranks that saved and left although this flow has not asked for it
    # the kernel kills with SIGKILL; the counter of the host tells it from a person
    if name == "SIGKILL" and evidence.oom_kills:
        return "out_of_memory"
    # a host that is gone explains the errors of all ranks that lost it
    if evidence.hosts:
        return "host_lost"
    kind = kind_of_rank_error(name)
    if not has_own_cause(name):
        # a disk explains any other error
        if evidence.disk or (error and says_storage(error.cause)):
            return "storage"
        if kind == "unknown":
            return _kind_without_class(evidence)
    return kind


def _kind_without_class(evidence: Evidence) -> EndingKind:
    """Return the kind of an ending by signals and texts, where neither the class of an error nor a disk decides."""
    error = evidence.error
    name = evidence.error_class
    signal = evidence.launcher_signal
    if evidence.outcome.reason in ("silent", "start_timeout"):
        return "hang"
    if name in KILLED_FROM_OUTSIDE or signal.startswith(KILLED_FROM_OUTSIDE):
        return "preempted"
    if error and TIMED_OUT.search(error.cause):
        return "hang"
    # a rank that a signal ended, and that nobody outside has asked
    if name.startswith("SIG"):
        return "rank_lost"
    if (error is None or error.secondary) and evidence.said.lost_host is not None:
        return "host_lost"
    # of the ranks that are left, each has only lost its connection to another one
    lost_another = error is not None and error.secondary
    return "rank_lost" if signal or lost_another else "unknown"


def sentence_of(evidence: Evidence) -> str:
    """Return what happened in one line, for a person."""
    result = evidence.result
    error = evidence.error
    if result and result.status == "done":
        return f"the run is done{f' before its last step: {result.ended_early}' if result.ended_early else ''}"
    if evidence.outcome.reason == "stopped":
        return "it was stopped as asked" if result else "it was stopped as asked, and did not save in time"
    if result and evidence.asked:
        return f"{evidence.asked}, and the ranks saved first"
    if evidence.outcome.reason == "out_of_time":
        return f"{evidence.ending}; they saved first" if result else f"{evidence.ending}, and did not save in time"
    if result:
        return "a signal that this flow had not sent (SIGTERM or SIGUSR1) asked the ranks to end; they saved first"
    if evidence.hosts or evidence.disk:
        return evidence.hosts or evidence.disk
    if evidence.launcher_signal:
        return f"{evidence.said.launcher} was ended by {evidence.launcher_signal}"
    if error is None:
        said = evidence.said
        lost = f"{said.launcher} cannot reach host {said.lost_host}, or has lost it; " if said.lost_host else ""
        return f"{lost}{evidence.ending}"
    if error.secondary:
        lost = f"the ranks on {evidence.peer}" if evidence.peer else "another rank"
        return f"rank {error.rank} on {error.host} has lost {lost}: {' '.join(error.cause.split())}"
    how = "was ended by" if re.match(r"SIG\w+: ", error.cause) else "failed:"
    return f"rank {error.rank} on {error.host} {how} {' '.join(error.cause.split())}"
