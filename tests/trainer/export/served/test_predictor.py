"""A file with its preprocessing.json gives for raw rows what it gives for the inputs of training's evaluation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.export import served
from onward.trainer.export.measuring.predictions import recipe_of
from onward.trainer.export.served import raw_inputs
from onward.trainer.export.served.predictor import BadRows, Predictor, UnusableModel
from onward.trainer.export.served.result_columns import softmax
from onward.trainer.onnx_graph import outputs
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir
from tests.equivalence.test_strings_in_front import CASES, FOREIGN
from tests.support import graphs
from tests.support.exported_runs import exported_run, finished_run, two_tables
from tests.support.images import encoded, picture
from tests.support.texts import bert_tokenizer

CITIES: dict[str, Any] = {
    "city": ["Rome", "Oslo", "Bonn", "Rome", "", "Oslo", "Bonn", "Rome"] * 5,
    "size": [3, 40, 500, 3, 40, 500, 3, 40] * 5,
    "age": [31.0, None, 18.0, 77.0, 50.0, 41.0, None, 29.0] * 5,
    "label": ["no", "yes", "maybe", "no", "yes", "maybe", "no", "yes"] * 5,
}
TABLE = {"categories": ["city", "size"], "standardise": {"age": "standard"}, "missing": {"*": "mean"}}


def cities_run(folder: Path, **table: Any) -> RunDir:
    """A run on categories and a number with gaps, whose labels have names."""
    data = two_tables(folder, **CITIES)
    data |= {"inputs": {"places": ["city", "size"], "age": "age"}, "table": TABLE | table}
    return finished_run(exported_run(folder, graphs.tiny_cities(), data=data), folder / "model.onnx")


def opened(run: RunDir) -> Predictor:
    path = run.export / "model.onnx"
    recipe, folder = recipe_of(path)
    return Predictor(path, recipe, folder)


def trained_outputs(run: RunDir, rows: Sequence[int]) -> dict[str, Any]:
    """What the file gives for the inputs that training's evaluation reads of these rows."""
    config = build_config(json.loads(run.config.read_text()))
    signature = read_training_signature(config.model)
    batch = one_batch(open_shards(run.shards, "evaluation"), config, signature, np.array(rows))
    inputs = {info.name: tensor.numpy() for info, tensor in zip(signature.inputs, batch.inputs, strict=True)}
    session = onnxruntime.InferenceSession(run.export / "model.onnx")
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_predicts_alike(run: RunDir, raw: Mapping[str, Sequence[Any]], count: int) -> Predictor:
    predictor = opened(run)
    found, wanted = predictor.outputs(raw), trained_outputs(run, range(count))
    for name, array in found.items():
        assert array.tobytes() == wanted[name].tobytes(), name
    return predictor


def test_rows_of_a_table_in_any_order_of_columns_with_more_columns(tmp_path: Path) -> None:
    run = cities_run(tmp_path)
    raw = {"more": [0] * 40, "age": CITIES["age"], "city": CITIES["city"], "size": CITIES["size"]}
    predictor = assert_predicts_alike(run, raw, 40)
    assert predictor.columns == {"city": "category", "size": "integers", "age": "number"}
    table = predictor.predict(raw)
    assert list(table) == ["class", "probability", "probability_maybe", "probability_no", "probability_yes"]
    logits = trained_outputs(run, range(40))["logits"]
    assert table["class"].tolist() == [["maybe", "no", "yes"][at] for at in logits.argmax(axis=1)]
    parts = np.stack([table[name] for name in list(table)[2:]], axis=1)
    np.testing.assert_allclose(parts.sum(axis=1), 1.0, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(table["probability"], parts.max(axis=1))


def test_images_and_texts(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "texts").mkdir()
    raw: dict[str, list[Any]] = {"image": [encoded(picture(at, 20 + at, 30)) for at in range(8)]}
    data = two_tables(tmp_path / "images", **raw, label=[0, 1, 2, 3] * 2) | {"image": {}}
    run = exported_run(tmp_path / "images", graphs.tiny_conv_net(image_size=16), data=data)
    finished_run(run, tmp_path / "images" / "model.onnx")
    assert assert_predicts_alike(run, raw, 8).columns == {"image": "image"}

    folder = tmp_path / "texts"
    bert_tokenizer(folder / "tokenizer.json")
    raw = {"text": ["a good film", "the plot was awful", "bad", "unbelievable!"] * 2}
    text = {"tokenizer": folder / "tokenizer.json", "columns": "text", "max_length": 12}
    proto = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=3)
    run = exported_run(folder, proto, data=two_tables(folder, **raw, label=[0, 1, 2, 0] * 2) | {"text": text})
    finished_run(run, folder / "model.onnx")
    assert assert_predicts_alike(run, raw, 8).columns == {"text": "text"}


def test_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    predictor = opened(cities_run(tmp_path))
    with pytest.raises(ValueError, match="column city, age is missing; there is size, town"):
        predictor.outputs({"size": [3], "town": ["Rome"]})


