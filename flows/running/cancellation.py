"""End a flow run that is cancelled or suspended in Prefect, whatever it is doing.

    Cancel  --> Cancelling --+                                --> while ranks train: they save and stop
                             +--> a thread of the run sees it --> else: this process gets SIGTERM, as from outside
    Suspend --> Suspended  --+                                                        |
                                     Stopped: the run is Cancelled, or Pause: it stays Suspended until Resume

Prefect itself stops only the runs of a worker, and suspends no run before its next task begins. The thread asks the
server every PERIOD_S; an outage of the server neither ends nor delays it. Of a deployment's run Prefect's own observer
sees a suspension first. A run without a deployment cannot be started again by Prefect: suspending it cancels it. The
thread also cancels scheduled runs that wait for this one, but for the newest.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from prefect import runtime
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Cancelled, Cancelling

from onward.flows.configuration import prefect_client
from onward.flows.deploying.deployment_limits import waits_for_all
from onward.flows.run_state.runs import how_to_continue
from onward.flows.running.flow_guard import SIGNALLED
from onward.infra.job import job
from onward.tasks.shown.prefect_server import prefect_answers
from onward.trainer.errors import Stopped
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import membership

if TYPE_CHECKING:
    from prefect._flow_run_suspension import FlowRunSuspensionRequest
    from prefect.client.schemas.objects import FlowRun

log = logging.getLogger(__name__)

PERIOD_S = 3.0
LOOK_S = 0.3
"""Seconds between two looks at what Prefect's observer has seen, which asks no server."""
WORKER_S = 15.0
"""Seconds that the worker of a run gets to stop it. It sends SIGTERM itself, and a second one would interrupt what
follows on the first."""


@contextlib.contextmanager
def stopped_from_prefect(run: RunDir) -> Iterator[StopRequest]:
    """Raise Stopped at the end of the block, or inside it, once the flow run or its sweep is cancelled in Prefect.

    Raises Prefect's Pause once the run is suspended. Outside of a flow run it does nothing.
    """
    # made in the main thread, whose context and signals it takes along
    request = StopRequest(run)
    request.start()
    try:
        yield request
        request.close()
        request.check()
    except Stopped:
        if request.suspended:
            raise request.pause() from None
        raise
    except Pause:  # of Prefect, at the beginning of a task
        run.close_log()  # ends the tasks beside the training, if it was just beginning
        raise request.pause() from None
    except Exception as error:
        if request.suspended:
            log.warning("while the run was suspended: %s: %s", type(error).__name__, error)
            raise request.pause() from error
        # Prefect takes no other state than Cancelled any more
        if request.seen:
            raise Stopped(f"{request}; meanwhile: {type(error).__name__}: {error}") from error
        raise
    except SIGNALLED:
        if request.signalled:
            request.check()
        raise
    finally:
        request.close()


class StopRequest:
    """Watches the states of a flow run and of its sweep.

    `seen`: whether it is to stop. `suspended`: whether that is so that Prefect's Resume starts it again.
    """

    def __init__(self, run: RunDir) -> None:
        self.seen = False
        self.suspended = False
        self.signalled = False
        self._run = run
        # of a trial the flow above is the sweep, whose cancellation ends its trials, too
        above = runtime.flow_run.get_parent_flow_run_id() if membership(run) else None
        self._flow_runs = [UUID(each) for each in (runtime.flow_run.get_id(), above) if each]
        # from the context: Prefect's `runtime.deployment` may ask the server, which may be away
        context = FlowRunContext.get()
        self._deployment = context.flow_run.deployment_id if context and context.flow_run else None
        # what Prefect's own observer has seen, in versions that have one
        observed = getattr(context, "flow_run_suspension_request", None) if self._deployment else None
        self._observed: FlowRunSuspensionRequest | None = observed
        self._suspended_state: State[object] | None = None
        # Prefect's worker sets this for the process of a flow run
        self._patience_s = WORKER_S if "PREFECT__FLOW_RUN_ID" in os.environ else 0.0
        # elsewhere SIGTERM would end the process: Prefect catches it in the main thread alone
        self._may_signal = threading.current_thread() is threading.main_thread()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # with this thread's context, which has Prefect's settings
        watch = contextvars.copy_context().run
        self._thread = threading.Thread(target=watch, args=(self._watch,), name="stop request", daemon=True)

    def __str__(self) -> str:
        suspended = self.suspended or self._is_observed()
        what = "suspended in Prefect: Resume there continues it, Retry after its time limit" if suspended else ""
        return f"{what or 'cancelled in Prefect'}; {how_to_continue(self._run)}"

    def pause(self) -> Pause:
        """Return what ends the flow and leaves the state of its run in Prefect as it is."""
        seen = self._observed.get_state() if self._observed else None
        return Pause(str(self), state=seen or self._suspended_state)

    def _is_observed(self) -> bool:
        return self._observed is not None and self._observed.is_requested()

    def start(self) -> None:
        """Begin to watch."""
        if self._flow_runs:
            self._thread.start()

    def close(self) -> None:
        """Stop watching: no signal is sent any more."""
        with self._lock:
            self._closed.set()

    def check(self) -> None:
        """Raise Stopped, or Pause of a suspended run, if the run is to stop, so that nothing further is begun."""
        if self.suspended:
            raise self.pause()
        if self.seen:
            raise Stopped(str(self))

    def _watch(self) -> None:
        asked_at = time.monotonic()
        while not self._closed.wait(min(LOOK_S, PERIOD_S)):
            # also if the run was resumed meanwhile: then another process waits for this one's end
            if self._is_observed():
                self._suspend()
                return
            # the observer is asked at each look, and the server at every tenth
            if time.monotonic() - asked_at < PERIOD_S:
                continue
            asked_at = time.monotonic()
            with contextlib.suppress(Exception):  # of the server: the next look tries again
                if not prefect_answers():
                    continue
                if self._stops():
                    return
                if self._deployment and not waits_for_all(str(self._deployment)):
                    cancel_superseded(self._deployment)

    def _stops(self) -> bool:
        """Let the run stop if it is cancelled or suspended; return whether that was done."""
        with prefect_client() as client:
            # one connection for all looks of this turn
            found = [(each, state) for each in self._flow_runs if (state := client.read_flow_run(each).state)]
            suspended = [each for each, state in found if is_suspended(state)]
            if suspended and not self._deployment:
                # somebody has suspended it although Prefect could not resume it
                why = "a run without a deployment is cancelled and not suspended, as Prefect could not start it again"
                log.warning("%s; %s", why, how_to_continue(self._run))
                client.set_flow_run_state(suspended[0], Cancelling(message=why), force=True)
                found = []
        states = [state for _, state in found]
        if suspended and self._deployment:
            self._suspended_state = next(filter(is_suspended, states))
            return self._suspend()
        if suspended or any(map(self._cancelled, states)):
            self.seen = True
            return job.stop_running(self._run.root) or self._signal()
        # a paused flow run waits for an answer, unless its ranks train
        return any(state.is_paused() for state in states) and job.stop_running(self._run.root)

    def _suspend(self) -> bool:
        self.suspended = self.seen = True
        return job.stop_running(self._run.root) or self._signal()

    def _cancelled(self, state: State[object]) -> bool:
        # a worker that has sent SIGTERM itself gets its time first
        age = datetime.datetime.now(datetime.UTC) - state.timestamp
        return (state.is_cancelling() or state.is_cancelled()) and age.total_seconds() >= self._patience_s

    def _signal(self) -> bool:
        with self._lock:
            # the lock orders this and `close`: behind the block a signal would hit something else
            if self._may_signal and not self._closed.is_set():
                self.signalled = True
                os.kill(os.getpid(), signal.SIGTERM)
        return self._may_signal


