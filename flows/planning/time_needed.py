"""How long a run takes: the time of a step from a measurement, else from a finished run, else from counted FLOPs.

measured    ONWARD_HOME/calibrations/KEY.json, by `onward plan --measure`
run         the event log of the newest finished run with the same structure, settings and machine
estimate    FLOPs / rate of the device: may be wrong by a factor, and says so
"""

from __future__ import annotations

import datetime
import hashlib
import math
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import onnx

from onward.flows.run_state.runs import all_runs, identity_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.model import GraphConfig, ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.row_counts import RowCount
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import OnwardError
from onward.trainer.onnx_graph.files.index import graphs_of
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.parallel.planning.plan_record import Plan
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.machine.this_machine import machine_text
from onward.trainer.run.records import Record, RuntimeReport, read_record
from onward.trainer.run.timing.step_timing import MEASURED, Pace, calibration_file, key_of, pace_of, settings_of_pace

BUSY = 0.7
"""Load average before a measurement, from which on other programs have taken a part of the cores."""
TRIED_RUNS = 200
"""Newest runs in which a pace is looked for."""


class TimeNeeded(Record):
    """How long a run takes, in seconds, from the first line of its training loop."""

    source: Literal["measured", "run", "estimate"]
    said: str
    """Where the time of a step is from, in a sentence."""
    step_s: float
    samples_per_s: float
    per_1000_samples_s: float
    setup_s: float = 0.0
    """Before the first step: loading the model, compiling."""
    steps_s: float | None
    """All steps; None if their number is not known."""
    evaluations: int | None = None
    """How many evaluations there are; None = not known."""
    evaluation_s: float | None = None
    """Of one evaluation; None = not measured."""
    checkpoints: int | None = None
    """How many checkpoints are saved; None = not known."""
    checkpoint_s: float | None = None
    """How long the training waits for one; None = not measured."""
    total_s: float | None
    """All of it; None if the number of steps is not known."""
    guessed: tuple[str, ...] = ()
    """What is not in the total, or not measured for this very run."""


def key_of_run(config: RunConfig) -> str:
    """Return the key under which the pace of this run is stored."""
    hosts = Path(config.launch.hostfile)
    # what decides the speed of the machine, or of the hosts of the hostfile
    machine = machine_text() + (f", hosts {hosts.read_text()}" if hosts.is_file() else "")
    return key_of(structure_digest(config.model.path), settings_of_pace(config), machine)


def known_pace(config: RunConfig) -> Pace | None:
    """Return the pace that was measured for such a run, or that of the newest finished one; None without either."""
    path = calibration_file(key_of_run(config))
    if path.is_file():
        try:
            return read_record(path, Pace)
        except OnwardError:
            path.unlink(missing_ok=True)  # of another version: it is measured again when somebody asks
    settings = settings_of_pace(config)
    structure = structure_digest(config.model.path)
    # newest first, so that the first match is the newest measurement
    for run in all_runs()[:TRIED_RUNS]:
        try:
            if (
                run.train.exists()
                and _is_alike(run, config.model, config.graph, config.launch, settings, structure)
                and (pace := _pace(run))
            ):
                return pace
        except (OnwardError, OSError):
            continue  # a run with a damaged record says nothing
    return None


def _is_alike(
    run: RunDir, model: ModelConfig, graph: GraphConfig, launch: LaunchConfig, settings: object, structure: str
) -> bool:
    own = read_config(run, "given")
    identity = identity_of(run)
    if model.fixed_batch == "auto":  # a rehearsal has chosen it for the run
        own = own.model_copy(update={"model": own.model.model_copy(update={"fixed_batch": "auto"})})
    if graph.compile == "auto":  # likewise
        own = own.model_copy(update={"graph": own.graph.model_copy(update={"compile": "auto"})})
    if identity is None or settings_of_pace(own) != settings or own.launch.hostfile != launch.hostfile:
        return False
    # a hostfile names its hosts; without one the run must have been on this machine
    ranks = read_record(run.runtime, RuntimeReport).ranks
    is_here = bool(own.launch.hostfile) or {rank.host for rank in ranks} == {socket.gethostname()}
    # another torch has other kernels, and so another speed
    if not is_here or {rank.versions.get("torch") for rank in ranks} != {metadata.version("torch")}:
        return False
    if identity.model_sha256 == model_digest(model.path):
        return True
    path = own.model.path  # other weights of the same structure, if the run's file is still there
    return path.is_file() and model_digest(path) == identity.model_sha256 and structure_digest(path) == structure


def _pace(run: RunDir) -> Pace | None:
    own = read_config(run, "given")
    identity = identity_of(run)
    pace = pace_of(RunHistory.of(run.events, series=MEASURED), batch=own.train.global_batch_size)
    if pace is None or identity is None:
        return None
    manifest = run.shards / "manifest.json"
    rows = read_record(manifest, ShardManifest).rows("evaluation") if manifest.exists() else 0
    # train.json is written when the training ends
    ended = datetime.datetime.fromtimestamp(run.train.stat().st_mtime, datetime.UTC)
    # 0 means all rows
    evaluated = own.data.evaluation_rows or rows
    facts = {
        "run": identity.name or identity.run_id,
        "measured_at": ended.isoformat(timespec="seconds"),
        "host": own.launch.hostfile or socket.gethostname(),
        "data": own.data.source,
        "evaluation_rows": min(evaluated, rows),
    }
    return pace.model_copy(update=facts)


ESTIMATED = (
    "the time of a step is estimated from counted FLOPs and the usual rate of the device, and may be wrong by a large "
    "factor, above all for small models; `onward plan --measure` measures it"
)
FOREIGN = (
    "the time of a step is estimated from counted FLOPs, data sheets and the network that was given; of six published "
    "runs of GPT it is within a third, of small models it may be wrong by a large factor"
)


