"""AttemptEnding: how an attempt ended, and what followed. The task `train` writes one for every attempt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.ending_kinds import EndingKind as EndingKind
from onward.trainer.run.records import Record, read_record


class AttemptEnding(Record):
    """How an attempt ended, and what followed."""

    attempt: int
    kind: EndingKind
    sentence: str
    """What happened, such as "rank 1 on h0 was ended by SIGKILL: ..."."""
    action: str
    """What follows, such as "it goes on from the checkpoint of step 120 ..."."""
    rank: int | None = None
    """The rank that failed first; None if no rank is known to have failed."""
    host: str = ""
    silent_hosts: Mapping[str, str] = {}
    """Hosts of the hostfile that did not answer at its end, with what ssh said."""
    step: int = 0
    """The step that the attempt was in; of one that is done or stopped, its last one."""
    resumed_from: int = 0
    """The step of the checkpoint that it began from; 0 = from the start."""
    checkpoint: int = 0
    """The step of the newest checkpoint at its end; 0 = there was none."""
    retry: int = 0
    """Which retry without a new checkpoint follows: 1 is the first; 0 = no attempt follows by itself."""
    delay_s: float = 0.0
    """Pause before that retry."""
    began_ms: int
    detected_ms: int
    """When a rank wrote its error, mpirun ended, or a time limit passed, whichever was first."""
    ended_ms: int
    """When no process of it was left on this host."""

    def __str__(self) -> str:
        """Return the ending as one line."""
        return f"attempt {self.attempt} ended at step {self.step}: {self.sentence}; {self.action}"


def endings(run: RunDir) -> list[AttemptEnding]:
    """Return how the attempts of a run ended, in their order; attempts without a readable record are left out."""
    found = []
    # not all numbers up to the newest: that one may be damaged, and billions
    for path in run.attempts.glob("*/ending.json"):
        with contextlib.suppress(OnwardError, OSError):
            found.append(read_record(path, AttemptEnding))
    return sorted(found, key=lambda ending: ending.attempt)
