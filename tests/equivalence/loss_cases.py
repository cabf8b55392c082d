"""One case for each loss and each of its settings: a graph, its data, the loss, and torch's formula for its mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support.runs import Array
from tests.trainer.model.test_loss_formulas import CASES as FORMULAS
from tests.trainer.model.test_loss_formulas import dice_by_hand

ROWS, BATCH, MICRO_BATCHES = 60, 20, 4
WEIGHTS = (0.2, 1.0, 3.0)


@dataclass(frozen=True)
class Case:
    """A graph, its data, its losses, and torch's own formula for the mean over one batch of outputs and labels."""

    model: Callable[[], onnx.ModelProto]
    columns: Mapping[str, Any]
    """Arrays; lists of lists where rows have lengths of their own."""
    loss: Any
    """Its settings, or those of several; `{folder}` in `file` is the folder of `files`."""
    formula: Callable[[Sequence[Tensor], Sequence[Any]], Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def losses(self, folder: Path) -> list[dict[str, Any]]:
        entries = self.loss if isinstance(self.loss, list) else [self.loss]
        return [{**each, "file": each["file"].format(folder=folder)} if "file" in each else each for each in entries]

    @property
    def at_once(self) -> bool:
        """Whether all samples of a step are in one micro-batch."""
        return self.losses(Path())[0].get("name") == "info_nce"

    @property
    def is_ragged(self) -> bool:
        return any(isinstance(column, list) for column in self.columns.values())

    def json_lines(self) -> str:
        names, rows = self.columns.keys(), zip(*self.columns.values(), strict=True)
        lists = ([cell if isinstance(cell, list) else cell.tolist() for cell in row] for row in rows)
        return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in lists)


# -- graphs


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


def towers(names: Mapping[str, str]) -> onnx.ModelProto:
    """For each input, [batch, 4], an output [batch, 6]."""
    g = GraphWriter("towers", seed=0)
    for x, name in names.items():
        hidden = g.op("Tanh", g.op("MatMul", g.input(x, ("batch", 4)), g.weight(f"{x}.1", g.normal(0.5, 4, 16))))
        g.op("MatMul", hidden, g.weight(f"{x}.2", g.normal(0.5, 16, 6)), outputs=name)
        g.output(name, ("batch", 6))
    return g.model()


def two_towers() -> onnx.ModelProto:
    return towers({"a": "query", "b": "key"})


def three_towers() -> onnx.ModelProto:
    return towers({"a": "anchor", "b": "like", "c": "unlike"})


def segmenter(*shape: str | int) -> onnx.ModelProto:
    """`image` [batch, 2, h, w] -> `scores` [batch, 3, h, w], which the file declares as `shape`."""
    g = GraphWriter("segmenter", seed=0)
    x = g.input("image", ("batch", 2, "h", "w"))
    x = g.op("Relu", g.op("Conv", x, g.weight("c1", g.normal(0.3, 8, 2, 3, 3)), pads=[1, 1, 1, 1]))
    x = g.op("Relu", g.op("Conv", x, g.weight("c2", g.normal(0.3, 8, 8, 3, 3)), pads=[1, 1, 1, 1]))
    g.op("Conv", x, g.weight("c3", g.normal(0.3, 3, 8, 1, 1)), outputs="scores")
    g.output("scores", ("batch", *(shape or (3, "h", "w"))))
    return g.model()


def boxes() -> onnx.ModelProto:
    """`features` [batch, 4] -> `boxes` [batch, 4]: x1, y1, and x2, y2 above them."""
    g = GraphWriter("boxes", seed=0)
    x = g.input("features", ("batch", 4))
    x = g.op("Tanh", g.op("MatMul", x, g.weight("fc1", g.normal(0.5, 4, 16))))
    corner = g.op("MatMul", x, g.weight("corner", g.normal(0.5, 16, 2)))
    side = g.op("Softplus", g.op("MatMul", x, g.weight("side", g.normal(0.5, 16, 2))))
    g.op("Concat", corner, g.op("Add", corner, side), axis=1, outputs="boxes")
    g.output("boxes", ("batch", 4))
    return g.model()


def recogniser() -> onnx.ModelProto:
    """`frames` int64 [batch, time] -> `scores` [batch, time, 5], each step by itself."""
    g = GraphWriter("recogniser", seed=0)
    frames = g.input("frames", ("batch", "time"), onnx.TensorProto.INT64)
    x = g.op("Gather", g.weight("table", g.normal(0.5, 8, 16)), frames, axis=0)
    x = g.op("Tanh", g.op("MatMul", x, g.weight("fc1", g.normal(0.5, 16, 16))))
    g.op("MatMul", x, g.weight("fc2", g.normal(0.5, 16, 5)), outputs="scores")
    g.output("scores", ("batch", "time", 5))
    return g.model()


