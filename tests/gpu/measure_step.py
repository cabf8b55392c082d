"""Profile a step of GPT-2 124M: kernels, idle time, waits, copies, optimizer, norm, casts. About 2 minutes on an H200.

A loop written by hand with the same batch and one micro-batch stands beside it. What a micro-batch costs is the
difference between 16 micro-batches in a step and one, divided by 15.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx
import torch

from onward.trainer.distributed.processes import MPIContext
from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import DEVICE, REHEARSAL
from tests.gpu.measure import by_hand, connected, free, run_of
from tests.gpu.measure_gpt2 import SIZES, TINY
from tests.gpu.results import attempt
from tests.gpu.traces import profile_calls, profile_training, slowest_kernels, step_figures

GPT2, BATCH = (TINY, 4) if REHEARSAL else (SIZES, 16)
CHECKS = ("GPT-2 bf16, 1 micro-batch", f"GPT-2 bf16, {BATCH} micro-batches", "by hand, 1 micro-batch")


def of_onward(mpi: MPIContext, model: onnx.ModelProto, micro_batches: int) -> dict[str, Any]:
    """Return the figures of a step of the training loop."""
    sections = {
        "precision": {"compute": "bf16"},
        "train": {"gradient_accumulation_steps": micro_batches},
    }
    with run_of(model, text(BATCH, GPT2["length"], GPT2["vocabulary"]), **sections) as run:
        events = profile_training(run, mpi)
    return step_figures(events) | {"slowest": slowest_kernels(events)}


def of_a_loop_by_hand(model: onnx.ModelProto) -> dict[str, Any]:
    """Return the figures of an update written by hand."""
    columns = text(BATCH, GPT2["length"], GPT2["vocabulary"])
    inputs, labels = (torch.from_numpy(column).to(DEVICE) for column in columns.values())
    update = by_hand(gpt2_from(model, GPT2).to(DEVICE), [inputs], labels, compute="bf16")
    for _ in range(3):
        update()
    events = profile_calls(update)
    free()
    return step_figures(events) | {"slowest": slowest_kernels(events)}


def main() -> None:
    """Profile both sides."""
    model = gpt2_model(GPT2)
    with connected() as mpi:
        for check, micro_batches in zip(CHECKS, (1, BATCH), strict=False):
            attempt(check, partial(of_onward, mpi, model, micro_batches))
        attempt(CHECKS[2], partial(of_a_loop_by_hand, model))


if __name__ == "__main__":
    main()
