"""Time of one weight update by the threads of a rank and by whether ranks are bound to cores.

    python -m tests.bench.threads [--models squeezenet gpt] [--ranks 1 2] [--rounds 30]

All variants run in the same processes, turn and turn about, one update each; in every turn the variants are in another
order. The figure of a variant is the median over the turns of its wall time over that of what a run does by default
(cores / ranks threads, bound to nothing; below 1: the variant is faster), the quarter and three-quarter points of these
ratios, and its least time, which other work on the machine hits least. `core` binds all threads of a rank to the core
of its number, as `mpirun --bind-to core` does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from tests.bench.update_time import MODELS, onward_update
from tests.support.ranks import run_ranks

Variant = tuple[int, str]
"""Threads, and `none` or `core`."""


def bind(cores: set[int]) -> None:
    """Let all threads of this process run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


def measure(mpi: MPIContext, name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of an update, for each variant, in each turn. Collective: every rank."""
    torch.manual_seed(0)
    build, batch_size = MODELS[name]
    imported, _, batch = build(batch_size)
    update = onward_update(cast("ImportedGraph", imported), batch, mpi)
    cores = sorted(os.sched_getaffinity(0))
    variants: list[Variant] = list(itertools.product(sorted({1, len(cores)}), ("none", "core")))
    order = random.Random(0)
    times: dict[str, list[float]] = {_label(variant): [] for variant in variants}
    for turn in range(rounds + 1):
        for threads, binding in order.sample(variants, len(variants)):
            torch.set_num_threads(threads)
            bind({cores[mpi.local_rank % len(cores)]} if binding == "core" else set(cores))
            dist.barrier()
            started_at = time.perf_counter()
            update()
            dist.barrier()
            if turn:  # the first turn warms up
                times[_label((threads, binding))].append(time.perf_counter() - started_at)
    bind(set(cores))
    return times


def _label(variant: Variant) -> str:
    threads, binding = variant
    return f"{threads} thread{'s' * (threads > 1)}, {binding}"


def main() -> None:
    """Run every comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["squeezenet", "gpt"], choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    print("| model, ranks | variant | median, least ms | over the default | quarters |\n|---|---|---|---|---|")
    for name, ranks in itertools.product(arguments.models, arguments.ranks):
        times = run_ranks(ranks, "tests.bench.threads:measure", name, arguments.rounds, timeout_s=900)[0]
        default = times[_label((max(1, len(os.sched_getaffinity(0)) // ranks), "none"))]
        for label, values in times.items():
            ratios = sorted(mine / other for mine, other in zip(values, default, strict=True))
            low, middle, high = (statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3)[:3]
            print(
                f"| {name}, {ranks} | {label} | {1e3 * statistics.median(values):.0f}, {1e3 * min(values):.0f} | "
                f"{middle:.2f} | {low:.2f} .. {high:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
