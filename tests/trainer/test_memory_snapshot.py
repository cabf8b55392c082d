"""A rank whose memory runs out: a snapshot needs a GPU. A real rank under a real limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_mlp
from tests.support.runs import make_run, start_attempt

pytestmark = pytest.mark.mpi
HIDDEN, BATCH = 16384, 1024
ACTIVATION_BYTES = 4 * HIDDEN * BATCH


def starved_run(folder: Path, *, wanted: bool) -> RunDir:
    """A run whose rank may have 96 MiB more after step 2; the hidden activations of step 3 take 64 MiB each."""
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(3000, 4)).astype(np.float32), "label": np.zeros(3000, np.float32)}
    model = tiny_mlp(hidden=HIDDEN)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Sigmoid"  # a ReLU would overwrite what the first layer has computed
    run = make_run(
        folder,
        model,
        columns,
        model={"loss": "mse"},
        # of two micro-batches the gradients are added in a bucket, which is there from the first on
        train={"global_batch_size": 2 * BATCH, "gradient_accumulation_steps": 2, "num_steps": 6, "log_period": 1},
        optimizer={"name": "adam"},
        monitor={"memory_snapshot": wanted},
    )
    assert start_attempt(run, starve_at=("scalars", 2)).wait(120) != 0
    return run


@pytest.mark.parametrize("wanted", [True, False])
def test_on_the_cpu_there_is_no_snapshot_and_the_log_says_why(tmp_path: Path, wanted: bool) -> None:
    run = starved_run(tmp_path, wanted=wanted)
    error = run.first_error(1)
    assert error is not None
    assert error.cause.startswith("OutOfMemory: DefaultCPUAllocator: can't allocate memory: you tried to allocate ")
    assert f"{ACTIVATION_BYTES} bytes" in error.cause
    assert "To need less memory: " in error.cause
    assert "What was in the memory" not in error.cause
    assert not run.memory.exists()
    said = "monitor.memory_snapshot = true has no effect: it needs a GPU, and this run trains on the CPU"
    assert (said in run.log(1).read_text()) == wanted