def with_own_loss() -> onnx.ModelProto:
    """`features` [batch, 4], `level` [batch] -> the mean of |prediction - level|^3."""
    g = GraphWriter("own_loss", seed=0)
    x = g.op("Tanh", g.op("MatMul", g.input("features", ("batch", 4)), g.weight("fc1", g.normal(0.5, 4, 16))))
    found = g.op("MatMul", x, g.weight("fc2", g.normal(0.5, 16, 1)))
    size = g.op("Abs", g.op("Sub", found, g.input("level", ("batch", 1))))
    g.op("ReduceMean", g.op("Mul", g.op("Mul", size, size), size), keepdims=0, outputs="loss")
    g.output("loss", ())
    return g.model()


def squares() -> bytes:
    """A loss file: `output` [batch, 3], `labels` [batch, 3] -> the mean of their squared difference, by row."""
    g = GraphWriter("squares", seed=0)
    difference = g.op("Sub", g.input("output", ("batch", 3)), g.input("labels", ("batch", 3)))
    square = g.op("Mul", difference, difference)
    g.op("ReduceMean", square, g.weight("axes", np.array([1])), keepdims=0, outputs="loss")
    g.output("loss", ("batch",))
    return g.model().SerializeToString()


PYTHON = b'''
import torch
import torch.nn.functional as F

def cubes(output, labels):
    return ((output - labels).abs() ** 3).mean(1).sum()

def entropy(output, labels):
    return F.cross_entropy(output, labels, reduction="sum")

def known(labels, size):
    """The labels that are not ignored."""
    return (labels != -100).sum()

def squares_of_known(output, labels):
    """With as many elements as the labels say."""
    return ((output - labels)[labels > 0] ** 2).sum()

def positive(labels, size):
    return float((labels > 0).sum())
'''


# -- data


def columns() -> dict[str, Array]:
    random = np.random.default_rng(0)
    kinds = random.integers(0, 3, ROWS)
    kinds[::7] = -100
    features = random.standard_normal((ROWS, 4), dtype=np.float32)
    return {"features": features, "kind": kinds, "level": features.sum(1) + 1}


def more_columns() -> dict[str, Array]:
    random = np.random.default_rng(2)
    yes = (random.random((ROWS, 3)) < 0.3).astype(np.float32)
    soft = random.dirichlet(np.ones(3), ROWS).astype(np.float32)
    numbers = random.standard_normal((ROWS, 3)).astype(np.float32)
    corners = random.standard_normal((ROWS, 2))
    box = np.concatenate([corners, corners + random.random((ROWS, 2)) + 0.1], 1).astype(np.float32)
    return {**columns(), "yes": yes, "soft": soft, "numbers": numbers, "box": box}


def tower_columns() -> dict[str, Array]:
    features = columns()["features"]
    alike = np.where(np.arange(ROWS) % 3, 1, -1).astype(np.float32)
    return {"a": features, "b": features[:, ::-1].copy(), "c": features[::-1].copy(), "alike": alike}


def masks() -> dict[str, Array]:
    random = np.random.default_rng(1)
    mask = random.integers(0, 3, (ROWS, 3, 3))
    mask[::5, 0] = -100
    return {"image": random.standard_normal((ROWS, 2, 3, 3), dtype=np.float32), "mask": mask}


def utterances(*, ragged: bool) -> dict[str, Any]:
    """Frames and their symbols; ragged: each row of its own length, and some have frames that do not count."""
    random = np.random.default_rng(4)
    symbols = [random.integers(1, 5, random.integers(1, 4)).tolist() for _ in range(ROWS)]
    if not ragged:
        padded = np.array([row + [-100] * (3 - len(row)) for row in symbols])
        return {"frames": random.integers(0, 8, (ROWS, 7)), "symbols": padded}
    # twice the labels suffice also where all are repeated
    steps = [2 * len(row) + int(random.integers(0, 3)) for row in symbols]
    frames = [random.integers(0, 8, count + int(random.integers(0, 3))).tolist() for count in steps]
    return {"frames": frames, "symbols": symbols, "steps": np.array(steps)}


# -- formulas


def clip(queries: Tensor, keys: Tensor) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.2
    own = torch.arange(len(queries))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def balanced(labels: Array) -> Tensor:
    counts = torch.bincount(torch.from_numpy(labels[labels >= 0]))
    return counts.sum() / (len(counts) * counts)


def ctc(scores: Tensor, labels: Tensor, steps: Tensor) -> Tensor:
    likelihoods, lengths = scores.log_softmax(-1).transpose(0, 1), (labels != -100).sum(1)
    return F.ctc_loss(likelihoods, labels.clamp(min=0), steps, lengths)


