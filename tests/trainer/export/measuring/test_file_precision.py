"""The mean average precision of what a detector's file itself returns, in every form in which files do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig, titles
from onward.trainer.config.metric_names import is_greatest
from onward.trainer.config.sections.metrics import MetricConfig, names_of_file
from onward.trainer.data.batches.batches import Batch
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.exported_model import Checkpoint, export
from onward.trainer.export.measuring import comparison
from onward.trainer.export.measuring.comparison import compare
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.file_precision import file_precision
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.model.losses.dense_heads import families
from onward.trainer.model.losses.dense_heads.families import FAMILIES, dense_detections
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.graph_parts import part_between
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.proposal.detectors.raw_outputs import find_raw_outputs
from onward.trainer.run.directory import read_config
from tests.support.detectors import ANCHORS, HEADS, RETURNED, SIDE, STRIDES, detector_file, with_selection
from tests.support.runs import make_run
from tests.trainer.data.images.test_boxes import annotate, pictures

METRICS = [MetricConfig(name=name) for name in ("map", "map_50", "map_medium")]
IMAGES = 5
AS_OURS = {"overlap": 0.65, "least": 0.001, "most": 300}
"""The selection of `dense_detections`."""


def loss_of(family: str, model: onnx.ModelProto) -> LossConfig:
    raw = find_raw_outputs(model, Path())
    assert raw
    names = []
    for level in raw.levels:
        # in the order of the roles, of which a Relu may come last in the file
        channels = dict(zip(level.names, level.channels, strict=True))
        names += sorted(channels, key=lambda name: HEADS[family].index(channels[name]))
    given = {
        "name": family,
        "output": tuple(names),
        "strides": STRIDES[: len(raw.levels)],
        "anchors": ANCHORS if family in ("yolov5", "retinanet", "ssd") else (),
        "ignore_index": -100,
        "image_size": (SIDE, SIDE),
    }
    return LossConfig.model_validate(given)


def labels_like(found: Sequence[Tensor]) -> Tensor:
    """Every third of the best boxes, moved a little: neither everything nor nothing is right. [B, objects x 6]."""
    random = np.random.default_rng(1)
    rows = torch.full((len(found), 40, 6), -1.0)
    for image, own in enumerate(found):
        chosen = own[:40:3]
        rows[image, : len(chosen), 0] = chosen[:, 0]
        noise = torch.from_numpy(random.normal(size=(len(chosen), 4)).astype(np.float32))
        rows[image, : len(chosen), 1:5] = chosen[:, 2:] + 0.02 * noise
        rows[image, : len(chosen), 5] = 0.0
    return rows.flatten(1)


def precisions(
    family: str, whole: onnx.ModelProto, *, loss: LossConfig | None = None
) -> tuple[dict[str, float], dict[str, float], str]:
    """The metrics of our decoding, those of the file, and why there are none."""
    loss = loss or loss_of(family, whole)
    part = part_between(whole, loss.outputs, ())
    images = torch.randn(IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    rows = [open_session(part).run(None, {"image": fed}) for fed in fed_batches(whole, images)]
    raw = [torch.from_numpy(np.concatenate(each)[:IMAGES]) for each in zip(*rows, strict=True)]
    labels = labels_like(dense_detections(raw, loss))
    batch = Batch((images,), (labels,), IMAGES, (1.0,) * loss.num_terms)

    def new_metrics(names: Sequence[str]) -> EvaluationMetrics:
        return EvaluationMetrics(Losses([loss], list(names)), METRICS, device=torch.device("cpu"))

    data = EvaluationData(batches=lambda: [batch], new_metrics=new_metrics)
    runner = OnnxRunner(part, data)
    of_file, reason = file_precision(whole, runner, data, METRICS)
    return runner.evaluate(), of_file, reason


def fed_batches(model: onnx.ModelProto, images: Tensor) -> list[np.ndarray[Any, Any]]:
    size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or len(images)
    padded = torch.cat([images, images[-1:].expand(-len(images) % size, -1, -1, -1)])
    return [each.numpy() for each in padded.split(size)]


def assert_equal(ours: dict[str, float], of_file: dict[str, float], reason: str) -> None:
    assert reason == ""
    assert list(of_file) == ["evaluation/file/map", "evaluation/file/map_50", "evaluation/file/map_medium"]
    for name, value in of_file.items():
        assert value == pytest.approx(ours[name.replace("file/", "")], abs=1e-6, nan_ok=True), name
    # else nothing is compared
    assert 0.02 < of_file["evaluation/file/map"] < 0.98


def transposed(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node.append(onnx.helper.make_node("Transpose", ["found"], ["other"], perm=[0, 2, 1]))
    model.graph.output[0].name = "other"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def with_fixed_batch(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


@pytest.mark.parametrize("family", HEADS)
def test_a_file_that_returns_all_boxes_has_the_precision_of_our_own_decoding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if FAMILIES[family].one_to_one:
        # as many as the file chooses
        monkeypatch.setattr(families, "MOST_DETECTIONS", 20)
    assert_equal(*precisions(family, detector_file(family)))


def test_the_boxes_of_yolov8_may_be_rows_and_the_batch_may_be_fixed() -> None:
    assert_equal(*precisions("yolov8", transposed(detector_file("yolov8"))))
    assert_equal(*precisions("yolov8", with_fixed_batch(detector_file("yolov8"), 1)))
    loss = loss_of("yolov8", detector_file("yolov8"))
    assert_equal(*precisions("yolov8", with_fixed_batch(detector_file("yolov8"), 2), loss=loss))


@pytest.mark.parametrize("returns", [name for name in RETURNED if name != "boxes"])
def test_a_file_that_chooses_as_we_do_has_the_precision_of_our_own_choice(returns: str) -> None:
    chosen = with_selection(detector_file("retinanet"), returns, **AS_OURS)
    assert_equal(*precisions("retinanet", chosen))


@pytest.mark.parametrize("returns", ["table", "choice"])
def test_what_a_file_leaves_out_itself_counts(returns: str) -> None:
    """The selection of the file keeps 3 boxes of each class and image."""
    chosen = with_selection(detector_file("fcos"), returns, overlap=0.65, least=0.001, most=3)
    ours, of_file, reason = precisions("fcos", chosen)
    assert reason == ""
    assert of_file["evaluation/file/map"] < 0.6 * ours["evaluation/map"]


def test_of_a_file_that_is_not_understood_only_our_own_decoding_counts() -> None:
    _, of_file, reason = precisions("retinanet", with_selection(detector_file("retinanet")))
    assert of_file == {}
    assert reason == ("the file returns boxes of retinanet, but beside them no scores and classes of the same boxes")
    _, of_file, reason = precisions("yolox", detector_file("yolox coded"))
    assert of_file == {}
    assert reason == "no output of the file holds the boxes that yolox decodes from the same raw outputs"
    loss = loss_of("retinanet", detector_file("retinanet"))
    raw = part_between(detector_file("retinanet"), loss.outputs, ())
    _, of_file, reason = precisions("retinanet", raw, loss=loss)
    assert of_file == {}
    assert reason == "the outputs of the file are the raw outputs, which its users decode"


def test_anchors_that_are_not_those_of_the_file_are_noticed() -> None:
    model = detector_file("yolov5")
    loss = loss_of("yolov5", model)
    others = tuple(tuple((1.2 * width, height) for width, height in level) for level in loss.anchors)
    _, of_file, reason = precisions("yolov5", model, loss=loss.model_copy(update={"anchors": others}))
    assert of_file == {}
    assert "holds the boxes that yolov5 decodes" in reason


@pytest.mark.slow
def test_the_record_of_an_export_has_both_before_and_after_and_so_has_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "RESAMPLES", 50)
    model = detector_file("yolov8")
    annotate(tmp_path, pictures(tmp_path, 12))
    loss = loss_of("yolov8", model)
    model.metadata_props.add(key="names", value="{0: 'cat', 1: 'dog'}")
    run = make_run(
        tmp_path / "run",
        model,
        {},
        data={
            "source": str(tmp_path / "images"),
            "label": "boxes",
            "evaluation_fraction": 0.5,
            "image": {"boxes": "../annotations.json", "resize": "stretch"},
        },
        loss=[{"name": "yolov8", "output": list(loss.outputs), "strides": [8, 16, 32]}],
        metrics=["map", "map_50"],
        train={"num_steps": 1, "global_batch_size": 4},
        export={"promote_if": {"metric": "evaluation/file/map_50", "confidence": 0.9}},
    )
    module = to_module(load_model(read_config(run).model.path))
    weights = {name: weight.detach().clone() for name, weight in named_weights(module).items()}
    exported = export(run, Checkpoint(1, weights), data=evaluation_data(run))
    names = {"evaluation/loss", *(f"evaluation/{of}map{at}" for of in ("", "file/") for at in ("", "_50"))}
    assert exported.before.keys() == exported.after.keys() == names
    assert exported.after["evaluation/file/map"] == pytest.approx(exported.after["evaluation/map"], abs=1e-6)
    assert exported.file_not_measured == ""
    assert [entry.value for entry in onnx.load(exported.path).metadata_props] == ["{0: 'red', 1: 'green'}"]
    config = read_config(run)
    found = compare(config, exported, config.model.path, evaluation_data(run))
    assert found.served == exported.before
    assert (found.metric, found.gain, found.refused) == ("evaluation/file/map_50", 0.0, "")
    assert found.interval == (0.0, 0.0)
    # of the raw outputs
    asked = config.export.promote_if.model_copy(update={"metric": "evaluation/map"})
    of_raw = config.model_copy(update={"export": config.export.model_copy(update={"promote_if": asked})})
    assert compare(of_raw, exported, config.model.path, evaluation_data(run)).interval == (0.0, 0.0)
    # a file that no comparison understands is said to be one
    unknown = exported.model_copy(update={"after": {}, "file_not_measured": "its outputs are others"})
    found = compare(config, unknown, config.model.path, evaluation_data(run))
    assert found.refused == "UnsupportedModel: its outputs are others"


def test_names_of_the_metrics_of_a_file() -> None:
    loss = loss_of("yolov8", detector_file("yolov8"))
    assert names_of_file([loss], METRICS[:1]) == ["evaluation/file/map"]
    assert is_greatest("evaluation/file/map") is True
    others = [LossConfig.model_validate({"name": "mse", "output": "a", "label": "b"}), loss]
    assert names_of_file(others, METRICS[:1]) == [f"evaluation/{titles(others)[1]}/file/map"]
    assert names_of_file(others[:1], METRICS[:1]) == []
