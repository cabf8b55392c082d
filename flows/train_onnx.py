"""train-onnx: the whole job, seven tasks in order. Read this file first.

Each task takes the run directory, does one thing, and leaves one record there for the next; what flows
through Prefect is paths and small records. Any task can be repeated: the run directory knows what is done.
"""

from __future__ import annotations

import datetime
import logging
import uuid
from typing import Any, cast

from prefect import State, flow, runtime
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from onward.flows.runs import close_mlflow, exclusively, run_of
from onward.infra.tracking import Status
from onward.tasks.checkpoint import checkpoint as keep_checkpoints
from onward.tasks.configure import configure
from onward.tasks.export import export as export_model
from onward.tasks.init_runtime import init_runtime
from onward.tasks.monitor import monitor as watch
from onward.tasks.shard_data import shard_data
from onward.tasks.train import train as train_model
from onward.trainer.checkpoint.manifest import announced
from onward.trainer.config.sections import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    GraphConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    TrainConfig,
)
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, TrainResult

log = logging.getLogger(__name__)

MISSED_AFTER = datetime.timedelta(hours=1)
"""A scheduled run that starts later than this is skipped: after a night without power one run is enough."""


def closing(status: Status) -> Any:
    """A hook that says in MLflow how the flow run ended, though nothing in the flow may be left to say it."""

    def close(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        close_mlflow(run_of(flow_run.id, flow_run.parameters), status)

    return close


@flow(
    name="train-onnx",
    flow_run_name="{name}",
    task_runner=ThreadPoolTaskRunner(max_workers=4),  # type: ignore[arg-type]  # of whatever futures
    on_completion=[closing("FINISHED")],
    on_failure=[closing("FAILED")],
    on_crashed=[closing("KILLED")],
    on_cancellation=[closing("KILLED")],
)
def train_onnx(
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    graph: GraphConfig = GraphConfig(),
    lora: LoraConfig = LoraConfig(),
    precision: PrecisionConfig = PrecisionConfig(),
    optimizer: OptimizerConfig = OptimizerConfig(),
    schedule: ScheduleConfig = ScheduleConfig(),
    parallel: ParallelConfig = ParallelConfig(),
    recompute: RecomputeConfig = RecomputeConfig(),
    launch: LaunchConfig = LaunchConfig(),
    checkpoint: CheckpointConfig = CheckpointConfig(),
    monitor: MonitorConfig = MonitorConfig(),
    export: ExportConfig = ExportConfig(),
    name: str = "onward",
    resume: str = "",
) -> ExportedModel | State[Any]:
    """Train an ONNX model on MPI ranks and give back the same file with better weights, proven.

    Args:
        model: The ONNX file and its loss.
        data: Where samples come from, and which column feeds which input.
        train: How long, and how much at a time.
        graph: How the imported graph is computed.
        lora: Low-rank adapters, instead of training whole weights.
        precision: The arithmetic of forward and backward.
        optimizer: The update rule.
        schedule: The learning rate over the steps.
        parallel: How the ranks divide the work.
        recompute: Activations computed again instead of kept.
        launch: How the ranks are started, and what is done when they fail.
        checkpoint: When to save, what to keep.
        monitor: What is recorded, and where.
        export: Which weights are written back, and what the file must pass.
        name: The run's name in Prefect, MLflow and the run list.
        resume: The id of a run to go on with, unchanged; empty = a new run.
    """
    if missed(runtime.flow_run.get_scheduled_start_time(), tags=runtime.flow_run.get_tags()):
        return Cancelled(message=f"missed: it should have started over {MISSED_AFTER} ago")
    sections = {
        "model": model,
        "data": data,
        "train": train,
        "graph": graph,
        "lora": lora,
        "precision": precision,
        "optimizer": optimizer,
        "schedule": schedule,
        "parallel": parallel,
        "recompute": recompute,
        "launch": launch,
        "checkpoint": checkpoint,
        "monitor": monitor,
        "export": export,
    }
    run = run_directory(resume)
    with exclusively(run):
        configure(run, name, sections)
        init_runtime(run)
        shard_data(run)
        watching, keeping = watch.submit(run), keep_checkpoints.submit(run)  # beside the training
        try:
            # here, in the main thread: the one that gets Ctrl-C, SIGTERM and Prefect's cancellation
            trained = train_model.with_options(retries=launch.retries, retry_delay_seconds=launch.retry_delay_s)(
                run, return_state=True
            )
        finally:
            run.close_log()  # however training ended, the watchers end too
            watching.wait()
            keeping.wait()
        if isinstance(died := watching.result(raise_on_failure=False), Exception):
            log.error("the monitor died, the event log has what it did not ship: %s: %s", type(died).__name__, died)
        if trained.is_cancelled():
            return Cancelled(message=f"stopped as asked; to go on: onward resume {run.root.name}")
        keeping.result()  # raises what went wrong with the checkpoints
        return export_model(run, cast(TrainResult, trained.result()), announced(run))


def run_directory(resume: str = "") -> RunDir:
    """The directory of this flow run, named after it; that of another run to `resume`, which must exist."""
    run = run_of(runtime.flow_run.get_id() or uuid.uuid4(), {"resume": resume})
    if resume and not run.config.exists():
        raise ConfigError(f"there is no run {resume} under {run.root.parent}; `onward runs` lists them")
    return run


def missed(scheduled_at: datetime.datetime, *, tags: list[str]) -> bool:
    """Whether a schedule made this run and its time is long past; a retry of a run that began is not missed."""
    began = run_directory().root.exists()  # even one that was refused before it had a configuration
    late = datetime.datetime.now(datetime.UTC) - scheduled_at > MISSED_AFTER
    return "auto-scheduled" in tags and late and not began
