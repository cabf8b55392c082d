"""Training with onnxruntime and the four files, where no torch and no onnx is, lands where Onward's loop lands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.losses_from_data import with_class_axes
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.export.training.files import TrainingArtifacts, write_artifacts
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.optim.schedules import learning_rate
from onward.trainer.run.directory import read_config
from tests.support.graphs import tiny_conv_net_with_batch_norm, tiny_transformer
from tests.support.runs import final_tensors, losses, make_run, tiny_images, tiny_text, train_run

NUM_STEPS = 20

ALONE = """
import json, sys
from pathlib import Path

sys.modules["torch"] = sys.modules["onnx"] = None  # importing either fails

import numpy as np
import onnxruntime

folder = Path(sys.argv[1])
names = json.loads((folder / "training.json").read_text())


def opened(kind):
    session = onnxruntime.InferenceSession(folder / names["files"][kind]["file"], providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(outputs, session.run(None, feeds)))


training, optimizer = opened("training"), opened("optimizer")
start, batches = np.load(folder / names["start"]), np.load(folder / "batches.npz")
weights = {name: start[name] for name in names["weights"]}
statistics = {name: start[name] for name in names["statistics"]}
state = {each: np.zeros_like(weights[name]) for name, of in names["weights"].items() for each in of["state"]}
given = [value["name"] for value in names["files"]["training"]["inputs"]]
losses = []
for step, rate in enumerate(batches["learning_rate"], start=1):
    feeds = {name: batches[f"{step}/{name}"] for name in given if f"{step}/{name}" in batches}
    found = training(feeds | weights | statistics)
    losses.append(found[names["loss"]])
    statistics = {name: found[new] for name, new in names["statistics"].items()}
    gradients = {of["gradient"]: found[of["gradient"]] for of in names["weights"].values()}
    scalars = {names["step"]: np.array(step), names["learning_rate"]: np.array(rate)}
    found = optimizer(weights | gradients | state | scalars)
    weights = {name: found[of["updated"]] for name, of in names["weights"].items()}
    state = {name: found[new] for of in names["weights"].values() for name, new in of["state"].items()}
