"""The outermost handler of a flow: whatever ends it, its record, Prefect and MLflow say the same, and say why.

    an error                         RUN_DIR/ending.json: failed       Prefect: Failed       MLflow: FAILED
    Ctrl-C, SIGTERM, Cancel          RUN_DIR/ending.json: cancelled    Prefect: Cancelled    MLflow: KILLED
    Suspend                          RUN_DIR/ending.json: suspended    Prefect: Suspended    MLflow: KILLED
    the process is killed            no record                         the next command sets Crashed and KILLED

The space for the record is taken when the flow begins, so that a full disk has its record, too.
"""

from __future__ import annotations

import logging
import signal
from types import TracebackType
from typing import Any, NoReturn

from prefect import State, runtime
from prefect.exceptions import Pause, TerminationSignal
from prefect.settings import get_current_settings
from prefect.states import Cancelled

from onward.flows.run_state.runs import end_mlflow_run, how_to_continue, identity_of
from onward.infra.mlflow.mlflow_store import database_of
from onward.tasks.shown.prefect_events import emit
from onward.trainer.errors import OnwardError, Stopped, StorageUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.refusals import known_error, recorded_error, unexpected
from onward.trainer.run.outcomes.run_ending import RunEnding, begin, end, ending_of
from onward.trainer.run.records import utc_now

log = logging.getLogger(__name__)

SIGNALLED = (KeyboardInterrupt, TerminationSignal, SystemExit)
"""What Ctrl-C and SIGTERM raise in the main thread, by Prefect or by flows/running/stop_signals.py."""


class Ending:
    """Records how the flow of a run ends, for which it is the outermost `with` block.

    with Ending(run) as ending:
        ...
        return result
    return ending.cancelled     # Stopped, Ctrl-C or SIGTERM was raised inside
    """

    def __init__(self, run: RunDir) -> None:
        self.cancelled: State[Any] = Cancelled()
        self._run = run

    def __enter__(self) -> Ending:
        try:
            begin(self._run)
        except OSError as error:
            raise own_error(error, self._run) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._write("completed")
        # True swallows the error: the flow returns a Cancelled state, which Prefect takes only as a result
        elif isinstance(error, (Stopped, *SIGNALLED)):
            self._cancel(error)
            return True
        elif isinstance(error, Pause):  # raised further: Prefect then leaves the state Suspended as it is
            log.warning("%s", error)
            self._write("suspended", Stopped(str(error)))
            end_mlflow_run(self._run, "KILLED")
        elif isinstance(error, Exception):
            own = own_error(error, self._run)
            self._write("failed", own)
            if isinstance(own, StorageUnavailable):
                _expect_no_answer()
            what = {
                "error": type(own).__name__,
                "message": "\n".join(own.problems),
                "directory": str(self._run.root),
            }
            emit("failed", self._run, what, about=type(own).__name__)
            if own is not error:
                raise own from error
        return False

    def _cancel(self, error: BaseException) -> None:
        # 128 + signal is what a shell expects of a process that a signal has ended
        number = _signal_of(error)
        what = f"stopped by {number.name}; {how_to_continue(self._run)}" if number else str(error)
        self.cancelled = Cancelled(message=what)
        self._write("cancelled", Stopped(what), exit_status=128 + number if number else Stopped.exit_code)
        end_mlflow_run(self._run, "KILLED")

    def _write(self, status: Any, error: OnwardError | None = None, *, exit_status: int | None = None) -> None:
        if exit_status is None:
            exit_status = error.exit_code if error else 0
        flow_run_id = runtime.flow_run.get_id() or ""
        record = RunEnding(
            status=status,
            exit_status=exit_status,
            error=type(error).__name__ if error else "",
            problems=error.problems if error else (),
            flow_run_id=flow_run_id,
            at=utc_now(),
        )
        try:
            end(self._run, record)
        except OSError as failed:  # it must not hide the error that it records, which may say the same
            if not isinstance(error, StorageUnavailable):
                log.warning("%s cannot be written: %s", self._run.flow_ending, failed)


def _expect_no_answer() -> None:
    """Let Prefect's client try twice only from now on, and say nothing of it: its server may be on the disk that fails.

    By default each call, and each part of the log, would be tried for a minute.
    """
    get_current_settings().client.max_retries = 1
    logging.raiseExceptions = False


def own_error(error: Exception, run: RunDir) -> OnwardError:
    """Return Onward's error for one that ended a flow; of an unexpected one it names the log to look into."""
    # also where a process left no record, or a server has no room for its database
    identity = identity_of(run)
    database = database_of(identity.tracking_uri) if identity else None
    places = (run.root, database.parent) if database else (run.root,)
    return known_error(error, *places) or unexpected(error, f"in {run.root / 'flow.log'}")


def raise_stop(run: RunDir, message: str) -> NoReturn:
    """Raise what has stopped the flow of a run: KeyboardInterrupt, SystemExit(143), or Stopped with its message."""
    ending = ending_of(run)
    # the record has crossed Prefect unchanged, while a state keeps a message only
    status = ending.exit_status if ending else Stopped.exit_code
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status == 128 + signal.SIGTERM:
        raise SystemExit(status)
    raise Stopped(message or "the run was stopped")


def recorded(error: Exception, run: RunDir) -> Exception:
    """Return the error that the flow has recorded, if another one follows from it: of a server that cannot answer."""
    if isinstance(error, OnwardError):
        return error
    ending = ending_of(run)
    # nothing was recorded that this error could follow from
    if ending is None or ending.status == "completed":
        return own_error(error, run)
    return recorded_error(ending.error, ending.problems) or error


def _signal_of(error: BaseException) -> signal.Signals | None:
    """Return the signal that raised an error; None for Stopped."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return None if isinstance(error, Stopped) else signal.SIGTERM
