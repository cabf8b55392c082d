"""A detector with a grid gets other classes: boxes and objectness keep their weights, and its decoding follows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.dense_heads.families import dense_detections
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.graph_parts import part_between
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery
from onward.trainer.proposal.detectors.dense_head import recognise
from onward.trainer.proposal.detectors.raw_outputs import find_raw_outputs
from tests.support.detectors import CLASSES, HEADS, SIDE, STRIDES, detector_file

IMAGE = np.random.default_rng(0).random((1, 3, SIDE, SIDE), np.float32)


def changed(model: onnx.ModelProto, family: str, outputs: tuple[str, ...], classes: int) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    config = ModelConfig.model_validate(
        {"path": "model.onnx", "output": outputs, "loss": family, "num_classes": classes}
    )
    apply_surgery(copy, config, seed=0)
    return copy


def raw_names(model: onnx.ModelProto) -> tuple[str, ...]:
    raw = find_raw_outputs(model, Path())
    assert raw
    head = recognise(raw)
    assert head
    return head.loss.outputs


@pytest.mark.parametrize("classes", [1, 7])
@pytest.mark.parametrize("family", HEADS)
def test_the_file_computes_its_boxes_as_before_and_has_other_classes(family: str, classes: int) -> None:
    model = detector_file(family)
    outputs = raw_names(model)
    other = changed(model, family, outputs, classes)
    raw = find_raw_outputs(other, Path())
    assert raw
    head = recognise(raw)
    assert head
    assert (head.loss.name, head.loss.outputs, head.num_classes) == (family, outputs, classes)
    # boxes of the same image; those of CenterNet are chosen by scores
    if family in ("fcos", "retinanet", "ssd"):
        before, after = (open_session(each).run(["boxes"], {"image": IMAGE})[0] for each in (model, other))
        np.testing.assert_array_equal(before, after)
    elif family in ("yolov5", "yolox"):
        before, after = (open_session(each).run(["found"], {"image": IMAGE})[0][..., :5] for each in (model, other))
        np.testing.assert_allclose(before, after, rtol=1e-6)
    elif family in ("yolov8", "yolo26"):
        before, after = (open_session(each).run(["found"], {"image": IMAGE})[0][:, :4] for each in (model, other))
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(("before", "classes"), [(2, 1), (4, 7)])
@pytest.mark.parametrize("family", ["yolov10", "yolo26_end2end"])
def test_a_file_that_chooses_pairs_of_box_and_class_knows_the_other_classes(
    family: str, before: int, classes: int
) -> None:
    """Also where boxes have as many numbers as there are classes."""
    model = detector_file(family)
    outputs = raw_names(model)
    model = changed(changed(model, family, outputs, before), family, outputs, classes)
    raw = open_session(part_between(model, outputs, ())).run(None, {"image": IMAGE})
    loss = LossConfig.model_validate({"name": family, "output": outputs, "strides": STRIDES, "ignore_index": -100})
    (wanted,) = dense_detections([torch.from_numpy(value) for value in raw], loss)
    (found,) = open_session(model).run(["found"], {"image": IMAGE})[0]
    assert found[:, 5].max() == classes - 1
    np.testing.assert_allclose(found[:, 4], wanted[: len(found), 1], rtol=1e-5)
    np.testing.assert_array_equal(found[:, 5], wanted[: len(found), 0])
    np.testing.assert_allclose(found[:, :4], wanted[: len(found), 2:] * SIDE, rtol=1e-3, atol=1e-3)


def test_only_channels_of_classes_begin_anew_with_rare_classes() -> None:
    model = detector_file("yolov5")
    other = changed(model, "yolov5", raw_names(model), 4)
    stored = [{t.name: numpy_helper.to_array(t) for t in each.graph.initializer} for each in (model, other)]
    bias, weight = (
        [values[f"heads.0.0.{kind}"].reshape(3, -1, *values[f"heads.0.0.{kind}"].shape[1:]) for values in stored]
        for kind in ("bias", "weight")
    )
    for before, after in (bias, weight):
        np.testing.assert_array_equal(before[:, :5], after[:, :5])
        assert (before.shape[1], after.shape[1]) == (5 + CLASSES, 5 + 4)
    np.testing.assert_allclose(bias[1][:, 5:], -math.log(99), rtol=1e-6)
    same = changed(model, "yolov5", raw_names(model), 4)
    assert same == other


def test_raw_outputs_that_are_no_convolutions_are_refused() -> None:
    model = detector_file("yolov8")
    (joined,) = (node.output[0] for node in model.graph.node if node.op_type == "Softmax")
    with pytest.raises(ConfigError, match=r"is not the result of a convolution with stored weights; name the results"):
        changed(model, "yolov8", (joined,), 3)


def test_layers_that_are_not_those_of_the_loss_are_refused() -> None:
    model = detector_file("yolov8")
    outputs = raw_names(model)
    with pytest.raises(
        ConfigError, match=r"have the channels {'boxes': 64, .* reads {'boxes': 4, 'scores': 0} \(0 = any\); name"
    ):
        changed(model, "retinanet", outputs, 5)


def test_levels_may_share_the_layer_of_their_scores() -> None:
    model = detector_file("retinanet")
    for node in model.graph.node:
        if node.op_type == "Conv" and "heads." in node.input[1]:
            kind = node.input[1].split(".")[2]
            node.input[1:] = [f"heads.0.{kind}.weight", f"heads.0.{kind}.bias"]
    other = changed(model, "retinanet", raw_names(model), 5)
    raw = find_raw_outputs(other, Path())
    assert raw
    head = recognise(raw)
    assert head
    assert (head.num_classes, open_session(other).run(["scores"], {"image": IMAGE})[0].shape[-1]) == (5, 5)


def test_a_layer_that_others_share_is_refused() -> None:
    model = detector_file("retinanet")
    names = raw_names(model)
    shared = next(node for node in model.graph.node if node.output[0] == names[1])
    copy = onnx.NodeProto()
    copy.CopyFrom(shared)
    copy.output[0], copy.name = "elsewhere", "elsewhere"
    model.graph.node.append(copy)
    with pytest.raises(ConfigError, match=r"layers elsewhere use 'heads\.0\.1\.weight', whose channels are classes"):
        changed(model, "retinanet", names, 5)


def test_a_file_that_takes_each_class_by_its_number_is_refused() -> None:
    model = detector_file("retinanet")
    last = helper.make_tensor("last", TensorProto.INT64, [], [CLASSES - 1])
    model.graph.initializer.append(last)
    model.graph.node.append(helper.make_node("Gather", ["scores", "last"], ["of_class"], "choice", axis=2))
    model.graph.output.append(helper.make_tensor_value_info("of_class", TensorProto.FLOAT, ["n", "cells"]))
    with pytest.raises(ConfigError, match=r"Gather 'choice' takes class 1 by its number.* train the first classes"):
        changed(model, "retinanet", raw_names(model), 5)


def test_weights_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = detector_file("fcos")
    outputs = raw_names(model)
    whole = changed(model, "fcos", outputs, 5)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    other = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    raw = find_raw_outputs(other, tmp_path)
    assert raw
    assert recognise(raw)
    given = {"path": tmp_path / "model.onnx", "output": outputs, "loss": "fcos", "num_classes": 5}
    apply_surgery(other, ModelConfig.model_validate(given), seed=0)
    stored = {tensor.name: tensor for tensor in other.graph.initializer}
    for level in range(3):
        assert stored[f"heads.{level}.2.bias"] == next(
            tensor for tensor in whole.graph.initializer if tensor.name == f"heads.{level}.2.bias"
        )
