"""infra.tracking on real MLflow stores: each test reads back what the store has."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.infra.mlflow.mlflow_store import (
    Store,
    TrackingError,
    TrackingUnavailable,
    local_store,
    translate_errors,
    with_password,
    without_password,
)
from onward.infra.mlflow.model_package import ModelFile, Point, Port
from onward.infra.mlflow.registry import Registry
from onward.infra.mlflow.tracking import (
    COLUMNS,
    TRAINING_PAGES,
    VIEW_TAG,
    DataSplit,
    Tracker,
    metric_name,
    page_on_own_server,
    table_of,
)
from tests.support.stores import client, free_port, new_run, new_store, points, points_of, tracking_store


def test_importing_tracking_does_not_import_mlflow() -> None:
    subprocess.run(
        [sys.executable, "-c", "import onward.infra.mlflow.tracking, sys; assert 'mlflow' not in sys.modules"],
        check=True,
    )


def test_each_experiment_has_the_view_that_the_address_of_its_table_names() -> None:
    tracker = new_run()
    experiment = client(tracker).get_run(tracker.run_id).info.experiment_id

    def columns() -> list[str]:
        found: list[str] = json.loads(client(tracker).get_experiment(experiment).tags[VIEW_TAG])["selectedColumns"]
        return found

    assert columns() == list(COLUMNS)
    client(tracker).set_experiment_tag(experiment, VIEW_TAG, "{}")  # as an earlier version had none
    new_run()
    assert columns() == list(COLUMNS)
    page = tracker.page("http://127.0.0.1:5000")
    expected = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs?viewStateShareKey=onward&{TRAINING_PAGES}"
    assert table_of(page) == expected


def test_a_run_is_found_by_its_key_and_set_to_running() -> None:
    first = new_run(key="the-key")
    first.set_status("KILLED")
    assert client(first).get_run(first.run_id).info.status == "KILLED"

    again = Tracker(tracking_store())
    run_id, page = again.start_run(
        "tests/all", key="the-key", name="other", tags={"attempt": "2"}, params={"learning_rate": 0.5}
    )
    run = client(again).get_run(run_id)
    assert run_id == first.run_id
    assert page == ""
    assert run.info.status == "RUNNING"
    assert run.info.run_name == "a-run"
    assert run.data.tags["attempt"] == "2"
    assert run.data.params == {"learning_rate": "0.5"}
    again.start_run("tests/all", key="the-key", name="", tags={}, params={"learning_rate": 0.25, "seed": 3})
    assert client(again).get_run(run_id).data.params == {"learning_rate": "0.5", "seed": "3"}


def test_a_run_of_another_key_is_another_run() -> None:
    assert new_run().run_id != new_run().run_id


def test_a_deleted_experiment_is_restored() -> None:
    tracker = Tracker(tracking_store())
    tracker.start_run("tests/deleted", key="a", name="a", tags={}, params={})
    client(tracker).delete_experiment(client(tracker).get_run(tracker.run_id).info.experiment_id)
    tracker.start_run("tests/deleted", key="b", name="b", tags={}, params={})
    assert client(tracker).get_run(tracker.run_id).data.tags["onward.run_id"] == "b"


def test_hundreds_of_long_parameters_are_stored_with_their_first_6000_characters() -> None:
    tracker = new_run()
    params = {f"weights.{index}": "x" * 7000 for index in range(250)}
    key = client(tracker).get_run(tracker.run_id).data.tags["onward.run_id"]
    tracker.start_run("tests/all", key=key, name="", tags={}, params=params)
    stored = client(tracker).get_run(tracker.run_id).data.params
    assert {name: len(value) for name, value in stored.items()} == dict.fromkeys(params, 6000)


def test_points_sent_again_are_stored_once_and_more_than_a_batch_is_split() -> None:
    tracker = new_run()
    sent = [Point("train/loss", 1.0 / step, 1_700_000_000_000 + step, step) for step in range(1, 2501)]
    for _ in range(3):
        tracker.log_batch(sent)
    tracker.log_batch(sent[700:1300])  # a batch cut otherwise
    assert points(tracker, "train/loss") == [(point.step, point.value) for point in sent]


def test_two_tasks_may_send_the_same_points_at_the_same_time() -> None:
    """As the monitor does beside the export, which gives them to the model."""
    tracker = new_run()
    sent = [Point(f"loss/{loss}", 1.0, 1_700_000_000_000 + step, step) for step in range(60) for loss in range(20)]

    def send(size: int) -> None:
        mine = Tracker(tracker.tracking_uri, tracker.run_id)
        for start in range(0, len(sent), size):
            mine.log_batch(sent[start : start + size])

    with ThreadPoolExecutor() as threads:
        list(threads.map(send, (20, 30, 50, 70)))
    assert sorted(points_of(tracker)) == sorted((point.key, point.step) for point in sent)


def test_values_that_are_not_finite_are_kept() -> None:
    tracker = new_run()
    sent = [Point("loss", math.nan, 1, 1), Point("loss", math.inf, 2, 2), Point("loss", -math.inf, 3, 3)]
    for _ in range(2):
        tracker.log_batch(sent)
    stored = [value for _, value in points(tracker, "loss")]
    assert [math.isnan(stored[0]), stored[1] > 1e308, stored[2] < -1e308, len(stored)] == [True, True, True, 3]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train/loss", "train/loss"),
        ("train/weight_norm//h.0/attn/c_attn", "train/weight_norm/h.0/attn/c_attn"),
        ("/embedding@table[0]", "embedding_table_0_"),
        ("onnx::MatMul_12", "onnx::MatMul_12"),
        ("a/../b", "b"),
        ("../../up", "up"),
        ("...", "_"),
        ("", "_"),
        ("größe (mm)", "größe _mm_"),
        ("k" * 300, "k" * 250),
    ],
)
def test_every_key_becomes_a_name_that_mlflow_accepts(key: str, name: str) -> None:
    assert metric_name(key) == name
    tracker = new_run()
    tracker.log_batch([Point(key, 0.5, 1, 1)])
    assert points(tracker, name) == [(1, 0.5)]


def test_a_checkpoint_is_recorded_once_and_the_newest_best_is_the_only_best() -> None:
    tracker = new_run()
    for step, best in ((100, True), (100, True), (200, True), (300, False), (200, True)):
        tracker.record_checkpoint(
            step,
            path=Path(f"/runs/one/checkpoints/step-{step:09d}"),
            bytes=step * 10,
            digest=f"digest-{step}",
            metrics={"evaluation/loss": 1.0 / step},
            points=[Point("evaluation/loss", 1.0 / step, 1_700_000_000_000 + step, step)],
            best=best,
        )
        # as the monitor sends it
        tracker.log_batch([Point("evaluation/loss", 1.0 / step, 1_700_000_000_000 + step, step)])
    run = client(tracker).get_run(tracker.run_id)
    found = client(tracker).search_logged_models([run.info.experiment_id], f"source_run_id = '{tracker.run_id}'")
    kept = {model.name: model for model in found}
    assert len(found) == 3
    assert kept["step-000000200"].tags == {
        "path": "/runs/one/checkpoints/step-000000200",
        "sha256": "digest-200",
        "bytes": "2000",
        "step": "200",
        "best": "true",
        "deleted": "false",
    }
    assert [kept[f"step-000000{step}"].tags["best"] for step in (100, 200, 300)] == ["false", "true", "false"]
    assert all(model.status == "READY" for model in found)
    assert run.data.tags["onward.best_checkpoint"] == "step-000000200"
    assert points(tracker, "evaluation/loss") == [(100, 0.01), (200, 0.005), (300, 1 / 300)], "one point of one name"
    assert set(run.data.metrics) == {"evaluation/loss"}


def test_the_best_checkpoint_on_disk_is_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    # of many checkpoints MLflow returns a part at a time, the newest first
    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SEARCH_LOGGED_MODEL_MAX_RESULTS_DEFAULT", 1)
    tracker = new_run()
    folder = Path(tempfile.mkdtemp(prefix="onward-checkpoints-"))
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        (folder / f"step-{step}").mkdir()
        what = {"path": folder / f"step-{step}", "bytes": 1, "digest": f"{tracker.run_id}-{step}", "best": False}
        tracker.record_checkpoint(step, metrics={"evaluation/loss": loss}, **what)
    (folder / "step-1").rmdir()
    tracker.mark_deleted_checkpoints()
    experiment = client(tracker).get_run(tracker.run_id).info.experiment_id
    found = client(tracker).search_logged_models(
        [experiment],
        f"source_run_id = '{tracker.run_id}' AND tags.deleted = 'false'",
        max_results=10,
        order_by=[{"field_name": "metrics.evaluation/loss", "ascending": True}],
    )
    assert [model.name for model in found] == ["step-3", "step-2"]
    shutil.rmtree(folder)


def test_the_data_is_recorded_by_its_digest_once() -> None:
    tracker = new_run()
    columns = (Port("image", "float32", (3, 8, 8)), Port("label", "int64", ()))
    rows = {"train": 1617, "evaluation": 180}
    data = [
        DataSplit(f"digits/{split}", context, digest * 64, {"num_rows": rows[split]}, columns)
        for split, context, digest in (("train", "training", "a"), ("evaluation", "evaluation", "b"))
    ]
    for _ in range(2):
        tracker.log_datasets(data, source=Path("shards"))
    inputs = client(tracker).get_run(tracker.run_id).inputs.dataset_inputs
    assert {item.dataset.name: item.dataset.profile for item in inputs} == {
        "digits/train": '{"num_rows": 1617}',
        "digits/evaluation": '{"num_rows": 180}',
    }
    assert {item.dataset.digest for item in inputs} == {"a" * 36, "b" * 36}
    assert sorted(tag.value for item in inputs for tag in item.tags) == ["evaluation", "training"]
    from mlflow.data.schema import TensorDatasetSchema
    from mlflow.types import Schema

    shown = json.loads(json.loads(inputs[0].dataset.schema)["mlflow_tensorspec"]["features"])
    features = Schema.from_json(json.dumps(shown))
    assert [(each.name, each.shape) for each in features.inputs] == [("image", (-1, 3, 8, 8)), ("label", (-1,))]
    assert TensorDatasetSchema(features=features).to_dict().keys() == json.loads(inputs[0].dataset.schema).keys()


def test_names_texts_and_numbers_beyond_mlflows_limits_break_no_run() -> None:
    tracker = new_run()
    key = client(tracker).get_run(tracker.run_id).data.tags["onward.run_id"]
    tags = {f"a tag of @ {'t' * 300} {number}": "x" * 20_000 for number in range(3)}
    params = {f"weights[{number}]@{'p' * 300}": "x" * 20_000 for number in range(3)}
    tracker.start_run("tests/all", key=key, name="", tags=tags, params=params)
    tracker.set_tags({f"many.{number}": "y" * 20_000 for number in range(250)})
    columns = tuple(Port(f"column {number} {'c' * 200}", "float32", ()) for number in range(10_000))
    tracker.log_datasets([DataSplit("d" * 1000, "training", "e" * 64, {}, columns)], source=Path("shards"))
    run = client(tracker).get_run(tracker.run_id)
    assert {len(text) for name, text in run.data.tags.items() if name.startswith("many.")} == {5000}
    assert len(run.inputs.dataset_inputs[0].dataset.name) == 500


def test_a_run_on_onwards_own_server_has_its_address_and_one_elsewhere_has_none(tmp_path: Path) -> None:
    assert page_on_own_server(tracking_store(), new_run().run_id) == ""
    assert page_on_own_server("http://127.0.0.1:1", "a") == ""
    assert page_on_own_server(f"sqlite:///{tmp_path}/elsewhere.db", "a") == ""
    tracker = new_run()
    experiment = client(tracker).get_run(tracker.run_id).info.experiment_id
    assert tracker.page("http://127.0.0.1:5000/") == (
        f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{tracker.run_id}?workflowType=machine_learning"
    )


def adder(folder: Path, *, by: float) -> ModelFile:
    """y = x + by, as an ONNX file."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [by, by])
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "adder", ports[:1], ports[1:], [weight])
    path = folder / f"adder-{by}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return ModelFile(
        path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        inputs=(Port("x", "float32", (-1, 2)),),
        outputs=(Port("y", "float32", (-1, 2)),),
        step=7,
        example={"x": np.zeros((1, 2), np.float32)},
        metrics={"evaluation/loss": 0.25},
        tags={"parity": "1e-7"},
    )


