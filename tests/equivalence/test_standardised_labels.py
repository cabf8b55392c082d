"""A regression with `loss.standardise_label` trains as on a label scaled by hand, and exports the label's units.

The same in every layout, in the files that train without torch, and when the exported file is trained again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.run_as_read import RunAsRead
from onward.trainer.model.first_output_units import choose_output_units
from onward.trainer.onnx_graph.surgery.output_units import has_label_units
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import ExportedModel
from tests.support import graphs
from tests.support.runs import Array, assert_close, events, final_tensors, make_run, train_run

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked")]
STANDARD = {"name": "mse", "standardise_label": "standard", "output_units": "standardised"}
SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 24, "evaluation_period": 0, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2},
    "data": {"label": "label"},
}
MASS, SPREAD = 4200.0, 800.0


def table(rows: int = 120, outputs: int = 1) -> dict[str, Array]:
    """Labels in grams; each further output is ten times the one before it."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    one = MASS + SPREAD * (0.7 * x[:, 0] - 0.5 * x[:, 1] * x[:, 2])
    label = one[:, None] * 10.0 ** np.arange(outputs)
    return {"features": x, "label": (label if outputs > 1 else label[:, 0]).astype(np.float32)}


def made(folder: Path, loss: dict[str, Any], *, columns: Any = None, outputs: int = 1, **sections: Any) -> RunDir:
    proto = graphs.tiny_mlp(outputs=outputs)
    given = columns or table(outputs=outputs)
    return make_run(folder, proto, given, **SETTINGS | {"model": {"loss": loss["name"]}, "loss": loss} | sections)


def units(run: RunDir) -> dict[str, Any]:
    (found,) = open_shards(run.shards, "train").fitted["label"].label_units.values()
    return found.model_dump()


def exported(run: RunDir) -> ExportedModel:
    weights = {name.removeprefix("model/"): t for name, t in final_tensors(run).items() if name.startswith("model/")}
    step = SETTINGS["train"]["num_steps"]
    return export.export(run, export.Checkpoint(step, weights), data=evaluation_data(run), folder=run.root / "export")


def predicted(path: Path, x: Array) -> Array:
    (output,) = onnxruntime.InferenceSession(path).run(None, {"features": x})
    return np.asarray(output)


def test_it_trains_the_same_weights_as_on_a_label_that_was_scaled_by_hand_and_predicts_in_grams(tmp_path: Path) -> None:
    run = made(tmp_path / "standard", STANDARD)
    train_run(run)
    training = open_shards(run.shards, "train").read(np.arange(96))["label"].astype(np.float64)
    found = units(run)
    np.testing.assert_allclose(found["center"], [training.mean()], rtol=1e-6)
    np.testing.assert_allclose(found["scale"], [training.std()], rtol=1e-6)

    columns = table()
    by_hand = columns | {"label": ((columns["label"] - found["center"]) / found["scale"]).astype(np.float32)}
    other = made(tmp_path / "by_hand", {"name": "mse"}, columns=by_hand)
    train_run(other)
    assert_close(final_tensors(run), final_tensors(other), 2e-4)

    file = exported(run)
    assert file.parity < 1e-5
    z = predicted(exported(other).path, columns["features"])
    grams = predicted(file.path, columns["features"])
    np.testing.assert_allclose(grams, z * found["scale"] + found["center"], rtol=1e-3)
    # the loss is of standardised numbers, and metrics are in the label's own units
    assert file.after["evaluation/loss"] < 0.9
    np.testing.assert_allclose(
        file.after["evaluation/mse"], file.after["evaluation/loss"] * found["scale"][0] ** 2, rtol=1e-3
    )


