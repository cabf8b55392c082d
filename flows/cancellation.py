"""End a flow run that is cancelled in Prefect, whatever it is doing; Prefect itself stops only the runs of a worker.

    Cancel --> the run is Cancelling --> a thread sees it --> while ranks train: they save and stop
                                                          --> else: this process gets SIGTERM, as from outside
                                                                                |
                                          Stopped, so that the run is Cancelled <+

The thread asks the server every PERIOD_S. An outage of the server neither ends nor delays it. It also cancels scheduled
runs that wait for this one, but for the newest (waiting_runs.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import os
import signal
import threading
from collections.abc import Iterator
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from onward.flows.deployment_limits import waits_for_all
from onward.flows.ending import SIGNALLED
from onward.flows.runs import how_to_continue
from onward.flows.waiting_runs import cancel_superseded
from onward.infra import mpirun
from onward.tasks.prefect_server import prefect_answers
from onward.trainer.errors import Stopped
from onward.trainer.run.directory import RunDir
from onward.trainer.run.sweeps import membership

PERIOD_S = 3.0
WORKER_S = 15.0
"""Seconds that the worker of a run gets to stop it. It sends SIGTERM itself, and a second one would interrupt what
follows on the first."""


@contextlib.contextmanager
def stopped_from_prefect(run: RunDir) -> Iterator[StopRequest]:
    """Raise Stopped at the end of the block, or inside it, once the flow run or its sweep is cancelled in Prefect.

    Outside of a flow run it does nothing.
    """
    request = StopRequest(run)
    request.start()
    try:
        yield request
        request.close()
        request.check()
    except Stopped:
        raise
    except Exception as error:
        # Prefect takes no other state than Cancelled any more
        if request.seen:
            raise Stopped(f"{request}; meanwhile: {type(error).__name__}: {error}") from error
        raise
    except SIGNALLED:
        if request.signalled:
            raise Stopped(str(request)) from None
        raise
    finally:
        request.close()


class StopRequest:
    """Watches the states of a flow run and of its sweep. `seen`: whether it is to stop."""

    def __init__(self, run: RunDir) -> None:
        self.seen = False
        self.signalled = False
        self._run = run
        above = runtime.flow_run.get_parent_flow_run_id() if membership(run) else None
        self._flow_runs = [UUID(each) for each in (runtime.flow_run.get_id(), above) if each]
        # from the context: Prefect's `runtime.deployment` may ask the server, which may be away
        context = FlowRunContext.get()
        self._deployment = context.flow_run.deployment_id if context and context.flow_run else None
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
        return f"cancelled in Prefect; {how_to_continue(self._run)}"

    def start(self) -> None:
        """Begin to watch."""
        if self._flow_runs:
            self._thread.start()

    def close(self) -> None:
        """Stop watching: no signal is sent any more."""
        with self._lock:
            self._closed.set()

    def check(self) -> None:
        """Raise Stopped if the run is to stop, so that nothing further is begun."""
        if self.seen:
            raise Stopped(str(self))

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD_S):
            with contextlib.suppress(Exception):  # of the server: the next look tries again
                if not prefect_answers():
                    continue
                if self._stops():
                    return
                if self._deployment and not waits_for_all(str(self._deployment)):
                    cancel_superseded(self._deployment)

    def _stops(self) -> bool:
        """Let the run stop if it is cancelled or suspended; return whether that was done."""
        with get_client(sync_client=True) as client:
            states = [state for each in self._flow_runs if (state := client.read_flow_run(each).state)]
        if any(map(self._cancelled, states)):
            self.seen = True
            return mpirun.stop_running(self._run.root) or self._signal()
        # a paused flow run waits for an answer, unless its ranks train
        return any(state.is_paused() for state in states) and mpirun.stop_running(self._run.root)

    def _cancelled(self, state: State[object]) -> bool:
        age = datetime.datetime.now(datetime.UTC) - state.timestamp
        return (state.is_cancelling() or state.is_cancelled()) and age.total_seconds() >= self._patience_s

    def _signal(self) -> bool:
        with self._lock:
            if self._may_signal and not self._closed.is_set():
                self.signalled = True
                os.kill(os.getpid(), signal.SIGTERM)
        return self._may_signal
