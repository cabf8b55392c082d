"""A detector with its preprocessing inside returns boxes in pixels of the image that it was given."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.box_columns import fitted_boxes
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.errors import ExportRefused
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.export.preprocessing.with_preprocessing import write_with_preprocessing
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir
from tests.support.detectors import ANCHORS, SIDE, STRIDES, detector_file, with_selection
from tests.support.exported_runs import exported_model, exported_run, serve
from tests.support.images import encoded, picture
from tests.trainer.data.images.test_boxes import annotate, pictures
from tests.trainer.export.measuring.test_file_precision import loss_of

Array = np.ndarray[Any, Any]
SIZES = ((90, 40), (37, 120), (SIDE, SIDE), (20, 30), (300, 200), (1, 64))
"""Height and width of images: portrait, landscape, of the size of the input, smaller, larger."""


def set_model(height: int = 32, width: int = 48, *, beside: str = "", masked: bool = False) -> onnx.ModelProto:
    """Class scores and boxes of 5 queries. beside: a further output of this kind. masked: pixels have a mask."""
    g = GraphWriter("set")
    pixels = g.input("image", ("n", 3, height, width))
    if masked:
        mask = g.op("Cast", g.input("pixel_mask", ("n", height, width), TensorProto.INT64), to=TensorProto.FLOAT)
        pixels = g.op("Mul", pixels, g.op("Unsqueeze", mask, g.weight("axes", [1])))
    x = g.op("GlobalAveragePool", g.op("Conv", pixels, g.weight("c", g.normal(1, 8, 3, 4, 4))))
    x = g.op("Flatten", x)
    for name, last in (("logits", 4), ("boxes", 4)):
        raw = g.op(
            "Reshape",
            g.op("MatMul", x, g.weight(f"w {name}", g.normal(2, 8, 5 * last))),
            g.weight(f"s{last}", [-1, 5, last]),
        )
        g.op("Identity" if name == "logits" else "Sigmoid", raw, outputs=name)
        g.output(name, ("n", 5, last))
    if beside == "corners":
        g.output(g.op("Mul", "boxes", g.weight("scale", 48.0), outputs="in pixels"), ("n", 5, 4))
    elif beside:
        g.output(g.op("Relu", x, outputs="features"), ("n", 8))
    return g.model()


def with_axes(model: onnx.ModelProto, axes: int) -> onnx.ModelProto:
    """Declare that the last output has so many axes."""
    name, kind = model.graph.output[-1].name, TensorProto.FLOAT
    model.graph.output[-1].CopyFrom(helper.make_tensor_value_info(name, kind, [f"axis {at}" for at in range(axes)]))
    return model


def detector_run(folder: Path, model: onnx.ModelProto, loss: Any, *, bind: Any = None, **image: Any) -> RunDir:
    shown = pictures(folder, 4)
    annotate(folder, shown)
    shutil.copytree(folder / "images", folder / "held")
    data = {
        "source": str(folder / "images"),
        "evaluation_source": str(folder / "held"),
        "label": "boxes",
        "image": {"boxes": "../annotations.json", **image},
    }
    return exported_run(folder, model, data=data, loss=loss, model={"bind": bind or {}})


def grid_loss(family: str) -> list[dict[str, Any]]:
    loss = {"name": family, "output": list(loss_of(family, detector_file(family)).outputs), "strides": STRIDES}
    return [loss | ({"anchors": ANCHORS} if family in ("retinanet", "ssd") else {})]


SET_LOSS = [
    {"name": "set_classes", "output": ["logits", "boxes"], "num_queries": 5},
    {"name": "set_l1", "output": ["logits", "boxes"]},
]


def corners(boxes: Array) -> Array:
    """Centre and size as corners."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


SIDES = np.array([48.0, 32.0, 48.0, 32.0])
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], Any, str, Callable[[Array], Array], Callable[[Array], Array]]] = {
    "centre and size, transposed": (
        lambda: detector_file("yolov8"), "yolov8", "found", lambda out: corners(out[0].T[:, :4]), lambda boxes: boxes
    ),
    "corners in shares": (
        lambda: detector_file("ssd"), "ssd", "boxes", lambda out: out[0], lambda boxes: boxes * SIDE
    ),
    "chosen ones, behind the number of the image": (
        lambda: with_axes(with_selection(detector_file("retinanet"), "table with the image"), 2),
        "retinanet", "found", lambda out: out[:, 1:5], lambda boxes: boxes,
    ),
    "a set, in shares": (
        set_model, "set", "boxes", lambda out: corners(out[0]), lambda boxes: boxes * SIDES
    ),
    "a set, with a bound mask": (
        lambda: set_model(masked=True), "set", "boxes", lambda out: corners(out[0]), lambda boxes: boxes * SIDES
    ),
}  # fmt: skip
"""File, family, output; corners of its boxes in an image; and these in pixels of the input."""


