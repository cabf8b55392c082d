"""Run the flow in this process, as `onward run` does: find or start Prefect, create the flow run, run it, log.

Prefect reads its settings from the environment when it is first imported. `prefect_server` sets them, so every import
of Prefect here is inside a function.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from onward.flows.configuration import prefect_client
from onward.flows.run_state.runs import end_mlflow_run, how_to_continue, is_running, run_directory_of
from onward.infra.job.process_identity import is_gone, this_process
from onward.infra.mlflow.tracking import Status
from onward.infra.servers import service_definitions, services
from onward.infra.servers.login import keep_from_others
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable, say
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.names import name_of
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.recorded.sweep_records import SweepDir, membership
from onward.trainer.run.records import ExportedModel, read_record
from onward.trainer.run.timing.phases import enter_phase

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

    from onward.flows.running.named_run import NamedRun

FLOWS = ("train-onnx", "sweep-onnx")
CREATOR = "onward.process"
"""The entry of a flow run's context with the process that has created it."""
log = logging.getLogger(__name__)

ORPHAN_RECHECK_S = 2.0
"""Seconds between the two checks that no process runs a flow run. A flow that is just ending releases its lock some
moments before it reports its final state."""


@contextlib.contextmanager
def prefect_server(*, start: bool = True, own: bool = False) -> Iterator[str]:
    """Yield the URL of a Prefect API: of the configured server, else of Onward's own, which is started if needed.

    own: Onward's own, even if another one is configured.
    Sets the environment variables that Prefect and MLflow read, and keeps Onward's own server running inside. Raises
    RuntimeUnavailable when the server cannot be reached or started, and with `start=False` when Onward's own server
    and its worker do not both run.
    """
    home = onward_home()
    make_private(home)
    with contextlib.ExitStack() as stack:
        try:
            # a server that the user has configured is not started or stopped by us
            if not own and (url := services.configured_prefect()):
                services.check_reachable(url)
                environment = {**service_definitions.CLIENT_SETTINGS, "PREFECT_API_URL": url, "ONWARD_HOME": str(home)}
            else:
                # the lease is taken first: a server that is found without it could stop a moment later
                stack.enter_context(services.lease(home))
                if not start and not {"prefect", "worker"} <= services.running(home).keys():
                    raise services.ServiceError("no Prefect server with a worker runs; start both with `onward up`")
                if "prefect" not in services.running(home):
                    say("starting a Prefect server on 127.0.0.1")
                server = services.ensure(home, ["prefect"])["prefect"]
                if other := services.beside(home):
                    said = f"the Prefect server of this home is on {other}, and this host has one for its own runs"
                    say(f"{said}; PREFECT_API_URL names one for all hosts")
                environment = service_definitions.environment(home, prefect_url=server)
        except services.ServiceError as error:
            raise RuntimeUnavailable(str(error)) from None
        # both libraries read the environment, and ranks inherit it
        before = {name: os.environ[name] for name in environment if name in os.environ}
        os.environ.update(environment)
        keep_from_others(environment["PREFECT_API_URL"], os.environ.get("PREFECT_API_AUTH_STRING", ""))
        # Prefect reads the environment again, if it was imported before: a script may call `onward.run` twice
        if "prefect.context" in sys.modules:
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        try:
            yield environment["PREFECT_API_URL"]
        except Exception as error:
            # httpx is a package of Prefect's, whose client raises its errors as they are
            if not any(
                f"{kind.__module__}.{kind.__name__}".endswith(".TransportError") for kind in type(error).__mro__
            ):
                raise
            raise RuntimeUnavailable(
                f"the Prefect server {environment['PREFECT_API_URL']} does not answer any more "
                f"({type(error).__name__}: {error}); repeat the command, and see `onward doctor` if it happens again"
            ) from error
        finally:
            # Else PREFECT_API_URL would name Onward's own server, which ends, as the one that the user configured.
            for name in environment:
                os.environ.pop(name)
            os.environ.update(before)


