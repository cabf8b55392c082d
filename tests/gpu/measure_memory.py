"""Measure memory on the device beside what `onward plan` predicts, and what a rank takes before it trains.

What is measured of a step is the allocator's: the peak of what tensors take (`allocated`) and of what is kept for them
(`reserved`), of the rank that takes most, above what it had before the run. About 6 minutes on an H200.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from onward.trainer.config.loading import build_config
from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record
from tests.bench import memory_prediction
from tests.bench.handwritten import gpt2_model
from tests.bench.memory_prediction import CASES, MODELS, SMALL, images, text
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REHEARSAL, synchronize
from tests.gpu.measure import Enough, connected, free, run_of, train_until_enough
from tests.gpu.measure_gpt2 import SIZES, TINY
from tests.gpu.measure_vision import SIDE, resnet50
from tests.gpu.results import attempt, is_finished
from tests.support import rank_server

FROM_STEP, TO_STEP = 3, 5
"""The peak is that of the steps in between; before, kernels are chosen and the optimizer makes its state."""
GPT2 = TINY if REHEARSAL else SIZES
GIB = 2**30
BF16 = {"precision": {"compute": "bf16"}}
LARGE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16, 4 micro-batches": BF16 | {"train": {"gradient_accumulation_steps": 4}},
    "bf16, recompute whole": BF16 | {"recompute": {"mode": "whole"}},
    "bf16, recompute selective": BF16 | {"recompute": {"mode": "selective"}},
}
LIMITS_GIB = (8, 16, 40)
CONFIGURATIONS = [CASES[0], CASES[8]] if REHEARSAL else CASES


# -- on the ranks


def peaks(mpi: MPIContext, roots: Sequence[str]) -> None:
    """Train each run for a few steps; leave the peaks in bytes, above what was there before, in its directory.

    On the CPU nothing is measured. Collective: every rank of the world.
    """
    for root in roots:
        run = RunDir(Path(root))
        free()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        train_until_enough(run, mpi, _stop_after_peak)
        after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found = [peak - already for peak, already in zip(after, before, strict=True)]
        (run.root / f"peaks-{mpi.rank}.json").write_text(json.dumps(found))


def _stop_after_peak(step: int) -> None:
    synchronize()
    if step == FROM_STEP and DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif step == TO_STEP:
        raise Enough


def measure(runs: Sequence[RunDir]) -> str:
    """Train runs of one world size, one after the other, on ranks that share the device; return what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        words = read_config(runs[0]).world_size, "tests.gpu.measure_memory:peaks", [str(run.root) for run in runs]
        try:
            ranks.call(*words, folder=Path(folder), timeout_s=500)
        except AssertionError as error:  # the runs before the one that failed have their files
            return str(error)
    return ""


# -- predicted and measured


def beside(run: RunDir, problem: str) -> dict[str, Any]:
    """Return predicted and measured GiB of the rank that takes most. Raises AssertionError where no rank measured."""
    config = read_config(run)
    estimated, dims = plan(config).memory, ParallelDims.of(config.parallel)
    files = [run.root / f"peaks-{rank}.json" for rank in range(dims.world_size)]
    assert all(file.exists() for file in files), problem
    predicted = [estimated[dims.coordinate(rank).pipeline].peak for rank in range(dims.world_size)]
    found = [json.loads(file.read_text()) for file in files]
    most = max(range(len(found)), key=lambda rank: found[rank])
    allocated, reserved = found[most]
    return {
        "predicted_gib": predicted[most] / GIB,
        "allocated_gib": allocated / GIB,
        "reserved_gib": reserved / GIB,
        "off": predicted[most] / allocated - 1 if allocated else "unknown",
    }


def small_configurations() -> None:
    """Measure the configurations of tests/bench/memory_prediction.py; those of one world size by one start of ranks."""
    models = SMALL if REHEARSAL else MODELS
    sections = {"launch": {"device": DEVICE.type}}
    with tempfile.TemporaryDirectory() as folder:
        by_size: dict[int, dict[str, RunDir]] = {}
        for number, (name, parallel, steps, others) in enumerate(CONFIGURATIONS):
            check = f"{name}: {memory_prediction.shown(parallel, steps, others)}"
            if is_finished(check):
                continue
            case = (name, parallel, steps, {**others, **sections})
            run = memory_prediction.make(Path(folder) / str(number), models, case, batch=16)
            by_size.setdefault(read_config(run).world_size, {})[check] = run
        for runs in by_size.values():
            first = next(iter(runs.values()))
            # the first run is made twice: what the libraries take once is not of a step
            problem = measure([first, *runs.values()])
            for check, run in runs.items():
                attempt(check, partial(beside, run, problem))