def of_kinds(label: str, formula: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> Case:
    """A loss of the output `kinds` [B, 3]."""
    loss = {"output": "kinds", "label": label, **settings}
    return Case(two_heads, more_columns(), loss, lambda outputs, labels: formula(outputs[0], labels[0]))


def of_file(label: str, formula: Callable[[Tensor, Tensor], Tensor], file: str, **settings: Any) -> Case:
    loss = {"output": "kinds", "label": label, "file": f"{{folder}}/{file}", **settings}
    files = {"my_loss.py": PYTHON, "my_loss.onnx": squares()}
    return Case(two_heads, more_columns(), loss, lambda outputs, labels: formula(outputs[0], labels[0]), files)


def of_masks(formula: Callable[[Tensor, Tensor], Tensor], *shape: str, **settings: Any) -> Case:
    return Case(
        lambda: segmenter(*shape),
        masks(),
        {"label": "mask", **settings},
        lambda outputs, labels: formula(outputs[0], labels[0]),
    )


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
    "ignored labels": of_kinds("kind", F.cross_entropy),
    "class axis of dynamic shapes": of_masks(F.cross_entropy, "c", "h", "w", class_axis=1),
    "label smoothing": of_kinds("kind", lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2), label_smoothing=0.2),
    "square images, weights and smoothing": of_masks(
        lambda o, t: F.cross_entropy(o, t, torch.tensor(WEIGHTS), label_smoothing=0.1),
        class_weights=WEIGHTS,
        label_smoothing=0.1,
    ),
    "cross-entropy and dice of one output": Case(
        segmenter,
        masks(),
        [{"label": "mask"}, {"label": "mask", "name": "dice", "weight": 0.5}],
        lambda outputs, labels: F.cross_entropy(outputs[0], labels[0]) + 0.5 * dice_by_hand(outputs[0], labels[0]),
    ),
    "dice": of_masks(dice_by_hand, name="dice"),
    "balanced classes": of_kinds(
        "kind", lambda o, t: F.cross_entropy(o, t, balanced(columns()["kind"])), class_weights="balanced"
    ),
    "probabilities": of_kinds("soft", F.cross_entropy, label_type="float32"),
    "positive weights": of_kinds(
        "yes",
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor(WEIGHTS)),
        name="bce_with_logits",
        positive_weights=WEIGHTS,
    ),
    "mse": of_kinds("numbers", F.mse_loss, name="mse"),
    "l1": of_kinds("numbers", F.l1_loss, name="l1"),
    "huber": of_kinds("numbers", lambda o, t: F.huber_loss(o, t, delta=0.5), name="huber", delta=0.5),
    "focal": of_kinds("yes", FORMULAS["focal"].formula, name="focal", alpha=0.3, gamma=1.5),
    "quantile": of_kinds("level", FORMULAS["quantile"].formula, name="quantile", quantiles=(0.1, 0.5, 0.9)),
    "giou": Case(
        boxes,
        more_columns(),
        {"name": "giou", "label": "box"},
        lambda outputs, labels: FORMULAS["giou"].formula(outputs[0], labels[0]),
    ),
    "ctc": Case(
        recogniser,
        utterances(ragged=False),
        {"name": "ctc", "label": "symbols"},
        lambda outputs, labels: ctc(outputs[0], labels[0], torch.full((len(labels[0]),), 7)),
    ),
    "ctc with input lengths": Case(
        recogniser,
        utterances(ragged=True),
        {"name": "ctc", "label": "symbols", "input_lengths": "steps"},
        lambda outputs, labels: ctc(outputs[0], labels[0][:, 1:], labels[0][:, 0]),
    ),
    "cosine": Case(
        two_towers,
        tower_columns(),
        {"name": "cosine", "output": ["query", "key"], "label": "alike", "margin": 0.1},
        lambda outputs, labels: F.cosine_embedding_loss(*outputs, labels[0], margin=0.1),
    ),
    "triplet": Case(
        three_towers,
        tower_columns(),
        {"name": "triplet", "output": ["anchor", "like", "unlike"], "margin": 3.0},
        lambda outputs, labels: F.triplet_margin_loss(*outputs, margin=3.0),
    ),
    "towers over all replicas": Case(
        two_towers,
        tower_columns(),
        {"name": "info_nce", "output": ["query", "key"], "temperature": 0.2},
        lambda outputs, labels: clip(outputs[0], outputs[1]),
    ),
    "output of the graph": Case(
        with_own_loss, columns(), {"name": "output", "output": "loss"}, lambda outputs, labels: outputs[0]
    ),
    "Python file": of_file("numbers", lambda o, t: ((o - t).abs() ** 3).mean(), "my_loss.py:cubes"),
    "Python file with a count": of_file(
        "kind", F.cross_entropy, "my_loss.py:entropy", count="known", label_type="int64"
    ),
    "Python file that chooses elements": of_file(
        "numbers",
        lambda o, t: ((o - t)[t > 0] ** 2).mean(),
        "my_loss.py:squares_of_known",
        count="positive",
    ),
    "ONNX file": of_file("numbers", F.mse_loss, "my_loss.onnx"),
}
