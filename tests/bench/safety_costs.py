"""What safety costs in each step: a checkpoint every 20 steps, and a comparison of the copies of the weights every 100.

    python -m tests.bench.safety_costs            about 5 minutes on 2 cores

The model and the batch of `gpt2-stdlib` over two ranks with one thread each, for 120 steps with each setting, in turn.
A turn gives one ratio for each setting: the time from step 20 to step 120 over that without both. Checkpoints are
written in the background, by threads that need the same cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.directory import RunDir
from tests.equivalence.layouts import train_all
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, make_run

FIRST, LAST = 20, 120
SETTINGS = {"neither": (0, 0), "a checkpoint every 20 steps": (20, 0), "a comparison every 100 steps": (0, 100)}
"""Steps between checkpoints, and between comparisons; 0 = none."""


def text(rows: int) -> dict[str, Array]:
    """Bytes, and the byte after each."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, 257))
    return {"input_ids": ids[:, :-1].copy(), "label": ids[:, 1:].copy()}


def make(folder: Path, period: int) -> RunDir:
    model = build_gpt2(vocab_size=256, sequence_length=256, num_layers=4, num_heads=4, width=128, dropout=0.0)
    usual: dict[str, Any] = {"global_batch_size": 8, "num_steps": LAST, "evaluation_period": 0, "log_period": 10}
    return make_run(
        folder,
        model,
        text(400),
        train=usual,
        parallel={"data": 2},
        checkpoint={"period": period},
    )


def train_in_turn(mpi: MPIContext, runs: list[tuple[str, int]]) -> None:
    """On a rank: one training after the other, with so many steps between comparisons."""
    from onward.trainer import loop

    for root, steps in runs:
        loop.DESYNC_CHECK_STEPS = steps
        train_all(mpi, [root])


def seconds(run: RunDir) -> float:
    """The time from step FIRST to step LAST."""
    at = {event.step: event.at_ms for event in events(run, "scalars")}
    return (at[LAST] - at[FIRST]) / 1e3


def main() -> None:
    """Take turns; print a line for each setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns, found = parser.parse_args().turns, dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="safety-") as folder:
        for turn in range(turns):
            runs = {name: make(Path(folder) / f"{turn} {name}", SETTINGS[name][0]) for name in SETTINGS}
            # the first training of a process is slower
            names = list(SETTINGS)[turn % 3 :] + list(SETTINGS)[: turn % 3]
            warm = make(Path(folder) / f"{turn} warm", 0)
            turns_of_ranks = [(str(warm.root), 0), *((str(runs[name].root), SETTINGS[name][1]) for name in names)]
            run_ranks(2, "tests.bench.safety_costs:train_in_turn", turns_of_ranks, timeout_s=600)
            for name, run in runs.items():
                found.setdefault(name, []).append(seconds(run))
    base = found["neither"]
    for name, times in found.items():
        ratios = [time / without for time, without in zip(times, base, strict=True)]
        print(f"{name}: {statistics.median(times):.1f} s, median of the ratios {statistics.median(ratios):.3f}", end="")
        print(f" ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} turns)")


if __name__ == "__main__":
    main()
