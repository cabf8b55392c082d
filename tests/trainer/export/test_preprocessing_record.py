"""preprocessing.json gives the inputs that training's evaluation reads, bit for bit, with the program of the docs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
import soundfile
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from onward.trainer.config.loading import build_config
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import model_digest, read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import ExportRefused
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir
from tests.support import graphs
from tests.support.exported_runs import exported_model, exported_run, serve, two_tables
from tests.support.images import encoded, picture
from tests.support.texts import bert_tokenizer


def write(run: RunDir, folder: Path) -> tuple[Path, ...]:
    folder.joinpath("served").mkdir()
    return write_preprocessing(run, exported_model(folder / "model.onnx"), folder / "served")


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
def table(tmp_path: Path) -> Callable[..., Any]:
    """Writes two tables with these columns; returns the settings of [data] for them."""
    return partial(two_tables, tmp_path)


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
    "grey borders": {"resize": "pad_grey"},
    "in the corner, of the colour of the mean": {"resize": "corner_mean", "color": "bgr"},
    "all of the centre, bicubic": {"crop_ratio": 1.0, "interpolation": "bicubic", "cache": "encoded"},
    "without antialias": {"interpolation": "bicubic_aliased"},
}


@pytest.mark.parametrize(
    "settings",
    # torchvision takes seconds to import
    [
        pytest.param(each, marks=pytest.mark.slow if "aliased" in each.get("interpolation", "") else ())
        for each in IMAGES.values()
    ],
    ids=IMAGES,
)
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
        "lowercase": not special_tokens,
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
    data = table(**raw) | {"text": text | {"task": "causal", "packing": "none", "tokens": {"end": "[SEP]"}}}
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


WORDS = [["Anna", "lives", "in", "Berlin", "."], ["unbelievable", "film"], ["in", "New", "York"], ["a"]]


@pytest.mark.parametrize("written", ["as lists", "with spaces"])
def test_lists_of_words_are_tokenized_word_by_word(tmp_path: Path, table: Callable[..., Any], written: str) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    tags = [["O"] * len(words) for words in WORDS]
    words: list[Any] = WORDS
    if written == "with spaces":
        words, tags = ([" ".join(row) for row in rows] for rows in (WORDS, tags))
    settings = {"task": "tokens", "columns": "words", "tokenizer": tmp_path / "tokenizer.json", "max_length": 7}
    data = table(words=words * 2, tags=tags * 2) | {"label": "tags", "text": settings}
    run = exported_run(tmp_path, graphs.tiny_token_classifier(vocab_size=400, num_classes=4), data=data)
    recipe = assert_served_alike(run, tmp_path, {"words": words}, [0, 1, 2, 3])
    assert recipe["text"]["words"] is True


def wave_model(shape: Sequence[int | str]) -> onnx.ModelProto:
    """A number for each clip [batch, *shape]."""
    g = GraphWriter("wave")
    x = g.op(
        "ReduceMean", g.input("audio", ("batch", *shape)), g.weight("axes", np.arange(1, len(shape) + 1)), keepdims=0
    )
    x = g.op(
        "Mul", g.op("Reshape", x, g.weight("shape", np.array([-1, 1]))), g.weight("w", np.ones((1, 2), np.float32))
    )
    g.output(x, ("batch", 2))
    return g.model()


AUDIO: dict[str, tuple[dict[str, Any], Sequence[int | str]]] = {
    "the middle of a waveform": ({"seconds": 0.05, "axes": "channel"}, (1, 400)),
    "waveforms of their own lengths": ({}, ("time",)),
    "a spectrogram": ({"seconds": 0.2, "features": "log_mel", "mel_bins": 8, "window": 256, "hop": 80}, (8, 21)),
    "frames in time": (
        {"seconds": 0.1, "features": "log_mel", "mel_bins": 6, "window": 128, "hop": 100, "axes": "time_first"},
        (9, 6),
    ),
}


@pytest.mark.parametrize(("settings", "shape"), AUDIO.values(), ids=AUDIO)
def test_audio_of_other_rates_lengths_and_channels(
    tmp_path: Path, table: Callable[..., Any], settings: dict[str, Any], shape: Sequence[int | str]
) -> None:
    rng = np.random.default_rng(0)
    raw = []
    for rate, length, channels in ((8000, 1000, 1), (16000, 900, 2), (11025, 2500, 1), (8000, 300, 2)):
        content = io.BytesIO()
        soundfile.write(content, rng.normal(0, 0.2, (length, channels)), rate, format="WAV", subtype="PCM_16")
        raw.append(content.getvalue())
    pads = {"pad_values": {"audio": -1.0}} if not settings else {}
    data = table(audio=raw * 2, label=[0, 1] * 4) | {"audio": {"sample_rate": 8000, **settings}, **pads}
    run = exported_run(tmp_path, wave_model(shape), data=data)
    assert_served_alike(run, tmp_path, {"audio": raw}, [0, 1, 2, 3])


def test_categories_of_a_csv_file_that_pandas_reads(tmp_path: Path) -> None:
    lines = ["city;size;age;label", "3;3;1;b", *["Rome;3;31;a", ";40;;b", "Oslo;500;2,5;c", "Rome;40;8;a"] * 5]
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("\n".join([*lines, ""]))
    data: dict[str, Any] = {"source": str(tmp_path / "a.csv"), "evaluation_source": str(tmp_path / "b.csv")}
    data["inputs"] = {"places": ["city", "size"], "age": "age"}
    missing = {"city": "mean", "age": "median"}
    columns = {"categories": ["city", "size"], "standardise": {"age": "min_max"}, "missing": missing}
    data["table"] = columns | {"decimal": ","}
    run = exported_run(tmp_path, graphs.tiny_cities(), data=data)
    frame = pd.read_csv(tmp_path / "b.csv", sep=";", decimal=",")
    recipe = assert_served_alike(run, tmp_path, frame, range(21))
    (city, size) = recipe["inputs"]["places"]["columns"]
    assert (city["categories"], city["integers"]) == (["", "3", "Oslo", "Rome"], False)
    assert (size["categories"], size["integers"]) == (["", "3", "40", "500"], True)
    # what training has not seen, and integers that pandas made floats because some are missing
    unknown = pd.DataFrame({"city": ["Paris", None, "Rome"], "size": [7, None, 40], "age": [1.0, 2.0, None]})
    inputs = serve().model_inputs(recipe, unknown, tmp_path)
    assert inputs["places"].tolist() == [[0, 0], [0, 0], [3, 2]]


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
