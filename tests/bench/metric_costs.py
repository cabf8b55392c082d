"""What it costs to say what training costs: FLOPs, tokens and memory with each line of the log, here in each step.

    python -m tests.bench.metric_costs            about 3 minutes on 2 cores

A small model in small steps, so that what is done for each line is as large a share of them as it may be, over two
ranks with one thread each. Trainings with and without it take turns in the same processes. A turn gives two ratios,
from step 20 to the last: of the processor time of rank 0, and of the time by the clock. What is called for a line in
Python is also timed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from onward.trainer import loop
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import EventWriter, Heartbeat
from onward.trainer.loop import train
from onward.trainer.parallel.observing.step_clock import StepClock
from onward.trainer.parallel.observing.throughput import Throughput, Work
from onward.trainer.parallel.planning.sample_flops import Lengths, SampleFlops
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_transformer
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_text

FIRST = 20
Times = tuple[float, float]
"""Seconds of the processor, and by the clock."""


def without() -> contextlib.AbstractContextManager[Any]:
    """Leave out what is counted and measured for a line; what a line had before stays."""
    values = Throughput.values

    def former(self: Throughput, step: int) -> dict[str, float]:
        known = values(self, step)
        return {name: known[name] for name in ("samples_per_s", "data_wait", "step_s")}

    return mock.patch.multiple(Throughput, work_of=lambda self, batches: Work(0.0, 0.0, 0.0), values=former)


def train_in_turn(mpi: MPIContext, roots: list[str]) -> list[Times]:
    """On a rank: train each run, every second one without; return its times."""
    loop.DESYNC_CHECK_STEPS = 0  # a comparison would be in one line of a hundred
    return [_times(mpi, RunDir(Path(root)), plain=number % 2 == 1) for number, root in enumerate(roots)]


def _times(mpi: MPIContext, run: RunDir, *, plain: bool) -> Times:
    at: dict[int, Times] = {}
    scalars = EventWriter.scalars

    def noted(self: EventWriter, step: int, **values: float) -> None:
        scalars(self, step, **values)
        at[step] = time.process_time(), time.monotonic()

    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    with without() if plain else contextlib.nullcontext(), mock.patch.object(EventWriter, "scalars", noted):
        heartbeat = Heartbeat(run.heartbeat)
        train(run, mpi, attempt=1, heartbeat=heartbeat, stop_requested=lambda: False)
    last = max(at)
    return at[last][0] - at[FIRST][0], at[last][1] - at[FIRST][1]


def alone_us(calls: int = 3000) -> float:
    """Return the processor time of what is called for a line without messages, in microseconds: the least of seven."""
    mpi = MPIContext(0, 1, 0, 1, "host", torch.device("cpu"))
    clock = StepClock(began_at=time.monotonic(), compiled_s=lambda: 0.0)
    clock.begin_steps()
    each = SampleFlops(Lengths((), ()), (1e9,), 1e9)
    pace = Throughput(each, 1e9, mpi, clock, counts=True, is_text=True, step=0)
    batches = [Batch((), (), 8, (8.0,), lengths=np.empty((8, 0), np.int64), num_tokens=96)]
    found = []
    for _ in range(7):
        began = time.process_time()
        for _ in range(calls):
            pace.add(8, pace.work_of(batches))
            pace.values(1)
        found.append(1e6 * (time.process_time() - began) / calls)
    return min(found)


def make(folder: Path, num_steps: int) -> RunDir:
    return make_run(
        folder,
        tiny_transformer(),
        tiny_text(400),
        train={"global_batch_size": 8, "num_steps": num_steps, "log_period": 1},
        parallel={"data": 2},
        checkpoint={"minutes": 0.0},
    )


def main() -> None:
    """Take turns; print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metric-costs-") as folder:
        # the first two are not counted: the first training of a process is slower
        runs = [make(Path(folder) / str(number), options.steps) for number in range(2 + 2 * options.turns)]
        found: list[Times] = run_ranks(
            2, "tests.bench.metric_costs:train_in_turn", [str(run.root) for run in runs], timeout_s=1800
        )[0]
    pairs = list(zip(found[2::2], found[3::2], strict=True))
    for what, place in (("processor time", 0), ("time", 1)):
        ratios = [with_it[place] / plain[place] for with_it, plain in pairs]
        each = statistics.median((one[place] - other[place]) / (options.steps - FIRST) for one, other in pairs)
        print(f"{what}: median of the ratios {statistics.median(ratios):.3f}", end="")
        print(f" ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} turns), {1e6 * each:.0f} us a line")
    print(f"alone: {alone_us():.1f} us of processor time a line")


if __name__ == "__main__":
    main()
