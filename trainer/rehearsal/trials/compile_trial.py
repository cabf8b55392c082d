"""Decide `graph.compile = "auto"`: run the micro-batch of a step eagerly and compiled, as a rank will.

    something forbids compiling, or its time cannot be measured here        false, and why
    eager passes of all steps x MOST_SAVED  <  COMPILE_S                    false: nothing is compiled for a short run
    compiling takes longer than eager passes of all steps x MOST_SAVED      false: the process ends
    it was compiled                                                         true if the steps pay for it, see below

              here, once                              each start of the ranks         each step
    eager                                                                             eager_s
    compiled  compile_s, kept in ONWARD_HOME          start_s: read from there        compiled_s

The run has its steps before it, so it compiles if steps > break-even = start_s / (eager_s - compiled_s). What compiling
took here is spent by then, whatever is chosen; the limit above bounds it by what it could have saved.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onward.trainer.checkpoint.manifest import read_manifest
from onward.trainer.config.rules import rank_rules as rules
from onward.trainer.config.run_config import COMPILE_TIMEOUT_S, RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.data.storage.row_counts import count_rows
from onward.trainer.distributed.arithmetic import set_arithmetic
from onward.trainer.distributed.processes import MPIContext, threads_of_rank
from onward.trainer.errors import OnwardError, reason_of
from onward.trainer.model.precision import autocast
from onward.trainer.model.weight_casts import casts_kept
from onward.trainer.parallel.compile_stages import compile_stages
from onward.trainer.parallel.layout import build_layout, recompute_units
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.planning.device_model import typical
from onward.trainer.parallel.rank_model import choose_formats
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from onward.trainer.rehearsal.sizes import Kind
from onward.trainer.run.directory import onward_home
from onward.trainer.run.machine.this_machine import missing_compiler
from onward.trainer.run.records import CompileTrial

CPU = torch.device("cpu")
MOST_SAVED = 0.35
"""The greatest part of eager passes that compiled code is expected to save."""
COMPILE_S = 15.0
"""What compiling a small graph takes at least, forward and backward, when none of its code was kept before."""
FASTER = 0.97
"""Compiled passes that take more than this part of the eager ones are not faster, but noise."""
TURNS = 7
TURNS_S = 6.0
"""Most turns of both, and the time after which no further turn begins."""


@dataclass(frozen=True)
class CompileTimes:
    """Seconds: of the forward and backward passes of one step on one rank, and of compiling."""

    eager_s: float
    compiled_s: float
    compile_s: float
    start_s: float
    """Of compiling again with the code that was kept, as each start of the ranks does."""

    def choice(self, steps: int) -> CompileTrial:
        """Return what a run of so many steps does."""
        saved_s = self.eager_s - self.compiled_s
        # a difference within the noise is no gain
        pays = self.compiled_s <= FASTER * self.eager_s
        # the steps whose saved time pays for one start of the ranks
        break_even = math.ceil(self.start_s / saved_s) if pays else None
        compiles = break_even is not None and steps > break_even
        if break_even is None:
            why = "compiled code is not faster here"
        elif compiles:
            why = f"{break_even} of the {steps} steps pay for a start, and the others are faster"
        else:
            why = f"a start would pay after {break_even} steps, and the run has {steps}"
        text = (
            f"the passes of a step take {self.eager_s:.3g} s eagerly and {self.compiled_s:.3g} s compiled; compiling "
            f"took {self.compile_s:.1f} s, and with the code that was kept {self.start_s:.1f} s: {why}"
        )
        return CompileTrial(
            compiles=compiles,
            text=text,
            eager_s=self.eager_s,
            compiled_s=self.compiled_s,
            compile_s=self.compile_s,
            start_s=self.start_s,
            steps=steps,
            break_even=break_even,
        )


def decide(
    graph: RehearsedGraph,
    config: RunConfig,
    batch: Callable[[Kind], Batch],
    rows: FirstRows,
    findings: Findings,
    begin_again: Callable[[float], None],
    *,
    on_gpu: bool,
) -> None:
    """Leave the choice with the findings. The graph must not be used afterwards.

    batch: makes a full micro-batch, and the first evaluation batch. begin_again: sets a time limit, in seconds from
    now, after which the process ends with the findings.
    """
    findings.compile = not_compiled(obstacle(config, on_gpu=on_gpu))
    if findings.compile.text:
        return
    training = batch("training")
    if training.size < config.micro_batch_size:
        findings.compile = not_compiled("a micro-batch does not fit into the memory that is free here")
        return
    # the first one was slower: it also made what the others use again
    batch_s = min(graph.run("training", training).elapsed_s for _ in range(2))
    steps = number_of_steps(config, rows, step_s=batch_s * _batches_of_step(config.train, config.parallel))
    if steps is None:
        findings.compile = not_compiled(
            "the number of steps is not known before the data is sharded; set train.num_steps, or graph.compile to "
            "true or false"
        )
        return
    # compiling for longer than it could ever save is given up
    most_s = min(MOST_SAVED * batch_s * _batches_of_step(config.train, config.parallel) * steps, COMPILE_TIMEOUT_S)
    if most_s < COMPILE_S:
        findings.compile = not_compiled(
            f"the passes of {steps} steps take about {most_s / MOST_SAVED:.2g} s, of which compiling could save some "
            f"{most_s:.2g} s, and compiling alone takes {COMPILE_S:g} s or more"
        )
        return
    findings.compile = not_compiled(f"compiling was not done after {most_s:.0f} s, about the most that it could save")
    findings.pending.clear()  # the choice says what was not reached
    begin_again(most_s)
    try:
        times = time_compiled(graph, config, batch, one_shape=not any(c.variable for c in rows.columns.values()))
    except Exception as error:  # the compiler, and what it calls, raise errors of many types
        findings.compile = not_compiled(f"compiling failed: {reason_of(error)}")
        return
    findings.compile = times.choice(steps)


def not_compiled(why: str) -> CompileTrial:
    """Return the choice of a run for which nothing was compiled."""
    return CompileTrial(compiles=False, text=why)


def obstacle(config: RunConfig, *, on_gpu: bool) -> str:
    """Return what forbids compiling this run, or measuring it in this process, as a clause; "" if nothing does."""
    graph = config.graph.with_compile(True)
    found = [
        *rules.split_backward(config.parallel, graph),
        *rules.compilation(graph, config.parallel, config.recompute, config.launch),
    ]
    if found:
        return "; ".join(found)
    if on_gpu:
        return "the ranks compute on GPUs, and the rehearsal measures on the CPU; set graph.compile to true or false"
    if config.launch.hostfile:
        return (
            "the ranks compute on the hosts of launch.hostfile, and the rehearsal measures this machine; set "
            "graph.compile to true or false"
        )
    if config.parallel.tensor > 1:
        return (
            f"each of parallel.tensor {config.parallel.tensor} ranks computes a part of every layer, which one process "
            "cannot measure; set graph.compile to true or false"
        )
    return missing_compiler()


def number_of_steps(config: RunConfig, rows: FirstRows, *, step_s: float) -> int | None:
    """Return the steps of the run, as far as `stop.max_hours` lets it go; None if its rows are not counted yet.

    A run that begins with a checkpoint of another one has the steps behind it.
    """
    num_rows = rows.counts[0] if rows.counts else 0
    if not config.train.num_steps and not num_rows:
        with contextlib.suppress(OnwardError, OSError):
            num_rows = count_rows(config, onward_home() / "shards").train
    if not config.train.num_steps and not num_rows:
        return None
    steps = config.train.steps_of_run(num_rows)
    if config.checkpoint.load:
        with contextlib.suppress(OnwardError, OSError):  # the ranks say what is wrong with it
            steps = max(0, steps - read_manifest(Path(config.checkpoint.load)).state.step)
    return min(steps, int(3600 * config.stop.max_hours / step_s)) if config.stop.max_hours else steps


def _batches_of_step(train: TrainConfig, parallel: ParallelConfig) -> float:
    """Return how many micro-batches a rank computes in a step; of a pipeline each computes a part of every one."""
    return train.gradient_accumulation_steps / parallel.pipeline


# -- measuring


def time_compiled(
    graph: RehearsedGraph, config: RunConfig, batch: Callable[[Kind], Batch], *, one_shape: bool
) -> CompileTimes:
    """Compile the stages as ranks do, and run the micro-batch of a step both ways. The graph must not be used after.

    batch: makes a full micro-batch, and the first evaluation batch. one_shape: whether all rows have one shape. Raises
    what compiling and the graph raise.
    """
    alone = MPIContext(rank=0, world_size=1, local_rank=0, local_size=1, host="", device=CPU)
    threads_before = torch.get_num_threads()
    # the code of a CPU is made for a number of threads
    torch.set_num_threads(threads_of_rank(config.world_size, config.launch.threads_per_rank))
    config = set_arithmetic(config, alone)
    config = config.model_copy(update={"graph": config.graph.with_compile(True)})
    cast = partial(autocast, config.precision, CPU)
    training = batch("training")
    evaluation = batch("evaluation")
    stages = _stages(graph, config, training, cast)
    asked = config.graph, config.parallel, config.precision.compute
    compile_all = partial(compile_stages, device=CPU, one_shape=one_shape, autocast=cast, beat=lambda: None)
    compile_all(stages, graph.module, *asked, training.inputs)
    graph = replace(graph, autocast=cast)

    def passes(kind: Kind) -> float:
        started_at = time.monotonic()
        with casts_kept(CPU):
            graph.run(kind, training if kind == "training" else evaluation, partial(_run, stages, kind))
        return time.monotonic() - started_at

    def both() -> float:
        return passes("training") + passes("evaluation")

    # the first passes compile, and are counted with the compilation
    first_s = both()
    # the turns before measuring, and what the steady passes take in `first_s`
    steady_s = both()
    # as a rank starts: it reads the compiled kernels from the cache of the first compilation
    torch.compiler.reset()
    start_s = both()
    eager = list[float]()
    compiled = list[float]()
    began_at = time.monotonic()
    while len(eager) < TURNS and (len(eager) < 2 or time.monotonic() - began_at < TURNS_S):
        with torch.compiler.set_stance("force_eager"):
            # both in turn, since the machine may become slower or faster meanwhile
            eager.append(passes("training"))
        compiled.append(passes("training"))
    torch.set_num_threads(threads_before)
    of_step = _batches_of_step(config.train, config.parallel)
    return CompileTimes(
        # the median of the turns' ratios: what else the machine does hits both sides of a turn
        eager_s=min(eager) * of_step,
        compiled_s=min(eager) * statistics.median(c / e for c, e in zip(compiled, eager, strict=True)) * of_step,
        compile_s=max(first_s - steady_s, 0.0),
        start_s=max(start_s - steady_s, 0.0),
    )


def _stages(graph: RehearsedGraph, config: RunConfig, training: Batch, cast: Any) -> Sequence[Stage]:
    """Return all stages of the pipeline, as the ranks of one replica have them before compiling."""
    device = typical("cpu", config.precision.compute)
    layout = build_layout(graph.module, config, training.inputs, rank=0, group="", autocast=cast, device=device)
    for coordinate in range(config.parallel.pipeline):
        own = layout.of(coordinate, config.parallel.pipeline)
        choose_formats(layout, own, config, CPU)
        recompute_units(layout, own, config, training.inputs, pipeline=coordinate)
    return layout.stages


def _run(stages: Sequence[Stage], kind: Kind, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the outputs of the graph, computed by one stage after the other."""
    values: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        stage.chain.train(kind == "training")
        values = stage.chain(*values, *(inputs[position] for position in stage.input_positions))
    return values