def load(folder: Path) -> Any:
    """A model directory, as MLflow serves it."""
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(folder))


def test_a_registered_model_is_the_file_byte_for_byte(tmp_path: Path) -> None:
    tracker, name = new_run(), "adders"
    one, two = adder(tmp_path, by=1.0), adder(tmp_path, by=2.0)
    assert tracker.register_model(one, name=name) == "1"
    assert tracker.register_model(one, name=name) == "1"  # done already
    assert tracker.register_model(two, name=name) == "2"

    version = client(tracker).get_model_version(name, "2")
    folder = Path(version.source.removeprefix("file://"))
    loaded = load(folder)
    assert version.tags == {"parity": "1e-7", "sha256": two.sha256}
    assert version.run_id == tracker.run_id
    assert (folder / "model.onnx").read_bytes() == two.path.read_bytes()
    assert loaded.predict({"x": np.ones((3, 2), np.float32)})["y"].tolist() == [[3.0, 3.0]] * 3
    assert [(port.name, port.type.name, port.shape) for port in loaded.metadata.signature.inputs] == [
        ("x", "float32", (-1, 2))
    ]
    assert points(tracker, "evaluation/loss") == [(7, 0.25), (7, 0.25)]  # one of each file
    (model,) = tracker._models(f"tags.sha256 = '{two.sha256}'")
    assert [(metric.key, metric.value) for metric in model.metrics] == [("evaluation/loss", 0.25)]
    other = new_run()
    assert other.register_model(replace(one, step=9), name=name) == "3"  # another run's file is another version