@pytest.mark.parametrize(
    ("case", "resize"),
    [*((case, "pad") for case in CASES), ("a set, in shares", "stretch"), ("a set, in shares", "corner_mean")],
)
def test_boxes_in_the_original_become_those_of_the_file_as_labels_do(tmp_path: Path, case: str, resize: str) -> None:
    make, family, name, read, in_pixels = CASES[case]
    model = make()
    bound = {"pixel_mask": 1} if case == "a set, with a bound mask" else {}
    loss = SET_LOSS if family == "set" else grid_loss(family)
    run = detector_run(tmp_path, model, loss, bind=bound, resize=resize)
    exported = exported_model(tmp_path / "model.onnx")
    difference, _ = write_with_preprocessing(run, exported, evaluation_data(run), tmp_path / "with.onnx")
    assert difference < 1e-5
    plain, inside = (onnxruntime.InferenceSession(tmp_path / file) for file in ("model.onnx", "with.onnx"))
    assert [(each.name, each.type) for each in inside.get_outputs()] == [
        (each.name, each.type) for each in plain.get_outputs()
    ]
    (tmp_path / "recipe").mkdir()
    write_preprocessing(run, exported, tmp_path / "recipe")
    recipe = serve().read_recipe(tmp_path / "recipe")
    size = (32, 48) if family == "set" else (SIDE, SIDE)
    config = ImageConfig(resize=resize)  # type: ignore[arg-type]
    for number, (height, width) in enumerate(SIZES):
        content = encoded(picture(number, height, width), "PNG")
        fed = serve().model_inputs(recipe, {"image": [content]}, tmp_path)
        of_file = dict(zip([each.name for each in plain.get_outputs()], plain.run(None, fed), strict=True))
        pixels = pixels_of(decode_image(content, grey=False))[None]
        given = {name: array for name, array in fed.items() if name in bound}
        for value in inside.get_inputs():
            given.setdefault(value.name, pixels)
        of_variant = dict(zip(of_file, inside.run(None, given), strict=True))
        original = read(of_variant.pop(name))
        boxes = in_pixels(read(of_file.pop(name)))
        assert len(boxes) >= 3
        # as training moves the boxes of an image to its input
        row = np.concatenate([[width, height], np.insert(np.insert(original, 0, 0, 1), 5, 0, 1).ravel()])
        np.testing.assert_allclose(fitted_boxes(row, size, config)[:, 1:5], boxes, rtol=1e-5, atol=1e-3)
        if (height, width) != size:
            assert np.abs(original - boxes).max() > 1, "else nothing is turned back"
        for other, value in of_file.items():
            np.testing.assert_allclose(of_variant[other], value, rtol=0, atol=1e-5)


def refused(run: RunDir, folder: Path) -> str:
    exported = exported_model(folder / "model.onnx")
    with pytest.raises(ExportRefused) as error:
        write_with_preprocessing(run, exported, evaluation_data(run), folder / "with.onnx")
    assert not (folder / "with.onnx").exists()
    return str(error.value)


def test_boxes_in_a_form_that_is_not_understood_are_refused(tmp_path: Path) -> None:
    models = {
        "coded": (detector_file("yolox coded"), grid_loss("yolox")),
        "without scores": (with_axes(with_selection(detector_file("fcos")), 2), grid_loss("fcos")),
        "twice": (set_model(beside="corners"), SET_LOSS),
        "beside features": (set_model(beside="features"), SET_LOSS),
        "own": (set_model(), [{"file": "own.py:f", "output": "boxes"}]),
    }
    found = {}
    for name, (model, loss) in models.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.py").write_text("def f(output, labels):\n    return output.sum()\n")
        loss = [each | {"file": f"{folder}/own.py:f"} if "file" in each else each for each in loss]
        run = detector_run(folder, model, loss, resize="pad")
        if name == "beside features":
            write_with_preprocessing(
                run, exported_model(folder / "model.onnx"), evaluation_data(run), folder / "with.onnx"
            )
        else:
            found[name] = refused(run, folder)
    assert "no output of the file holds the boxes that yolox decodes" in found["coded"]
    assert "beside them no scores and classes" in found["without scores"]
    assert "'in pixels' may hold boxes beside 'boxes', in a form that is not known" in found["twice"]
    assert "how the file holds boxes is not known of a loss of your own" in found["own"]


def test_places_beside_the_boxes_are_refused(tmp_path: Path) -> None:
    """Key points behind the classes, in an output of their own, or the boxes a second time."""
    base = detector_file("yolov8")
    columns = {
        "key points": [helper.make_node("Concat", ["found", "found"], ["more"], axis=1)],
        "an output": [
            helper.make_node("Transpose", ["found"], ["t"], perm=[0, 2, 1]),
            helper.make_node("Neg", ["t"], ["more"]),
        ],
        "twice": [helper.make_node("Transpose", ["found"], ["more"], perm=[0, 2, 1])],
    }
    found = {}
    for name, nodes in columns.items():
        folder = tmp_path / name
        folder.mkdir()
        model = onnx.ModelProto()
        model.CopyFrom(base)
        model.graph.node.extend(nodes)
        if name == "key points":
            del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name="more"))
        found[name] = refused(detector_run(folder, with_axes(model, 3), grid_loss("yolov8"), resize="pad"), folder)
    assert "what the columns 6 to 11 of 'more' hold is not known" in found["key points"]
    assert "what output 'more' holds is not known" in found["an output"]
    assert "'more' hold boxes as well" in found["twice"]
