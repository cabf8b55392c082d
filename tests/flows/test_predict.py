"""`onward predict` and `onward evaluate`: a run, a file and a registered model on tables, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.infra.mlflow.mlflow_store import local_store
from onward.infra.mlflow.registry import Registry
from onward.tasks.export import register
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, write_record
from tests.support import graphs
from tests.support.exported_runs import exported_run, finished_run, two_tables
from tests.support.images import write_classes
from tests.support.stores import free_port, new_run, new_store
from tests.support.workshop import Workshop, until
from tests.test_docs import blocks

RAW: dict[str, Any] = {
    "city": ["Rome", "Oslo", "Bonn", "Rome", "", "Oslo", "Bonn", "Rome"] * 5,
    "size": [3, 40, 500, 3, 40, 500, 3, 40] * 5,
    "age": [31.0, None, 18.0, 77.0, 50.0, 41.0, None, 29.0] * 5,
    "label": ["no", "yes", "maybe", "no", "yes", "maybe", "no", "yes"] * 5,
}
COLUMNS = ["row", "class", "probability", "probability_maybe", "probability_no", "probability_yes"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path, home: Path) -> RunDir:
    """A run on a table of categories and a number with gaps; its file is exported."""
    data = two_tables(tmp_path, **RAW) | {"inputs": {"places": ["city", "size"], "age": "age"}}
    data["table"] = {"categories": ["city", "size"], "standardise": {"age": "standard"}, "missing": {"*": "mean"}}
    run = exported_run(tmp_path, graphs.tiny_cities(), data=data, name="cities")
    pd.DataFrame(RAW).to_csv(tmp_path / "t.csv", index=False)
    return finished_run(run, tmp_path / "model.onnx")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


# -- the command


@pytest.mark.slow
def test_a_run_predicts_a_table_into_a_file_and_is_measured_on_it(run: RunDir, workshop: Workshop) -> None:
    source, out = workshop.root / "t.csv", workshop.root / "out.parquet"
    facts = workshop.onward("predict", str(run.root), str(source), "-o", str(out))
    assert facts == {"path": str(out), "rows": 40}
    written = pd.read_parquet(out)
    assert list(written) == COLUMNS
    again = workshop.onward("predict", str(run.root), str(source), "-o", str(out), status=2)
    assert again["problems"] == [f"{out} exists already; name another file, or add --overwrite"]
    measured = workshop.onward("evaluate", str(run.root), str(source))
    assert measured["rows"] == 40
    assert measured["metrics"]["accuracy"] == pytest.approx((written["class"] == RAW["label"]).mean())


def test_without_a_file_the_first_rows_are_printed_and_bad_ones_are_named(run: RunDir, workshop: Workshop) -> None:
    shown = workshop.onward("predict", str(run.root), str(workshop.root / "t.csv"), "--top", "2")
    assert (len(shown["predictions"]), shown["more"]) == (20, True)
    assert list(shown["predictions"][0]) == ["row", "class", "probability", "class_2", "probability_2"]
    (workshop.root / "bad.csv").write_text("city,size,age\nRome,3,1\nRome,3,old\n")
    refused = workshop.onward("predict", str(run.root), str(workshop.root / "bad.csv"), status=2)
    assert len(refused["problems"]) == 1
    assert "old" in refused["problems"][0]
    missing = workshop.onward("predict", str(run.root), str(workshop.root / "gone.csv"), status=2)
    assert missing["problems"] == [f"there is no file or folder {workshop.root / 'gone.csv'}"]


def test_predicting_loads_no_torch_no_prefect_and_no_mlflow(run: RunDir, tmp_path: Path) -> None:
    program = (
        f"import onward, sys; onward.predict({str(run.root)!r}, {str(tmp_path / 't.csv')!r}); "
        "print(*sorted({'torch', 'prefect', 'mlflow', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# -- the function


def test_a_file_a_frame_and_a_copy_with_its_preprocessing_predict_alike(run: RunDir, tmp_path: Path) -> None:
    shutil.copyfile(run.export / "model.onnx", tmp_path / "cities.onnx")
    (tmp_path / "cities.preprocessing").mkdir()
    shutil.copyfile(run.export / "preprocessing.json", tmp_path / "cities.preprocessing" / "preprocessing.json")
    found = onward.predict(run.root, tmp_path / "t.csv")
    frame = pd.read_csv(tmp_path / "t.csv").assign(more=1)[["more", "label", "age", "size", "city"]]
    assert found.equals(onward.predict(tmp_path / "cities.onnx", frame))
    assert found.equals(onward.predict(run.export / "model.onnx", frame, batch_size=7))
    assert list(found) == COLUMNS


def test_what_cannot_predict_says_why(run: RunDir, home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run has the name or id 'digits'"):
        onward.predict("digits", tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"there is no file gone\.onnx"):
        onward.predict("gone.onnx", tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="data is list; give a path, or a pandas DataFrame"):
        onward.predict(run.root, [1])
    with pytest.raises(ConfigError, match=r"says which columns feed model\.onnx; leave out inputs"):
        onward.predict(run.root, tmp_path / "t.csv", inputs={"age": ["age"]})
    with pytest.raises(ConfigError, match=r"has a preprocessing\.json, which decides"):
        onward.evaluate(run.root, tmp_path / "t.csv", {"data.label": "age"})
    for function in (onward.predict, onward.evaluate):
        with pytest.raises(ConfigError, match="batch_size is -1 and bad_rows 'ignore': 0 or more, and fail or skip"):
            function(run.root, tmp_path / "t.csv", batch_size=-1, bad_rows="ignore")  # type: ignore[operator]
    run.exported.unlink()
    with pytest.raises(ConfigError, match="has no exported file yet; `onward export"):
        onward.predict(run.root, tmp_path / "t.csv")


def test_a_file_without_preprocessing_names_its_columns_and_how_to_stack_them(home: Path, tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "plain.onnx")
    random = np.random.default_rng(0)
    frame = pd.DataFrame({name: random.normal(size=20) for name in ("a", "b", "c", "d", "price")})
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match="has no column features; it has a, b, c, d, price") as caught:
        onward.predict(tmp_path / "plain.onnx", tmp_path / "t.csv")
    assert "`--input INPUT=COLUMN,...` stacks others" in caught.value.__notes__[0]
    found = onward.predict(tmp_path / "plain.onnx", tmp_path / "t.csv", inputs={"features": list("abcd")})
    assert list(found) == ["row", "prediction"]

    measured = onward.evaluate(tmp_path / "plain.onnx", tmp_path / "t.csv", ["data.label=price"])
    squares = (found["prediction"] - frame["price"]) ** 2
    assert measured.metrics["mse"] == pytest.approx(squares.mean(), rel=1e-5)
    assert measured.guessed[1:] == ("input features: columns a, b, c, d", "output prediction: mse against price")


def test_images_without_preprocessing_are_measured_by_a_guess_that_is_said(home: Path, tmp_path: Path) -> None:
    onnx.save(graphs.tiny_conv_net(image_size=16, num_classes=2), tmp_path / "plain.onnx")
    write_classes(tmp_path / "photos", each=8)
    measured = onward.evaluate(tmp_path / "plain.onnx", tmp_path / "photos")
    assert measured.rows == 16
    assert 0 <= measured.metrics["accuracy"] <= 1
    assert "mean 0.485, 0.456, 0.406" in measured.guessed[1]
    assert measured.guessed[2].endswith("classes sorted by name: cat, dog")


def test_a_run_on_time_series_predicts_what_comes_after_the_last_row(home: Path, tmp_path: Path) -> None:
    series = {"load": (np.arange(40.0) * 3).tolist(), "heat": (np.arange(40.0) * -2).tolist()}
    data = two_tables(tmp_path, **series) | {"inputs": {"past": ["load", "heat"]}, "label": ["load_ahead"]}
    data["table"] = {"window": {"length": 5, "horizon": 1}, "standardise": "standard"}
    ports = {"past": ["batch", 5, 2], "y": ["batch", 1]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.items())
    nodes = [helper.make_node("Flatten", ["past"], ["flat"]), helper.make_node("Gemm", ["flat", "w"], ["y"])]
    weight = numpy_helper.from_array(np.ones((10, 1), np.float32), "w")
    graph = helper.make_graph(nodes, "sums", [x], [y], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = exported_run(tmp_path, proto, model={"path": tmp_path / "model.onnx", "loss": "mse"}, data=data)
    finished_run(run, tmp_path / "model.onnx")
    pd.DataFrame(series).to_csv(tmp_path / "t.csv", index=False)
    found = onward.predict(run.root, tmp_path / "t.csv")
    assert list(found) == ["window", "predicted_load_ahead"]
    assert len(found) == 36, "the last window ends with the last row"
    measured = onward.evaluate(run.root, tmp_path / "t.csv")
    assert measured.rows == 35
    squares = (found["predicted_load_ahead"][:35] - np.array(series["load"])[5:]) ** 2
    assert measured.metrics["mse"] == pytest.approx(squares.mean(), rel=1e-5)


# -- registered models


def registered(run: RunDir, home: Path, model: Path) -> Path:
    """Register the file of a run in a real store; return the directory that MLflow has of it."""
    tracker = new_run(new_store(home))
    identity = RunIdentity(run_id="run", name="cities", created_at="", model_sha256="")
    where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, identity.model_copy(update=where))
    inputs = {"places": np.zeros((1, 2), np.int64), "age": np.zeros((1, 1), np.float32)}
    np.savez(run.export / "example.npz", **inputs)  # type: ignore[arg-type]
    exported = register(run, read_record(run.exported, ExportedModel), tags={})
    registry = Registry(tracker.tracking_uri)
    version = registry.version("cities", exported.version)
    registry.set_alias(version, "champion")
    return registry.download(version, home / "downloaded").parent


@pytest.mark.slow
def test_a_registered_model_predicts_on_the_columns_of_training(run: RunDir, home: Path, tmp_path: Path) -> None:
    folder = registered(run, home, tmp_path)
    import mlflow.pyfunc  # warns of itself, unless Onward has imported it

    frame = pd.read_csv(tmp_path / "t.csv")
    by_run = onward.predict(run.root, frame)
    assert by_run.equals(onward.predict("models:/cities@champion", frame))
    assert by_run.equals(onward.predict("models:/cities/1", tmp_path / "t.csv"))
    with pytest.raises(ConfigError, match="cities has no alias 'best'; its aliases are champion"):
        onward.predict("models:/cities@best", frame)

    loaded = mlflow.pyfunc.load_model(str(folder))
    signature = loaded.metadata.signature
    assert {spec.name: str(spec.type) for spec in signature.inputs} == {
        "city": "DataType.string",
        "size": "Any",
        "age": "Any",
    }
    assert [spec.name for spec in signature.outputs] == COLUMNS[1:]
    found = loaded.predict(frame[["age", "city", "size"]])
    assert found.equals(by_run.drop(columns="row"))
    # whole numbers, and a dictionary of lists
    whole = loaded.predict(pd.DataFrame({"city": ["Rome"], "size": [3], "age": [31]}))
    assert whole["class"].tolist() == loaded.predict({"city": ["Rome"], "size": [3], "age": [31.0]})["class"].tolist()
    example = loaded.input_example
    assert list(example) == ["city", "size", "age"]
    assert len(loaded.predict(example)) == 1
    with pytest.raises(Exception, match=r"Model is missing inputs \['size'\]"):
        loaded.predict(frame[["age", "city"]])
    # the file itself is there as before, and nothing is pickled
    flavors = loaded.metadata.flavors
    assert flavors["onnx"]["data"] == "model.onnx"
    assert flavors["python_function"]["loader_module"].startswith("onward_served_")
    assert (folder / "model.onnx").read_bytes() == (run.export / "model.onnx").read_bytes()
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle")]


@pytest.mark.slow
@pytest.mark.usefixtures("only_servers")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["registry", "image"])
def test_mlflow_serves_a_registered_model_by_the_commands_of_the_page(
    run: RunDir, home: Path, tmp_path: Path, way: str
) -> None:
    folder, page = registered(run, home, tmp_path), "docs/how-to/predict.md"
    if way == "registry":
        (line,) = (line for block in blocks(page) for line in block.text.splitlines() if line.startswith("mlflow mod"))
        command = line.replace("reviews", "cities").split()
    else:  # what the image runs, on the directory that the page downloads for it
        (text,) = (block.text for block in blocks(page) if block.title == "Dockerfile.served")
        command = json.loads(text.splitlines()[-1].removeprefix("CMD "))
        command[command.index("/model")] = str(folder)
    port, frame = free_port(), pd.read_csv(tmp_path / "t.csv")
    command[command.index("-h") + 1 :] = ["127.0.0.1", "-p", str(port)]
    with serving(command, port, home, tmp_path):
        given = json.loads(frame[["city", "size", "age"]].to_json(orient="split", index=False))
        rows = invoke(port, {"dataframe_split": given})["predictions"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            invoke(port, {"dataframe_split": {"columns": ["city", "size", "age"], "data": [["Rome", 3, "old"]]}})
        assert refused.value.code == 400
        refused.value.close()
    wanted = onward.predict(run.root, frame)
    assert [row["class"] for row in rows] == wanted["class"].tolist()
    assert [row["probability"] for row in rows] == pytest.approx(wanted["probability"].tolist(), abs=1e-6)


@contextlib.contextmanager
def serving(command: list[str], port: int, home: Path, folder: Path) -> Iterator[None]:
    """Run a command that serves until the block ends; it begins when the server answers."""
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": local_store(home), "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    environment.pop("PYTHONPATH", None)
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [f"{programs}/{command[0]}", *command[1:]],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(lambda: answers(port), limit_s=120)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def invoke(port: int, body: dict[str, Any]) -> Any:
    content = json.dumps(body).encode()
    address = f"http://127.0.0.1:{port}/invocations"
    asked = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