def create_flow_run(
    config: RunConfig, *, resume: str = "", named: NamedRun | None = None, asked_ms: int
) -> tuple[RunDir, FlowRun]:
    """Create the flow run in Prefect without starting it; return its run directory and the flow run.

    The run directory is named after the flow run's id. The caller needs it before the flow starts, because the flow
    then occupies the main thread while another thread shows its progress. named: the name of a new run that was given
    on the command line, in place of the configuration's with a number. asked_ms: when somebody asked for the run,
    in milliseconds since 1970.
    """
    from prefect.states import Pending

    from onward.flows.train_onnx import train_onnx

    mark_orphaned_runs_crashed()
    with prefect_client() as client:
        flow_run = client.create_flow_run(
            train_onnx,
            name=config.name,
            parameters={**dict(config), "resume": resume},
            tags=[config.model.path.stem, Path(config.data.source).name],
            context={CREATOR: this_process()},
            state=Pending(),
        )
    try:
        run = run_directory_of(flow_run.id, {"resume": resume})
        # the name needs the id of the flow run, which Prefect gives it only now
        wanted = {"wanted": named.name, "instead_of": named.instead_of} if named else {}
        name = name_of(run, config.name, **wanted)
        with prefect_client() as client:
            client.update_flow_run(flow_run.id, name=name)
        enter_phase(run, "start", at_ms=asked_ms)
    except BaseException as error:  # a signal, or no name: Prefect would show a run that never begins
        close_flow_run(flow_run, error)
        raise
    return run, flow_run.model_copy(update={"name": name})


def close_flow_run(flow_run: FlowRun, error: BaseException) -> None:
    """Give a flow run a final state if an error has ended it before it could report one itself.

    That is an error between its creation and its first task, or a signal outside of the flow's own handler.
    """
    from prefect.states import Cancelled, Failed

    asked = isinstance(error, KeyboardInterrupt | SystemExit)
    with contextlib.suppress(Exception), prefect_client() as client:  # the error itself must be shown
        state = client.read_flow_run(flow_run.id).state
        is_open = state is None or not state.is_final()
        # Prefect takes a signal for a crash; that the user has asked for it makes the run Cancelled
        was_crashed = state is not None and state.is_crashed()
        if is_open or (asked and was_crashed):
            what = "before the run began, or after its last task"
            closed: State[object] = Cancelled(message=f"stopped {what}") if asked else Failed(message=str(error))
            client.set_flow_run_state(flow_run.id, closed, force=True)


def mark_orphaned_runs_crashed() -> None:
    """Set flow runs without a process to Crashed in Prefect and KILLED in MLflow, and their tasks with them.

    When a flow's process is killed, or the machine loses power, Prefect goes on showing the run as running, and the
    run uses up its deployment's concurrency limit of 1. A run that was killed before it began is shown as pending.
    """
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.client.schemas.responses import SetStateStatus

    types = ["PENDING", "RUNNING", "CANCELLING"]
    running = {"state": {"type": {"any_": types}}}
    started_before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=10)
    with prefect_client() as client:
        shown = client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": FLOWS}}),
            flow_run_filter=FlowRunFilter.model_validate(running),
        )
        orphans = []
        for flow_run in shown:
            run = run_directory_of(flow_run.id, flow_run.parameters)
            if is_running(run) or not _may_be_orphan(flow_run, run):
                continue
            # A flow run that has just started may not have locked its run directory yet, unless its process is gone.
            if is_gone(flow_run.context.get(CREATOR)) or (flow_run.start_time or started_before) <= started_before:
                orphans.append((flow_run.id, run))
        # one wait for all of them, not one for each
        if orphans:
            time.sleep(ORPHAN_RECHECK_S)
        for flow_run_id, run in orphans:
            state = client.read_flow_run(flow_run_id).state
            if is_running(run) or state is None or state.type.value not in types:
                continue
            final, status = _how_it_ended(flow_run_id, run)
            # Prefect rejects Cancelling -> Crashed unless it is forced. For other states its rejection is wanted: the
            # run has reported its own final state in the meantime.
            result = client.set_flow_run_state(flow_run_id, final, force=state.is_cancelling())
            if result.status == SetStateStatus.ACCEPT:
                _mark_tasks_crashed(client, flow_run_id)
                end_mlflow_run(run, status)


