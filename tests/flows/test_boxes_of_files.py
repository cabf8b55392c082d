"""`onward predict` gives the boxes of a file in pixels of the images, and `onward evaluate` their precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import onward
from onward.flows import predict as flows_predict
from onward.flows.box_evaluation import _recorded
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.geometry import resized_size
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.measuring.file_precision import objects_of
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.measuring.predictions import write_predictions
from onward.trainer.export.model_file import ModelFile, trained_part
from onward.trainer.export.preprocessing.mask_files import write_masks
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.model.metrics.measured import Measured
from onward.trainer.run.directory import read_config
from tests.equivalence.test_detectors import GRID_LOSS, grid_model
from tests.support.detectors import STRIDES, detector_file, image_file, with_selection
from tests.support.exported_runs import exported_model, exported_run
from tests.trainer.data.images.test_boxes import annotate, pictures
from tests.trainer.export.preprocessing.test_box_nodes import SET_LOSS, detector_run, grid_loss, set_model

INNER_OUTPUTS = [
    f"/detector/{name}_output_0"
    for level in range(3)
    for name in (f"Relu{f'_{level}' if level else ''}", f"heads.{level}.1/Conv", f"heads.{level}.2/Conv")
]
INNER_LOSS = {"name": "fcos", "output": INNER_OUTPUTS, "strides": STRIDES}
CASES = {
    "decoded": (lambda: detector_file("yolov8"), lambda: grid_loss("yolov8"), "stretch"),
    "chosen": (
        lambda: with_selection(detector_file("retinanet"), "choice"),
        lambda: grid_loss("retinanet"),
        "pad_grey",
    ),
    "raw": (grid_model, lambda: GRID_LOSS, "stretch"),
    "set": (set_model, lambda: SET_LOSS, "corner_mean"),
    "bound": (lambda: set_model(masked=True), lambda: SET_LOSS, "corner_grey"),
    "inner": (lambda: image_file("fcos"), lambda: INNER_LOSS, "corner_mean"),
}
"""What the file returns -> the file, its loss, and how images are resized."""
MODEL = {"bound": {"bind": {"pixel_mask": 1}}, "inner": {"start": ["/Pad_output_0"]}}
"""As `onward init` proposes it."""
PIXEL_MASK = {"kind": "value", "value": [[[1]]], "shape": [None, 32, 48], "dtype": "int64"}


def exported(folder: Path, case: str) -> tuple[Path, dict[str, Any], OnnxRunner, Any]:
    """A file with its preprocessing.json, without its run; with its trained part and its rows."""
    make, loss, resize = CASES[case]
    shown = pictures(folder, 4)
    annotate(folder, shown)
    random = np.random.default_rng(0)
    for file in (folder / "images").iterdir():
        # cells of equal scores would be suppressed in any order
        Image.fromarray(random.integers(0, 256, (*size_of(file), 3), np.uint8)).save(file)
    shutil.copytree(folder / "images", folder / "held")
    source = {"source": str(folder / "images"), "evaluation_source": str(folder / "held"), "label": "boxes"}
    image = {"boxes": "../annotations.json", "resize": resize}
    run = exported_run(folder, make(), model=MODEL.get(case, {}), data={**source, "image": image}, loss=loss())
    data = evaluation_data(run)
    file = ModelFile.read(folder / "model.onnx")
    part = OnnxRunner(trained_part(file.proto, file.path, folder / "part", read_config(run).model), data)
    record = exported_model(file.path).model_copy(update={"objects": objects_of(file, part, data)})
    write_preprocessing(run, record, folder)
    recipe = json.loads((folder / "preprocessing.json").read_text())
    return file.path, recipe, part, data


@pytest.mark.parametrize("case", CASES)
def test_predicted_boxes_are_those_of_the_metric_in_pixels_of_the_images(tmp_path: Path, case: str) -> None:
    path, recipe, part, data = exported(tmp_path, case)
    own = {value.name for value in onnx.load(path).graph.output}
    assert (recipe["outputs"][0]["name"] in own) == (case != "inner")
    assert recipe["outputs"][0]["classes"] == ["red", "green"]
    assert (recipe["objects"]["form"] is None) == (case in ("raw", "inner"))
    found = onward.predict(path, tmp_path / "held")
    assert list(found) == ["file", "class", "probability", "x", "y", "width", "height"]
    (batch,) = data.batches()
    loss = data.new_metrics(part.outputs).losses.each[0]
    outputs = [torch.as_tensor(each) for each in part.outputs_of(batch, 0, batch.size)]
    measured = Measured(loss, outputs, batch.labels[0], task="objects").objects[0]
    how, *others = recipe["inputs"].values()
    assert others == ([PIXEL_MASK] if case == "bound" else [])
    image = read_config_of(tmp_path).data.image
    assert image
    sizes = {file.name: size_of(file) for file in (tmp_path / "held").iterdir()}
    for name, boxes in zip(sorted(sizes), measured, strict=True):
        height, width = sizes[name]
        new, begin = resized_size((height, width), (how["height"], how["width"]), image)
        sides = np.tile([how["width"], how["height"]], 2)
        scales = np.tile(np.divide((height, width), new)[::-1], 2)
        corners = (boxes[:, 2:].numpy() * sides + np.tile(begin[::-1], 2)) * scales
        corners = corners.clip(0, np.tile([width, height], 2))
        rows = found[found["file"] == name]
        if case == "chosen":  # the file keeps fewer
            assert 0 < len(rows) <= len(boxes)
            continue
        np.testing.assert_allclose(rows["probability"], boxes[:, 1], atol=1e-5)
        np.testing.assert_allclose(rows["x"], corners[:, 0], atol=0.02)
        np.testing.assert_allclose(rows["y"] + rows["height"], corners[:, 3], atol=0.02)
        assert list(rows["class"]) == [["red", "green", "2"][int(each)] for each in boxes[:, 0]]


def read_config_of(folder: Path) -> Any:
    from onward.trainer.run.directory import RunDir

    return read_config(RunDir(folder / "run"))


def size_of(file: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(file) as image:
        return image.height, image.width


@pytest.mark.parametrize("case", ["decoded", "raw", "set", "bound", "inner"])
def test_evaluate_gives_the_map_of_the_evaluation_and_of_the_file(tmp_path: Path, case: str) -> None:
    path, _, part, _ = exported(tmp_path, case)
    wanted = part.evaluate()
    # elsewhere than in training
    shutil.copytree(tmp_path / "held", tmp_path / "new" / "photos")
    boxes = {"data.image.boxes": str(tmp_path / "annotations.json")}
    found = onward.evaluate(path, tmp_path / "new" / "photos", boxes)
    assert found.rows == 4
    assert found.metrics["loss"] == pytest.approx(
        wanted["evaluation/loss" if case in ("decoded", "raw", "inner") else "evaluation/set_classes/loss"], rel=1e-5
    )
    assert ("file/map" in found.metrics) == (case == "decoded")
    with pytest.raises(DataError, match="nothing says where the boxes"):
        onward.evaluate(path, tmp_path / "new" / "photos")


@pytest.mark.parametrize("resize", ["stretch", "pad", "pad_grey", "corner_grey", "corner_mean"])
def test_a_file_is_measured_with_the_size_and_the_borders_of_its_training(resize: str, tmp_path: Path) -> None:
    mean = [0.4, 0.5, 0.6]
    run = detector_run(
        tmp_path, set_model(), SET_LOSS, resize=resize, size=[32, 48], mean=mean, std=[0.2, 0.25, 0.3], color="bgr"
    )
    objects = {"outputs": ["logits", "boxes"], "form": None, "loss": SET_LOSS[0]}
    record = exported_model(tmp_path / "model.onnx").model_copy(update={"objects": objects})
    write_preprocessing(run, record, tmp_path)
    recipe = json.loads((tmp_path / "preprocessing.json").read_text())
    settings = _recorded(record.path, recipe)["data"]["image"]
    read, trained = ImageConfig.model_validate(settings), read_config(run).data.image
    assert trained
    for name in ("resize", "size", "mean", "std", "scale", "color", "interpolation", "crop_ratio"):
        assert getattr(read, name) == getattr(trained, name), name


def test_boxes_are_written_as_coco_has_them_and_other_forms_name_one_that_works(tmp_path: Path) -> None:
    path, _, _, _ = exported(tmp_path, "decoded")
    write_predictions(tmp_path / "found.json", flows_predict.predictions(path, tmp_path / "held"))
    content = json.loads((tmp_path / "found.json").read_text())
    assert [each["name"] for each in content["categories"]] == ["red", "green"]
    assert [each["file_name"] for each in content["images"]] == sorted(
        file.name for file in (tmp_path / "held").iterdir()
    )
    table = onward.predict(path, tmp_path / "held")
    boxes = np.array([each["bbox"] for each in content["annotations"]])
    np.testing.assert_allclose(boxes, table[["x", "y", "width", "height"]], atol=0.01)
    write_predictions(tmp_path / "found.parquet", flows_predict.predictions(path, tmp_path / "held"))
    with pytest.raises(ConfigError, match=r"would hold masks; name a file .csv, .parquet or .json"):
        write_masks(tmp_path / "masks", flows_predict.predictions(path, tmp_path / "held"))


def test_messages_about_a_file_of_others_name_the_command_that_works(tmp_path: Path) -> None:
    shown = pictures(tmp_path, 4)
    annotate(tmp_path, shown)
    onnx.save(detector_file("yolov8"), tmp_path / "foreign.onnx")
    with pytest.raises(DataError) as caught:
        onward.predict(tmp_path / "foreign.onnx", tmp_path / "images")
    assert "`onward init foreign.onnx DATA`, then `onward run`" in caught.value.__notes__[0]
    with pytest.raises(ConfigError) as refused:
        onward.evaluate(tmp_path / "foreign.onnx", tmp_path / "images")
    assert "--boxes PLACE names the boxes" in refused.value.__notes__[0]
    boxes = {"data.image.boxes": str(tmp_path / "annotations.json")}
    found = onward.evaluate(tmp_path / "foreign.onnx", tmp_path / "images", boxes)
    assert found.rows == 4
    assert {"map", "file/map"} <= found.metrics.keys()
    assert any(line.startswith("loss.name") for line in found.guessed)
