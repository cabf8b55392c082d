"""`onward init` finds the boxes beside a folder of images, and the losses that fit the outputs of the model."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

import onward
from onward.flows.cli import app
from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.detectors.box_places import box_place
from tests.equivalence.test_detectors import set_model
from tests.trainer.data.images.test_boxes import annotate, detector, pictures


def proposed(folder: Path, model: onnx.ModelProto, **settings: Any) -> RunConfig:
    onnx.save(model, folder / "model.onnx")
    shutil.rmtree(folder / "labels")
    onward.init(folder / "model.onnx", folder / "images", settings, output=folder / "new.toml", steps=0, force=True)
    return load_config(folder / "new.toml")


@pytest.mark.parametrize("kind", ["annotations.json", "labels", "xml"])
def test_the_boxes_beside_the_images_are_found(kind: str, tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    (tmp_path / "xml").rename(tmp_path / "Annotations")
    kept = {"annotations.json": "annotations.json", "labels": "labels", "xml": "Annotations"}[kind]
    for name in {"annotations.json", "labels", "Annotations"} - {kept}:
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    assert box_place(tmp_path / "images") == f"../{kept}"


def test_folders_of_splits_beside_each_other_are_found(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    for name in ("images", "labels"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / name).rename(tmp_path / "data" / name / "train")
    assert box_place(tmp_path / "data" / "images" / "train") == "../../labels/{source}"


@pytest.mark.parametrize(("classes", "scores"), [(2, "softmax"), (1, "sigmoid")])
def test_the_losses_of_a_set_are_proposed_with_their_reasons(classes: int, scores: str, tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    config = proposed(tmp_path, set_model(classes=classes))
    assert [loss.name for loss in config.losses] == ["set_classes", "set_l1", "set_giou"]
    assert {loss.outputs for loss in config.losses} == {("logits", "found")}
    assert [loss.weight for loss in config.losses] == [1.0, 5.0, 2.0]
    # as many scores as classes leave none for no object
    assert {loss.scores for loss in config.losses} == {scores}
    assert config.data.image is not None
    resize = "corner_mean" if scores == "softmax" else "stretch"
    assert (config.data.image.boxes, config.data.image.resize) == ("../annotations.json", resize)
    assert (config.data.label, config.data.bad_rows) == ("boxes", "fail")
    assert [metric.name for metric in config.metrics] == ["map", "map_50"]
    text = (tmp_path / "new.toml").read_text()
    assert "# the boxes of these images" in text
    assert "a set of boxes" in text


@pytest.mark.parametrize(("is_chosen", "scores", "queries"), [(True, "varifocal", 0), (False, "softmax", 6)])
def test_lengths_that_the_file_leaves_open_are_measured_and_chosen_queries_are_those_of_rt_detr(
    is_chosen: bool, scores: str, queries: int, tmp_path: Path
) -> None:
    annotate(tmp_path, pictures(tmp_path))
    model = set_model()
    if is_chosen:
        model.graph.initializer.append(helper.make_tensor("number", TensorProto.INT64, [1], [6]))
        model.graph.node.append(helper.make_node("TopK", ["logits", "number"], ["best", "places"], axis=1))
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            dim.dim_param = "open"
    loss, *_ = proposed(tmp_path, model).losses
    assert (loss.name, loss.outputs, loss.scores) == ("set_classes", ("logits", "found"), scores)
    assert loss.num_queries == queries


def test_a_model_of_another_kind_is_refused_with_its_outputs(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    with pytest.raises(ConfigError, match=r"as DETR has them.* The outputs are map .*detect-objects.md"):
        proposed(tmp_path, detector())


def test_the_option_takes_a_path_with_any_letters(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    onnx.save(set_model(), tmp_path / "model.onnx")
    boxes = tmp_path / 'anna\'s "boxes".json'
    (tmp_path / "annotations.json").rename(boxes)
    words = ["init", "model.onnx", "images", "--boxes", str(boxes), "--no-try", "-o", "new.toml"]
    with contextlib.chdir(tmp_path):
        found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    image = load_config(tmp_path / "new.toml").data.image
    assert image is not None
    assert image.boxes == str(boxes)


def detr(queries: int = 6, scores: int = 5) -> onnx.ModelProto:
    """As transformers exports DETR: a second input `pixel_mask`, and a layer of scores for every query."""
    g = GraphWriter("detr")
    x, mask = g.input("pixel_values", ("batch", 3, 48, 48)), g.input("pixel_mask", ("batch", 64, 64), TensorProto.INT64)
    x = g.op("Conv", x, g.weight("w1", g.normal(0.1, queries * 8, 3, 8, 8)), kernel_shape=[8, 8], strides=[8, 8])
    seen = g.op("ReduceMean", g.op("Cast", mask, to=TensorProto.FLOAT), g.weight("axes", [1, 2]), keepdims=1)
    x = g.op("Reshape", g.op("GlobalAveragePool", x), g.weight("shape", [-1, queries, 8]))
    x = g.op("Mul", x, seen)
    g.output(g.op("MatMul", x, g.weight("w2", g.normal(0.2, 8, scores)), outputs="logits"), ("batch", queries, scores))
    corners = g.op("MatMul", x, g.weight("w3", g.normal(0.2, 8, 4)))
    g.output(g.op("Sigmoid", corners, outputs="found"), ("batch", queries, 4))
    return g.model()


def test_the_mask_of_pixels_is_bound_and_the_scores_of_a_set_get_a_new_layer(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    config = proposed(tmp_path, detr(), **{"model.num_classes": 3})
    assert config.model.bind == {"pixel_mask": 1}
    assert [loss.outputs for loss in config.losses] == [("logits", "found")] * 3
    signature = read_training_signature(config.model)
    assert [info.shape for info in signature.outputs] == [(None, 6, 3), (None, 6, 4)]
    annotate(tmp_path / "again", pictures(tmp_path / "again", 4))
    renamed = detr()
    renamed.graph.input[1].name = "other"
    (cast,) = (node for node in renamed.graph.node if node.op_type == "Cast")
    cast.input[0] = "other"
    with pytest.raises(ConfigError, match=r"input other .* model.bind.other=1"):
        proposed(tmp_path / "again", renamed)