def test_a_model_is_registered_with_external_data_in_a_subdirectory_and_with_documents_about_it(tmp_path: Path) -> None:
    import mlflow.onnx

    plain = adder(tmp_path, by=4.0)
    path = tmp_path / "apart" / "adder.onnx"
    (path.parent / "below").mkdir(parents=True)
    model = onnx.load(plain.path)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full(2, 4.0, np.float32), "w"))
    content = model.graph.initializer[0].raw_data
    onnx.save(model, path, save_as_external_data=True, location="below/weights.bin", size_threshold=0)
    document = tmp_path / "preprocessing.json"
    document.write_text("{}")
    apart = replace(plain, path=path, beside=(path.parent / "below" / "weights.bin",), documents=(document,))
    tracker, name = new_run(), "adders-apart"
    version = tracker.register_model(apart, name=name)
    folder = Path(client(tracker).get_model_version(name, version).source.removeprefix("file://"))
    assert load(folder).predict({"x": np.ones((3, 2), np.float32)})["y"].tolist() == [[5.0, 5.0]] * 3
    assert mlflow.onnx.load_model(str(folder)).graph.initializer[0].raw_data == content
    assert (folder / "preprocessing.json").read_text() == "{}"


def test_nothing_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tracker = new_run()
    (tmp_path / "note.txt").write_text("note")
    tracker.log_file(tmp_path / "note.txt", "notes")
    tracker.register_model(adder(tmp_path, by=3.0), name="adders")
    assert list(Path().iterdir()) == []
    beside = Path(tracking_store().removeprefix("sqlite:///")).parent / "artifacts"
    assert {"note.txt", "model.onnx"} <= {path.name for path in beside.rglob("*.*")}


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        new_run().log_file(tmp_path / "absent.txt")


