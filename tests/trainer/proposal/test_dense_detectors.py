"""The family of a detector with a grid is read from what its file computes, with its strides and anchors."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.detectors.dense_head import DenseHead, recognise
from onward.trainer.proposal.detectors.raw_outputs import find_raw_outputs
from tests.support import detectors
from tests.support.detectors import ANCHORS, CLASSES, HEADS, STRIDES, detector_file, with_selection
from tests.trainer.data.images.test_boxes import annotate, pictures


def recognised(model: onnx.ModelProto) -> DenseHead | None:
    raw = find_raw_outputs(model, Path())
    return recognise(raw) if raw else None


@pytest.mark.parametrize("family", HEADS)
def test_the_family_its_strides_and_its_anchors_are_those_of_the_file(family: str) -> None:
    head = recognised(detector_file(family))
    assert head
    assert head.loss.name == family
    assert head.loss.strides == (STRIDES[:1] if family == "centernet" else STRIDES)
    assert head.num_classes == CLASSES
    assert len(head.loss.outputs) == len(head.loss.strides) * len(HEADS[family])
    if family in ("yolov5", "retinanet", "ssd"):
        np.testing.assert_allclose(head.loss.anchors, ANCHORS, rtol=1e-4)


@pytest.mark.parametrize("family", ["retinanet", "fcos"])
def test_it_is_recognised_through_a_choice_among_its_boxes(family: str) -> None:
    whole, chosen = (recognised(model) for model in (detector_file(family), with_selection(detector_file(family))))
    assert whole
    assert chosen
    assert (chosen.loss.name, chosen.loss.outputs) == (whole.loss.name, whole.loss.outputs)
    if family == "retinanet":
        np.testing.assert_allclose(chosen.loss.anchors, ANCHORS, rtol=1e-3)


def test_a_file_of_yolox_may_leave_the_decoding_to_its_users() -> None:
    head = recognised(detector_file("yolox coded"))
    assert head
    assert (head.loss.name, head.loss.strides) == ("yolox", STRIDES)
    assert "as they are coded, which its users decode" in head.reason


class SSD300(torch.nn.Module):
    """The raw outputs of SSD's six levels of 38, 19, 10, 5, 3 and 1 cells, each a convolution of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Conv2d(3, own, side, side, padding) for own in HEADS["ssd"])
            for side, padding in ((8, 2), (16, 2), (32, 10), (64, 10), (100, 0), (300, 0))
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return detectors.DECODED["ssd"]([[head(x) for head in level] for level in self.levels])


def test_the_strides_of_ssd_on_300_pixels_are_read_from_its_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = (8, 16, 32, 64, 100, 300)
    sides = tuple(tuple((0.9 * s * w, 0.9 * s / w) for w in (0.7, 1.0, 1.4)) for s in strides)
    for name, value in (("SIDE", 300), ("STRIDES", strides), ("ANCHORS", sides)):
        monkeypatch.setattr(detectors, name, value)
    content = io.BytesIO()
    names = {"input_names": ["image"], "output_names": ["boxes", "scores"]}
    with warnings.catch_warnings(action="ignore"):
        image = torch.zeros(1, 3, 300, 300)
        torch.onnx.export(SSD300().eval(), (image,), content, dynamo=False, opset_version=17, **names)  # type: ignore[arg-type]
    head = recognised(onnx.load_from_string(content.getvalue()))
    assert head
    assert (head.loss.name, head.loss.strides) == ("ssd", strides)
    np.testing.assert_allclose(head.loss.anchors, sides, rtol=1e-3)


def test_other_numbers_are_no_coded_boxes_however_large_the_image() -> None:
    model = detector_file("yolox coded")
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["found"], ["squashed"]))
    model.graph.output[0].name = "squashed"
    # any size: it is tried with 320 pixels
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], ("h", "w"), strict=True):
        dim.dim_param = name
    assert recognised(model) is None


def test_a_file_that_decodes_its_boxes_otherwise_is_refused_with_its_last_layers(tmp_path: Path) -> None:
    model = detector_file("yolox")
    for tensor in model.graph.initializer:
        # the strides of the grid, all 8
        values = numpy_helper.to_array(tensor)
        if set(np.unique(values)) == {8.0, 16.0, 32.0}:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(values, 8.0), tensor.name))
    constants = [n for n in model.graph.node if n.op_type == "Constant" and n.attribute[0].t.dims]
    for node in constants:
        values = numpy_helper.to_array(node.attribute[0].t)
        if values.dtype == np.float32 and set(np.unique(values)) == {8.0, 16.0, 32.0}:
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.full_like(values, 8.0)))
    assert recognised(model) is None
    annotate(tmp_path, pictures(tmp_path))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match=r"its last layers are stride 8: .* with 4, .* set loss\.name, loss\.output"):
        onward.init(tmp_path / "model.onnx", tmp_path / "images", {}, output=tmp_path / "new.toml", steps=0)


@pytest.mark.parametrize(
    ("family", "resize"),
    [("yolov8", "pad_grey"), ("yolox", "corner_grey"), ("retinanet", "corner_mean"), ("ssd", "stretch")],
)
def test_init_proposes_the_pixels_of_the_family(family: str, resize: str, tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    onnx.save(detector_file(family), tmp_path / "model.onnx")
    onward.init(tmp_path / "model.onnx", tmp_path / "images", {}, output=tmp_path / "new.toml", steps=0)
    config = load_config(tmp_path / "new.toml")
    assert config.data.image is not None
    assert config.data.image.resize == resize
    if "grey" in resize:
        assert (config.data.image.mean, config.data.image.std) == ((0,) * 3, (1,) * 3)
    assert [loss.name for loss in config.losses] == [family]


def test_init_proposes_the_loss_with_reasons(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    onnx.save(detector_file("retinanet"), tmp_path / "model.onnx")
    onward.init(tmp_path / "model.onnx", tmp_path / "images", {}, output=tmp_path / "new.toml", steps=0)
    (loss,) = load_config(tmp_path / "new.toml").losses
    assert loss.name == "retinanet"
    assert loss.strides == STRIDES
    assert (
        "# fed with random raw outputs, the file computes the boxes of retinanet" in (tmp_path / "new.toml").read_text()
    )
