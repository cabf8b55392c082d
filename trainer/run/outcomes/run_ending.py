"""The record of how the newest flow of a run ended: RUN_DIR/ending.json, also when the disk is full."""

from __future__ import annotations

import contextlib
from typing import Literal

from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Record, read_record
from onward.trainer.run.reserved import reserve, write_reserved


class RunEnding(Record):
    """How a flow of a run ended. There is none while it runs, and none after its process was killed."""

    status: Literal["completed", "cancelled", "suspended", "failed"]
    """`suspended`: cancelled so that Prefect's Resume continues it."""
    exit_status: int = 0
    """Of `onward run` and `onward resume`: 130 after Ctrl-C, 143 after SIGTERM, else the error's."""
    error: str = ""
    """The name of the error's class."""
    problems: tuple[str, ...] = ()
    """What happened, one sentence for each thing."""
    flow_run_id: str = ""
    """Of the flow run in Prefect: a resumed run has several."""
    at: str = ""
    """ISO 8601, UTC."""


def begin(run: RunDir) -> None:
    """Take the space of the record, and delete that of an earlier flow. Raises OSError when the disk is full."""
    run.flow_ending.unlink(missing_ok=True)
    reserve(run.reserved)


def end(run: RunDir, ending: RunEnding) -> None:
    """Write the record, and give back the space that was taken for other records."""
    for left in run.attempts.glob("*/*.reserved"):
        left.unlink(missing_ok=True)
    write_reserved(run.flow_ending, ending, run.reserved)


def ending_of(run: RunDir) -> RunEnding | None:
    """Return how the newest flow of a run ended; None while it runs, after a kill, or if the record is damaged."""
    with contextlib.suppress(OnwardError, OSError):
        return read_record(run.flow_ending, RunEnding)
    return None
