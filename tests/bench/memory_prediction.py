"""Peak memory of a rank: what `onward plan` estimates beside what the operating system measures.

    python -m tests.bench.memory_prediction            about 5 minutes on 2 cores

Each configuration is a real run of the loop under mpirun. Measured is the peak of resident memory during its steps,
above what the same ranks held after a run in the same layout of a model that is next to nothing: libraries, buffers
of gloo, Python. The allocator is told to give freed tensors back (MALLOC_MMAP_THRESHOLD_), so that what is resident is
what is alive. Exits with 1 if a prediction is off by more than ALLOWED.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import Heartbeat
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import Array, make_run

ALLOWED = 0.2
NUM_STEPS, FROM_STEP = 5, 3
MiB = 2**20
Sections = dict[str, dict[str, Any]]


def text(rows: int, length: int, words: int) -> dict[str, Array]:
    """Random words, and the word after each."""
    ids = np.random.default_rng(0).integers(0, words, (rows, length + 1))
    return {"input_ids": ids[:, :-1].copy(), "label": ids[:, 1:].copy()}


def images(rows: int, side: int) -> dict[str, Array]:
    """Noise in ten classes."""
    random = np.random.default_rng(0)
    pixels = random.standard_normal((rows, 3, side, side), np.float32)
    return {"image": pixels, "label": np.arange(rows) % 10}


def gpt2(width: int, layers: int, words: int, length: int) -> Callable[[], onnx.ModelProto]:
    heads = max(1, width // 64)
    return lambda: build_gpt2(
        vocab_size=words, sequence_length=length, num_layers=layers, num_heads=heads, width=width, dropout=0.0
    )


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[int], dict[str, Array]]]] = {
    "GPT-2 8 x 256": (gpt2(256, 8, 512, 128), lambda rows: text(rows, 128, 512)),
    "GPT-2 4 x 512, 4096 words": (gpt2(512, 4, 4096, 64), lambda rows: text(rows, 64, 4096)),
    "llama 8 x 32": (lambda: graphs.tiny_llama(vocab_size=1024, num_layers=8), lambda rows: text(rows, 256, 1024)),
    "SqueezeNet 96": (
        lambda: build_squeezenet(num_classes=10, image_size=96),
        lambda rows: images(rows, 96),
    ),
}
SMALL: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[int], dict[str, Array]]]] = {
    "GPT-2 8 x 256": (gpt2(8, 8, 16, 4), lambda rows: text(rows, 4, 16)),
    "GPT-2 4 x 512, 4096 words": (gpt2(8, 4, 16, 4), lambda rows: text(rows, 4, 16)),
    "llama 8 x 32": (lambda: graphs.tiny_llama(vocab_size=16, num_layers=8), lambda rows: text(rows, 4, 16)),
    "SqueezeNet 96": (
        lambda: build_squeezenet(num_classes=10, image_size=32),
        lambda rows: images(rows, 32),
    ),
}
"""The same graphs, next to nothing."""

GPT, WORDS, LLAMA, CONV = MODELS
BF16: Sections = {"precision": {"compute": "bf16"}}
CASES: list[tuple[str, dict[str, Any], int, Sections]] = [
    (GPT, {}, 1, {}),
    (GPT, {}, 4, {}),
    (GPT, {}, 1, BF16),
    (GPT, {}, 4, BF16),
    (GPT, {"data": 2, "zero": 2}, 2, BF16),
    (GPT, {"data": 2, "zero": 3}, 2, BF16),
    (GPT, {"units": 8}, 1, {"recompute": {"mode": "whole"}}),
    (GPT, {"units": 8}, 1, {"recompute": {"mode": "selective"}}),
    (GPT, {"data": 2}, 1, {}),
    (GPT, {"data": 2, "zero": 1}, 2, {}),
    (GPT, {"data": 2, "zero": 2}, 2, {}),
    (GPT, {"data": 2, "zero": 3}, 2, {}),
    (GPT, {"tensor": 2}, 1, {}),
    (GPT, {"pipeline": 2}, 4, {}),
    (GPT, {"pipeline": 2, "schedule": "gpipe"}, 4, {}),
    (GPT, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, 4, {}),
    (GPT, {"tensor": 2, "pipeline": 2}, 4, {}),
    (GPT, {"data": 2, "pipeline": 2, "zero": 3}, 4, {}),
    (WORDS, {}, 1, {}),
    (WORDS, {}, 1, {"optimizer": {"name": "adamw", "moments": "bf16"}}),
    (WORDS, {}, 1, {"optimizer": {"name": "sgd"}}),
    (WORDS, {"tensor": 2}, 1, {}),
    (WORDS, {"data": 2, "zero": 3}, 1, {}),
    (WORDS, {"data": 4, "zero": 3}, 1, {}),
    (WORDS, {"data": 4, "zero": 3, "shard": 2}, 1, {}),
    (LLAMA, {}, 1, {}),
    (LLAMA, {"tensor": 2}, 2, {}),
    (LLAMA, {"data": 2, "tensor": 2, "pipeline": 2}, 2, {}),
    (CONV, {}, 1, {}),
    (CONV, {"pipeline": 2}, 2, {}),
    (CONV, {"data": 2, "zero": 2}, 1, {}),
]
"""(model, [parallel], micro-batches, other sections)"""


def make(folder: Path, models: Any, case: tuple[str, dict[str, Any], int, Sections], *, batch: int) -> RunDir:
    """The run directory of one case."""
    name, parallel, steps, sections = case
    build, columns = models[name]
    train = {"global_batch_size": batch, "gradient_accumulation_steps": steps, "num_steps": NUM_STEPS}
    return make_run(folder, build(), columns(2 * batch), train=train, parallel=parallel, **sections)


class Meter(Heartbeat):
    """Notes the peak of resident memory from one step to the last."""

    peak = 0

    def beat(self, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
        if step == FROM_STEP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        elif step == NUM_STEPS:
            self.peak = resident("VmHWM")
        super().beat(step, longest_step_s=longest_step_s)


def resident(key: str) -> int:
    """Bytes, as the operating system says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def measured(mpi: MPIContext, small: str, root: str) -> int:
    """On a rank: bytes at the peak of a step, above what a run of the small model leaves."""
    from onward.trainer.loop import train

    for path in (small, root):
        run = RunDir(Path(path))
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = resident("VmRSS")
        meter = Meter(run.heartbeat)
        train(run, mpi, attempt=1, heartbeat=meter, stop_requested=lambda: False)
    return meter.peak - before


