"""`onward doctor MODEL DATA` ranks the preprocessing first that the model was made for, and says when none fits."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import Tokenizer
from typer.testing import CliRunner

import onward
from onward.flows.cli import app
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.errors import ConfigError
from onward.trainer.rehearsal.trials.data_of_model import settings_for
from onward.trainer.rehearsal.trials.preprocessing_trials import best_order
from tests.support.images import encoded
from tests.support.texts import bert_tokenizer, write_csv

Array = np.ndarray[Any, np.dtype[Any]]
COLOURS = {
    "grey": (120, 120, 120),
    "orange": (200, 120, 40),
    "pink": (200, 40, 120),
    "red": (200, 40, 40),
    "yellow": (200, 200, 40),
}
"""As blue, green, red most of them are nearest to grey, whatever the order of the classes."""
IMAGENET = {"scale": 1 / 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def nearest(prototypes: Array, *, images: bool) -> onnx.ModelProto:
    """A classifier by the nearest prototype, [classes, features]: of the mean of each channel, or of the features."""
    prototypes = prototypes.astype(np.float32)
    shape = ["batch", 3, 16, 16] if images else ["batch", prototypes.shape[1]]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", len(prototypes)])
    front = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["f"])]
    # -|f - p|^2 without |f|^2, which is the same for all classes
    gemm = helper.make_node("Gemm", ["f" if images else "x", "w", "b"], ["y"], transB=1)
    weights = {"w": 2 * prototypes, "b": -np.square(prototypes).sum(axis=1)}
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([*(front if images else []), gemm], "nearest", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def pictures(folder: Path, each: int = 30) -> Path:
    """A folder of classes, whose images have the colours of their names and different sizes."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for at in range(each):
            shape = (int(rng.integers(18, 40)), int(rng.integers(18, 40)), 3)
            pixels = (np.array(colour) + rng.normal(0, 12, shape)).clip(0, 255).astype(np.uint8)
            (folder / name / f"{at}.png").write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    return folder


def colour_model(path: Path, *, bgr: bool = False, order: Sequence[int] = range(5), **values: Any) -> Path:
    colours = np.array([list(colour) for colour in COLOURS.values()], np.float64)[list(order)]
    prototypes = (colours * values["scale"] - np.array(values["mean"])) / np.array(values["std"])
    onnx.save(nearest(prototypes[:, ::-1] if bgr else prototypes, images=True), path)
    return path


@pytest.mark.parametrize(
    ("values", "bgr"),
    [
        (IMAGENET, False),
        ({"scale": 1.0, "mean": [123.675, 116.28, 103.53], "std": [1.0] * 3}, True),
        ({"scale": 1 / 255, "mean": [0.0] * 3, "std": [1.0] * 3}, False),
    ],
)
def test_the_scale_the_mean_and_the_order_of_channels_of_training_are_first(
    tmp_path: Path, values: dict[str, Any], bgr: bool
) -> None:
    model = colour_model(tmp_path / "model.onnx", bgr=bgr, **values)
    found = onward.doctor(model, pictures(tmp_path / "data"), rows=100)
    assert found.trials is not None
    default = {"data.image.color": "rgb", **{f"data.image.{key}": value for key, value in IMAGENET.items()}}
    best = found.trials.trials[0]
    chosen = default | best.settings
    assert best.accuracy > 0.95
    assert found.trials.better_than_chance
    assert chosen["data.image.color"] == ("bgr" if bgr else "rgb")
    assert chosen["data.image.scale"] == values["scale"]
    assert chosen["data.image.mean"] == pytest.approx(values["mean"], abs=1e-3)
    assert not found.trials.other_order
    assert found.trials.classes == tuple(COLOURS)
    assert (found.trials.sorted_by_name, found.trials.model_classes) == (True, 5)
    tried = [(trial.accuracy, default | trial.settings) for trial in found.trials.trials]
    assert max(accuracy for accuracy, settings in tried if settings["data.image.scale"] != values["scale"]) < 0.9
    assert {trial.rows for trial in found.trials.trials} == {32, 96, 100}