evaluation = opened("eval")(feeds | weights | statistics)
assert sum(name.partition(".")[0] == "torch" for name in sys.modules) == 1
found = {"evaluation loss": evaluation[names["loss"]], "losses": losses}
np.savez(folder / "trained.npz", **found, **weights, **statistics)
"""

# A weight whose gradient is 0 but for rounding (a key's bias) would move by rounding errors at full rate with
# Adam's usual epsilon of 1e-8: in torch alone, too, from one machine to the next.
ADAMW = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.05, "epsilon": 1e-5}
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
PLAIN = {"name": "cross_entropy"}


def pixels_and_boxes() -> onnx.ModelProto:
    """`image` [batch, 2, h, w] -> `scores` [batch, 3, h, w] and `box` [batch, 4]."""
    g = GraphWriter("pixels_and_boxes", seed=0)
    x = g.input("image", ("batch", 2, "h", "w"))
    x = g.op("Relu", g.op("Conv", x, g.weight("c1", g.normal(0.3, 8, 2, 3, 3)), pads=[1, 1, 1, 1]))
    g.op("Conv", x, g.weight("c2", g.normal(0.3, 3, 8, 1, 1)), outputs="scores")
    pooled = g.op("Flatten", g.op("GlobalAveragePool", x))
    g.op(
        "Gemm", pooled, g.weight("head", g.normal(0.5, 8, 4)), g.weight("bias", np.float32([0, 0, 1, 1])), outputs="box"
    )
    g.output("scores", ("batch", 3, "h", "w"))
    g.output("box", ("batch", 4))
    return g.model()


def tiny_pixels(number: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    image = random.standard_normal((number, 2, 6, 6), dtype=np.float32)
    mask = (image[:, 0] > 0.3).astype(np.int64) + (image[:, 1] > 0.3)
    mask[::5, 0] = -100
    corner = image.mean((1, 2, 3))[:, None]
    return {"image": image, "mask": mask, "box": np.concatenate([corner - 1, corner, corner + 1, corner + 2], 1)}


SEVERAL = [
    {"name": "cross_entropy", "output": "scores", "label": "mask", "label_smoothing": 0.1, "class_weights": "balanced"},
    {"name": "giou", "output": "box", "label": "box", "weight": 2.0},
]
MODELS: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray[Any, Any]], Any]] = {
    "conv net": (tiny_conv_net_with_batch_norm(), tiny_images(160), PLAIN),
    "transformer": (tiny_transformer(), tiny_text(160), PLAIN),
    "two losses": (pixels_and_boxes(), tiny_pixels(160), SEVERAL),
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("conv net", ADAMW),
        pytest.param("conv net", SGD, marks=pytest.mark.slow),
        pytest.param("transformer", ADAMW, marks=pytest.mark.slow),
        pytest.param("transformer", SGD, marks=pytest.mark.slow),
        pytest.param("transformer", ADAMW | {"layer_decay": 0.75}, marks=pytest.mark.slow),
        pytest.param("two losses", ADAMW, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_without_torch_land_where_the_loop_lands(
    tmp_path: Path, name: str, optimizer: dict[str, Any]
) -> None:
    model, columns, loss = MODELS[name]
    run = make_run(
        tmp_path,
        model,
        columns,
        loss=loss,
        train={"num_steps": NUM_STEPS, "global_batch_size": 12, "clip_norm": 0.5},
        optimizer=optimizer,
        schedule={"mode": "cosine", "warmup_ratio": 0.2},
    )
    config, folder = read_config(run), tmp_path / "alone"
    rows, signature = open_shards(run.shards, "train"), read_training_signature(config.model)
    config = resolve(config, rows, signature)
    config = config.model_copy(update={"loss": with_class_axes(config.losses, rows.columns, signature)})
    record = write_artifacts(folder, onnx.load(config.model.path), config, base=tmp_path)
    np.savez(folder / "batches.npz", **batches_of(run, config, record))

    train_run(run)
    command = [sys.executable, "-c", ALONE, str(folder)]
    alone = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone.stderr

    trained = np.load(folder / "trained.npz")
    np.testing.assert_allclose(trained["losses"], [losses(run)[step] for step in range(1, NUM_STEPS + 1)], rtol=2e-5)
    tensors = {
        key.removeprefix("model/"): t.numpy() for key, t in final_tensors(run).items() if key.startswith("model/")
    }
    assert set(record.weights) | set(record.statistics) == tensors.keys()
    for weight, expected in tensors.items():
        atol = 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(trained[weight], expected, rtol=0, atol=atol, err_msg=weight)
        moved = np.abs(expected - np.load(folder / "weights.npz")[weight]).max()
        assert moved > 100 * atol, f"{weight} moved by {moved} only"
    assert trained["evaluation loss"] < 0.9 * trained["losses"][0]


def batches_of(run: Any, config: RunConfig, record: TrainingArtifacts) -> dict[str, np.ndarray[Any, Any]]:
    """The samples and rates of every step, as the loop takes them."""
    stream = Batches(
        open_shards(run.shards, "train"),
        config,
        read_training_signature(config.model),
        replica=0,
        num_replicas=1,
        device=torch.device("cpu"),
    )
    size = config.train.global_batch_size
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    rates = []
    for step in range(1, NUM_STEPS + 1):
        (batch,) = stream.take((step - 1) * size, size)
        name = record.files["training"].inputs[0].name
        named = {name: batch.inputs[0], **dict(zip((loss.labels for loss in record.losses), batch.labels, strict=True))}
        arrays |= {f"{step}/{name}": value.numpy() for name, value in named.items() if value is not None}
        rates.append(learning_rate(step, optimizer=config.optimizer, schedule=config.schedule, num_steps=NUM_STEPS))
    stream.close()
    return arrays | {"learning_rate": np.array(rates, np.float32)}
