"""THE TRAINING LOOP: one function, read from top to bottom.

Every rank runs it. Only rank 0 writes the event log and the result; of other files each rank writes its own. A *step*
is one weight update. The sample stream, the dropout masks and the learning rate depend on the seed and the position
alone, so a run that was killed and resumed ends with the same bits as one that ran without interruption.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from onward.trainer.attempt.agreement import agree
from onward.trainer.attempt.evaluation import Evaluation
from onward.trainer.attempt.restore import Trained, restore
from onward.trainer.checkpoint.background import CheckpointWriter
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.resolve import resolved_for
from onward.trainer.data.schema.signature import read_source, training_signature
from onward.trainer.data.storage.opened_shards import open_evaluated, open_shards
from onward.trainer.distributed.arithmetic import set_arithmetic
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import Ended, EventWriter, Heartbeat, Started
from onward.trainer.model.compile import compiled_s, why_compiled
from onward.trainer.model.summaries import summarise
from onward.trainer.model.teacher.teacher_labels import with_soft_labels
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.optim.optimizers import clip_factor, set_learning_rate
from onward.trainer.optim.schedules import learning_rate
from onward.trainer.parallel.nonfinite.replay import BadValues
from onward.trainer.parallel.observing.step_clock import StepClock
from onward.trainer.parallel.observing.throughput import Throughput
from onward.trainer.parallel.planning.peak_flops import peak_of_ranks
from onward.trainer.parallel.planning.sample_flops import count_sample_flops
from onward.trainer.parallel.profiling.step_profiler import StepProfiler
from onward.trainer.parallel.rank_model import build_pipeline, build_rank_model
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.stopping import is_out_of_time, reason_to_end
from onward.trainer.run.records import AttemptResult

DESYNC_CHECK_STEPS = 100
"""Steps between comparisons of what several ranks hold alike: so rare, they cost less time than can be measured."""


def train(
    run: RunDir,
    mpi: MPIContext,
    *,
    attempt: int,
    heartbeat: Heartbeat,
    stop_requested: Callable[[], bool],
    given: RunConfig | None = None,
) -> AttemptResult:
    """Train until the configured end, until [stop] ends the run, or until any rank is asked to stop.

    given: what `read_config` has read. Collective: every rank. Raises Diverged when the loss or the gradient is finite
    at no allowed loss scale.
    """
    clock = StepClock(began_at=time.monotonic(), compiled_s=compiled_s)
    beat = heartbeat.beat

    # -- 1. Ranks: who computes what, and in which arithmetic
    config = set_arithmetic(resolved_for(run, given or read_config(run), ["evaluation"])["evaluation"], mpi)
    dims = ParallelDims.of(config.parallel)
    mesh = make_mesh(mpi, dims, timeout_s=config.collective_timeout_s)
    here = dims.coordinate(mpi.rank)
    events = EventWriter(run.events, attempt=attempt, rank=mpi.rank)

    # -- 2. Data: this replica's share, the same for all ranks of one replica
    source = read_source(config.model.path, by_parts=True)
    signature = training_signature(source, config.model)
    rows = open_shards(run.shards, "train")
    held_out = open_evaluated(run.shards, config.data)
    rows, held_out = with_soft_labels((rows, held_out), config, signature, run.teacher, mpi, beat=beat)
    batches = Batches(rows, config, signature, replica=here.data, num_replicas=dims.data, device=mpi.device)
    num_steps = config.train.steps_of_run(batches.num_rows)
    num_samples = config.train.samples_of_run(batches.num_rows)

    # -- 3. Model: the ONNX graph becomes this rank's stages, its weights this rank's parts of them
    example = batches.example().inputs
    trainable = open_with_teacher(config, source=source, cached=bool(rows.soft_labels), by_parts=True)
    flops = count_sample_flops(trainable.module, config, example, batches, mpi, beat=beat)  # before it is divided
    model = build_rank_model(trainable, config, mesh, mpi, example=example, one_shape=batches.one_shape, beat=beat)
    del trainable, source  # what the graph still refers to would be kept
    reducer = model.reducer
    pipeline = build_pipeline(model, config.parallel, config.precision, mesh, mpi, config.collective_timeout_s)

    # -- 4. What changes the weights; resume, or start at zero
    rules = config.optimizer, config.average, config.precision
    trained = Trained.begin(model, *rules, seed=config.train.seed, num_steps=num_steps, device=mpi.device)
    scaler = trained.scaler
    restored = restore(trained, run, config, num_rows=batches.num_rows, mpi=mpi, heartbeat=heartbeat)
    state = restored.state
    parts = trained.parts()
    limits = config.parallel.memory_gib, config.collective_timeout_s
    checkpoints = CheckpointWriter(run, config.checkpoint, *limits, attempt=attempt, mpi=mpi, events=events)
    checkpoints.compare_copies(parts, step=state.step, beat=beat)

    # -- 5. What watches the training
    profiler = StepProfiler(config.monitor.profile_steps, run, model, pipeline, here, mpi, attempt, num_steps, beat)
    bad_values = BadValues(config, signature, model, pipeline, rows, batches, mpi, beat, state.step)
    explain = bad_values.explain_evaluation
    evaluate = Evaluation(held_out, config, signature, trained, pipeline, explain, events, heartbeat, mpi)
    peak = peak_of_ranks(config.precision.compute, config.launch.ranks_per_gpu, mpi)
    started = Started(
        step=state.step,
        num_steps=num_steps,
        num_samples=num_samples,
        num_rows=batches.num_rows,
        num_parameters=model.num_parameters,
        flops_per_sample=flops.mean if flops else None,
        peak_flops_per_s=peak,
        compute=config.precision.compute,
        compile=why_compiled(run),
        resumed=restored.resumed,
        damaged=restored.damaged,
    )
    events.emit(started)
    clock.begin_steps(trained_before_s=state.stop.trained_s, counts_hours=mpi.rank == 0 and config.stop.max_hours > 0)
    clock.emit(events, state.step)
    if state.step == 0:
        with clock("evaluation"):
            state = state.evaluated(evaluate(0), config.checkpoint).counted(config.stop, config.checkpoint)
        clock.emit(events, 0)
    counts_work = here.tensor == here.pipeline == 0  # one rank of each replica
    pace = Throughput(flops, peak, mpi, clock, counts=counts_work, is_text=batches.counts.is_text, step=state.step)

    # -- 6. One iteration is one weight update; after an fp16 overflow the same step is tried at half the scale
    reason = reason_to_end(state.stop, config.stop, config.checkpoint)  # an attempt may have ended without saying so
    while state.step < num_steps and not reason:
        step = state.step + 1
        size = min(config.train.global_batch_size, num_samples - state.samples_seen)  # the last step may be smaller
        heartbeat.new_shapes = size < config.train.global_batch_size
        heartbeat.beat(step, longest_step_s=clock.begin_step())
        checkpoints.poll()  # the one that is being written in the background
        # equal on tensor-parallel ranks, which compute the same activations between regions and must drop the same ones
        reseed = partial(torch.manual_seed, dropout_seed(config.train.seed, step, mpi.rank // dims.tensor))
        reseed()
        rate = learning_rate(step, optimizer=config.optimizer, schedule=config.schedule, num_steps=num_steps)
        set_learning_rate(trained.optimizer, rate)

        with profiler.step(step):
            with clock("data wait"):
                micro_batches = batches.take(state.samples_seen, size)
            with clock("pipeline"):
                loss_share = pipeline.run(micro_batches, reducer, scale=scaler.scale, beat=beat)
            with clock("gradient reduction"):
                agreed = agree(
                    mpi.device,
                    squares=reducer.reduce(),  # whatever overlap did not already do
                    loss=loss_share,
                    divisor=pipeline.own_divisor,
                    wait_s=batches.wait_s,
                    trained_s=clock.trained_s,
                    stop=stop_requested(),
                    save=checkpoints.is_due(),
                    work=pace.work_of(micro_batches),
                )
            loss = agreed.loss
            norm = math.sqrt(agreed.squares) / scaler.scale
            clock.waited(agreed.wait_s / mpi.world_size)
            bad_values.note(step, norm, state.samples_seen, size)
            skipped = step in config.train.skip_steps or not math.isfinite(norm + loss)
            if not skipped:
                with clock("optimizer"):
                    # `norm` is that of the unscaled gradients, so unscaling and clipping are one multiplication
                    reducer.multiply(clip_factor(norm, config.train.clip_norm) / scaler.scale / agreed.divisor)
                    summarise(events, step, model, config=config.monitor, last=step == num_steps)
                    trained.optimizer.step()
                    trained.averages.update(step)
                    scaler.grow()

        if skipped:
            reducer.undo()  # BatchNorm's running statistics, which the forward passes have updated
            remedy = "skip" if step in config.train.skip_steps else scaler.overflow()
            if remedy == "none":
                checkpoints.wait(beat)
                raise bad_values.diverged(step, loss, norm, rate, micro_batches, scale=scaler.scale, reseed=reseed)
            events.scalars(step, skipped=1, loss_scale=scaler.scale)
            if remedy == "again":
                continue

        state = state.advance(size, scaler.state(), trained_s=agreed.trained_s)
        ending = is_out_of_time(state.stop, config.stop) or step == num_steps
        if every(DESYNC_CHECK_STEPS, step):
            checkpoints.compare_copies(parts, step=step, beat=beat)
            bad_values.remember_weights(step)
        pace.add(size, agreed.work)
        logs = every(config.train.log_period, step) or agreed.stop or ending
        if logs and not skipped:
            rates = {"learning_rate": rate, "loss_scale": scaler.scale, **pace.values(step)}
            events.scalars(step, loss=loss, gradient_norm=norm, **rates)
        if every(config.train.log_period, step):
            pace.begin(step)
        evaluates = evaluation_is_due(config.train.evaluation_period, state, size, num_rows=batches.num_rows)
        if evaluates or ending:
            with clock("evaluation"):
                state = state.evaluated(evaluate(step), config.checkpoint)
                state = state.counted(config.stop, config.checkpoint) if evaluates else state
        reason = reason_to_end(state.stop, config.stop, config.checkpoint)
        last = agreed.stop or ending or bool(reason)
        is_best = state.is_best and config.export.checkpoint == "best"
        saves = every(config.checkpoint.period, step) or agreed.save
        if saves or last or is_best:
            with clock("checkpoint"):
                checkpoints.save(state, parts, beat=beat, last=last)
            bad_values.remember_weights(step)
        clock.emit(events, step)
        if agreed.stop:
            break

    # -- 7. Leave nothing half-written
    with clock("checkpoint"):
        profiler.close()
        checkpoints.close(beat)
        batches.close()
        reducer.close()
        heartbeat.stop()
    clock.emit(events, state.step, now=True)
    status: Literal["done", "stopped"] = "done" if reason or state.step == num_steps else "stopped"
    ended_early = reason if state.step < num_steps else ""
    events.emit(Ended(step=state.step, status=status, ended_early=ended_early))
    events.close()
    return state.result(attempt=attempt, status=status, elapsed_s=clock.elapsed_s, ended_early=ended_early)


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
