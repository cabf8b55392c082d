"""One trial of a sweep: begin it, train it from where it is, and read its result."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from prefect import State

from onward.flows.live_view.view import live_view
from onward.flows.run_state.flow_log import flow_log
from onward.flows.sweeps.choice import choose_settings
from onward.flows.train_onnx import train_onnx
from onward.tasks.export import choose
from onward.tasks.promotion.pruning import history
from onward.trainer.checkpoint.retention import announced
from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import (
    ConfigError,
    DataError,
    DeviceAssertion,
    Diverged,
    OutOfMemory,
    TrainingFailed,
    UnsupportedModel,
)
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.sweep_records import Membership, Pruned, Sweep, SweepDir, Trial
from onward.trainer.run.records import RunIdentity, TrainResult, read_record, record_if_written, write_record

RESULTS = (ConfigError, DataError, UnsupportedModel, Diverged, OutOfMemory, DeviceAssertion, TrainingFailed)
"""Errors that can come from the settings of a trial. Any other one, such as of a full disk, ends the sweep, and the
trial goes on when it is resumed."""
DATA_SECTIONS = ("model", "data", "loss", "graph", "lora")
"""Sections that decide what the shards contain."""


def trial_config(sweep: Sweep, trial: Trial) -> RunConfig:
    """Return the configuration of a trial. All trials register under the sweep's name, and have names of their own."""
    config = load_config(sweep.settings, trial.settings.items())
    # the best trial becomes a version of one model, whatever trial it is
    export = config.export.model_copy(update={"register_as": config.registered_name})
    monitor = config.monitor.model_copy(update={"tracking_uri": sweep.tracking_uri})
    name = f"{sweep.name}-{trial.number}"
    return config.model_copy(update={"name": name, "export": export, "monitor": monitor})


def begin(folder: SweepDir, plan: Sweep, number: int) -> Trial:
    """Return a trial as it is recorded; of a new one, choose the settings and write its record."""
    if known := record_if_written(folder.trial(number), Trial):
        return known
    # chosen once and written before the trial begins: a resumed sweep must not choose again
    settings = choose_settings(plan, number, folder.trials(), lambda trial: history(trial, plan.metric))
    trial = Trial(number=number, run_id=str(uuid.uuid4()), settings=settings)
    write_record(folder.trial(number), trial)
    return trial


def train(trial: Trial, plan: Sweep, identity: RunIdentity, *, exports: bool = False) -> State[Any] | None:
    """Run a trial's flow, from where it is; return its final state, or None if it was pruned before."""
    run = trial.run
    # a resumed sweep finds the decision, and does not train the trial again
    if run.pruned.exists() and not exports:
        return None
    run.root.mkdir(parents=True, exist_ok=True)
    member = Membership(
        sweep_id=plan.sweep_id, number=trial.number, mlflow_run_id=identity.mlflow_run_id, exports=exports
    )
    write_record(run.trial, member)
    with flow_log(run) as terminal, live_view(run, stream=terminal):
        config = trial_config(plan, trial)
        state: State[Any] = train_onnx(**dict(config), resume=trial.run_id, return_state=True)
    return state


def result_of(trial: Trial, plan: Sweep, state: State[Any] | None, *, first: Trial) -> Trial:
    """Return the trial with its result. Raises every other error than those of RESULTS."""
    run = trial.run
    trained = record_if_written(run.train, TrainResult)
    known: dict[str, Any] = {"ended_at_ms": time.time_ns() // 1_000_000}
    if trained:
        known |= {"step": trained.step, "elapsed_s": trained.elapsed_s}
    if run.pruned.exists() and not (state is not None and state.is_completed()):  # else it was done before it stopped
        pruned = read_record(run.pruned, Pruned)
        return trial.model_copy(update={**known, "status": "pruned", "reason": pruned.reason})
    assert state is not None
    try:
        if not state.is_completed():
            state.result()  # raises the error of the run
        # of the checkpoint that would be exported, because that is what the best trial would give
        value = value_of(run, plan)
        refuse_other_ground(trial, first, plan)
    except RESULTS as error:
        failed = {
            "status": "failed",
            "reason": str(error).splitlines()[0],
            "step": known.get("step", last_beat(run.heartbeat).step),
        }
        return trial.model_copy(update={**known, **failed})
    return trial.model_copy(update={**known, "status": "complete", "value": value})


def value_of(run: RunDir, plan: Sweep) -> float:
    """Return the metric of the checkpoint that would be exported. Raises ConfigError if it has none."""
    chosen = choose(announced(run), read_config(run, "given").export.checkpoint)
    value = chosen.metrics.get(plan.metric, math.nan)
    if not math.isfinite(value):
        known = ", ".join(sorted(chosen.metrics))
        raise ConfigError(f"{plan.metric} of {chosen.path.name} is {value}; it has {known}")
    return value


def refuse_other_ground(trial: Trial, first: Trial, plan: Sweep) -> None:
    """Raise ConfigError when a trial began with another model file or other data than the first one did."""
    if first.number == trial.number or not first.run.identity.exists():
        return
    before, now = (read_record(each.run.identity, RunIdentity).model_sha256 for each in (first, trial))
    if "model.path" not in plan.tried and before != now:
        raise ConfigError(
            f"the model file changed while the sweep ran: SHA-256 {now[:12]}, of trial {first.number} {before[:12]}"
        )
    # trials that vary such a setting have other shards by intention
    if any(key.partition(".")[0] in DATA_SECTIONS for key in plan.tried) or not first.run.shards.is_symlink():
        return
    # the shard cache names a directory by the key of its content
    before, now = (each.run.shards.readlink().name for each in (first, trial))
    if before != now:
        raise ConfigError(
            f"the data changed while the sweep ran: key {now[:12]}, of trial {first.number} {before[:12]}"
        )
