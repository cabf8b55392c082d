"""What a layout costs: one weight update on two ranks beside one rank's, at equal work.

    python -m tests.bench.layouts [--layouts dp2 tp2 ...] [--turns 3]            about 5 minutes on 2 cores

Each layout is a real run of the loop (GPT-2, 4 layers of width 256; 16 sequences of 128 bytes in 8 micro-batches), one
thread a rank. Printed is the median time of a step over one rank's, runs taking turns (0.5 would be perfect), and the
time that a rank's collectives were under way, relative to the step: more than what it waits for, where they overlap.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.directory import RunDir, read_config
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, make_run

TURNS, NUM_STEPS, MICRO_BATCHES = 3, 6, 8
ALONE = "1x1x1"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "dp2": {"data": 2},
    "dp2, MPI": {"data": 2, "transport": "mpi"},
    "dp2, ZeRO 1": {"data": 2, "zero": 1},
    "dp2, ZeRO 2": {"data": 2, "zero": 2},
    "dp2, ZeRO 3": {"data": 2, "zero": 3},
    "tp2": {"tensor": 2},
    "pp2 1F1B": {"pipeline": 2},
    "pp2 GPipe": {"pipeline": 2, "schedule": "gpipe"},
    "pp2 interleaved": {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
}


def text(rows: int) -> dict[str, Array]:
    """Bytes, and the byte after each."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, 129))
    return {"input_ids": ids[:, :-1].copy(), "label": ids[:, 1:].copy()}


def make(folder: Path, parallel: dict[str, Any]) -> RunDir:
    """The run directory of one layout."""
    model = build_gpt2(vocab_size=256, sequence_length=128, num_layers=4, num_heads=4, width=256, dropout=0.0)
    train = {
        "global_batch_size": 16,
        "gradient_accumulation_steps": MICRO_BATCHES // parallel.get("data", 1),
        "num_steps": NUM_STEPS,
    }
    return make_run(folder, model, text(120), train=train, parallel=parallel)


def profiled(mpi: MPIContext, root: str) -> float:
    """On a rank: train; the seconds that collectives and messages were under way."""
    from onward.trainer.events import Heartbeat
    from onward.trainer.loop import train

    run = RunDir(Path(root))
    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    heartbeat = Heartbeat(run.heartbeat)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(run, mpi, attempt=1, heartbeat=heartbeat, stop_requested=lambda: False)
    return sum(event.time_range.elapsed_us() for event in found.events() if event.name.startswith("gloo:")) / 1e6


def step_times(run: RunDir) -> list[float]:
    """Seconds of each step but the first two, from the event log."""
    samples = read_config(run).train.global_batch_size
    speeds = [event.values.get("train/samples_per_s") for event in events(run, "scalars")]
    return [samples / speed for speed in speeds if speed][2:]


def main() -> None:
    """Take turns over the layouts; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2: the first one is profiled and not timed")
    options = parser.parse_args()
    # one rank is always there: all others are compared with it
    layouts = {name: LAYOUTS[name] for name in dict.fromkeys((ALONE, *options.layouts))}
    times: dict[str, list[float]] = {name: [] for name in layouts}
    under_way: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        for turn in range(options.turns):
            for name, parallel in layouts.items():
                run = make(Path(folder) / f"{turn} {name}", parallel)
                size = read_config(run).world_size
                function = "profiled" if turn == 0 else "trained"
                seconds = run_ranks(size, f"tests.bench.layouts:{function}", str(run.root), timeout_s=300)
                if turn == 0:
                    under_way[name] = seconds[0] / NUM_STEPS
                else:
                    times[name] += step_times(run)
    alone = statistics.median(times[ALONE])
    for name, found in times.items():
        median = statistics.median(found)
        share = under_way[name] / median
        print(f"{name:18} {median * 1e3:6.0f} ms  {median / alone:5.2f} of one rank's  collectives {share:4.0%}")


def trained(mpi: MPIContext, root: str) -> float:
    """On a rank: train, without the profiler."""
    from tests.equivalence.layouts import train_all

    train_all(mpi, [root])
    return 0.0


if __name__ == "__main__":
    main()