def test_no_rows_give_no_predictions_in_the_same_columns(tmp_path: Path) -> None:
    predictor = opened(cities_run(tmp_path))
    table = predictor.predict({"city": [], "size": [], "age": []})
    assert list(table) == ["class", "probability", "probability_maybe", "probability_no", "probability_yes"]
    assert {len(cells) for cells in table.values()} == {0}


def test_each_bad_row_is_named_with_its_reason(tmp_path: Path) -> None:
    vocabulary = {"city": ["Oslo", "Rome", "Bonn", ""], "size": ["3", "40", "500"]}
    predictor = opened(cities_run(tmp_path, categories=vocabulary))
    rows = {"city": ["Rome", "Paris", "Bonn"], "size": [3, 41, 500], "age": [1.0, 2.0, float("inf")]}
    with pytest.raises(BadRows) as caught:
        predictor.outputs(rows)
    assert caught.value.rows == {1: "'41' is no category of size; training had 3, 40, 500", 2: "age is inf"}
    found = predictor.outputs({name: cells[:1] for name, cells in rows.items()})
    assert found["logits"].shape == (1, 3)


def test_a_number_that_training_never_saw_missing_is_a_bad_row_when_it_is(tmp_path: Path) -> None:
    data = two_tables(tmp_path, **{name: np.arange(20.0) for name in "abcd"}, label=np.zeros(20))
    data |= {"inputs": {"features": list("abcd")}}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    run = finished_run(exported_run(tmp_path, graphs.tiny_mlp(), model=model, data=data), tmp_path / "model.onnx")
    predictor = opened(run)
    assert list(predictor.predict({name: [1, 2] for name in "abcd"})) == ["predicted_label"]
    with pytest.raises(BadRows, match="row 1: c is missing, and training had no value"):
        predictor.outputs({name: [1.0, None if name == "c" else 2.0] for name in "abcd"})
    with pytest.raises(BadRows, match="row 0: a holds 'high', not a number"):
        predictor.outputs({name: ["high" if name == "a" else 2.0] for name in "abcd"})


def test_cells_that_are_no_windows_are_refused_where_training_had_windows(tmp_path: Path) -> None:
    columns = [{"name": "load"}]
    how = {"kind": "columns", "columns": columns, "stacked": False, "shape": [4], "dtype": "float32", "as_it_is": True}
    meaning = {"name": "prediction", "loss": "mse", "classes": [], "label": ["load_ahead"]}
    recipe = {"inputs": {"features": how}, "text": None, "outputs": [meaning], "window_length": 4}
    predictor = Predictor(plain(tmp_path), recipe, tmp_path)
    assert list(predictor.predict({"load": [[1.0, 2.0, 3.0, 4.0]]})) == ["predicted_load_ahead"]
    for cell in (1.0, [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"windows of 4 successive values.* each cell of load must be a list of 4"):
            predictor.predict({"load": [cell]})


# -- files of other kinds


def plain(folder: Path, *, batch: int | str = "batch") -> Path:
    proto = graphs.tiny_mlp()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].Clear()
        if isinstance(batch, int):
            value.type.tensor_type.shape.dim[0].dim_value = batch
        else:
            value.type.tensor_type.shape.dim[0].dim_param = batch
    onnx.save(proto, folder / "plain.onnx")
    return folder / "plain.onnx"


def test_a_file_without_preprocessing_takes_columns_of_its_inputs_names_or_stacked_ones(tmp_path: Path) -> None:
    path = plain(tmp_path)
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(path).run(None, {"features": rows})
    by_name = Predictor(path, None, tmp_path).predict({"features": rows.tolist()})
    np.testing.assert_array_equal(by_name["prediction"], wanted[:, 0])
    stacked = Predictor(path, None, tmp_path, inputs={"features": list("abcd")})
    found = stacked.predict({name: rows[:, at].tolist() for at, name in enumerate("abcd")})
    np.testing.assert_array_equal(found["prediction"], wanted[:, 0])
    with pytest.raises(UnusableModel, match="input features takes 4 numbers a row, but 2 columns are named"):
        Predictor(path, None, tmp_path, inputs={"features": ["a", "b"]})
    with pytest.raises(UnusableModel, match="no input x; it takes features"):
        Predictor(path, None, tmp_path, inputs={"x": ["a"]})


def test_a_fixed_batch_is_filled_up_and_the_copies_are_left_out(tmp_path: Path) -> None:
    predictor = Predictor(plain(tmp_path, batch=4), None, tmp_path)
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    found = predictor.predict({"features": rows.tolist()})["prediction"]
    (wanted,) = onnxruntime.InferenceSession(plain(tmp_path)).run(None, {"features": rows})
    assert (predictor.fixed_rows, len(found)) == (4, 6)
    np.testing.assert_allclose(found, wanted[:, 0], rtol=0, atol=1e-6)


