"""THE TRAINING LOOP: one function, read from top to bottom.

Every rank runs it. Only rank 0 writes the event log and the result; of other files each rank writes its own. A *step*
is one weight update. The sample stream, the dropout masks and the learning rate depend on the seed and the position
alone, so a run that was killed and resumed ends with the same bits as one that ran without interruption.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from onward.trainer.checkpoint.background import CheckpointWriter
from onward.trainer.checkpoint.consistency import check_copies
from onward.trainer.checkpoint.load import load, verify_together
from onward.trainer.checkpoint.resume import find_resume_point
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches, evaluation_batches
from onward.trainer.data.losses_from_data import with_losses_from_data
from onward.trainer.data.signature import read_training_signature
from onward.trainer.data.storage.shards import open_shards
from onward.trainer.data.text.byte_counts import with_bytes_of_targets
from onward.trainer.distributed.arithmetic import set_arithmetic
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import check_fit
from onward.trainer.errors import Diverged, ReplicasDiffer
from onward.trainer.events import ConfusionMatrix, Ended, Evaluated, EventWriter, Heartbeat, NonFiniteLoss, Started
from onward.trainer.model.compile import compiled_s, why_compiled
from onward.trainer.model.metrics.measures import Counts
from onward.trainer.model.metrics.metrics import EvaluationMetrics
from onward.trainer.model.precision import autocast
from onward.trainer.model.soft_labels import with_soft_labels
from onward.trainer.model.summaries import summarise
from onward.trainer.model.teacher import open_with_teacher
from onward.trainer.optim.averages import Averages, average_shapes
from onward.trainer.optim.loss_scaler import LossScaler
from onward.trainer.optim.optimizers import build_optimizer, clip_factor, set_learning_rate
from onward.trainer.optim.schedules import learning_rate
from onward.trainer.optim.state import load_optimizer_parts, optimizer_parts, optimizer_shapes
from onward.trainer.parallel.memory_snapshot import keep_graph_frames
from onward.trainer.parallel.nonfinite.replay import BadValues
from onward.trainer.parallel.peak import peak_of_ranks
from onward.trainer.parallel.pipeline.engine import Pipeline, stage_group
from onward.trainer.parallel.profiling.step_profiler import StepProfiler
from onward.trainer.parallel.rank_model import build_rank_model
from onward.trainer.parallel.sample_flops import count_sample_flops
from onward.trainer.parallel.throughput import Throughput
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult
from onward.trainer.run.stopping import is_out_of_time, reason_to_end
from onward.trainer.run.time_spent import TimeSpent


def train(
    config: RunConfig,
    run: RunDir,
    mpi: MPIContext,
    *,
    attempt: int,
    heartbeat: Heartbeat,
    stop_requested: Callable[[], bool],
) -> AttemptResult:
    """Train until the configured end, until [stop] ends the run, or until any rank is asked to stop.

    Collective: every rank.

    Raises Diverged when the loss or a gradient is not finite at every allowed loss scale. Any other error of one rank
    ends the job. Checkpoints that were saved before stay in both cases.
    """
    started_at = time.monotonic()

    # -- 1. Ranks: who computes what, and in which arithmetic
    config = set_arithmetic(config, mpi)
    dims = ParallelDims.of(config.parallel)
    mesh = make_mesh(mpi, dims, timeout_s=config.collective_timeout_s)
    here = dims.coordinate(mpi.rank)
    events = EventWriter(run.events, attempt=attempt, rank=mpi.rank)
    spent = TimeSpent(events, since=started_at, compiled_s=compiled_s)

    # -- 2. Data: this replica's share, the same for all ranks of one replica
    signature = read_training_signature(config.model)
    share = {"replica": here.data, "num_replicas": dims.data}
    rows = open_shards(run.shards, "train")
    held_out = open_shards(run.shards, "evaluation", most=config.data.evaluation_rows)
    rows, held_out = with_soft_labels((rows, held_out), config, signature, run.teacher, mpi, beat=heartbeat.beat)
    config = with_losses_from_data(config, rows, signature)
    batches = Batches(rows, config, signature, **share, device=mpi.device)
    config = with_bytes_of_targets(config, held_out, signature)
    num_steps, num_samples = config.num_steps(batches.num_rows), config.total_samples(batches.num_rows)

    # -- 3. Model: the ONNX graph becomes this rank's stages, its weights this rank's parts of them
    example, one_shape, beat = batches.example().inputs, batches.one_shape, heartbeat.beat
    trainable = open_with_teacher(config, cached=bool(rows.soft_labels), by_parts=True)
    flops = count_sample_flops(trainable.module, config, example, batches, mpi, beat=beat)  # before it is divided
    model = build_rank_model(trainable, config, mesh, mpi, example=example, one_shape=one_shape, beat=beat)
    keep_graph_frames(model.stages, config.monitor)
    del trainable  # what the graph still refers to would be kept
    reducer, trained = model.reducer, model.trained
    pipeline = Pipeline(
        model.stages,
        model.losses,
        schedule=config.parallel.schedule,
        stages_for=model.shapes_of,
        autocast=partial(autocast, config.precision, mpi.device),
        device=mpi.device,
        group_pipeline=stage_group(mesh, timeout_s=config.collective_timeout_s),
        group_data=mesh.get_group("data"),
        counts_loss=here.tensor == 0,
    )
    profiler = StepProfiler(config, run, model, pipeline, mpi, attempt=attempt, num_steps=num_steps, beat=beat)

    # -- 4. What changes the weights
    optimizer = build_optimizer(
        config.optimizer,
        trained,
        seed=config.train.seed,
        elsewhere=model.trained_names,
        parts=model.part_sums,
        layer_scales=model.layer_scales,
    )
    scaler = LossScaler(config.precision)
    averages = Averages(
        config.average, model.averaged, num_steps=num_steps, device=mpi.device, swapped=reducer.regather
    )

    bad_values = BadValues(config, signature, model, pipeline, mpi, heartbeat.beat)
    new_totals = partial(EvaluationMetrics, model.losses, config.metrics, device=mpi.device, counts=here.tensor == 0)
    own_part = partial(evaluation_batches, held_out, config, signature, **share, device=mpi.device)

    def evaluate(step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        confusion: Mapping[str, Counts] = {}
        for prefixes in averages.in_turn():  # first the weights themselves, then their averages in their place
            totals, part = new_totals(), own_part()
            with heartbeat.compiling():
                values = pipeline.evaluate(part, totals, heartbeat.beat)
            if not math.isfinite(values.get("loss", 0.0)) and not bad_values.explained_evaluation:
                why = bad_values.explain_evaluation(own_part(), new_totals(), held_out)
                events.emit(NonFiniteLoss(step=step, text=f"the evaluation loss is {values['loss']:g}. {why}"))
            metrics |= {f"{prefix}/{name}": value for prefix in prefixes for name, value in values.items()}
            confusion = confusion or totals.confusion
        events.emit(Evaluated(step=step, values=metrics))
        for loss, counts in confusion.items():
            events.emit(ConfusionMatrix(step=step, loss=loss, counts=counts))
        return metrics

    # the tensors themselves, which training changes in place: what is saved is always their present value
    parts = model.parts() | optimizer_parts(optimizer, trained) | averages.parts()
    checkpoints = CheckpointWriter(run, config, attempt=attempt, mpi=mpi, events=events)

    def compare_copies(step: int) -> None:
        try:
            check_copies(parts, mpi, step=step, beat=heartbeat.beat)
        except ReplicasDiffer:
            checkpoints.wait(heartbeat.beat)  # for the one before, from which a retry resumes
            raise
        bad_values.remember_weights(step)

    def save_checkpoint(*, last: bool) -> None:
        # a copy that has diverged must not get into a checkpoint, from which every resume would start
        compare_copies(state.step)
        events.sync()  # before the checkpoint: a resumed run does not emit the events of earlier steps again
        checkpoints.save(state, parts, beat=heartbeat.beat, last=last)

    # -- 5. Resume, or start at zero
    state = TrainState(step=0, samples_seen=0, scaler=scaler.state(), metrics={})
    checkpoint, damaged, resumed = find_resume_point(
        run, mpi=mpi, step_before=heartbeat.step_before, beat=heartbeat.beat
    )
    of_this_run = checkpoint is not None
    if checkpoint is None and config.checkpoint.load:
        checkpoint = verify_together(Path(config.checkpoint.load).resolve(), mpi=mpi, beat=heartbeat.beat)
        resumed = f"begins with checkpoint {checkpoint.path} of another run, at step {checkpoint.info.step}"
    if checkpoint is not None:
        name = f"checkpoint {checkpoint.path}"
        found, averaged = average_shapes(config.average, model.averaged_shapes, name, checkpoint.shapes)
        expected = (
            model.checkpoint_shapes
            | optimizer_shapes(config.optimizer, model.trained_shapes, model.matrices)
            | averaged
        )
        check_fit(name, found, expected)
        checkpoint.manifest.state.check_reachable(name, config, num_rows=batches.num_rows)
        placements = {key: placement for key, (_, placement) in parts.items() if key in expected}
        state, tensors = load(checkpoint, placements, beat=heartbeat.beat)
        state = state if of_this_run else state.as_start()
        model.load(tensors)
        load_optimizer_parts(optimizer, trained, tensors)
        averages.load(tensors)
        scaler.restore(state.scaler)
        checkpoints.previous = checkpoint.certificate
    compare_copies(state.step)  # nothing is broadcast: every rank has read its own parts
    peak = peak_of_ranks(config, mpi)
    events.emit(
        Started(
            step=state.step,
            num_steps=num_steps,
            num_samples=num_samples,
            num_rows=batches.num_rows,
            num_parameters=model.num_parameters,
            flops_per_sample=flops.mean if flops else None,
            peak_flops_per_s=peak,
            compute=config.precision.compute,
            compile=why_compiled(run),
            resumed=resumed,
            damaged=damaged,
            certificate=checkpoints.previous,
        )
    )
    spent.lap("setup")
    spent.emit(state.step)
    if state.step == 0:
        state = state.evaluated(evaluate(0), config.checkpoint).counted(config)
        spent.lap("evaluation")
        spent.emit(0)

    def trained_s() -> float:
        # by the clock of one rank: what the ranks decide depends on the sum, which they all have
        counts = mpi.rank == 0 and config.stop.max_hours > 0
        return trained_before_s + time.monotonic() - started_at if counts else 0.0

    # -- 6. One iteration is one weight update; after an fp16 overflow the same step is tried at half the scale
    is_first = here.tensor == here.pipeline == 0  # of the ranks of its replica
    pace = Throughput(flops, peak, mpi, counts=is_first, is_text=batches.counts.is_text, step=state.step)
    trained_before_s = state.stop.trained_s
    stopping, reason = False, reason_to_end(state.stop, config)  # an attempt may have ended before it could say so
    while state.step < num_steps and not stopping and not reason:
        step = state.step + 1
        size = min(config.train.global_batch_size, num_samples - state.samples_seen)
        heartbeat.new_shapes = size < config.train.global_batch_size
        heartbeat.beat(step)
        checkpoints.poll()  # of the one that is being written in the background
        # equal on tensor-parallel ranks, which compute the same activations between regions and must drop the same ones
        reseed = partial(torch.manual_seed, dropout_seed(config.train.seed, step, mpi.rank // dims.tensor))
        reseed()
        rate = learning_rate(step, optimizer=config.optimizer, schedule=config.schedule, num_steps=num_steps)
        set_learning_rate(optimizer, rate)

        profiler.begin(step)  # it ends before evaluation and checkpoint
        micro_batches = batches.take(state.samples_seen, size)
        profiler.phase("pipeline")
        part = pipeline.run(micro_batches, reducer, scale=scaler.scale, beat=heartbeat.beat)
        profiler.phase("gradient reduction")
        own_squares = reducer.reduce()  # whatever overlap did not already do
        # one all-reduce and one read of the device for all: ranks must take the same branch and stop at the same step;
        # whole numbers are ranks that were asked to stop, and the half is that of rank 0, whose clock says "save"
        asked = stop_requested() + 0.5 * checkpoints.is_due()
        sums = reducer.sum(own_squares, part, asked, batches.wait_s, trained_s(), *pace.work_of(micro_batches))
        squares, loss, asked, waits_s, seconds, *work = sums
        profiler.phase("optimizer")
        pace.wait_s += waits_s / mpi.world_size
        norm = math.sqrt(squares) / scaler.scale
        passed_over = step in config.train.skip_steps
        overflowed = passed_over or not math.isfinite(norm + loss)
        bad_values.note(step, norm, state.samples_seen, size)

        if overflowed:
            reducer.undo()  # of BatchNorm's running statistics, which the forward passes have updated
            remedy = "skip" if passed_over else scaler.overflow()
            if remedy == "none":
                checkpoints.wait(heartbeat.beat)
                why = bad_values.explain_step(
                    micro_batches, rows, scale=scaler.scale, reseed=reseed, rows_at=batches.rows
                )
                raise Diverged(
                    f"step {step}: loss {loss:g}, gradient norm {norm:g} at learning rate {rate:g} and loss scale "
                    f"{scaler.scale:g}; lower the learning rate, lengthen the warm-up, or compute in bf16 or fp32. "
                    f"{why}"
                )
            events.scalars(step, skipped=1, loss_scale=scaler.scale)
            if remedy == "again":
                continue
        else:
            # `norm` is that of the unscaled gradients, so unscaling and clipping are one multiplication
            reducer.multiply(clip_factor(norm, config.train.clip_norm) / scaler.scale)
            summarise(events, step, model, config=config.monitor)
            optimizer.step()
            averages.update(step)
            scaler.grow()
        profiler.phase("other")
        state = state.advance(size, scaler.state(), trained_s=seconds)
        stopping, due = asked >= 1, asked % 1 > 0
        ending = is_out_of_time(state.stop, config) or step == num_steps
        if every(config.train.desync_check_period, step):
            compare_copies(step)

        pace.add(size, *work)
        if not overflowed and (every(config.train.log_period, step) or stopping or ending):
            cost = pace.values(step)
            events.scalars(step, loss=loss, learning_rate=rate, gradient_norm=norm, loss_scale=scaler.scale, **cost)
        profiler.end(step)
        spent.lap("steps", wait_s=waits_s / mpi.world_size)
        evaluates = evaluation_is_due(config.train.evaluation_period, state, size, num_rows=batches.num_rows)
        if evaluates or ending:
            state = state.evaluated(evaluate(step), config.checkpoint)
            spent.lap("evaluation")
        if evaluates:
            state = state.counted(config)
        reason = reason_to_end(state.stop, config)
        last = stopping or ending or bool(reason)
        is_best = state.is_best and config.export.checkpoint == "best"
        if every(config.checkpoint.period, step) or due or last or is_best:
            save_checkpoint(last=last)
            spent.lap("checkpoint")
        spent.emit(step)
        # after evaluation and checkpoint, whose time does not count as training time
        if every(config.train.log_period, step):
            pace.begin(step)

    # -- 7. Leave nothing half-written
    profiler.close()
    checkpoints.close(heartbeat.beat)
    batches.close()
    reducer.close()
    heartbeat.stop()
    spent.lap("checkpoint")
    spent.emit(state.step, now=True)
    status: Literal["done", "stopped"] = "done" if reason or state.step == num_steps else "stopped"
    ended_early = reason if state.step < num_steps else ""
    events.emit(Ended(step=state.step, status=status, ended_early=ended_early))
    events.close()
    return AttemptResult(
        attempt=attempt,
        status=status,
        step=state.step,
        samples_seen=state.samples_seen,
        metrics=state.metrics,
        elapsed_s=time.monotonic() - started_at,
        ended_early=ended_early,
        stop=state.stop,
    )


def every(period: int, step: int) -> bool:
    """Return whether something periodic is due at this step; a period of 0 means never."""
    return period > 0 and step % period == 0


def evaluation_is_due(period: int | Literal["epoch"], state: TrainState, size: int, *, num_rows: int) -> bool:
    """Return whether an evaluation follows the step of `size` samples that led to `state`; an epoch has num_rows."""
    if period == "epoch":
        return state.samples_seen // num_rows > (state.samples_seen - size) // num_rows
    return every(period, state.step)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of one rank's dropout masks in one step, which needs no saved state."""
    return zlib.crc32(f"{seed} {step} {rank}".encode())