def _how_it_ended(flow_run_id: UUID, run: RunDir) -> tuple[State[object], Status]:
    """Return the final state of a flow run without a process, in Prefect and in MLflow.

    It has recorded how it ended if only Prefect's server could not be told, such as on a full disk; else it was killed.
    """
    from prefect.states import Cancelled, Completed, Crashed, Failed

    ending = ending_of(run)
    if ending is None or ending.flow_run_id != str(flow_run_id):
        return Crashed(message=f"the process was killed; {how_to_continue(run)}"), "KILLED"
    message = "; ".join(ending.problems)
    if ending.status == "completed":
        return Completed(message=message), "FINISHED"
    if ending.status in ("cancelled", "suspended"):
        return Cancelled(message=message), "KILLED"
    return Failed(message=message), "FAILED"


def _may_be_orphan(flow_run: FlowRun, run: RunDir) -> bool:
    """Return whether a flow run that nothing runs belongs to this machine and is not about to begin."""
    if flow_run.state_type == "PENDING":
        # a pending trial waits for its turn as long as its sweep runs
        if flow_run.parent_task_run_id and (trial := membership(run)):
            return not is_running(RunDir(SweepDir.of(trial.sweep_id).root))
        return is_gone(flow_run.context.get(CREATOR))  # a worker's, which has no such entry, is about to begin
    return run.root.exists()


def _mark_tasks_crashed(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Set the tasks to Crashed that a killed flow run has left running."""
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.states import Crashed

    running = {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    with contextlib.suppress(Exception):  # the state of the flow run is what counts
        for task_run in client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [str(flow_run_id)]}}),
            task_run_filter=TaskRunFilter.model_validate(running),
        ):
            crashed: State[object] = Crashed(message="the process was killed")
            client.set_task_run_state(task_run.id, crashed, force=True)


def run_to_end(flow_run: FlowRun, parameters: dict[str, object]) -> ExportedModel:
    """Run a created flow run in this process. Call from the main thread, which receives the signals.

    parameters: of the flow. Raises Stopped when the run was cancelled, KeyboardInterrupt after Ctrl-C, SystemExit after
    SIGTERM, else the error that made it fail.
    """
    from prefect.flow_engine import run_flow

    from onward.flows.running.flow_guard import raise_stop, recorded
    from onward.flows.train_onnx import train_onnx

    run = run_directory_of(flow_run.id, parameters)
    try:
        final_state = run_flow(train_onnx, flow_run=flow_run, parameters=parameters, return_type="state")
        # a state and not a result, because a cancelled run has no result and must end as Stopped
        state = cast("State[ExportedModel]", final_state)
        if state.is_cancelled():
            raise_stop(run, state.message or "")
        # Where an event loop runs, as in a notebook, Prefect would return a coroutine.
        result: ExportedModel = state.result(_sync=True)  # type: ignore[call-overload]
    except Exception as error:
        ending = ending_of(run)
        # the record of an earlier flow of this run says nothing about this one
        is_done = ending and (ending.status, ending.flow_run_id) == ("completed", str(flow_run.id))
        if is_done and run.exported.exists():
            # only Prefect could not be told; the next command tells it
            log.warning(
                "the run is done, but its Prefect server does not answer any more (%s) and shows it as running until "
                "the server and an `onward run` are started again",
                type(error).__name__,
            )
            return read_record(run.exported, ExportedModel)
        # Prefect wraps what a flow raises; the record has the error that came first
        if (own := recorded(error, run)) is error:
            raise
        raise own from error
    return result