def is_suspended(state: State[object]) -> bool:
    """Return whether Prefect would start a process anew to resume a run: Suspend, not a question in the flow."""
    return state.is_paused() and bool(state.state_details.pause_reschedule)


# -- of the scheduled runs of a deployment that wait for a running one, at most the newest stays
#
#     running since 02:00          waiting: 03:00   04:00   05:00
#                                      Cancelled  Cancelled   starts when the running one has ended
#
# Prefect starts waiting runs in no certain order. All of a schedule would do the same on the same data, so the newest
# does for all. Runs that somebody has started, and those with other parameters, are not cancelled; nor is a run that
# has begun, however late: where a start takes longer than the interval of a schedule, no run would ever train.

AUTO = "auto-scheduled"
"""The tag by which Prefect marks the runs that a schedule creates."""


def superseded(waiting: Iterable[FlowRun]) -> list[tuple[FlowRun, FlowRun]]:
    """Return (run, the newer one in its place) for each waiting run of a schedule but the newest."""
    by_parameters: dict[str, list[FlowRun]] = {}
    for run in waiting:
        # a run that a person has started is wanted, and waits
        if AUTO in run.tags and run.expected_start_time:
            # runs with other parameters do other work, and do not stand for each other
            by_parameters.setdefault(json.dumps(run.parameters, sort_keys=True, default=str), []).append(run)
    found: list[tuple[FlowRun, FlowRun]] = []
    for runs in by_parameters.values():
        *older, newest = sorted(runs, key=lambda run: (run.expected_start_time, run.id))
        found += [(run, newest) for run in older]
    return found


def reason(newer: FlowRun) -> str:
    """Return why a waiting run was cancelled."""
    at = f"{newer.expected_start_time:%Y-%m-%d %H:%M:%S} UTC" if newer.expected_start_time else "later"
    return f"skipped: it waited for another run of its deployment, and the run scheduled for {at} takes its place"


def cancel_superseded(deployment_id: UUID) -> None:
    """Cancel the waiting runs of a deployment that a newer one supersedes."""
    with prefect_client() as client:
        for run, newer in superseded(_waiting(deployment_id)):
            state = client.read_flow_run(run.id).state
            if state is not None and state.is_scheduled():  # it may have begun meanwhile
                cancelled: object = Cancelled(message=reason(newer))
                client.set_flow_run_state(run.id, cancelled)  # type: ignore[arg-type]


def _waiting(deployment_id: UUID) -> Sequence[FlowRun]:
    """Return the runs of a deployment whose time has come and that have not begun."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter

    now = datetime.datetime.now(datetime.UTC).isoformat()
    asked = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": {"before_": now}}
    with prefect_client() as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [str(deployment_id)]}}),
            flow_run_filter=FlowRunFilter.model_validate(asked),
        )
    # a run that has begun before, such as one to be retried, has a start
    return [run for run in found if run.start_time is None]
