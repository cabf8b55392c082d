"""Show how the attempts of a run ended in Prefect and MLflow, as soon as each has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from prefect.artifacts import create_table_artifact
from prefect.context import TaskRunContext

from onward.tasks.shown.prefect_server import prefect_answers
from onward.tasks.shown.training_progress import Periodic
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings

PERIOD_S = 2.0


class EndingReports:
    """A table of all attempts on the page of the Prefect flow run, and MLflow tags with the newest ending."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._due = Periodic(PERIOD_S)
        self._shown = 0

    def new_tags(self, *, now: bool) -> Mapping[str, str]:
        """Show attempts that have ended since the last call, and return their MLflow tags; {} if there are none.

        Looks every PERIOD_S, or `now`.
        """
        if not (self._due() or now) or len(found := endings(self._run)) == self._shown:
            return {}
        # before the calls: an outage must not show the same table again and again
        self._shown = len(found)
        # A direct call of the task's function has no task run, and so no page; an error of Prefect ends nothing.
        if TaskRunContext.get() and prefect_answers():
            with contextlib.suppress(Exception):
                create_table_artifact(
                    [row_of(ending) for ending in found], key="attempts", description="How each attempt ended, and why"
                )
        newest = found[-1]
        return {
            "onward.attempts": str(newest.attempt),
            "onward.ending.kind": newest.kind,
            "onward.ending": str(newest),
        }


def row_of(ending: AttemptEnding) -> dict[str, str | int]:
    """Return an ending as a row of the table."""
    return {
        "attempt": ending.attempt,
        "kind": ending.kind,
        "began at step": ending.resumed_from,
        "ended at step": ending.step,
        "what happened": ending.sentence,
        "what followed": ending.action,
    }