def time_needed(config: RunConfig, plan: Plan, rows: RowCount, pace: Pace | None) -> TimeNeeded:
    """Return how long the run takes. config: with the sizes of the plan. pace: as `known_pace` has found it."""
    batch = config.train.global_batch_size
    steps = number_of_steps(config.train, rows)
    # each thing that is not counted is named, so that the total is not taken for more than it is
    guessed = [*_left_out(config.stop, rows, steps)]
    if pace is None:
        # without a measurement: the FLOPs of a step over the usual rate of the device
        per_second = batch / plan.step_s if plan.step_s else 0.0
        guessed.append(FOREIGN if plan.cluster and plan.cluster.gpu else ESTIMATED)
        steps_s = steps * plan.step_s if steps else None
        return TimeNeeded(
            source="estimate",
            said=f"not measured: estimated from counted FLOPs for {plan.device}",
            step_s=plan.step_s,
            samples_per_s=per_second,
            per_1000_samples_s=1000 / per_second if per_second else 0.0,
            steps_s=steps_s,
            total_s=steps_s,
            guessed=(*guessed, "evaluations, checkpoints and loading the model are not in the total"),
        )
    if pace.data and pace.data != config.data.source:
        guessed.append(f"the time of a step is that of other data, {pace.data}: reading this one may take longer")
    if pace.load > BUSY:
        guessed.append(
            f"other programs were computing when it was measured (load average {pace.load:.1f}); measure again when "
            "the machine is free, if it will be during the run"
        )
    evaluations = number_of_evaluations(config.train, rows)
    evaluation_s = None
    if pace.evaluation_rows and rows.evaluation:
        evaluation_s = pace.evaluation_s * rows.evaluation / pace.evaluation_rows
    else:
        guessed.append("evaluations are not in the total")
    setup_s = pace.setup_s + pace.compile_s
    steps_s = steps * pace.step_s if steps else None
    checkpoints = None
    total_s = None
    if steps_s is not None:
        # checkpoints by time are counted over training and evaluations together, because both pass on the clock
        evaluated_s = (evaluations or 0) * (evaluation_s or 0.0)
        checkpoints = number_of_checkpoints(config.checkpoint, steps or 0, steps_s + evaluated_s)
        total_s = setup_s + steps_s + evaluated_s + checkpoints * pace.checkpoint_s
    return TimeNeeded(
        source="run" if pace.run else "measured",
        said=_said(pace),
        step_s=pace.step_s,
        samples_per_s=batch / pace.step_s,
        per_1000_samples_s=1000 * pace.step_s / batch,
        setup_s=setup_s,
        steps_s=steps_s,
        evaluations=evaluations,
        evaluation_s=evaluation_s,
        checkpoints=checkpoints,
        checkpoint_s=pace.checkpoint_s,
        total_s=total_s,
        guessed=tuple(guessed),
    )


def _said(pace: Pace) -> str:
    number = f"{pace.steps} step{'s' * (pace.steps != 1)}"
    if pace.run:
        return f"that of run {pace.run} on {pace.host}, which ended at {pace.measured_at}: {number}"
    return f"measured at {pace.measured_at} on {pace.host}: {number}"


def _left_out(stop: StopConfig, rows: RowCount, steps: int | None) -> Iterator[str]:
    if steps is None:
        yield f"the number of rows is {rows.source}; so is the number of steps"
    if stop.max_hours:
        yield f"stop.max_hours ends the training after {stop.max_hours:g} h at the latest"
    if stop.patience or stop.target is not None:
        yield "[stop] may end the training earlier"
    yield "checks, sharding and launching before the training, and the export behind it, are not in the total"


def number_of_steps(train: TrainConfig, rows: RowCount) -> int | None:
    """Return the steps of the run; None if they depend on rows that were not counted."""
    return train.steps_of_run(rows.train) if train.num_steps or rows.train else None


def number_of_evaluations(train: TrainConfig, rows: RowCount) -> int | None:
    """Return how often the run evaluates, before the first and after the last step included; None = not known."""
    steps = number_of_steps(train, rows)
    period = train.evaluation_period
    if steps is None or (period == "epoch" and not rows.train):
        return None
    if period == "epoch":
        # one before the first step, one behind each epoch, and one behind a last epoch that is not whole
        full, rest = divmod(train.samples_of_run(rows.train), rows.train)
        return 1 + full + bool(rest)
    return 1 + (math.ceil(steps / period) if period else 1)


def number_of_checkpoints(checkpoint: CheckpointConfig, steps: int, trained_s: float) -> int:
    """Return how many checkpoints the run saves in all."""
    # saving by time counts only where saving by step does not happen
    by_step = steps // checkpoint.period if checkpoint.period else 0
    by_time = int(trained_s / (60 * checkpoint.minutes)) if checkpoint.minutes and not by_step else 0
    # the last step is saved in any case, and not twice if its turn comes then
    is_last_saved = checkpoint.period and by_step and steps % checkpoint.period == 0
    return by_step + by_time + (not is_last_saved)


# -- the digest of a model's structure: what it computes, whatever values its trained weights have

KEPT_VALUES = 64
"""Integers in small tensors are shapes and axes, which belong to the structure."""
FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def structure_digest(path: Path) -> str:
    """Return a SHA-256 of the nodes, and of the names, types and shapes of the tensors; equal for other weights."""
    model = read_model(path)
    model.ClearField("metadata_props")
    model.ClearField("doc_string")
    for graph in graphs_of(model.graph):
        for tensor in graph.initializer:
            # floats may be trained, and many integers may be a quantized weight
            if tensor.data_type in FLOATS or math.prod(tensor.dims) > KEPT_VALUES:
                bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
                tensor.CopyFrom(bare)
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
