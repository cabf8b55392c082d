"""A flow run in this process, as a terminal wants it: its server, its log lines, its end.

Prefect reads its environment when it is imported, so the imports of Prefect here are inside functions.
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

from onward.flows.runs import close_mlflow, is_owned, run_of
from onward.infra import services, supervisor
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable, Stopped
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.records import ExportedModel

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

SECOND_LOOK_S = 2.0
"""Between finding a run without an owner and calling it dead: one that is just leaving says itself how it ended."""


@contextlib.contextmanager
def prefect_server(*, start: bool = True) -> Iterator[str]:
    """The Prefect API to use inside: the configured one, else that of Onward's own server, held by a lease.

    Sets the environment that Prefect and MLflow read. Raises RuntimeUnavailable, also when Onward's own
    server and its worker do not both run and may not be started.
    """
    home = onward_home()
    with contextlib.ExitStack() as held:
        try:
            if url := services.configured_prefect():
                services.check_reachable(url)
                told = {**supervisor.QUIET, "PREFECT_API_URL": url, "ONWARD_HOME": str(home)}
            else:
                held.enter_context(services.lease(home))
                if not start and not {"prefect", "worker"} <= services.running(home).keys():
                    raise services.ServiceError("no Prefect server with a worker is running: start it with `onward up`")
                if "prefect" not in services.running(home):
                    print("onward: starting a Prefect server of its own", file=sys.stderr)
                server = services.ensure(home, ["prefect"])["prefect"]
                told = supervisor.environment(home, prefect_url=server)
        except services.ServiceError as error:
            raise RuntimeUnavailable(str(error)) from None
        os.environ.update(told)
        yield told["PREFECT_API_URL"]


def announce(config: RunConfig, *, resume: str = "") -> tuple[RunDir, FlowRun]:
    """Tell Prefect of a flow run that is about to start; returns its run directory too.

    Known beforehand, so that a terminal can follow the directory while the flow holds the main thread.
    """
    from prefect.client.orchestration import get_client
    from prefect.states import Pending

    from onward.flows.train_onnx import train_onnx

    bury_the_dead()
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(
            train_onnx,
            name=config.name,
            parameters={**dict(config), "resume": resume},
            tags=[config.model.path.stem, Path(config.data.source).name],
            state=Pending(),
        )
    return run_of(flow_run.id, {"resume": resume}), flow_run


def bury_the_dead() -> None:
    """Mark as Crashed, and KILLED in MLflow, what Prefect shows as running though nobody works on it any more.

    A process that was killed, or a machine that lost power, leaves such runs; they would be shown as running
    for ever, and hold their deployment's only slot.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Crashed

    types = ["RUNNING", "CANCELLING"]
    running = {"state": {"type": {"any_": types}}}
    just_now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=10)
    with get_client(sync_client=True) as client:
        shown = client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": ["train-onnx"]}}),
            flow_run_filter=FlowRunFilter.model_validate(running),
        )
        ownerless = [
            (flow_run.id, run)
            for flow_run in shown
            if (run := run_of(flow_run.id, flow_run.parameters)).root.exists()  # absent: another machine's
            and not is_owned(run)
            and (flow_run.start_time or just_now) <= just_now  # else it may be about to own it
        ]
        if ownerless:
            time.sleep(SECOND_LOOK_S)
        for flow_run_id, run in ownerless:
            state = client.read_flow_run(flow_run_id).state
            if is_owned(run) or state is None or state.type.value not in types:
                continue
            message = f"its process was killed; to go on: onward resume {run.root.name}"
            # a cancelled run stays Cancelling unless forced; a running one that just ended keeps its own end
            died: State[object] = Crashed(message=message)
            answer = client.set_flow_run_state(flow_run_id, died, force=state.is_cancelling())
            if answer.status == SetStateStatus.ACCEPT:
                close_mlflow(run, "KILLED")


def run_here(flow_run: FlowRun, config: RunConfig, *, resume: str = "") -> ExportedModel:
    """Run an announced flow run to its end, in this process's main thread.

    Raises Stopped when it was asked to stop, and whatever made it fail.
    """
    from prefect.flow_engine import run_flow

    from onward.flows.train_onnx import train_onnx

    parameters = {**dict(config), "resume": resume}
    ending = run_flow(train_onnx, flow_run=flow_run, parameters=parameters, return_type="state")
    state = cast("State[ExportedModel]", ending)
    if state.is_cancelled():
        raise Stopped(state.message or "stopped as asked")
    return state.result()


@contextlib.contextmanager
def readable_log(run: RunDir) -> Iterator[None]:
    """Onward's own lines to stderr; everything, Prefect's chatter and tracebacks too, to RUN_DIR/flow.log."""
    import prefect.main  # noqa: F401  its import sets up the loggers that are changed here

    run.root.mkdir(parents=True, exist_ok=True)
    everything = logging.FileHandler(run.root / "flow.log")
    everything.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler()
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.addFilter(lambda record: record.name.startswith("onward."))
    root = logging.getLogger()
    before, root.handlers = root.handlers, [everything, terminal]  # Prefect's console handler is on the root
    logging.getLogger("onward").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = before
        everything.close()
