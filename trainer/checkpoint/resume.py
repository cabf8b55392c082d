"""Find the checkpoint that training goes on from, and say in one sentence which one it is and what is made again.

    step-000000060             damaged    } passed over, named in the sentence
    step-000000040.damaged     set aside  }
    step-000000020             complete   <- training goes on from here; steps 21 to 63 are made again

A run that has only damaged checkpoints is refused: beginning again at step 0 is for its user to decide.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import NamedTuple

from onward.trainer.checkpoint.load import verify_together
from onward.trainer.checkpoint.manifest import Beat
from onward.trainer.checkpoint.retention import list_checkpoints, list_damaged, step_in
from onward.trainer.checkpoint.verification import VerifiedCheckpoint, all_damaged
from onward.trainer.distributed.exchange import gather, gather_bytes
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import CheckpointError, OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding
from onward.trainer.run.records import read_record

log = logging.getLogger(__name__)


class ResumePoint(NamedTuple):
    """Where training goes on."""

    checkpoint: VerifiedCheckpoint | None
    """None: at step 0, since no checkpoint of the run was ever complete."""
    damaged: tuple[str, ...]
    """The newer checkpoints that are damaged, the newest first."""
    sentence: str
    """Which step it is, what is damaged and what is made again; "" of a run that has not begun before."""


def find_resume_point(run: RunDir, *, mpi: MPIContext, step_before: int = 0, beat: Beat = lambda: None) -> ResumePoint:
    """Return the newest checkpoint that verifies. Collective: every rank.

    step_before: the step that rank 0 was last in, as far as the heartbeat of the former attempt says. Raises
    CheckpointError, with the same text on every rank, when the run has checkpoints and all of them are damaged.
    """
    checkpoint, refused = newest_complete(run, mpi=mpi, beat=beat)
    step = checkpoint.info.step if checkpoint else 0
    # the checkpoint task, which runs beside this, has renamed some; and not every rank may see the same directory
    seen = {path.name.removesuffix(".damaged") for path in list_damaged(run)} | refused.keys()
    everywhere = {name for names in gather_bytes(mpi, json.dumps(sorted(seen)).encode()) for name in json.loads(names)}
    damaged = tuple(sorted((name for name in everywhere if step_in(name) > step), key=_age, reverse=True))
    if damaged and checkpoint is None:
        raise all_damaged(run, damaged, next(iter(refused.values()), ""))
    # heartbeat, record and log may each be behind the others
    reached = max(step_before, _last_step(run))
    return ResumePoint(checkpoint, damaged, _sentence(run, checkpoint, damaged, reached))


def newest_complete(
    run: RunDir, *, mpi: MPIContext, beat: Beat = lambda: None
) -> tuple[VerifiedCheckpoint | None, dict[str, str]]:
    """Return the newest checkpoint that verifies, and the name of each newer one with its damage, which is logged.

    Collective: every rank. All ranks get the same: the oldest of the ones they see as newest, since a network file
    system may not show the newest one everywhere yet.
    """
    names = [path.name for path in list_checkpoints(run)]
    refused: dict[str, str] = {}
    # the oldest of them exists on every rank; "" of a rank that sees none ends the search on all
    while oldest := min(gather(mpi, names[-1] if names else ""), key=_age):
        try:
            return verify_together(run.checkpoints / oldest, mpi=mpi, beat=beat), refused
        except CheckpointError as error:
            log.warning("not used: %s", error)
            refused[oldest] = str(error)
        # all ranks drop the same ones, since all got the same error
        names = [name for name in names if _age(name) < _age(oldest)]
    return None, refused


def _age(name: str) -> tuple[int, str]:
    # names of ten digits are newer than names of nine; "" is older than any
    return len(name), name


def _last_step(run: RunDir) -> int:
    """Return the last step of the attempts before: from the record of how the last one ended, and the event log."""
    steps = [RunHistory.of_tail(run.events).last_step]
    ending = run.ending(run.current_attempt - 1)
    with contextlib.suppress(OnwardError, OSError):  # absent or damaged; the log alone may be some steps behind
        steps.append(read_record(ending, AttemptEnding).step)
    return max(steps)


def _sentence(run: RunDir, checkpoint: VerifiedCheckpoint | None, damaged: tuple[str, ...], reached: int) -> str:
    step = checkpoint.info.step if checkpoint else 0
    again = ""
    if reached > step:
        again = f"step {reached} is" if reached == step + 1 else f"steps {step + 1} to {reached} are"
        again = f"; {again} made again"
    if checkpoint is None:
        return f"begins again at step 0, because no checkpoint was saved{again}" if reached else ""
    passed = ""
    if damaged:
        kind = "1 newer checkpoint is" if len(damaged) == 1 else f"{len(damaged)} newer checkpoints are"
        passed = f"; {kind} damaged and not used: {', '.join(damaged)} (kept in {run.checkpoints})"
    return f"goes on from step {step} ({checkpoint.path.name}){again}{passed}"
