"""A run whose model, data and operators are in an object store: the bytes that it began with, at every resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.flows import model_api
from onward.flows.run_state.runs import clean_downloads
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.configure import configure
from onward.tasks.shard_data import shard_data
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.config.urls import url_of
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.errors import ConfigError
from onward.trainer.extras import how_to_install
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.home import download_cache, onward_home
from onward.trainer.run.records import RunIdentity, read_record
from onward.trainer.run.remote import remote_files
from onward.trainer.run.remote.local_copies import LocalCopies
from tests.support.graphs import tiny_conv_net
from tests.support.remote_servers import object_store, web_server, without

pytestmark = pytest.mark.usefixtures("home", "forked")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with object_store(monkeypatch) as client:
        yield client


def data(folder: Path, rows: int = 20, seed: int = 0) -> bytes:
    images = np.random.default_rng(seed).normal(size=(rows, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "made.npz", image=images, label=np.arange(rows) % 4)
    return (folder / "made.npz").read_bytes()


@pytest.fixture
def sections(bucket: Any, tmp_path: Path) -> dict[str, Any]:
    """A model with external data, and a directory of two files, in the bucket."""
    (tmp_path / "weights").mkdir()
    onnx.save_model(
        tiny_conv_net(num_classes=4),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="weights/model.bin",
        size_threshold=0,
    )
    for name in ("model.onnx", "weights/model.bin"):
        bucket.put_object(Bucket="bucket", Key=f"models/{name}", Body=(tmp_path / name).read_bytes())
    for seed in range(2):
        bucket.put_object(Bucket="bucket", Key=f"train/{seed}.npz", Body=data(tmp_path, seed=seed))
    return {
        "model": ModelConfig(path="s3://bucket/models/model.onnx"),
        "data": DataConfig(source="s3://bucket/train"),
        "train": TrainConfig(global_batch_size=8, num_steps=4),
        "launch": LaunchConfig(rehearsal="off"),
    }


def begin(sections: dict[str, Any]) -> RunDir:
    run = RunDir(onward_home() / "runs" / onward_home().parent.name)
    configure.fn(run, {"name": "tiny", **sections})
    return run


def test_the_configuration_keeps_urls_and_ranks_read_local_copies(
    sections: dict[str, Any], bucket: Any, tmp_path: Path
) -> None:
    run = begin(sections)
    settings, config = read_config(run, "given"), read_config(run)
    assert url_of(settings.model.path) == "s3://bucket/models/model.onnx"
    assert settings.data.source == "s3://bucket/train"
    assert config.model.path.is_file()
    assert (config.model.path.parent / "weights" / "model.bin").is_file()
    onnx.load(config.model.path)  # with its external data, which onnx refuses behind a link
    assert shard_data.fn(run).rows("train") + shard_data.fn(run).rows("evaluation") == 40
    identity = read_record(run.identity, RunIdentity)
    params = Tracker(identity.tracking_uri)._client.get_run(identity.mlflow_run_id).data.params
    assert params["model.path"] == "s3://bucket/models/model.onnx"
    everything = "".join(file.read_text(errors="replace") for file in run.root.rglob("*.json"))
    assert "test-secret" not in everything


def test_the_shards_are_those_of_a_local_copy(sections: dict[str, Any], tmp_path: Path) -> None:
    remote = shard_data.fn(begin(sections))
    shutil.copytree(read_config(begin(sections)).data.source, tmp_path / "copied")
    local = RunDir(onward_home() / "runs" / "local")
    configure.fn(local, {"name": "tiny", **sections, "data": DataConfig(source=str(tmp_path / "copied"))})
    assert shard_data.fn(local).key == remote.key


def test_a_resumed_run_reads_what_it_began_with_without_asking_the_store(sections: dict[str, Any], bucket: Any) -> None:
    run = begin(sections)
    before, key = run.config.read_bytes(), shard_data.fn(run).key
    bucket.put_object(Bucket="bucket", Key="train/2.npz", Body=b"changed")
    bucket.put_object(Bucket="bucket", Key="models/model.onnx", Body=b"changed")
    begin(sections)
    assert run.config.read_bytes() == before
    assert shard_data.fn(run).key == key


def test_deleted_copies_are_fetched_again_in_the_same_version_only(sections: dict[str, Any], bucket: Any) -> None:
    run = begin(sections)
    key = shard_data.fn(run).key
    shutil.rmtree(download_cache())
    begin(sections)
    assert shard_data.fn(run).key == key
    shutil.rmtree(download_cache())
    bucket.put_object(Bucket="bucket", Key="train/1.npz", Body=b"changed")
    with pytest.raises(ConfigError, match="s3://bucket/train changed since the run began, and its local copy"):
        begin(sections)


def test_changed_external_data_is_another_model(sections: dict[str, Any], bucket: Any, tmp_path: Path) -> None:
    first = read_config(begin(sections)).model.path
    content = (tmp_path / "weights/model.bin").read_bytes()
    bucket.put_object(Bucket="bucket", Key="models/weights/model.bin", Body=content[::-1])
    copies, problems = fetch({"model": sections["model"]})
    assert not problems
    assert copies.copies[0].path != first
    assert (copies.copies[0].path.parent / "weights/model.bin").read_bytes() == content[::-1]


def test_everything_that_cannot_be_fetched_is_said_at_once_and_nothing_is_written(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "gcsfs")
    run = RunDir(onward_home() / "runs" / "refused")
    wrong = {
        **sections,
        "model": {"path": "s3://bucket/models/none.onnx"},
        "data": {"source": "s3://none/train", "evaluation_source": "gs://bucket/held-out.csv"},
        "export": {"path": "s3://none/out.onnx"},
    }
    with pytest.raises(ConfigError) as refusal:
        configure.fn(run, {"name": "tiny", **wrong})
    assert [problem.split(":")[0] for problem in refusal.value.problems] == [
        *("model.path", "data.source", "data.evaluation_source", "export.path")
    ]
    assert f"gs:// needs gcsfs, which is not installed: {how_to_install('gcs')}" in "\n".join(refusal.value.problems)
    assert not run.root.exists()


def test_a_url_that_always_ends_in_the_middle_is_refused_before_the_run_and_not_half_cached(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.01,))
    run = RunDir(onward_home() / "runs" / "refused")
    with web_server({"train.npz": data(tmp_path)}) as web:
        web.cut_after, web.cuts_left, web.ranges = 5000, -1, False
        with pytest.raises(ConfigError, match=r"data.source: http://127.0.0.1:\d+/train.npz: the connection ended"):
            configure.fn(run, {"name": "tiny", **sections, "data": {"source": f"{web.url}/train.npz"}})
    assert not run.root.exists()
    assert not list(download_cache().rglob("train.npz"))


def test_export_path_must_not_be_the_model(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"export.path s3://bucket/models/model.onnx is the model that is trained"):
        begin({**sections, "export": {"path": "s3://bucket/models/model.onnx"}})


def test_a_run_without_urls_asks_no_store_and_writes_no_record(sections: dict[str, Any], tmp_path: Path) -> None:
    data(tmp_path)
    local = {"model": {"path": tmp_path / "model.onnx"}, "data": {"source": str(tmp_path / "made.npz")}}
    run = begin({**sections, **local})
    assert not run.remote.exists()
    assert not download_cache().exists()
    assert fetch(read_config(run)) == (LocalCopies(), [])


def test_python_files_and_models_of_commands_come_by_url(bucket: Any, sections: dict[str, Any], tmp_path: Path) -> None:
    same = model_api.diff("s3://bucket/models/model.onnx", tmp_path / "model.onnx")
    assert same.same
    with web_server({"model.onnx": tiny_conv_net(num_classes=4).SerializeToString(), "rules.py": b"1/0\n"}) as web:
        assert model_api.to_module(f"{web.url}/model.onnx").input_names == ("image",)
        with pytest.raises(ConfigError, match=r"rules.py: ZeroDivisionError"):
            model_api.doctor(f"{web.url}/model.onnx", converters=[f"{web.url}/rules.py"])


def test_cleaning_leaves_what_was_used_lately_and_what_a_run_can_go_on_with(
    sections: dict[str, Any], bucket: Any, tmp_path: Path
) -> None:
    run = begin(sections)
    with web_server({"other.npz": data(tmp_path, seed=5)}) as web:
        other = fetch({"data": {"source": f"{web.url}/other.npz"}})[0].copies[0].path
    (download_cache() / ".0.partial").write_bytes(b"half")
    assert clean_downloads(30.0).deleted == 0
    for entry in download_cache().iterdir():  # as if all had been used two months ago
        os.utime(entry, (0, 0))
    assert clean_downloads(30.0).deleted >= 2  # what a joined directory was made of goes, too
    assert not other.exists()
    assert not (download_cache() / ".0.partial").exists()
    model, source = read_config(run).model.path, Path(read_config(run).data.source)
    assert [file.stat().st_size > 0 for file in source.glob("*.npz")] == [True, True]  # through links
    onnx.load(model)
    # a copy that is used again is young again
    os.utime(source.parent, (0, 0))
    begin(sections)
    assert source.parent.stat().st_mtime > 1e9
    # a run that has exported its model needs none
    run.export.mkdir()
    run.exported.write_text("{}")
    assert clean_downloads(0.0).kept == 0
    assert not [path for path in download_cache().iterdir() if path.suffix != ".lock"]
