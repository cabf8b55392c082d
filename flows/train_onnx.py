"""The flow `train-onnx`: the seven tasks of a run, in their order. Read this file first.

    configure -> init runtime -> shard data -> train -> export
                                        |       (beside it:)
                                        +-----> monitor, checkpoint

Each task gets the run directory, does one thing, and writes one record there for the tasks after it. Prefect passes
only paths and small records between them. Every task can be repeated: what the run directory holds already is reused.
"""

from __future__ import annotations

import datetime
import logging
import signal
import uuid
from pathlib import Path
from typing import Any, cast

from prefect import State, flow, runtime
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.flows import Flow
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner

from onward.flows.deploying.approval import ask_for_approval
from onward.flows.deploying.deployment_limits import check_limits
from onward.flows.form import Closed, settings_of
from onward.flows.run_reports.at_the_end import reported
from onward.flows.run_state.flow_log import own_log
from onward.flows.run_state.runs import command_to_continue, end_mlflow_run, how_to_continue, locked, run_directory_of
from onward.flows.running.cancellation import stopped_from_prefect
from onward.flows.running.flow_guard import Ending
from onward.flows.running.flow_in_store import stored
from onward.infra.job.forks import fork_server
from onward.infra.mlflow.tracking import Status
from onward.tasks.attempts.explained_errors import explain_errors
from onward.tasks.checkpoint import checkpoint as keep_checkpoints
from onward.tasks.configure import configure
from onward.tasks.export import export as export_model
from onward.tasks.init_runtime import init_runtime
from onward.tasks.monitor import monitor as monitor_training
from onward.tasks.shard_data import shard_data
from onward.tasks.train import BY_SIGTERM
from onward.tasks.train import train as train_model
from onward.trainer.checkpoint.retention import announced
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import MetricConfig, StopConfig
from onward.trainer.config.sections.model import GraphConfig, LoraConfig, ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig, RecomputeConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig, MonitorConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import (
    AverageConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from onward.trainer.errors import ConfigError, OnwardError, Stopped
from onward.trainer.run.directory import RunDir
from onward.trainer.run.names import name_of
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.recorded.sweep_records import Pruned, membership
from onward.trainer.run.records import ExportedModel, TrainResult, read_record
from onward.trainer.run.timing.phases import enter_phase

log = logging.getLogger(__name__)

MISSED_AFTER = datetime.timedelta(hours=1)
"""A scheduled run that would start later than this is skipped: after an outage of many hours one run is enough."""

MOST_ATTEMPTS = 100_000
"""Prefect's limit of retries, which is never reached: the condition of the task `train` ends them."""


def end_mlflow_run_as(status: Status) -> Any:
    """Return a state hook that sets the MLflow run's status; Prefect calls it even when the flow itself has crashed."""

    def hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        end_mlflow_run(run_directory_of(flow_run.id, flow_run.parameters), status)

    return hook


def name_of_flow_run() -> str:
    """Return the name of the run that a flow run trains, such as `mlp-14`: its name in Prefect."""
    parameters = runtime.flow_run.get_parameters()
    name = str(parameters.get("name", "onward"))
    try:
        run = run_directory_of(runtime.flow_run.get_id(), parameters)
        return name_of(run, name, wanted=name if membership(run) else "")
    except (OnwardError, OSError):  # an error here would be no task's; `configure` takes the name, and raises it
        return name


@flow(
    name="train-onnx",
    flow_run_name=name_of_flow_run,
    # threads are enough: the tasks beside training mostly wait for files and servers
    task_runner=ThreadPoolTaskRunner(max_workers=4),  # type: ignore[arg-type]  # its type names one kind of future
    on_completion=[end_mlflow_run_as("FINISHED")],
    on_failure=[end_mlflow_run_as("FAILED")],
    on_crashed=[end_mlflow_run_as("KILLED")],
    on_cancellation=[end_mlflow_run_as("KILLED")],
)
def train_onnx(
    # In the order of Prefect's form: the sections with the settings that most runs set, which are marked COMMON; then
    # the others, which are closed there.
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    optimizer: OptimizerConfig = OptimizerConfig(),
    parallel: ParallelConfig = ParallelConfig(),
    name: str = "onward",
    schedule: Closed[ScheduleConfig] = None,
    precision: Closed[PrecisionConfig] = None,
    checkpoint: Closed[CheckpointConfig] = None,
    stop: Closed[StopConfig] = None,
    export: Closed[ExportConfig] = None,
    metrics: tuple[MetricConfig, ...] = (),
    loss: tuple[LossConfig, ...] = (),
    lora: Closed[LoraConfig] = None,
    average: Closed[AverageConfig] = None,
    teacher: Closed[TeacherConfig] = None,
    quantize: Closed[QuantizeConfig] = None,
    graph: Closed[GraphConfig] = None,
    recompute: Closed[RecomputeConfig] = None,
    launch: Closed[LaunchConfig] = None,
    monitor: Closed[MonitorConfig] = None,
    resume: str = "",
) -> ExportedModel | State[Any]:
    """Train an ONNX model on MPI ranks and return the same file with trained weights, verified.

    Prefect's form describes the sections and their settings with the docstrings in trainer/config/sections/.

    Args:
        name: The configuration's name, else its model's. Its runs are NAME-1, NAME-2 ... in Prefect, MLflow and lists.
        resume: The id of a run to continue, with the configuration it began with; empty = a new run. A trial of a
            sweep begins in the directory that the sweep has made.
    """
    settings = settings_of(dict(locals()))  # the parameters above are the only list of sections here
    explain_errors()
    if is_missed(runtime.flow_run.get_scheduled_start_time(), tags=runtime.flow_run.get_tags()):
        return Cancelled(message=f"skipped: the scheduled start was over {MISSED_AFTER} ago")
    deployment = runtime.deployment.get_id()
    allowed = check_limits(deployment, settings) if deployment else None
    run = run_directory(resume)
    # for the whole flow: a retry or a resume in another process must not work in the same directory
    with (
        locked(run),
        fork_server(),  # of a run from the command line it is there already
        own_log(run),
        stored(run),
        reported(run),
        Ending(run) as ending,
        stopped_from_prefect(run) as request,
    ):
        enter_phase(run, "configure")
        configure(run, settings, allowed)
        enter_phase(run, "preflight")
        init_runtime(run)
        enter_phase(run, "data")
        shard_data(run)
        enter_phase(run, "train")
        # in threads, beside training
        monitoring = monitor_training.submit(run)
        keeping = keep_checkpoints.submit(run)
        try:
            # In this, the main thread: only it receives Ctrl-C, SIGTERM and Prefect's cancellation.
            # How many retries there are depends on their progress, so the task itself counts them, and pauses.
            trained = train_model.with_options(retries=MOST_ATTEMPTS)(run, return_state=True)
        finally:
            run.close_log()  # ends monitor and checkpoint, however training ended
            try:
                monitoring.wait()
            finally:  # of a suspended run, `wait` raises Pause
                keeping.wait()
        error = monitoring.result(raise_on_failure=False)
        # of a disk that has ended the training, too, one sentence is enough
        if isinstance(error, Exception) and not (trained.is_failed() and storage_error(error, run.root)):
            log.error(
                "the monitor failed, and MLflow lacks the newest metrics; `%s` sends them: %s: %s",
                *(command_to_continue(run), type(error).__name__, error),
            )
        if trained.is_cancelled() and trained.message == BY_SIGTERM:
            raise TerminationSignal(signal.SIGTERM)
        if trained.is_cancelled() and run.pruned.exists():
            raise Stopped(read_record(run.pruned, Pruned).reason)
        if trained.is_cancelled():
            raise Stopped(f"stopped; {how_to_continue(run)}")
        request.check()
        keeping.result()  # raises the error of the checkpoint task, if it failed
        result = cast(TrainResult, trained.result())  # raises that of the training
        if (trial := membership(run)) and not trial.exports:
            return Completed(message=f"trial {trial.number} is trained; the best trial of the sweep is exported")
        enter_phase(run, "export")
        exported = export_model(run, result, announced(run))
        enter_phase(run, "approval")
        return ask_for_approval(run, exported)
    return ending.cancelled  # Ctrl-C, SIGTERM, or Stopped


def run_directory(resume: str = "") -> RunDir:
    """Return the directory of this flow run, or of the run `resume`. Raises ConfigError if that run does not exist."""
    if resume and (Path(resume).name != resume or resume == ".."):
        raise ConfigError(f"resume {resume!r} is not the id of a run; `onward runs` lists the runs")
    run = run_directory_of(runtime.flow_run.get_id() or uuid.uuid4(), {"resume": resume})
    if resume and not run.config.exists() and not run.trial.exists():
        raise ConfigError(f"there is no run {resume} under {run.root.parent}; `onward runs` lists the runs")
    return run


def is_missed(scheduled_at: datetime.datetime, *, tags: list[str]) -> bool:
    """Return whether a schedule created this run and its time is over an hour ago.

    A retry of a run that has begun is not missed. It has begun when its directory exists, even if its configuration
    was refused.
    """
    began = run_directory().root.exists()
    late = datetime.datetime.now(datetime.UTC) - scheduled_at > MISSED_AFTER
    return "auto-scheduled" in tags and late and not began
