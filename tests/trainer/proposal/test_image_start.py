"""A detector whose input is an image without a batch is trained from the batch of one that its file makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.onnx_graph.files.index import dims_of, known_types
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from tests.support.detectors import ANCHORS, INPUT, PIXEL_MEAN, PIXEL_STD, SIDE, STRIDES, image_file
from tests.support.workshop import Workshop
from tests.trainer.data.images.test_boxes import annotate, pictures

IMAGE = {"image": np.random.default_rng(0).random((3, *INPUT), np.float32)}


def propose(folder: Path, family: str, steps: int) -> onward.Proposed:
    folder.mkdir(exist_ok=True)
    annotate(folder, pictures(folder))
    onnx.save(image_file(family), folder / "model.onnx")
    return onward.init(folder / "model.onnx", folder / "images", {}, output=folder / "new.toml", steps=steps)


@pytest.mark.parametrize("family", ["fcos", "retinanet"])
def test_init_proposes_the_start_and_its_pixels(family: str, tmp_path: Path) -> None:
    found = propose(tmp_path, family, steps=0)
    config = load_config(tmp_path / "new.toml")
    (loss,) = config.losses
    assert (loss.name, loss.strides) == (family, STRIDES)
    if family == "retinanet":  # the boxes of the file are in pixels of its smaller input
        np.testing.assert_allclose(loss.anchors, ANCHORS, rtol=1e-4)
    assert config.model.start == ("/Pad_output_0",)
    assert config.data.image is not None
    assert (config.data.image.mean, config.data.image.std) == (PIXEL_MEAN, PIXEL_STD)
    (info,) = read_training_signature(config.model).inputs
    assert info.shape == (1, 3, SIDE, SIDE)
    assert not found.questions
    assert not found.notes
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert reasons["model.start"].startswith("the batch of one that the file makes of image, an image alone")
    assert "measured by running it" in reasons["data.image.mean"]


def test_a_file_that_takes_pixels_to_255_says_so(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    model = image_file("fcos")
    (division,) = (node for node in model.graph.node[:10] if node.op_type == "Div")
    division.input[0] = "shares"
    model.graph.node.insert(0, helper.make_node("Div", ["image", "most"], ["scaled"]))
    model.graph.initializer.append(helper.make_tensor("most", TensorProto.FLOAT, [], [255.0]))
    (shift,) = (node for node in model.graph.node[:10] if node.op_type == "Sub")
    shift.input[0], shift.output[0] = "scaled", "shares"
    onnx.save(model, tmp_path / "model.onnx")
    onward.init(tmp_path / "model.onnx", tmp_path / "images", {}, output=tmp_path / "new.toml", steps=0)
    image = load_config(tmp_path / "new.toml").data.image
    assert image is not None
    assert image.scale == 1.0
    np.testing.assert_allclose((image.mean, image.std), 255 * np.array([PIXEL_MEAN, PIXEL_STD]), rtol=1e-4)


def test_the_part_declares_the_lengths_that_onnx_leaves_open() -> None:
    model = image_file("fcos")
    assert dims_of(known_types(model)["/Pad_output_0"]) == [None] * 4
    part = extract_subgraph(model, ModelConfig(path=Path("model.onnx"), start=("/Pad_output_0",)))
    assert dims_of(part.graph.input[0]) == [1, 3, SIDE, SIDE]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_a_run_trains_it_and_exports_the_file_with_its_own_input(tmp_path: Path) -> None:
    found = propose(tmp_path / "data", "retinanet", steps=8)
    assert found.proof is not None
    assert found.proof.loss_after < found.proof.loss_before
    workshop = Workshop(tmp_path)
    try:
        words = ["train.global_batch_size=4", "train.num_epochs=3", "optimizer.learning_rate=0.002"]
        facts = workshop.onward("run", str(tmp_path / "data" / "new.toml"), *words, limit_s=800)
    finally:
        workshop.close()
    given, trained = onnx.load(tmp_path / "data" / "model.onnx"), onnx.load(facts["model"])
    assert (trained.graph.input, trained.graph.output) == (given.graph.input, given.graph.output)
    before, after = (open_session(model).run(None, IMAGE) for model in (given, trained))
    assert [value.shape for value in before] == [value.shape for value in after]
    for old, new in zip(before, after, strict=True):
        assert np.isfinite(new).all()
        assert np.abs(old - new).max() > 1e-3 * np.abs(old).max()