def test_another_order_of_the_classes_is_found_and_named(tmp_path: Path) -> None:
    order = (3, 1, 4, 0, 2)
    model = colour_model(tmp_path / "model.onnx", order=order, **IMAGENET)
    found = onward.doctor(model, pictures(tmp_path / "data"), rows=120).trials
    assert found is not None
    assert found.other_order == {label: order.index(label) for label in range(5)}
    assert found.other_order_accuracy > 0.95
    ended = CliRunner().invoke(app, ["doctor", str(model), str(tmp_path / "data"), "--rows", "120"])
    assert ended.exit_code == 0, ended.output
    names, printed = list(COLOURS), " ".join(ended.output.split())
    assert "labels: 0 = grey, 1 = orange, 2 = pink, 3 = red, 4 = yellow, in the order of their names" in printed
    assert "the model has 5 classes, which do not fit in this order" in printed
    assert f"data.classes = {json.dumps([names[place] for place in order])}" in " ".join(ended.output.split())


def test_an_untrained_head_is_no_better_than_chance_and_no_settings_are_printed(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    onnx.save(nearest(rng.normal(size=(5, 3)) * 1e-3, images=True), tmp_path / "model.onnx")
    rows = pictures(tmp_path / "data")
    labels = [(f"data/{file.parent.name}/{file.name}", int(rng.integers(5))) for file in sorted(rows.glob("*/*.png"))]
    with (tmp_path / "table.csv").open("w") as file:
        csv.writer(file).writerows([("image", "label"), *labels])
    ended = CliRunner().invoke(app, ["doctor", str(tmp_path / "model.onnx"), str(tmp_path / "table.csv")])
    assert ended.exit_code == 0, ended.output
    assert "none is better than a constant" in ended.output
    assert "settings of the best" not in ended.output


@pytest.mark.parametrize("scaled", [True, False])
def test_a_table_is_standardised_if_the_model_was_trained_so(tmp_path: Path, scaled: bool) -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[900.0, 0.2], [1000.0, 0.9], [1100.0, 0.1], [1000.0, 0.4]])
    labels = rng.integers(4, size=400)
    features = centres[labels] + rng.normal(size=(400, 2)) * [20, 0.05]
    with (tmp_path / "table.csv").open("w") as file:
        rows = [[*row, label] for row, label in zip(features.tolist(), labels.tolist(), strict=True)]
        csv.writer(file).writerows([("a", "b", "kind"), *rows])
    # unscaled, the second column is too small to matter for distances: multiplied by the weights of a linear model
    prototypes = (centres - features.mean(0)) / features.std(0) if scaled else centres
    model = nearest(prototypes, images=False)
    if not scaled:
        scale = np.array([1e-4, 1.0], np.float32)
        weights = {"w": (2 * centres * scale).astype(np.float32), "b": -(np.square(centres) * scale).sum(1)}
        for tensor in model.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].astype(np.float32), tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    found = onward.doctor(tmp_path / "model.onnx", tmp_path / "table.csv", label="kind").trials
    assert found is not None
    first, second = found.trials[:2]
    assert first.settings.get("data.table.standardise", "none") == ("standard" if scaled else "none")
    assert first.accuracy > 0.9 > second.accuracy
    assert first.rows == 300


def word_model(tokenizer: Tokenizer, words: Sequence[str], *, special: bool = True) -> onnx.ModelProto:
    """Class 1 where the second word is more frequent than the first; only with [CLS] in front, if `special`."""
    weight = np.zeros((400, 2), np.float32)
    weight[[tokenizer.token_to_id(word) for word in words], 1] = -1, 1
    weight[tokenizer.token_to_id("[CLS]"), 1] = 20
    bias = np.array([0, -20 if special else 0], np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "input_ids"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "b"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])
    stored = {"w": weight, "b": bias, "axis": np.array([1])}
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "words", [ids], [logits], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("special", [True, False])
def test_texts_get_special_tokens_if_the_model_was_trained_with_them(tmp_path: Path, special: bool) -> None:
    tokenizer = bert_tokenizer(tmp_path / "tokenizer.json")
    words = [word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3][:2]
    onnx.save(word_model(tokenizer, words, special=special), tmp_path / "model.onnx")
    rows = [(" ".join([words[at % 2]] * (1 + at % 5)), at % 2) for at in range(200)]
    write_csv(tmp_path / "texts.csv", ("text", "label"), rows)
    found = onward.doctor(tmp_path / "model.onnx", tmp_path / "texts.csv", rows=100).trials
    assert found is not None
    assert found.trials[0].settings.get("data.text.special_tokens", True) is special
    assert found.trials[0].accuracy == 1.0
    assert found.trials[1].accuracy < 0.7


