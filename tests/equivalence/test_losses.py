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

from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.losses_from_data import with_balanced_weights
from onward.trainer.data.signature import read_training_signature
from onward.trainer.data.storage.shards import open_shards
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_graph.builder import GraphWriter
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import TOLERANCE, differences, gradients
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, losses, make_run
from tests.trainer.model.test_loss_formulas import CASES as FORMULAS
from tests.trainer.model.test_loss_formulas import dice_by_hand

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


def two_towers() -> onnx.ModelProto:
    """`a` and `b` [batch, 4] -> `query` and `key` [batch, 6]."""
    g = GraphWriter("two_towers", seed=0)
    for x, name in (("a", "query"), ("b", "key")):
        hidden = g.op("Tanh", g.op("MatMul", g.input(x, ("batch", 4)), g.weight(f"{x}.1", g.normal(0.5, 4, 16))))
        g.op("MatMul", hidden, g.weight(f"{x}.2", g.normal(0.5, 16, 6)), outputs=name)
        g.output(name, ("batch", 6))
    return g.model()


def clip(queries: Tensor, keys: Tensor) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.2
    own = torch.arange(len(queries))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def balanced(labels: Array) -> Tensor:
    counts = torch.bincount(torch.from_numpy(labels[labels >= 0]))
    return counts.sum() / (len(counts) * counts)


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


def segmenter() -> onnx.ModelProto:
    """`image` [batch, 2, h, w] -> `scores` [batch, 3, h, w]."""
    g = GraphWriter("segmenter", seed=0)
    x = g.input("image", ("batch", 2, "h", "w"))
    x = g.op("Relu", g.op("Conv", x, g.weight("c1", g.normal(0.3, 8, 2, 3, 3)), pads=[1, 1, 1, 1]))
    x = g.op("Relu", g.op("Conv", x, g.weight("c2", g.normal(0.3, 8, 8, 3, 3)), pads=[1, 1, 1, 1]))
    g.op("Conv", x, g.weight("c3", g.normal(0.3, 3, 8, 1, 1)), outputs="scores")
    g.output("scores", ("batch", 3, "h", "w"))
    return g.model()


def masks() -> dict[str, Array]:
    random = np.random.default_rng(1)
    mask = random.integers(0, 3, (ROWS, 3, 3))
    mask[::5, 0] = -100
    return {"image": random.standard_normal((ROWS, 2, 3, 3), dtype=np.float32), "mask": mask}


WEIGHTS = (0.2, 1.0, 3.0)
CASES |= {
    "square images, weights and smoothing": Case(
        segmenter,
        masks(),
        {"label": "mask", "class_weights": WEIGHTS, "label_smoothing": 0.1},
        lambda outputs, labels: F.cross_entropy(outputs[0], labels[0], torch.tensor(WEIGHTS), label_smoothing=0.1),
    ),
    "cross-entropy and dice of one output": Case(
        segmenter,
        masks(),
        [{"label": "mask"}, {"label": "mask", "name": "dice", "weight": 0.5}],
        lambda outputs, labels: F.cross_entropy(outputs[0], labels[0]) + 0.5 * dice_by_hand(outputs[0], labels[0]),
    ),
    "balanced classes": Case(
        two_heads,
        columns(),
        {"output": "kinds", "label": "kind", "class_weights": "balanced"},
        lambda outputs, labels: F.cross_entropy(outputs[0], labels[0], balanced(columns()["kind"])),
    ),
    "towers over all replicas": Case(
        two_towers,
        {"a": columns()["features"], "b": columns()["features"][:, ::-1].copy()},
        {"name": "info_nce", "output": ["query", "key"], "temperature": 0.2},
        lambda outputs, labels: clip(outputs[0], outputs[1]),
    ),
}


def more_columns() -> dict[str, Array]:
    random = np.random.default_rng(2)
    yes = (random.random((ROWS, 3)) < 0.3).astype(np.float32)
    soft = random.dirichlet(np.ones(3), ROWS).astype(np.float32)
    numbers = random.standard_normal((ROWS, 3)).astype(np.float32)
    return {**columns(), "yes": yes, "soft": soft, "numbers": numbers}


def of_kinds(label: str, formula: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> Case:
    """A loss of the output `kinds` [B, 3]."""
    loss = {"output": "kinds", "label": label, **settings}
    return Case(two_heads, more_columns(), loss, lambda outputs, labels: formula(outputs[0], labels[0]))


ALIKE = np.where(np.arange(ROWS) % 3, 1, -1).astype(np.float32)
CASES |= {
    "probabilities": of_kinds("soft", F.cross_entropy, soft_labels=True),
    "positive weights": of_kinds(
        "yes",
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor(WEIGHTS)),
        name="bce_with_logits",
        positive_weights=WEIGHTS,
    ),
    "huber": of_kinds("numbers", lambda o, t: F.huber_loss(o, t, delta=0.5), name="huber", delta=0.5),
    "focal": of_kinds("yes", FORMULAS["focal"].formula, name="focal", alpha=0.3, gamma=1.5),
    "quantile": of_kinds("level", FORMULAS["quantile"].formula, name="quantile", quantiles=(0.1, 0.5, 0.9)),
    "cosine": Case(
        two_towers,
        {"a": columns()["features"], "b": columns()["features"][:, ::-1].copy(), "alike": ALIKE},
        {"name": "cosine", "output": ["query", "key"], "label": "alike", "margin": 0.1},
        lambda outputs, labels: F.cosine_embedding_loss(*outputs, labels[0], margin=0.1),
    ),
}


def make_case(case: Case, folder: Path, layout: str) -> RunDir:
    parallel = LAYOUTS[layout]
    at_once = not isinstance(case.loss, list) and case.loss.get("name") == "info_nce"
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
            "gradient_accumulation_steps": 1 if at_once else MICRO_BATCHES // parallel.get("data", 1),
            # one row is like no other, so that its loss would be 0
            "num_epochs": (2 * BATCH + (3 if at_once else 1)) / ROWS,
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
    config, rows = read_config(run), open_shards(run.shards, "train")
    signature, share = read_training_signature(config.model), {"replica": 0, "num_replicas": 1}
    config = with_balanced_weights(config, rows, signature)
    stream = Batches(rows, config, signature, **share, device=torch.device("cpu"))
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


# each kind of loss over replicas with shares of different size and with none; pipelines and shards are slower
QUICK = {
    "square images, weights and smoothing": ["dp2", "pp2"],
    "cross-entropy and dice of one output": ["dp2"],
    "balanced classes": ["dp2"],
    "towers over all replicas": ["dp2"],
}


def assert_alike(case: Case, folder: Path, layouts: Sequence[str]) -> None:
    runs = trained(case, folder, ["alone", *layouts])
    assert_as_by_hand(case, runs["alone"])
    # what every replica evaluates with info_nce are its own rows only
    skipped = {"evaluation"} if case is CASES["towers over all replicas"] else set()
    for name in layouts:
        found = {key: value for key, value in differences(runs[name], runs["alone"]).items() if key not in skipped}
        assert max(found.values()) <= TOLERANCE, (name, found)


@pytest.mark.mpi
@pytest.mark.parametrize("name", QUICK)
def test_losses_train_on_any_ranks_as_torch_trains_them_on_one(name: str, tmp_path: Path) -> None:
    assert_alike(CASES[name], tmp_path, QUICK[name])


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_loss_trains_in_every_layout_as_on_one_rank(name: str, tmp_path: Path) -> None:
    at_once = name == "towers over all replicas"
    assert_alike(CASES[name], tmp_path, ["dp2"] if at_once else [layout for layout in LAYOUTS if layout != "alone"])


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
