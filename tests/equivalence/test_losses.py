"""Losses are sums over counts: on any ranks, micro-batches and ragged ends they are what torch computes on one.

Each run has three steps: two full ones and one of a single sample, for which a replica has no sample at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.data.batches import Batches
from onward.trainer.data.shards import open_shards
from onward.trainer.data.signature import read_training_signature
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_graph.builder import GraphWriter
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import TOLERANCE, differences, gradients
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, losses, make_run

ROWS, BATCH, MICRO_BATCHES = 60, 20, 4
LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
}


@dataclass(frozen=True)
class Case:
    """A graph, its data, its losses, and torch's own formula for the mean over one batch of outputs and columns."""

    model: Callable[[], onnx.ModelProto]
    columns: Mapping[str, Array]
    loss: Any
    formula: Callable[[Sequence[Tensor], Sequence[Tensor | None]], Tensor]


def two_heads() -> onnx.ModelProto:
    """`features` [batch, 4] -> `kinds` [batch, 3] and `level` [batch, 1]."""
    g = GraphWriter("two_heads", seed=0)
    x = g.input("features", ("batch", 4))
    for name, (inputs, outputs) in {"fc1": (4, 16), "fc2": (16, 16)}.items():
        weight = g.weight(f"{name}.weight", g.normal(0.5, outputs, inputs))
        x = g.op("Tanh", g.op("Gemm", x, weight, g.weight(f"{name}.bias", g.normal(0.1, outputs)), transB=1))
    for name, size in (("kinds", 3), ("level", 1)):
        weight = g.weight(f"{name}.weight", g.normal(0.5, size, 16))
        g.op("Gemm", x, weight, g.weight(f"{name}.bias", g.normal(0.1, size)), transB=1, outputs=name)
        g.output(name, ("batch", size))
    return g.model()


def columns() -> dict[str, Array]:
    random = np.random.default_rng(0)
    kinds = random.integers(0, 3, ROWS)
    kinds[::7] = -100
    features = random.standard_normal((ROWS, 4), dtype=np.float32)
    return {"features": features, "kind": kinds, "level": features.sum(1) + 1}


CASES: dict[str, Case] = {
    "two heads": Case(
        two_heads,
        columns(),
        [
            {"output": "kinds", "label": "kind"},
            {"output": "level", "label": "level", "name": "mse", "weight": 0.25},
        ],
        lambda outputs, labels: (
            F.cross_entropy(outputs[0], labels[0]) + 0.25 * F.mse_loss(outputs[1].flatten(), labels[1])
        ),
    ),
}


def make_case(case: Case, folder: Path, layout: str) -> RunDir:
    parallel = LAYOUTS[layout]
    folder.mkdir()
    np.savez(folder / "held-out.npz", **case.columns)
    return make_run(
        folder,
        case.model(),
        case.columns,
        data={"evaluation_source": str(folder / "held-out.npz")},
        loss=case.loss,
        train={
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES // parallel.get("data", 1),
            "num_epochs": (2 * BATCH + 1) / ROWS,
            "clip_norm": 0.0,
        },
        optimizer={"name": "adamw", "epsilon": 1e-3},
        parallel={**parallel, "convolutions": "always"},
        checkpoint={"period": 1, "keep_newest": 9},
    )


def trained(case: Case, folder: Path, layouts: Sequence[str]) -> dict[str, RunDir]:
    runs = {layout: make_case(case, folder / str(number), layout) for number, layout in enumerate(layouts)}
    for size in sorted({read_config(run).world_size for run in runs.values()}):
        roots = [str(run.root) for run in runs.values() if read_config(run).world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=300)
    return runs


def by_hand(case: Case, run: RunDir) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first step and its gradients, as torch computes them on the whole batch at once."""
    config = read_config(run)
    signature, share = read_training_signature(config.model), {"replica": 0, "num_replicas": 1}
    stream = Batches(open_shards(run.shards, "train"), config, signature, **share, device=torch.device("cpu"))
    batches = stream.take(0, BATCH)
    stream.close()
    inputs = [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]
    labels = [
        None if parts[0] is None else torch.cat(parts) for parts in zip(*(b.labels for b in batches), strict=True)
    ]
    module = open_trainable(config).module.train()
    outputs = module(*inputs)
    loss = case.formula((outputs,) if isinstance(outputs, Tensor) else outputs, labels)
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in named_weights(module).items() if w.grad is not None}


def assert_as_by_hand(case: Case, run: RunDir) -> None:
    loss, expected = by_hand(case, run)
    assert losses(run)[1] == pytest.approx(loss, rel=1e-5)
    found = gradients(run)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[f"{name}/moment_1"], gradient, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.mpi
def test_two_heads_train_on_any_ranks_as_torch_trains_them_on_one(tmp_path: Path) -> None:
    case = CASES["two heads"]
    runs = trained(case, tmp_path, ["alone", "dp2", "pp2", "tp2"])
    assert_as_by_hand(case, runs["alone"])
    found = {name: differences(run, runs["alone"]) for name, run in runs.items() if name != "alone"}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    for run in runs.values():
        for event in events(run, "evaluation"):
            values = event.fields["values"]
            parts = values["evaluation/kinds/loss"] + 0.25 * values["evaluation/level/loss"]
            assert values["evaluation/loss"] == pytest.approx(parts, rel=1e-6)
            assert {"evaluation/kinds/accuracy", "evaluation/level/mae"} < values.keys()
