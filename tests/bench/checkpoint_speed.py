"""Saving and loading a checkpoint beside torch.save and safetensors, and what it costs a running training.

    python -m tests.bench.checkpoint_speed [--rounds 3] [--layers 5] [--width 1024] [--words 32000]

With these defaults 3 minutes on 2 cores and 8 GB of disk: a GPT-2 of 96 million parameters with the two moments of
AdamW, 1.15 GB. In training: a real run, one rank with all cores; the time that the loop spends in
`CheckpointWriter.save`, and by how much the 11 steps after it take longer than the median of the others, in which the
checkpoint is written. Both are the cost of a checkpoint. Alone, in turn in one process: `save` (digest, sums, fsync,
manifest, rename) over torch.save and safetensors.save_file, each with an fsync; and verifying and loading every tensor
over safetensors.load_file and the SHA-256 of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from onward.trainer.checkpoint.load import load, verify_together
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.directory import RunDir
from tests.bench.checkpoint_stall import saving
from tests.support.ranks import run_ranks
from tests.support.runs import events, make_run

STEPS, PERIOD, WRITTEN, BATCH = 46, 15, 11, 4


def training(mpi: MPIContext, root: str) -> list[float]:
    """On a rank with all cores: train; the seconds of each `save` but the last, which is never in the background."""
    torch.set_num_threads(os.cpu_count() or 1)
    return saving(mpi, root)


def alone(mpi: MPIContext, root: str, folder: str, rounds: int) -> dict[str, list[float]]:
    """On a rank: the seconds of each way to save and to load the newest checkpoint of a run."""
    found = newest_complete(RunDir(Path(root)))
    assert found is not None
    state, mapped = load(found)
    tensors = {key: tensor.clone() for key, tensor in mapped.items()}
    parts = {key: (tensor, Placement.full(tuple(tensor.shape))) for key, tensor in tensors.items()}
    del mapped
    torch.set_num_threads(os.cpu_count() or 1)
    place = Path(folder)

    def synced(path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def by_torch() -> None:
        torch.save(tensors, place / "torch")
        synced(place / "torch")

    def by_safetensors() -> None:
        save_file(tensors, place / "safetensors")
        synced(place / "safetensors")

    def by_onward() -> None:
        run = RunDir(place / f"run {time.monotonic_ns()}")
        run.root.mkdir()
        save(run, attempt=0, state=state, parts=parts, mpi=mpi)

    def read_safetensors() -> None:
        with (place / "safetensors").open("rb") as file:
            hashlib.file_digest(file, "sha256")
        for tensor in load_file(place / "safetensors").values():
            tensor.clone()

    def read_onward() -> None:
        for tensor in load(verify_together(found.path, mpi=mpi))[1].values():
            tensor.clone()

    cases: dict[str, Callable[[], None]] = {
        "torch.save": by_torch,
        "safetensors.save_file": by_safetensors,
        "save": by_onward,
        "safetensors.load_file and SHA-256": read_safetensors,
        "verify and load": read_onward,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Train, save and load; print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--words", type=int, default=32000)
    given = parser.parse_args()
    model = build_gpt2(
        **{"vocab_size": given.words, "sequence_length": 64, "num_layers": given.layers, "num_heads": 8},
        **{"width": given.width, "dropout": 0.0},
    )
    ids = np.random.default_rng(0).integers(0, 256, (STEPS * BATCH * 2, 65))
    with tempfile.TemporaryDirectory(prefix="checkpoint-speed-") as folder:
        run = make_run(
            Path(folder) / "training",
            model,
            {"input_ids": ids[:, :-1].copy(), "label": ids[:, 1:].copy()},
            train={"global_batch_size": BATCH, "num_steps": STEPS},
            checkpoint={"period": PERIOD, "keep_newest": 1, "background": True},
            launch={"threads_per_rank": os.cpu_count() or 1},
        )
        (stalls,) = run_ranks(1, "tests.bench.checkpoint_speed:training", str(run.root), timeout_s=900)
        seconds = {
            event.step: event.values["train/step_s"]
            for event in events(run, "scalars")
            if "train/step_s" in event.values
        }
        found = newest_complete(run)
        assert found is not None
        # the first step makes the moments; those after a checkpoint are computed while it is written
        beside = {step for step in seconds if step > PERIOD and (step - 1) % PERIOD < WRITTEN}
        usual = statistics.median(value for step, value in seconds.items() if step > 1 and step not in beside)
        longer = sum(seconds[step] - usual for step in beside) / len(stalls)
        print(f"checkpoint {found.info.bytes / 1e9:.2f} GB; step {usual:.2f} s")
        print(f"loop stands still: {', '.join(f'{value:.2f}' for value in stalls)} s; the first also makes the memory")
        print(f"steps beside it: {longer:.2f} s longer a checkpoint")
        share = (statistics.median(stalls) + longer) / (50 * usual)
        print(f"stall alone {statistics.median(stalls) / (50 * usual):.2%}, both {share:.2%} of 50 steps")
        (alone_s,) = run_ranks(
            1, "tests.bench.checkpoint_speed:alone", str(run.root), folder, given.rounds, timeout_s=900
        )
    for name, values in alone_s.items():
        middle = statistics.median(values)
        rate = found.info.bytes / middle / 1e6
        print(f"{name:34} {middle:6.2f} s ({min(values):.2f} to {max(values):.2f}), {rate:,.0f} MB/s")


if __name__ == "__main__":
    main()
