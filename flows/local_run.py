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

from onward.flows.runs import command_to_continue, end_mlflow_run, is_running, run_directory_of
from onward.infra import service_definitions, services
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable, Stopped
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.private_home import make_private
from onward.trainer.run.records import ExportedModel, read_record
from onward.trainer.run.sweeps import Sweep, SweepDir

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

ORPHAN_RECHECK_S = 2.0
"""Seconds between the two checks that no process runs a flow run. A flow that is just ending releases its lock some
moments before it reports its final state."""


@contextlib.contextmanager
def prefect_server(*, start: bool = True) -> Iterator[str]:
    """Yield the URL of a Prefect API: of the configured server, else of Onward's own, which is started if needed.

    Sets the environment variables that Prefect and MLflow read, and keeps Onward's own server running inside. Raises
    RuntimeUnavailable when the server cannot be reached or started, and with `start=False` when Onward's own server
    and its worker do not both run.
    """
    home = onward_home()
    make_private(home)
    with contextlib.ExitStack() as stack:
        try:
            if url := services.configured_prefect():
                services.check_reachable(url)
                environment = {**service_definitions.CLIENT_SETTINGS, "PREFECT_API_URL": url, "ONWARD_HOME": str(home)}
            else:
                stack.enter_context(services.lease(home))
                if not start and not {"prefect", "worker"} <= services.running(home).keys():
                    raise services.ServiceError("no Prefect server with a worker runs; start both with `onward up`")
                if "prefect" not in services.running(home):
                    print("onward: starting a Prefect server on 127.0.0.1", file=sys.stderr)
                server = services.ensure(home, ["prefect"])["prefect"]
                stack.enter_context(services.kept_running(home, "prefect", server))
                environment = service_definitions.environment(home, prefect_url=server)
        except services.ServiceError as error:
            raise RuntimeUnavailable(str(error)) from None
        before = dict(os.environ)
        os.environ.update(environment)
        _reread_prefect_settings()
        try:
            yield environment["PREFECT_API_URL"]
        finally:
            # Else PREFECT_API_URL would name Onward's own server, which ends, as the one that the user configured.
            for name in environment:
                os.environ.pop(name)
                os.environ.update({name: before[name]} if name in before else {})


def _reread_prefect_settings() -> None:
    """Let Prefect read the environment again, if it was imported before: a script may call `onward.run` twice."""
    if "prefect.context" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def create_flow_run(config: RunConfig, *, resume: str = "") -> tuple[RunDir, FlowRun]:
    """Create the flow run in Prefect without starting it; return its run directory and the flow run.

    The run directory is named after the flow run's id. The caller needs it before the flow starts, because the flow
    then occupies the main thread while another thread shows its progress.
    """
    from prefect.client.orchestration import get_client
    from prefect.states import Pending

    from onward.flows.train_onnx import train_onnx

    mark_orphaned_runs_crashed()
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(
            train_onnx,
            name=config.name,
            parameters={**dict(config), "resume": resume},
            tags=[config.model.path.stem, Path(config.data.source).name],
            state=Pending(),
        )
    return run_directory_of(flow_run.id, {"resume": resume}), flow_run


def mark_orphaned_runs_crashed() -> None:
    """Set flow runs without a process to Crashed in Prefect and KILLED in MLflow.

    When a flow's process is killed, or the machine loses power, Prefect goes on showing the run as running, and the
    run uses up its deployment's concurrency limit of 1.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Crashed

    types = ["RUNNING", "CANCELLING"]
    running = {"state": {"type": {"any_": types}}}
    started_before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=10)
    with get_client(sync_client=True) as client:
        shown = client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": ["train-onnx", "sweep-onnx"]}}),
            flow_run_filter=FlowRunFilter.model_validate(running),
        )
        orphans = [
            (flow_run.id, run)
            for flow_run in shown
            if (run := run_directory_of(flow_run.id, flow_run.parameters)).root.exists()  # else another machine runs it
            and not is_running(run)
            # A flow run that has just started may not have locked its run directory yet.
            and (flow_run.start_time or started_before) <= started_before
        ]
        # one wait for all of them, not one for each
        if orphans:
            time.sleep(ORPHAN_RECHECK_S)
        for flow_run_id, run in orphans:
            state = client.read_flow_run(flow_run_id).state
            if is_running(run) or state is None or state.type.value not in types:
                continue
            message = f"the process was killed; to continue: {command_to_continue(run)}"
            crashed: State[object] = Crashed(message=message)
            # Prefect rejects Cancelling -> Crashed unless it is forced. For other states its rejection is wanted: the
            # run has reported its own final state in the meantime.
            result = client.set_flow_run_state(flow_run_id, crashed, force=state.is_cancelling())
            if result.status == SetStateStatus.ACCEPT:
                end_mlflow_run(run, "KILLED")


def run_to_end(flow_run: FlowRun, config: RunConfig, *, resume: str = "") -> ExportedModel:
    """Run a created flow run in this process. Call from the main thread, which receives the signals.

    Raises Stopped when the run was cancelled or interrupted, else the error that made it fail.
    """
    from prefect.flow_engine import run_flow

    from onward.flows.train_onnx import train_onnx

    parameters = {**dict(config), "resume": resume}
    final_state = run_flow(train_onnx, flow_run=flow_run, parameters=parameters, return_type="state")
    # a state and not a result, because a cancelled run has no result and must end as Stopped
    state = cast("State[ExportedModel]", final_state)
    if state.is_cancelled():
        raise Stopped(state.message or "the run was stopped")
    # Where an event loop runs, as in a notebook, Prefect would return a coroutine.
    result: ExportedModel = state.result(_sync=True)  # type: ignore[call-overload]
    return result


def run_sweep(folder: SweepDir) -> None:
    """Run the flow of a sweep in this process. Call from the main thread, which receives the signals.

    Raises Stopped when the sweep or one of its trials was cancelled, else the error that made it fail.
    """
    import prefect

    from onward.flows.sweep import sweep_onnx

    mark_orphaned_runs_crashed()
    name = read_record(folder.sweep, Sweep).name
    with prefect.tags("sweep"), readable_log(RunDir(folder.root)):
        state = sweep_onnx(folder.root.name, name=name, return_state=True)
    if state.is_cancelled():
        raise Stopped(state.message or "the sweep was stopped")
    state.result(_sync=True)  # type: ignore[call-overload]


@contextlib.contextmanager
def readable_log(run: RunDir) -> Iterator[None]:
    """Write Onward's own log lines to stderr, and all lines with tracebacks to RUN_DIR/flow.log."""
    import prefect.main  # noqa: F401  this import configures the loggers that are changed below

    run.root.mkdir(parents=True, exist_ok=True)
    log_file = logging.FileHandler(run.root / "flow.log")
    log_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler()
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.addFilter(lambda record: record.name.startswith("onward."))
    root = logging.getLogger()
    before, root.handlers = root.handlers, [log_file, terminal]  # this removes Prefect's console handler
    logging.getLogger("onward").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = before
        log_file.close()
