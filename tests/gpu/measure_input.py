"""Measure how fast samples come from the shards, and whether their copies run beside the computation.

Images of 224 x 224 pixels in fp32, 128 in a step, for ResNet-50 in bf16. About 2 minutes on an H200.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import onnx

from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.run.directory import read_config
from tests.bench.memory_prediction import images
from tests.gpu.device import DEVICE, REHEARSAL, synchronize
from tests.gpu.measure import TIMED, WARM_UP, connected, run_of, time_training
from tests.gpu.measure_vision import BATCH, SIDE, resnet50
from tests.gpu.results import attempt
from tests.gpu.traces import overlap_share, profile_training, step_figures

ROWS = (2 if REHEARSAL else 4) * BATCH
CHECKS = ("batches alone", "batches in training", "copies of batches")
SECTIONS: dict[str, Any] = {
    "precision": {"compute": "bf16"},
    "train": {"global_batch_size": BATCH, "shuffle": True, "num_steps": 1_000_000},
}


def alone(model: onnx.ModelProto) -> dict[str, Any]:
    """Return the images per second that `Batches.take` gives, on the device, when nothing else is done."""
    with run_of(model, images(ROWS, SIDE), **SECTIONS) as run:
        config = read_config(run)
        signature = read_training_signature(config.model)
        batches = Batches(open_shards(run.shards, "train"), config, signature, replica=0, num_replicas=1, device=DEVICE)
        for step in range(WARM_UP + TIMED):
            if step == WARM_UP:
                synchronize()
                started_at = time.perf_counter()
            batches.take(step * BATCH, BATCH)
        synchronize()
        seconds = time.perf_counter() - started_at
        batches.close()
    image_bytes = 4 * 3 * SIDE * SIDE
    return {"images_per_s": TIMED * BATCH / seconds, "gb_per_s": TIMED * BATCH * image_bytes / seconds / 1e9}


def in_training(mpi: MPIContext, model: onnx.ModelProto) -> dict[str, Any]:
    """Return the images per second of the training loop with shuffled images."""
    with run_of(model, images(ROWS, SIDE), **SECTIONS) as run:
        times = sorted(time_training(run, mpi))
    return {
        "images_per_s": 1e3 * BATCH / times[len(times) // 2],
        "step_ms": times[len(times) // 2],
        "slowest_ms": times[-1],
    }


def copies(mpi: MPIContext, model: onnx.ModelProto) -> dict[str, Any]:
    """Return how much of the time of the copies to the device kernels run, too."""
    with run_of(model, images(ROWS, SIDE), **SECTIONS) as run:
        events = profile_training(run, mpi)
    figures = step_figures(events)
    return {"overlap_share": overlap_share(events)} | {
        name: figures[name] for name in ("copies_to_device", "idle_share", "busy_ms")
    }


def main() -> None:
    """Make each check."""
    model, _ = resnet50()
    attempt(CHECKS[0], partial(alone, model))
    with connected() as mpi:
        attempt(CHECKS[1], partial(in_training, mpi, model))
        attempt(CHECKS[2], partial(copies, mpi, model))


if __name__ == "__main__":
    main()