def main() -> None:
    """Run every case; print predicted and measured peaks of the rank that holds most."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    worst = 0.0
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        for number, case in enumerate(CASES):
            name, parallel, steps, sections = case
            title = f"{name}: {shown(parallel, steps, sections)}"
            if wanted and not any(word in title for word in wanted):
                continue
            run = make(Path(folder) / f"{number}", MODELS, case, batch=16)
            small = make(Path(folder) / f"{number}-small", SMALL, case, batch=16)
            config = read_config(run)
            for each in (run, small):
                each.begin_attempt()
            peaks = run_ranks(
                config.world_size,
                "tests.bench.memory_prediction:measured",
                str(small.root),
                str(run.root),
                timeout_s=300,
            )
            estimated = plan(config).memory
            dims = ParallelDims.of(config.parallel)
            pairs = [(estimated[dims.coordinate(rank).pipeline].peak, peak) for rank, peak in enumerate(peaks)]
            predicted, found = max(pairs, key=lambda pair: pair[1])
            off = predicted / found - 1
            worst = max(worst, abs(off))
            print(f"{title:75} {predicted / MiB:7.1f} {found / MiB:7.1f} MiB  {off:+5.0%}", flush=True)
    print(f"worst {worst:.0%}")
    sys.exit(worst > ALLOWED)


def shown(parallel: dict[str, Any], steps: int, sections: Sections) -> str:
    """Return the settings of one case in words."""
    settings = {**parallel, "micro-batches": steps, **{k: v for each in sections.values() for k, v in each.items()}}
    return ", ".join(f"{key} {value}" for key, value in settings.items())


if __name__ == "__main__":
    main()