LAYOUTS = {
    "replicas": {"data": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "sharded": {"data": 2, "zero": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_what_one_rank_trains(tmp_path: Path, layout: str) -> None:
    one = made(tmp_path / "one", STANDARD, outputs=3)
    train_run(one)
    parallel = LAYOUTS[layout]
    train = SETTINGS["train"] | {"gradient_accumulation_steps": 4 if layout == "pipeline" else 1}
    several = made(tmp_path / layout, STANDARD, outputs=3, parallel=parallel, train=train)
    train_run(several)
    assert_close(final_tensors(several), final_tensors(one), 2e-5)


@pytest.mark.parametrize("kind", ["standard", "robust", "log"])
def test_vectors_have_units_for_each_element_and_the_exported_file_is_right(tmp_path: Path, kind: str) -> None:
    run = made(tmp_path, STANDARD | {"standardise_label": kind}, outputs=3)
    labels = open_shards(run.shards, "train").read(np.arange(96))["label"].astype(np.float64)
    read = np.log1p(labels) if kind == "log" else labels
    if kind == "robust":
        low, middle, high = np.percentile(read, [25, 50, 75], axis=0)
        center, scale = middle, high - low
    else:
        center, scale = read.mean(0), read.std(0)
    np.testing.assert_allclose(units(run)["center"], center, rtol=1e-5)
    np.testing.assert_allclose(units(run)["scale"], scale, rtol=1e-5)

    train_run(run)
    file, columns = exported(run), table(outputs=3)
    assert file.parity < 1e-5
    grams = predicted(file.path, columns["features"])
    of = np.log1p(grams) if kind == "log" else grams
    wanted = np.log1p(columns["label"]) if kind == "log" else columns["label"]
    held_out = open_shards(run.shards, "evaluation").read(np.arange(24))["label"]
    rows = [int(np.flatnonzero((columns["label"] == each).all(1))[0]) for each in held_out]
    loss = (((of - wanted) / scale)[rows] ** 2).mean()
    np.testing.assert_allclose(file.after["evaluation/loss"], loss, rtol=1e-3)
    assert file.after["evaluation/loss"] < file.before["evaluation/loss"]


def test_an_exported_file_is_trained_again_from_where_it_was_without_more_nodes(tmp_path: Path) -> None:
    first = made(tmp_path / "first", STANDARD)
    train_run(first)
    file = exported(first)
    model = onnx.load(file.path)
    assert has_label_units(model.graph, "prediction")

    again = make_run(tmp_path / "again", model, table(), **SETTINGS | {"model": {"loss": "mse"}, "loss": STANDARD})
    train_run(again)
    (start,) = {e.values["evaluation/loss"] for e in events(again, "evaluation") if e.step == 0}
    np.testing.assert_allclose(start, file.after["evaluation/loss"], rtol=1e-4)
    assert final_tensors(again).keys() == final_tensors(first).keys(), "the constants are no weights"
    nodes = [node.op_type for node in onnx.load(exported(again).path).graph.node]
    assert nodes == [node.op_type for node in model.graph.node]


def test_what_the_file_computes_is_found_on_the_first_rows_and_said(tmp_path: Path) -> None:
    fresh = read_config(made(tmp_path / "fresh", STANDARD | {"output_units": "auto"}))
    config, chosen, (why,) = choose_output_units(fresh)
    assert chosen == ("standardised",)
    assert why.startswith("the output for label label is taken as standardised: on 64 rows the loss is ")
    assert config.losses[0].label_units is not None

    proto = graphs.tiny_mlp()
    (bias,) = [t for t in proto.graph.initializer if t.name.startswith("fc2") and list(t.dims) == [1]]
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([MASS], np.float32), bias.name))
    run = make_run(
        tmp_path / "own",
        proto,
        table(),
        **SETTINGS | {"model": {"loss": "mse"}, "loss": STANDARD | {"output_units": "auto"}},
    )
    assert choose_output_units(read_config(run))[1] == ("label",)


def test_a_file_in_the_labels_units_stays_as_it_is_and_only_the_loss_is_scaled(tmp_path: Path) -> None:
    run = made(tmp_path, STANDARD | {"output_units": "label"})
    train_run(run)
    file = exported(run)
    assert len(onnx.load(file.path).graph.node) == len(graphs.tiny_mlp().graph.node)
    found, columns = units(run), table()
    held_out = open_shards(run.shards, "evaluation").read(np.arange(24))
    errors = (predicted(file.path, held_out["features"])[:, 0] - held_out["label"]) / found["scale"]
    np.testing.assert_allclose(file.after["evaluation/loss"], (errors**2).mean(), rtol=1e-3)
    assert len(columns["label"]) == 120


@pytest.mark.parametrize("kind", ["standard", "log"])
def test_the_files_that_train_without_torch_have_the_same_loss(tmp_path: Path, kind: str) -> None:
    run = made(tmp_path, STANDARD | {"standardise_label": kind}, outputs=3, export={"variants": ["training"]})
    train_run(run)
    file = exported(run)
    weights = {name.removeprefix("model/"): t for name, t in final_tensors(run).items() if name.startswith("model/")}
    export.export_training(run, export.Checkpoint(24, weights), folder=tmp_path / "training", opened=RunAsRead.of(run))
    held_out = open_shards(run.shards, "evaluation").read(np.arange(24))
    session = onnxruntime.InferenceSession(tmp_path / "training" / "model_with_loss.onnx")
    feeds = {each.name: held_out["features" if each.name == "features" else "label"] for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]
    values = dict(zip(names, session.run(None, feeds), strict=True))
    loss = next(value for name, value in values.items() if "loss" in name)
    np.testing.assert_allclose(loss, file.after["evaluation/loss"], rtol=1e-4)


def test_what_cannot_be_standardised_is_refused_with_the_setting(tmp_path: Path) -> None:
    columns = table()
    with pytest.raises(DataError, match="'log' takes labels from 0 on, and column 'label' has -"):
        made(tmp_path / "log", STANDARD | {"standardise_label": "log"}, columns=columns | {"label": -columns["label"]})
    with pytest.raises(ConfigError, match="standardise_label 'standard' is for mse and l1 and huber and quantile"):
        made(tmp_path / "classes", {"name": "cross_entropy", "standardise_label": "standard"})
    with pytest.raises(
        ConfigError, match=r"output_units 'auto' runs the model on the first rows, but launch\.rehearsal"
    ):
        made(tmp_path / "off", STANDARD | {"output_units": "auto"}, launch={"rehearsal": "off"})
    with pytest.raises(ConfigError, match=r"quantize\.aware compares it with that of the float file"):
        made(tmp_path / "quantized", STANDARD, quantize={"aware": True})
    with pytest.raises(ConfigError, match="the teacher's outputs are in units of their own"):
        made(tmp_path / "taught", STANDARD, teacher={"path": "teacher.onnx"})
    with pytest.raises(ConfigError, match=r"output_units 'label' needs loss\.standardise_label"):
        made(tmp_path / "alone", {"name": "mse", "output_units": "label"})


def test_a_large_mean_is_not_lost_in_bf16(tmp_path: Path) -> None:
    run = made(tmp_path, STANDARD, precision={"compute": "bf16"})
    train_run(run)
    z, found = table(), units(run)
    grams = predicted(exported(run).path, z["features"])[:, 0]
    # bf16 has steps of 32 at 4200: the last digits come from the nodes behind the output, which compute in fp32
    assert torch.tensor(grams).unique().numel() > 100
    assert np.abs(grams - found["center"][0]).max() < 10 * found["scale"][0]


def test_the_setting_is_a_part_of_the_loss_that_the_configuration_completes() -> None:
    assert LossConfig(name="mse").label_units is None
    with pytest.raises(AssertionError, match="not completed"):
        _ = LossConfig(name="mse", standardise_label="standard").label_units
