"""A rank whose memory runs out writes down what was in it, by name. A real rank under a real limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.memory_record import MemorySnapshot, snapshot_path
from onward.trainer.run.records import read_record
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


def test_a_rank_that_runs_out_of_memory_leaves_its_largest_tensors_by_name(tmp_path: Path) -> None:
    run = starved_run(tmp_path, wanted=True)
    error, path = run.first_error(1), snapshot_path(run, 1, 0)
    assert error is not None
    assert error.cause.startswith("OutOfMemory: DefaultCPUAllocator: can't allocate memory: you tried to allocate ")
    assert f"{ACTIVATION_BYTES} bytes" in error.cause
    assert "To need less memory: " in error.cause
    assert error.cause.endswith(f". What was in the memory of the rank is in {path}")
    found = read_record(path, MemorySnapshot)
    assert (found.rank, found.attempt, found.step) == (0, 1, 3)
    assert f"{ACTIVATION_BYTES} bytes" in found.error
    assert 0 < found.rss_bytes < found.address_space_limit_bytes
    by_kind = {kind: {each.name: each for each in found.tensors if each.kind == kind} for kind in found.bytes_by_kind}
    weights = by_kind["weight"]
    assert {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"} <= weights.keys()
    assert weights["fc1.weight"].shape == (HIDDEN, 4)
    assert weights["fc1.weight"].bytes == 4 * 4 * HIDDEN
    (bucket,) = by_kind["gradient"].values()
    assert (bucket.bytes, bucket.more_names) == (4 * (6 * HIDDEN + 1), 3), "the gradients of all four weights"
    assert {"fc1.weight: moment_1", "fc1.weight: moment_2"} <= by_kind["optimizer state"].keys()
    (node,) = [each for each in onnx.load(tmp_path / "model.onnx").graph.node if "fc1.weight" in each.input]
    largest = found.tensors[0]
    assert (largest.kind, largest.name) == ("activation", node.output[0]), "what the first layer has computed"
    assert (largest.shape, largest.bytes) == ((BATCH, HIDDEN), ACTIVATION_BYTES)
    assert by_kind["activation"]["kept by AddmmBackward0"].shape == (BATCH, 4), "the input, for the gradient of fc1"
    assert found.bytes_by_kind["activation"] >= ACTIVATION_BYTES + 4 * 4 * BATCH
    sizes = [each.bytes for each in found.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert found.num_tensors >= len(sizes)


def test_without_the_setting_the_error_is_as_it_was(tmp_path: Path) -> None:
    run = starved_run(tmp_path, wanted=False)
    error = run.first_error(1)
    assert error is not None
    assert error.cause.startswith("OutOfMemory: ")
    assert "What was in the memory" not in error.cause
    assert not run.memory.exists()
