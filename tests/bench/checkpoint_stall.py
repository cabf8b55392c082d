"""How long a checkpoint keeps training waiting: written in the background beside written while training waits.

    python -m tests.bench.checkpoint_stall            about 2 minutes on 2 cores

Real runs of the loop (GPT-2, 6 layers of width 512, AdamW: a checkpoint of 230 MB), a checkpoint after every third
step, one thread a rank, runs taking turns. The stall is the time that the loop spends in `CheckpointWriter.save`, on
the slowest rank; in the first checkpoint it contains the allocation of the host memory, so the median is of the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.directory import RunDir, read_config
from tests.support.ranks import run_ranks
from tests.support.runs import Array, make_run

TURNS, NUM_STEPS, PERIOD = 2, 13, 3


def text(rows: int) -> dict[str, Array]:
    """Bytes, and the byte after each."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, 65))
    return {"input_ids": ids[:, :-1].copy(), "label": ids[:, 1:].copy()}


def make(folder: Path, *, data: int, background: bool) -> RunDir:
    """The run directory of one case."""
    model = build_gpt2(vocab_size=256, sequence_length=64, num_layers=6, num_heads=8, width=512, dropout=0.0)
    return make_run(
        folder,
        model,
        text(24),
        train={"global_batch_size": 2, "num_steps": NUM_STEPS},
        parallel={"data": data},
        checkpoint={"period": PERIOD, "keep_newest": 1, "background": background},
    )


def saving(mpi: MPIContext, root: str) -> list[float]:
    """On a rank: train; the seconds of each `save` but the last, which is never in the background."""
    from onward.trainer.checkpoint.background import CheckpointWriter
    from tests.equivalence.layouts import train_all

    seconds = []
    save = CheckpointWriter.save

    def timed(*arguments: Any, **options: Any) -> None:
        began = time.perf_counter()
        save(*arguments, **options)
        seconds.append(time.perf_counter() - began)

    CheckpointWriter.save = timed  # type: ignore[method-assign]
    train_all(mpi, [root])
    CheckpointWriter.save = save  # type: ignore[method-assign]
    return seconds[:-1]


def main() -> None:
    """Take turns; print the table."""
    stalls: dict[tuple[int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="stall-") as folder:
        for turn in range(TURNS):
            for data in (1, 2):
                for background in (False, True):
                    run = make(Path(folder) / f"{turn} {data} {background}", data=data, background=background)
                    size = read_config(run).world_size
                    ranks = run_ranks(size, "tests.bench.checkpoint_stall:saving", str(run.root), timeout_s=300)
                    stalls.setdefault((data, background), []).extend(list(map(max, *ranks, [0.0] * 9))[1:])
    for data in (1, 2):
        waiting, background = (statistics.median(stalls[data, how]) for how in (False, True))
        print(f"{data} ranks: waiting {waiting * 1e3:5.0f} ms, background {background * 1e3:5.0f} ms", end="")
        print(f" = {background / waiting:.2f}")


if __name__ == "__main__":
    main()
