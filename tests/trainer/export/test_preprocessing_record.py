"""preprocessing.json gives the inputs that training's evaluation reads, bit for bit, with the program of the docs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from onward.tasks.export import export_file
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.signature import model_digest, read_training_signature
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import open_shards
from onward.trainer.errors import ExportRefused
from onward.trainer.export.preprocessing import write_preprocessing
from onward.trainer.export.with_preprocessing import write_with_preprocessing
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, write_record
from tests.support import graphs
from tests.support.images import encoded, picture
from tests.support.runs import make_run, train_run
from tests.support.texts import bert_tokenizer
from tests.test_docs import blocks

PAGE = "docs/how-to/serve-with-the-same-preprocessing.md"


def serve() -> SimpleNamespace:
    """The program of the page."""
    (text,) = (block.text for block in blocks(PAGE) if block.title == "serve.py")
    module: dict[str, Any] = {}
    exec(compile(text, "serve.py", "exec"), module)
    return SimpleNamespace(**module)


def exported_run(folder: Path, proto: onnx.ModelProto, **sections: Any) -> RunDir:
    """A run whose file is as good as exported; its evaluation rows are those of evaluation_source, in order."""
    onnx.save(proto, folder / "model.onnx")
    config = build_config(
        {
            "model": {"path": folder / "model.onnx"},
            "train": {"num_steps": 1, "global_batch_size": 4},
            **sections,
        }
    )
    run = RunDir(folder / "run")
    write_record(run.config, config)
    shards, _, _ = make_training_shards(config, folder / "cache")
    run.shards.symlink_to(shards, target_is_directory=True)
    return run


def write(run: RunDir, folder: Path) -> tuple[Path, ...]:
    path = folder / "model.onnx"
    exported = ExportedModel(path=path, sha256=model_digest(path), step=1, parity=0, before={}, after={}, changed=0)
    folder.joinpath("served").mkdir()
    return write_preprocessing(run, exported, folder / "served")


def evaluation_inputs(run: RunDir, rows: Sequence[int]) -> dict[str, Any]:
    config = build_config(json.loads(run.config.read_text()))
    signature = read_training_signature(config.model)
    batch = one_batch(open_shards(run.shards, "evaluation"), config, signature, np.array(rows))
    names = [info.name for info in signature.inputs]
    return {name: tensor.numpy() for name, tensor in zip(names, batch.inputs, strict=True)}


def assert_served_alike(run: RunDir, folder: Path, raw: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> Any:
    """Compare what the program computes of the raw rows with what training's evaluation reads of them."""
    write(run, folder)
    program, served = serve(), folder / "served"
    recipe = program.read_recipe(served)
    chosen = {name: [cells[row] for row in rows] for name, cells in raw.items()}
    found, wanted = program.model_inputs(recipe, chosen, served), evaluation_inputs(run, rows)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
    return recipe


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes a.parquet and b.parquet with these columns; returns the settings of [data] for them."""

    def make(**columns: Any) -> Any:
        for name in ("a", "b"):
            pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        return {"source": str(tmp_path / "a.parquet"), "evaluation_source": str(tmp_path / "b.parquet")}

    return make


def test_columns_of_a_table_in_the_order_of_training(tmp_path: Path, table: Callable[..., Any]) -> None:
    raw = {name: np.random.default_rng(place).normal(size=20) for place, name in enumerate("dcba")}
    data = table(**raw, label=np.zeros(20))
    run = exported_run(
        tmp_path,
        graphs.tiny_mlp(),
        model={"path": tmp_path / "model.onnx", "loss": "mse"},
        data=data | {"inputs": {"features": ["b", "d", "a", "c"]}},
    )
    recipe = assert_served_alike(run, tmp_path, raw, [3, 1, 4, 1])
    assert [column["name"] for column in recipe["inputs"]["features"]["columns"]] == ["b", "d", "a", "c"]
    (output,) = recipe["outputs"]
    assert (output["loss"], output["label"]) == ("mse", ["label"])
    assert recipe["sha256"] == model_digest(tmp_path / "model.onnx")


def test_rows_of_varying_length_are_padded_as_configured(tmp_path: Path, table: Callable[..., Any]) -> None:
    ids = [[5, 6, 7], [8], [9, 1, 2, 3], [4, 4]] * 3
    data = table(input_ids=ids, label=ids)
    proto = graphs.tiny_transformer()
    run = exported_run(tmp_path, proto, data=data | {"pad_values": {"input_ids": 31}})
    recipe = assert_served_alike(run, tmp_path, {"input_ids": ids}, [0, 2, 1])
    assert recipe["inputs"]["input_ids"]["pad_value"] == 31


IMAGES: dict[str, dict[str, Any]] = {
    "as torchvision": {},
    "stretched, to -1..1": {"resize": "stretch", "mean": [0.5] * 3, "std": [0.5] * 3},
    "with borders, BGR, 0..255": {"resize": "pad", "color": "bgr", "scale": 1.0, "mean": [104.0] * 3, "std": [1.0] * 3},
    "all of the centre, bicubic": {"crop_ratio": 1.0, "interpolation": "bicubic", "cache": "encoded"},
}


@pytest.mark.parametrize("settings", IMAGES.values(), ids=IMAGES)
def test_images_of_every_kind_and_geometry(tmp_path: Path, table: Callable[..., Any], settings: dict[str, Any]) -> None:
    see_through = picture(3).convert("RGBA")
    see_through.putalpha(Image.fromarray(np.tile(np.arange(30, dtype=np.uint8) * 8, (24, 1))))
    turned = Image.Exif()
    turned[0x0112] = 6
    raw = {
        "image": [
            encoded(picture(0)),
            encoded(picture(1, 40, 33)),
            encoded(picture(2, 50, 20, grey=True), "PNG"),
            encoded(see_through, "PNG"),
            encoded(picture(4), "WEBP", lossless=True),
            encoded(picture(5, 20, 41), exif=turned),
            encoded(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100), "PNG"),
            encoded(picture(7).convert("CMYK")),
        ]
    }
    data = table(**raw, label=[0, 1, 2, 3] * 2) | {"image": settings}
    run = exported_run(tmp_path, graphs.tiny_conv_net(image_size=16), data=data)
    recipe = assert_served_alike(run, tmp_path, raw, range(8))
    (how,) = recipe["inputs"].values()
    assert (how["kind"], how["height"], how["layout"]) == ("image", 16, "nchw")


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("pairs", [False, True])
def test_texts_by_the_tokenizer_that_is_copied_beside(
    tmp_path: Path, table: Callable[..., Any], pairs: bool, special_tokens: bool
) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    raw = {
        "one": ["a good film", "the plot was awful, the actor was great " * 3, "bad", "unbelievable!"] * 2,
        "two": ["it is", "liked by me and by nobody else", "no", "yes"] * 2,
    }
    text = {
        "tokenizer": tmp_path / "tokenizer.json",
        "columns": ["one", "two"] if pairs else "one",
        "max_length": 12,
        "special_tokens": special_tokens,
    }
    proto = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=3)
    run = exported_run(tmp_path, proto, data=table(**raw, label=[0, 1, 2, 0] * 2) | {"text": text})
    recipe = assert_served_alike(run, tmp_path, raw, [0, 1, 2, 3])
    assert recipe["text"]["max_length"] == 12
    assert (tmp_path / "served" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_padding_on_the_left_and_windows_of_long_texts(tmp_path: Path, table: Callable[..., Any]) -> None:
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    raw = {"text": ["a good film", "the plot was awful, the actor was great " * 3, "bad", "unbelievable!"] * 2}
    text = {"tokenizer": tmp_path / "tokenizer.json", "pad_side": "left", "max_length": 12}
    proto = graphs.tiny_decoder()
    data = table(**raw) | {"text": text | {"task": "causal", "packing": "none", "end_token": "[SEP]"}}
    text_rows = [0, 2, 3]  # training cuts the longer ones behind the end token
    recipe = assert_served_alike(exported_run(tmp_path, proto, data=data), tmp_path, raw, text_rows)
    assert {each["pad_side"] for each in recipe["inputs"].values()} == {"left"}
    (tmp_path / "divided").mkdir()
    data = table(**raw, label=[0, 1, 2, 0] * 2) | {"text": text | {"pad_side": "auto", "stride": 4}}
    run = exported_run(tmp_path / "divided", graphs.tiny_bert(vocab_size=400, positions=64), data=data)
    write(run, tmp_path / "divided")
    program, served = serve(), tmp_path / "divided" / "served"
    library.enable_truncation(12, stride=4)
    windows = sum(1 + len(library.encode(each).overflowing) for each in raw["text"])
    found, wanted = (
        program.model_inputs(program.read_recipe(served), raw, served),
        evaluation_inputs(run, range(windows)),
    )
    assert len(wanted["input_ids"]) == windows > 8
    for name, array in wanted.items():
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_gaps_logarithms_scales_and_indicators_fitted_on_training_rows(
    tmp_path: Path, table: Callable[..., Any]
) -> None:
    random = np.random.default_rng(0)
    raw: dict[str, Any] = {name: (random.normal(size=40) ** 2 * 1e3).round(3).tolist() for name in "abc"}
    for place in range(0, 40, 7):
        raw["a"][place] = raw["b"][39 - place] = None
    data = table(**raw, label=np.arange(40.0))
    run = exported_run(
        tmp_path,
        graphs.tiny_mlp(),
        model={"path": tmp_path / "model.onnx", "loss": "mse"},
        data=data
        | {
            "inputs": {"features": ["a", "b", "c", "a_missing"]},
            "table": {
                "standardise": {"*": "standard", "b": "robust"},
                "missing": {"a": "mean", "b": "median"},
                "log1p": ["c"],
                "indicators": ["a"],
            },
        },
    )
    columns = {name: [float("nan") if cell is None else cell for cell in cells] for name, cells in raw.items()}
    recipe = assert_served_alike(run, tmp_path, columns, range(40))
    assert [column["indicates_missing"] for column in recipe["inputs"]["features"]["columns"]] == [False] * 3 + [True]


def test_windows_over_a_time_series(tmp_path: Path, table: Callable[..., Any]) -> None:
    series = {name: (np.arange(40.0) * factor).tolist() for name, factor in (("load", 3), ("heat", -2))}
    data = table(**series) | {
        "inputs": {"past": ["load", "heat"]},
        "label": ["load_ahead"],
        "table": {"window": {"length": 5, "horizon": 1}, "standardise": "standard"},
    }
    x = helper.make_tensor_value_info("past", TensorProto.FLOAT, ["batch", 5, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])
    weights = {"w": np.ones((10, 1), np.float32), "b": np.zeros(1, np.float32)}
    nodes = [helper.make_node("Flatten", ["past"], ["flat"]), helper.make_node("Gemm", ["flat", "w", "b"], ["y"])]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], stored), opset_imports=[helper.make_opsetid("", 17)]
    )
    run = exported_run(tmp_path, proto, model={"path": tmp_path / "model.onnx", "loss": "mse"}, data=data)
    cells = {name: [values[at : at + 5] for at in range(35)] for name, values in series.items()}
    recipe = assert_served_alike(run, tmp_path, cells, range(35))
    assert recipe["window_length"] == 5


def test_the_names_of_the_classes_are_in_the_order_of_the_logits(tmp_path: Path, table: Callable[..., Any]) -> None:
    raw = {name: np.arange(12.0) for name in "abcd"}
    data = table(**raw, label=["dog", "cat", "bird"] * 4) | {"inputs": {"features": list("abcd")}}
    run = exported_run(tmp_path, graphs.tiny_mlp(outputs=3), data=data)
    recipe = assert_served_alike(run, tmp_path, raw, [0, 5])
    assert recipe["outputs"][0]["classes"] == ["bird", "cat", "dog"]


def test_a_tokenizer_that_is_gone_is_named_and_nothing_is_written(tmp_path: Path, table: Callable[..., Any]) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    text = {"tokenizer": tmp_path / "tokenizer.json", "columns": "one"}
    proto = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=3)
    run = exported_run(tmp_path, proto, data=table(one=["a good film"] * 8, label=[0] * 8) | {"text": text})
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ExportRefused, match=r"tokenizer\.json cannot be read"):
        write(run, tmp_path)
    assert not list((tmp_path / "served").iterdir())


# -- as nodes in the file


def with_preprocessing(run: RunDir, folder: Path) -> onnxruntime.InferenceSession:
    path = folder / "model.onnx"
    exported = ExportedModel(path=path, sha256=model_digest(path), step=1, parity=0, before={}, after={}, changed=0)
    parity, latency = write_with_preprocessing(run, exported, folder / "with.onnx")
    assert parity < 1e-6
    assert latency > 0
    return onnxruntime.InferenceSession(folder / "with.onnx")


@pytest.mark.parametrize("settings", IMAGES.values(), ids=IMAGES)
def test_the_file_with_preprocessing_takes_pixels_and_gives_the_outputs_of_the_trained_file(
    tmp_path: Path, table: Callable[..., Any], settings: dict[str, Any]
) -> None:
    raw = [encoded(picture(at, 30 + at, 40 - at)) for at in range(8)]
    data = table(image=raw, label=[0, 1, 2, 3] * 2) | {"image": settings}
    run = exported_run(tmp_path, graphs.tiny_conv_net(image_size=16), data=data)
    (taken,) = with_preprocessing(run, tmp_path).get_inputs()
    assert (taken.type, taken.shape[1:]) == ("tensor(uint8)", [16, 16, 3])


def test_the_file_with_preprocessing_takes_raw_columns_with_gaps(tmp_path: Path, table: Callable[..., Any]) -> None:
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


@pytest.mark.mpi
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
