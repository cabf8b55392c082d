"""A file with its preprocessing inside takes raw pixels and columns, and gives the outputs of the trained file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from PIL import __version__ as pillow_version

from onward.tasks.export import export_file
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.images.geometry import fitted_image
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.errors import DataError, ExportRefused
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.preprocessing.image_nodes import Fitting
from onward.trainer.export.preprocessing.with_preprocessing import write_with_preprocessing
from onward.trainer.onnx_graph.node_builder import GraphExtender, GraphWriter
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.preprocessing_record import ImageInput
from tests.support import graphs
from tests.support.exported_runs import exported_model, exported_run, serve, two_tables
from tests.support.images import encoded, picture
from tests.support.runs import make_run, train_run
from tests.support.texts import bert_tokenizer


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Any]:
    """Writes two tables with these columns; returns the settings of [data] for them."""
    return partial(two_tables, tmp_path)


def with_preprocessing(run: RunDir, folder: Path) -> onnxruntime.InferenceSession:
    exported = exported_model(folder / "model.onnx")
    parity, latency = write_with_preprocessing(run, exported, evaluation_data(run), folder / "with.onnx")
    assert parity < 1e-6
    assert not latency <= 0, "NaN where the machine is too busy to tell"
    return onnxruntime.InferenceSession(folder / "with.onnx")


# -- images


def resizer(size: tuple[int, int], config: ImageConfig, *, channels: int, opset: int) -> onnxruntime.InferenceSession:
    """A graph of the nodes that resize alone."""
    how = ImageInput(
        column="image",
        height=size[0],
        width=size[1],
        resize=config.fit,
        border_color=config.border_color(channels) if config.fit == "pad" else (),
        is_in_corner=config.is_in_corner,
        crop_ratio=config.crop_ratio,
        interpolation=config.interpolation,
        antialias=True,
        pillow=pillow_version,
        scale=1.0,
        mean=(),
        std=(),
        channels="rgb",
        layout="nchw",
        dtype="float32",
    )
    pixels = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", "h", "w", channels])
    graph = helper.make_graph([], "resize", [pixels], [])
    fitted = Fitting(how, GraphExtender(graph)).pixels("image")
    graph.output.append(helper.make_tensor_value_info(fitted, TensorProto.FLOAT, ["n", channels, *size]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString())


def compare_with_pillow(interpolation: str, resize: str, cases: int) -> None:
    """Compare the nodes with what training computes, on random sizes: all bits are equal."""
    rng = np.random.default_rng(cases)
    for case in range(cases):
        size = (int(rng.integers(1, 60)),) * 2 if case % 2 else tuple(map(int, rng.integers(1, 60, 2)))
        ratio = (0.875, 1.0, 0.777)[case % 3]
        config = ImageConfig.model_validate({"interpolation": interpolation, "resize": resize, "crop_ratio": ratio})
        channels = 1 if case % 4 == 3 else 3
        session = resizer(size, config, channels=channels, opset=(11, 13, 17, 18, 23)[case % 5])
        # high, wide, of the final size, smaller than it, and of one pixel
        for height, width in ((200, 37), (61, 230), size, (9, 14), (1, 1)):
            pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
            image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
            wanted = pixels_of(fitted_image(image, size, config))
            (found,) = session.run(None, {"image": np.stack([pixels, pixels])})
            case_is = f"{interpolation} {resize} {ratio} {height} x {width} -> {size}"
            np.testing.assert_array_equal(found[0].transpose(1, 2, 0), wanted, case_is)
            np.testing.assert_array_equal(found[1], found[0])


RESIZES = ("crop", "stretch", "pad", "pad_grey", "corner_mean")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box")


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_pixels_are_those_of_pillow_bit_for_bit(interpolation: str) -> None:
    for resize in RESIZES:
        compare_with_pillow(interpolation, resize, 3)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_pixels_are_those_of_pillow_bit_for_bit_for_hundreds_of_sizes(interpolation: str) -> None:
    for resize in RESIZES:
        compare_with_pillow(interpolation, resize, 20)


IMAGES: dict[str, dict[str, Any]] = {
    "as torchvision": {},
    "stretched, to -1..1": {"resize": "stretch", "mean": [0.5] * 3, "std": [0.5] * 3},
    "with borders, BGR, 0..255": {"resize": "pad", "color": "bgr", "scale": 1.0, "mean": [104.0] * 3, "std": [1.0] * 3},
    "in the corner, of the colour of the mean": {"resize": "corner_mean", "color": "bgr"},
    "all of the centre, bicubic": {"crop_ratio": 1.0, "interpolation": "bicubic", "cache": "encoded"},
}


@pytest.mark.parametrize("settings", IMAGES.values(), ids=IMAGES)
def test_the_file_takes_pixels_of_any_size_and_gives_the_outputs_of_the_trained_file(
    tmp_path: Path, table: Callable[..., Any], settings: dict[str, Any]
) -> None:
    raw = [encoded(picture(at, 30 + at, 40 - 3 * at)) for at in range(8)]
    data = table(image=raw, label=[0, 1, 2, 3] * 2) | {"image": settings}
    run = exported_run(tmp_path, graphs.tiny_conv_net(image_size=16), data=data)
    session = with_preprocessing(run, tmp_path)
    (taken,) = session.get_inputs()
    assert (taken.name, taken.type, taken.shape[1:]) == ("image_2", "tensor(uint8)", [None, None, 3])
    # an image of a size that no row has, by the program that serves the trained file
    program, content = serve(), encoded(picture(99, 77, 51), "PNG")
    recipe = onnx_recipe(run, tmp_path)
    inputs = program.model_inputs(recipe, {"image": [content, content]}, tmp_path)
    (plain,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, inputs)
    pixels = pixels_of(decode_image(content, grey=False))
    (inside,) = session.run(None, {"image_2": np.stack([pixels, pixels])})
    np.testing.assert_allclose(inside, plain, rtol=0, atol=1e-6)


def onnx_recipe(run: RunDir, folder: Path) -> Any:
    """preprocessing.json of the run."""
    from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing

    folder.joinpath("recipe").mkdir()
    write_preprocessing(run, exported_model(folder / "model.onnx"), folder / "recipe")
    return serve().read_recipe(folder / "recipe")


def test_grey_pixels_of_a_model_that_takes_them_last_and_as_integers(tmp_path: Path, table: Callable[..., Any]) -> None:
    g = GraphWriter("grey")
    x = g.op("Cast", g.input("x", (2, 12, 10, 1), TensorProto.UINT8), to=TensorProto.FLOAT)
    x = g.op("Gemm", g.op("Flatten", x), g.weight("w", g.normal(0.01, 120, 4)))
    g.output(x, (2, 4))
    raw = [encoded(picture(at, 30 + at, 40 - 3 * at, grey=True)) for at in range(7)]
    data = table(image=raw, label=[0, 1, 2, 3, 0, 1, 2])
    session = with_preprocessing(exported_run(tmp_path, g.model(), data=data | {"image": {}}), tmp_path)
    (taken,) = session.get_inputs()
    assert taken.shape == [2, None, None, 1], "the size of a batch stays fixed"


def test_rows_that_were_left_out_of_the_shards_are_left_out_of_the_comparison(
    tmp_path: Path, table: Callable[..., Any]
) -> None:
    raw = [encoded(picture(at, 30 + at, 40 - 3 * at)) for at in range(8)]
    raw[0] = raw[5] = b"no image"
    data = table(image=raw, label=[0, 1, 2, 3] * 2) | {"image": {}, "bad_rows": "skip"}
    with_preprocessing(exported_run(tmp_path, graphs.tiny_conv_net(image_size=16), data=data), tmp_path)


def test_images_whose_files_are_gone_cannot_be_compared(tmp_path: Path, table: Callable[..., Any]) -> None:
    data = table(image=[encoded(picture(at)) for at in range(4)], label=[0, 1, 2, 3]) | {"image": {}}
    run = exported_run(tmp_path, graphs.tiny_conv_net(image_size=16), data=data)
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(DataError, match=r"b\.parquet"):
        with_preprocessing(run, tmp_path)


def test_resizing_without_antialias_and_old_opsets_are_refused_by_name(
    tmp_path: Path, table: Callable[..., Any]
) -> None:
    raw = [encoded(picture(at)) for at in range(8)]
    data = table(image=raw, label=[0, 1, 2, 3] * 2)
    run = exported_run(
        tmp_path,
        graphs.tiny_conv_net(image_size=16),
        data=data | {"image": {"interpolation": "bilinear_aliased", "cache": "encoded"}},
    )
    with pytest.raises(ExportRefused, match=r"data\.image\.interpolation 'bilinear_aliased' .* processors"):
        with_preprocessing(run, tmp_path)
    old = tmp_path / "old"
    old.mkdir()
    proto = graphs.tiny_conv_net(image_size=16)
    proto.opset_import[0].version = 10
    run = exported_run(old, proto, data=data | {"image": {}})
    with pytest.raises(ExportRefused, match="opset 10, but the nodes that resize images need 11"):
        with_preprocessing(run, old)


# -- tables


def test_the_file_takes_raw_columns_with_gaps(tmp_path: Path, table: Callable[..., Any]) -> None:
    raw: dict[str, Any] = {name: (np.arange(40.0) * (place + 1) % 17).tolist() for place, name in enumerate("abc")}
    for place in range(0, 40, 7):
        raw["a"][place] = None
    columns = {"standardise": "standard", "missing": {"a": "mean"}, "log1p": ["c"], "indicators": ["a"]}
    data = table(**raw, label=np.arange(40.0)) | {"table": columns, "inputs": {"features": [*"abc", "a_missing"]}}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    session = with_preprocessing(exported_run(tmp_path, graphs.tiny_mlp(), model=model, data=data), tmp_path)
    assert [(value.name, value.type) for value in session.get_inputs()] == [(name, "tensor(double)") for name in "abc"]
    row = {"a": np.array([np.nan]), "b": np.array([3.0]), "c": np.array([2.0])}
    assert np.isfinite(session.run(None, row)[0]).all()


COLUMNS: dict[str, Any] = {
    "city": ["Rome", "Oslo", "Bonn", "Rome", "", "Oslo", "Bonn", "Rome"] * 5,
    "size": [3, 40, 500, 3, 40, 500, 3, 40] * 5,
    "age": [31.0, None, 18.0, 77.0, 50.0, 41.0, None, 29.0] * 5,
    "label": [0, 1, 2, 0, 1, 2, 0, 1] * 5,
}


def cities(folder: Path, **table: Any) -> dict[str, Any]:
    given = {"categories": ["city", "size"], "standardise": {"age": "standard"}, "missing": {"*": "mean"}}
    return {"inputs": {"places": ["city", "size"], "age": "age"}, "table": given | table}


def test_texts_and_integers_become_ids_inside_of_the_file_and_unknown_ones_too(
    tmp_path: Path, table: Callable[..., Any]
) -> None:
    run = exported_run(tmp_path, graphs.tiny_cities(), data=table(**COLUMNS) | cities(tmp_path))
    session = with_preprocessing(run, tmp_path)
    types = {value.name: value.type for value in session.get_inputs()}
    assert types == {"city": "tensor(string)", "size": "tensor(int64)", "age_2": "tensor(double)"}
    # as a program computes them from preprocessing.json, with categories that training has not seen
    raw = {"city": ["Rome", "Paris", "", "Bonn"], "size": [40, 3, 41, 500], "age": [30.0, float("nan"), 1.0, 2.0]}
    recipe = onnx_recipe(run, tmp_path)
    inputs = serve().model_inputs(recipe, raw, tmp_path)
    assert inputs["places"].tolist() == [[3, 2], [0, 1], [0, 0], [1, 3]]
    (plain,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, inputs)
    given = {"city": np.array(raw["city"], object), "size": np.array(raw["size"]), "age_2": np.array(raw["age"])}
    (inside,) = session.run(None, given)
    np.testing.assert_allclose(inside, plain, rtol=0, atol=1e-6)


def test_an_unknown_category_that_has_no_id_ends_the_run_of_the_file(tmp_path: Path, table: Callable[..., Any]) -> None:
    vocabulary = {"city": ["Oslo", "Rome", "Bonn"], "size": ["3", "40", "500", "huge"]}
    columns = {**COLUMNS, "city": [text or "Oslo" for text in COLUMNS["city"]]}
    data = table(**columns) | cities(tmp_path, categories=vocabulary)
    run = exported_run(tmp_path, graphs.tiny_cities(), data=data)
    session = with_preprocessing(run, tmp_path)
    age = np.array([1.0])
    session.run(None, {"city": np.array(["Bonn"], object), "size": np.array([500]), "age_2": age})
    for city, size in (("Paris", 3), ("Rome", 4)):
        with pytest.raises(Exception, match="out of data bounds"):
            session.run(None, {"city": np.array([city], object), "size": np.array([size]), "age_2": age})
    with pytest.raises(ValueError, match="'Paris' is no category of city"):
        serve().model_inputs(onnx_recipe(run, tmp_path), {"city": ["Paris"], "size": [3], "age": [1.0]}, tmp_path)


def test_tables_with_fewer_evaluation_rows_and_several_sources_are_compared(
    tmp_path: Path, table: Callable[..., Any]
) -> None:
    settings = cities(tmp_path) | {"evaluation_rows": 7, "evaluation_fraction": 0.3}
    files = table(**COLUMNS)
    data = {"sources": [{"source": files["source"]}, {"source": files["evaluation_source"], "weight": 2.0}]}
    with_preprocessing(exported_run(tmp_path, graphs.tiny_cities(), data=data | settings), tmp_path)


def test_integers_without_steps_beside_categories_stay_exact(tmp_path: Path, table: Callable[..., Any]) -> None:
    g = GraphWriter("integers")
    x = g.input("x", ("batch", 2), TensorProto.INT64)
    residue = g.op("Cast", g.op("Mod", x, g.weight("m", np.array([7, 7]))), to=TensorProto.FLOAT)
    g.output(g.op("Gemm", residue, g.weight("w", g.normal(1.0, 2, 3))), ("batch", 3))
    number = 2**40 + 1
    columns = {"city": COLUMNS["city"], "number": [number + at for at in range(40)], "label": COLUMNS["label"]}
    settings = {"inputs": {"x": ["city", "number"]}, "table": {"categories": ["city"], "missing": {"city": "mean"}}}
    session = with_preprocessing(exported_run(tmp_path, g.model(), data=table(**columns) | settings), tmp_path)
    (found,) = session.run(None, {"city": np.array(["Bonn"], object), "number": np.array([float(number)])})
    weights = numpy_helper.to_array(next(t for t in g.model().graph.initializer if t.name == "w"))
    np.testing.assert_allclose(found[0], np.array([1, number % 7]) @ weights, rtol=1e-6)


def test_a_tokenizer_is_no_node_of_onnx(tmp_path: Path, table: Callable[..., Any]) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    text = {"tokenizer": tmp_path / "tokenizer.json", "columns": "one"}
    proto = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=3)
    run = exported_run(tmp_path, proto, data=table(one=["a good film"] * 8, label=[0] * 8) | {"text": text})
    with pytest.raises(ExportRefused, match="onnxruntime-extensions"):
        with_preprocessing(run, tmp_path)
    assert not (tmp_path / "with.onnx").exists()


def test_a_file_without_preprocessing_gets_none(tmp_path: Path, table: Callable[..., Any]) -> None:
    data = table(**{name: np.arange(8.0) for name in "abcd"}, label=np.zeros(8)) | {"inputs": {"features": [*"abcd"]}}
    run = exported_run(tmp_path, graphs.tiny_mlp(), model={"path": tmp_path / "model.onnx", "loss": "mse"}, data=data)
    with pytest.raises(ExportRefused, match="no input has any preprocessing"):
        with_preprocessing(run, tmp_path)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_trained_run_is_exported_with_its_preprocessing_beside_and_inside(tmp_path: Path) -> None:
    columns = {name: np.random.default_rng(place).normal(100, 9, 60) for place, name in enumerate("abcd")}
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(),
        {**columns, "label": columns["a"].astype(np.float32)},
        model={"loss": "mse"},
        data={"inputs": {"features": [*"abcd"]}, "table": {"standardise": "standard"}},
        train={"global_batch_size": 8, "num_steps": 2},
    )
    train_run(run)
    extras = ExportConfig(variants=("with_preprocessing",))
    exported = export_file(run, run.checkpoint(2), tmp_path / "out.onnx", extras=extras)
    assert exported.preprocessing == (tmp_path / "out.preprocessing" / "preprocessing.json",)
    (variant,) = exported.variants
    assert (variant.refused, variant.path) == ("", tmp_path / "out.with_preprocessing.onnx")
    raw = {name: values[:3] for name, values in columns.items()}
    program, folder = serve(), tmp_path / "out.preprocessing"
    inputs = program.model_inputs(program.read_recipe(folder), raw, folder)
    (plain,) = onnxruntime.InferenceSession(exported.path).run(None, inputs)
    (inside,) = onnxruntime.InferenceSession(variant.path).run(None, raw)
    np.testing.assert_array_equal(plain, inside)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_run_on_jpeg_files_of_different_sizes_predicts_the_same_from_their_raw_pixels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, each in (("train", 20), ("held", 10)):
        for name, factor in (("bright", 1.0), ("dark", 0.5)):
            (tmp_path / split / name).mkdir(parents=True)
            for at in range(each):
                height, width = map(int, rng.integers(20, 200, 2))
                image = picture(at, height, width).point([int(value * factor) for value in range(256)] * 3)
                (tmp_path / split / name / f"{at:02d}.jpg").write_bytes(encoded(image))
    run = make_run(
        tmp_path,
        graphs.tiny_conv_net(image_size=32, num_classes=2),
        {"unused": np.zeros(2)},
        data={"source": str(tmp_path / "train"), "evaluation_source": str(tmp_path / "held"), "image": {}},
        train={"global_batch_size": 8, "num_steps": 4},
    )
    train_run(run)
    extras = ExportConfig(variants=("with_preprocessing",))
    exported = export_file(run, run.checkpoint(4), tmp_path / "out.onnx", extras=extras)
    (variant,) = exported.variants
    assert variant.refused == ""
    assert variant.path is not None
    program, folder = serve(), tmp_path / "out.preprocessing"
    recipe = program.read_recipe(folder)
    plain, inside = (onnxruntime.InferenceSession(path) for path in (exported.path, variant.path))
    (raw,) = inside.get_inputs()
    right, files = 0, sorted((tmp_path / "held").glob("*/*.jpg"))
    for file in files:
        content = file.read_bytes()
        (logits,) = inside.run(None, {raw.name: pixels_of(decode_image(content, grey=False))[None]})
        (wanted,) = plain.run(None, program.model_inputs(recipe, {"image": [content]}, folder))
        np.testing.assert_array_equal(logits, wanted)
        right += recipe["outputs"][0]["classes"][logits.argmax()] == file.parent.name
    assert right / len(files) == pytest.approx(exported.after["evaluation/accuracy"], abs=1e-6)