def test_a_file_whose_output_is_behind_the_scores_of_the_loss(tmp_path: Path) -> None:
    g = GraphWriter("probabilities", seed=0)
    g.op("MatMul", g.input("x", ("batch", 3)), g.weight("w", g.normal(1.0, 3, 2)), outputs="scores")
    g.op("Softmax", "scores", outputs="chances")
    g.output("chances", ("batch", 2))
    onnx.save(g.model(), tmp_path / "model.onnx")
    column = {"kind": "columns", "stacked": False, "shape": [3], "dtype": "float32", "as_it_is": True}
    recipe = {
        "inputs": {"x": {**column, "columns": [{"name": "x"}]}},
        "text": None,
        "outputs": [{"name": "scores", "loss": "cross_entropy", "classes": ["a", "b"], "label": ["y"]}],
    }
    rows = [[0.5, 1.0, -1.0], [2.0, 0.0, 1.0]]
    table = Predictor(tmp_path / "model.onnx", recipe, tmp_path).predict({"x": rows})
    (chances,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": np.array(rows, np.float32)})
    np.testing.assert_allclose(np.stack([table["probability_a"], table["probability_b"]], 1), chances, atol=1e-6)


def test_a_classifier_that_gives_probabilities_of_which_training_read_the_logarithm(tmp_path: Path) -> None:
    assert raw_inputs.LOG == outputs.LOG
    g = GraphWriter("probabilities", seed=0)
    x = g.op("MatMul", g.input("x", ("batch", 3)), g.weight("w", g.normal(1.0, 3, 2)))
    g.op("Softmax", x, outputs="chances")
    g.output("chances", ("batch", 2))
    onnx.save(g.model(), tmp_path / "model.onnx")
    column = {"kind": "columns", "stacked": False, "shape": [3], "dtype": "float32", "as_it_is": True}
    meaning = {"name": "chances/log_probabilities", "loss": "cross_entropy", "classes": [], "label": ["y"]}
    recipe = {"inputs": {"x": {**column, "columns": [{"name": "x"}]}}, "text": None, "outputs": [meaning]}
    rows = [[0.5, 1.0, -1.0], [2e4, 0.0, 1.0]]
    predictor = Predictor(tmp_path / "model.onnx", recipe, tmp_path)
    table = predictor.predict({"x": rows})
    (chances,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": np.array(rows, np.float32)})
    np.testing.assert_allclose(np.stack([table["probability_0"], table["probability_1"]], 1), chances, atol=1e-6)
    assert np.isfinite(predictor.outputs({"x": rows})["chances/log_probabilities"]).all()


def test_a_file_that_takes_more_than_its_preprocessing_says_is_refused(tmp_path: Path) -> None:
    recipe = {"inputs": {}, "text": None, "outputs": []}
    with pytest.raises(UnusableModel, match="says how to compute no input: nothing is known of features"):
        Predictor(plain(tmp_path), recipe, tmp_path)


@pytest.mark.slow
def test_the_files_that_are_copied_into_registered_models_need_no_onward_and_no_torch(tmp_path: Path) -> None:
    run = cities_run(tmp_path)
    shutil.copytree(Path(served.__file__).parent, tmp_path / "alone" / "copied")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'alone')!r})\n"
        "import pandas as pd\n"
        "from copied import mlflow_model\n"
        f"model = mlflow_model._load_pyfunc({str(run.export)!r})\n"
        "frame = pd.DataFrame({'city': ['Rome', None], 'size': [3, 40], 'age': [1, float('nan')]})\n"
        "print(*model.predict(frame).columns)\n"
        "assert not {'onward', 'torch', 'mlflow'} & set(sys.modules)\n"
    )
    # -I: neither the working directory nor PYTHONPATH, by which this test finds Onward
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["class", "probability", "probability_maybe", "probability_no", "probability_yes"]


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_begins_with_strings_takes_them(tmp_path: Path, name: str) -> None:
    columns, settings = CASES[name]
    raw = {key: np.array(cells).tolist() for key, cells in columns(40).items()}
    data = two_tables(tmp_path, **raw) | settings.get("data", {})
    model = {"path": tmp_path / "model.onnx"} | settings.get("model", {})
    run = exported_run(tmp_path, onnx.load(FOREIGN / f"{name}.onnx"), model=model, data=data)
    finished_run(run, tmp_path / "model.onnx")
    table = opened(run).predict(raw)
    session = onnxruntime.InferenceSession(run.export / "model.onnx")
    feed = {}
    for value in session.get_inputs():
        kind = object if value.type == "tensor(string)" else np.float32
        stacked = data.get("inputs", {}).get(value.name, [value.name])
        array = np.stack([np.array(raw[each], kind) for each in stacked], axis=-1)
        feed[value.name] = array if len(value.shape) == 2 else array[:, 0]
    scores = session.run(None, feed)[-1]
    wanted = scores if session.get_outputs()[-1].name == "probabilities" else softmax(scores)
    np.testing.assert_array_equal(table["class"], wanted.argmax(axis=1))
    np.testing.assert_allclose(table["probability"], wanted.max(axis=1), rtol=0, atol=1e-6)