@pytest.mark.parametrize("vocabulary", ["lower-case", "of both cases"])
def test_texts_are_made_lower_case_where_only_the_vocabulary_is(tmp_path: Path, vocabulary: str) -> None:
    tokenizer = bert_tokenizer(tmp_path / "tokenizer.json")
    words = [word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3][:2]
    onnx.save(word_model(tokenizer, words), tmp_path / "model.onnx")
    # a tokenizer.json that was saved without its lower-casing
    settings = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": None}
    if vocabulary == "of both cases":
        other = next(word for word in settings["model"]["vocab"] if word.isalpha() and word not in words)
        settings["model"]["vocab"]["Berlin"] = settings["model"]["vocab"].pop(other)
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    rows = [(" ".join([words[at % 2].upper()] * (1 + at % 5)), at % 2) for at in range(120)]
    write_csv(tmp_path / "texts.csv", ("text", "label"), rows)
    found = onward.doctor(tmp_path / "model.onnx", tmp_path / "texts.csv", rows=60).trials
    assert found is not None
    tried = [trial.settings.get("data.text.lowercase", False) for trial in found.trials]
    if vocabulary == "of both cases":
        assert not any(tried)
        return
    assert (tried[0], found.trials[0].accuracy) == (True, 1.0)
    assert max(trial.accuracy for trial, lower in zip(found.trials, tried, strict=True) if not lower) < 0.7


def test_rows_are_drawn_from_all_of_a_sorted_source(tmp_path: Path) -> None:
    onnx.save(nearest(np.eye(4), images=False), tmp_path / "model.onnx")
    with (tmp_path / "table.csv").open("w") as file:
        rows = [(*np.eye(4)[at // 250], at // 250) for at in range(1000)]
        csv.writer(file).writerows([(*"abcd", "label"), *rows])
    config = settings_for(tmp_path / "model.onnx", str(tmp_path / "table.csv"), [])
    found = read_first_rows(config, read_training_signature(config.model), 40, spread=True)
    assert found.num_rows == 40
    counts = np.bincount(np.asarray(found.values["label"]).astype(np.int64))
    assert counts.min() >= 3, "of each class, though the first 250 rows are of one"


def test_a_configuration_takes_the_place_of_the_file(tmp_path: Path) -> None:
    colour_model(tmp_path / "model.onnx", **IMAGENET)
    pictures(tmp_path / "data", each=12)
    lines = ["[model]", 'path = "model.onnx"', "[data]", 'source = "data"', "[data.image]", "scale = 1.0", "[train]"]
    (tmp_path / "run.toml").write_text("\n".join([*lines, "num_steps = 1", "global_batch_size = 8"]))
    found = onward.doctor(tmp_path / "run.toml", rows=40).trials
    assert found is not None
    assert found.trials[0].settings["data.image.scale"] == 1 / 255


def test_labels_that_are_no_classes_of_the_model_are_refused_with_both_numbers(tmp_path: Path) -> None:
    colour_model(tmp_path / "model.onnx", order=(0, 1, 2), **IMAGENET)
    with pytest.raises(ConfigError, match=r"5 class names .* 3 classes"):
        onward.doctor(tmp_path / "model.onnx", pictures(tmp_path / "data", each=3))


def test_a_loss_without_labels_is_refused(tmp_path: Path) -> None:
    colour_model(tmp_path / "model.onnx", **IMAGENET)
    with pytest.raises(ConfigError, match=r"one loss of cross_entropy.*, not output"):
        onward.doctor(tmp_path / "model.onnx", pictures(tmp_path / "data", each=3), ["model.loss=output"])


def test_a_file_whose_rows_depend_on_each_other_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    g (float[4, 3] x) => (float[4, 3] logits) { w = Softmax<axis = 0> (x) y = Mul (x, w) logits = Add (y, bias) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "bias"))
    onnx.save(model, tmp_path / "model.onnx")
    rows = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rows.normal(size=(50, 3)).astype(np.float32), label=rows.integers(0, 3, 50))
    with pytest.raises(ConfigError, match=r"declares a batch of 4 and its rows depend on each other .*cannot be tried"):
        onward.doctor(tmp_path / "model.onnx", tmp_path / "data.npz")


def test_the_best_order_agrees_with_the_most_pairs_and_moves_no_class_without_need() -> None:
    assert best_order(np.array([[0, 2], [0, 2], [1, 1], [2, 0], [3, 3]])) == {0: 2, 1: 1, 2: 0, 3: 3}
    assert best_order(np.array([[0, 0], [1, 0], [2, 2]])) == {0: 0, 1: 1, 2: 2}