def test_an_unreachable_store_raises_tracking_unavailable_within_20_s() -> None:
    port = free_port()
    tracker = Tracker(f"http://127.0.0.1:{port}", "some-run")
    began_at = time.monotonic()
    with pytest.raises(TrackingUnavailable, match=f"127.0.0.1:{port}"):
        tracker.log_batch([Point("loss", 1.0, 1, 1)])
    with pytest.raises(TrackingUnavailable):
        tracker.start_run("any", key="k", name="n", tags={}, params={})
    assert time.monotonic() - began_at < 20


def test_a_password_is_read_from_the_environment_sent_to_the_store_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"] or "")
            self.send_error(403, "not you")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:s3cret@{place}/mlflow")
        recorded = without_password(os.environ["MLFLOW_TRACKING_URI"])
        assert recorded == f"http://me@{place}/mlflow"
        with pytest.raises(TrackingError) as caught:
            Registry(recorded).served("digits", "champion")
        server.shutdown()
    assert "s3cret" not in str(caught.value)
    assert place in str(caught.value)
    assert {base64.b64decode(each.removeprefix("Basic ")) for each in asked} == {b"me:s3cret"}


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("https://mlflow.example/a", "https://mlflow.example/a"),
        ("postgresql://me:a%40b@db:5432/mlflow?sslmode=require", "postgresql://me@db:5432/mlflow?sslmode=require"),
        ("https://:token@mlflow.example", "https://@mlflow.example"),
    ],
)
def test_a_uri_is_recorded_without_its_password(uri: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_password(uri) == shown
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert with_password(shown) == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other:pw@mlflow.example/b")
    assert with_password(shown) == shown, "that of another store is not sent to this one"


def test_a_database_that_cannot_be_opened_raises_tracking_unavailable(tmp_path: Path) -> None:
    (tmp_path / "mlflow").write_text("a file where the folder should be")
    with pytest.raises(TrackingUnavailable):
        Tracker(local_store(tmp_path), "some-run").set_status("FINISHED")


def test_what_a_disk_under_the_store_says_is_passed_on() -> None:
    class Full(Store):
        @translate_errors
        def copy(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx")

    with pytest.raises(TrackingUnavailable, match=r"\[Errno 28\] No space left on device"):
        Full("sqlite:////home/mlflow.db").copy()


def test_a_refusal_raises_tracking_error_and_not_tracking_unavailable() -> None:
    with pytest.raises(TrackingError, match="no-such-run") as caught:
        Tracker(tracking_store(), "no-such-run").set_status("FINISHED")
    assert not isinstance(caught.value, TrackingUnavailable)


@pytest.mark.slow
def test_two_processes_can_create_the_tables_of_one_database_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from onward.infra.mlflow.tracking import Tracker; tracker = Tracker(sys.argv[1])\n"
        "print(tracker.start_run('race', key=sys.argv[2], name='n', tags={}, params={})[0])"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code, local_store(tmp_path), key], stdout=subprocess.PIPE)
        for key in ("a", "b")
    ]
    made = [maker.communicate()[0].decode().strip() for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    store = client(Tracker(local_store(tmp_path)))
    experiment = store.get_experiment_by_name("race")
    assert sorted(run.info.run_id for run in store.search_runs([experiment.experiment_id])) == sorted(made)


@pytest.mark.slow
def test_preparing_a_registration_leaves_the_store_as_it_is_and_says_nothing_of_what_is_wrong(tmp_path: Path) -> None:
    code = """
import sys
from onward.infra.mlflow.mlflow_store import registering_prepared
with registering_prepared(sys.argv[1]):
    print("inside")
from mlflow.utils import requirements_utils
print("onnx" in (requirements_utils._PACKAGES_TO_MODULES or {}))
"""
    database = Path(new_store(tmp_path / "home").removeprefix("sqlite:///"))
    damaged, missing = tmp_path / "damaged.db", tmp_path / "missing.db"
    damaged.write_bytes(b"not a database" * 100)
    before = database.read_bytes()
    for path in (database, damaged, missing):
        done = subprocess.run(
            [sys.executable, "-c", code, f"sqlite:///{path}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "inside\nTrue\n", ""), path
    assert database.read_bytes() == before
    assert damaged.read_bytes() == b"not a database" * 100
    assert not missing.exists()