def large(model: Any, columns: Any, sections: dict[str, Any]) -> dict[str, Any]:
    """Return predicted and measured memory of a model of real size on one rank."""
    with run_of(model, columns, **sections) as run:
        return beside(run, measure([run, run]))


def fits(model: Any, limit_gib: float) -> dict[str, Any]:
    """Plan a step of 32 sequences with `parallel = "auto"` and this much memory, and run what was chosen."""
    columns = text(2 if REHEARSAL else 32, GPT2["length"], GPT2["vocabulary"])
    sections = {**BF16, "parallel": {"sizes": "auto", "memory_gib": limit_gib}, "launch": {"num_ranks": 1}}
    with run_of(model, columns, **sections) as run:
        config = read_config(run)
        chosen = plan(config)
        train = config.train.model_copy(update={"gradient_accumulation_steps": chosen.gradient_accumulation_steps})
        sizes = {"parallel": chosen.parallel, "recompute": chosen.recompute, "train": train}
        write_record(run.config, build_config({**dict(config), **sizes}))
        figures = beside(run, measure([run]))
    found = figures["reserved_gib"]
    assert found <= limit_gib, f"{found:.2f} GiB were reserved, {limit_gib} GiB allowed"
    return figures | {
        "kept_free_gib": chosen.reserve.total / GIB,
        "micro_batches": chosen.gradient_accumulation_steps,
        "recompute": chosen.recompute.mode,
    }


def logits() -> dict[str, Any]:
    """Return the bytes that one logit takes at the peak of a step: 2 layers, 32 x 1,024 tokens, 50,257 words, bf16."""
    sizes, rows = GPT2 | {"layers": 1 if REHEARSAL else 2}, 2 if REHEARSAL else 32
    columns = text(rows, sizes["length"], sizes["vocabulary"])
    with run_of(gpt2_model(sizes), columns, **BF16) as run:
        figures = beside(run, measure([run, run]))
    memory = figures["allocated_gib"] * GIB
    parameters = 12 * sizes["layers"] * sizes["width"] ** 2 + sizes["width"] * (sizes["vocabulary"] + sizes["length"])
    count = rows * sizes["length"] * sizes["vocabulary"]
    return figures | {"bytes_per_logit_and_activations": (memory - 16 * parameters) / count if memory else "unknown"}


# -- a rank that has not begun to train


def used_bytes() -> int:
    """Return what is used on the whole device, with the driver's part, which the allocator does not know."""
    if DEVICE.type != "cuda":
        return psutil.Process().memory_info().rss
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split()[0]) << 20


def bare_rank() -> dict[str, float]:
    """Return the MiB that a process takes on the device for each thing that it begins to use. In a process of its own:
    what was begun is not ended before the process ends."""
    marks = {"nothing": used_bytes()}
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    marks["context"] = used_bytes()
    (x @ x).sum().backward()
    (x.bfloat16() @ x.bfloat16()).sum().backward()
    synchronize()
    marks["matrix_products"] = used_bytes()
    image = torch.ones(1, 64, 8, 8, device=DEVICE, requires_grad=True)
    F.conv2d(image, torch.ones(64, 64, 3, 3, device=DEVICE, requires_grad=True), padding=1).sum().backward()
    synchronize()
    marks["convolutions"] = used_bytes()
    with connected():
        dist.all_reduce(torch.ones(1, device=DEVICE))
        synchronize()
        marks["communication"] = used_bytes()
    values = list(marks.values())
    steps = {f"{name}_mib": (after - values[0]) / 2**20 for name, after in list(marks.items())[1:]}
    return {name: round(mib, 1) for name, mib in steps.items()}


def bare_rank_alone() -> dict[str, float]:
    """Return what `bare_rank` returns in a process of its own; each figure contains those before it."""
    words = [*rank_server.command(), "-m", "tests.gpu.measure_memory", "bare-rank"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert not ended.returncode, ended.stderr[-2000:]
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Make each check."""
    attempt("a rank that has not begun to train", bare_rank_alone)
    small_configurations()
    gpt2 = gpt2_model(GPT2)
    columns = text(2 if REHEARSAL else 16, GPT2["length"], GPT2["vocabulary"])
    for name, sections in list(LARGE.items())[-1:] if REHEARSAL else LARGE.items():
        attempt(f"GPT-2 124M {name}", partial(large, gpt2, columns, sections))
    if not REHEARSAL:
        attempt("ResNet-50 bf16", partial(large, resnet50()[0], images(64, SIDE), BF16))
    for limit in LIMITS_GIB[:1] if REHEARSAL else LIMITS_GIB:
        attempt(f"GPT-2 124M, parallel = auto in {limit} GiB", partial(fits, gpt2, limit))
    attempt("logits", logits)


if __name__ == "__main__":
    if sys.argv[1:] == ["bare-rank"]:
        print(json.dumps(bare_rank()))
    else:
        main()
