"""The task links the run to complete shards, and refuses data that does not fit the model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.tasks.shard_data import shard_data
from onward.tasks.shown.mlflow_tags import digests_of
from onward.trainer.config.loading import build_config
from onward.trainer.data.storage import sharding_progress
from onward.trainer.data.storage.opened_shards import damaged_files, open_shards
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, write_record
from onward.trainer.run.timing.phases import RECORDS
from tests.support import graphs
from tests.support.stores import client, new_run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))


def configured(tmp_path: Path, label: Any, name: str = "run", **data: Any) -> RunDir:
    np.savez(tmp_path / "data.npz", image=np.zeros((len(label), 3, 8, 8), np.uint8), label=label)
    onnx.save(graphs.tiny_conv_net(), tmp_path / "model.onnx")
    run = RunDir(tmp_path / name)
    config = build_config(
        {
            "model": {"path": tmp_path / "model.onnx"},
            "data": {"source": str(tmp_path / "data.npz"), **data},
            "train": {"num_steps": 1},
        }
    )
    write_record(run.config, config)
    write_record(run.identity, RunIdentity(run_id=name, name=name, created_at="2026-01-01", model_sha256=""))
    return run


def test_the_run_directory_links_to_the_shards(tmp_path: Path) -> None:
    run = configured(tmp_path, np.arange(40) % 4)
    manifest = shard_data.fn(run)
    assert run.shards.resolve().parent == tmp_path / "home" / "shards"
    assert (open_shards(run.shards, "train").num_rows, open_shards(run.shards, "evaluation").num_rows) == (36, 4)
    assert manifest.table["label"].extremes == (0, 1, 2, 3)
    assert damaged_files(run.shards, manifest) == []


def test_a_task_says_how_far_it_is_and_how_fast_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sharding_progress, "PERIOD_S", 0.0)
    run = configured(tmp_path, np.arange(8000) % 4)
    shard_data.fn(run)
    (note, *_) = [event.text for event, _ in read_events(run.phases, records=RECORDS) if event.kind == "note"]
    assert re.fullmatch(r"[012] of 2 MB, \d+%, [\d,.]+ MB/s, \d:\d\d left", note), note
    assert any(re.search(r"files written in .* s \([\d,.]+ MB/s\)", line) for line in caplog.messages)


@pytest.mark.parametrize(("size_bytes", "elapsed_s", "shown"), [(1.52e9, 10, "152 MB/s"), (3e6, 10, "0.3 MB/s")])
def test_a_slow_disk_has_no_speed_of_0(size_bytes: float, elapsed_s: float, shown: str) -> None:
    assert sharding_progress.speed(size_bytes, elapsed_s) == shown


def test_a_second_run_and_a_retry_share_the_shards(tmp_path: Path) -> None:
    first, second = (configured(tmp_path, np.arange(40) % 4, name) for name in ("one", "two"))
    manifests = [shard_data.fn(run) for run in (first, second, first)]
    assert manifests[0] == manifests[1] == manifests[2]
    assert first.shards.resolve() == second.shards.resolve()
    assert len(list((tmp_path / "home" / "shards").iterdir())) == 1
    assert [path.name for path in first.root.iterdir() if path.name.startswith(".")] == []


def test_data_that_changed_since_training_began_is_refused_with_both_keys(tmp_path: Path) -> None:
    run = configured(tmp_path, np.arange(40) % 4)
    before = shard_data.fn(run).key
    configured(tmp_path, np.arange(44) % 4)
    other = shard_data.fn(run).key  # nothing was trained yet: the new data is as good
    run.begin_attempt()
    configured(tmp_path, np.arange(40) % 4)
    shutil.rmtree(tmp_path / "home" / "shards")  # somebody emptied the cache
    with pytest.raises(ConfigError, match=rf"since the run began \(key {other[:12]}, now {before[:12]}\); put it back"):
        shard_data.fn(run)
    configured(tmp_path, np.arange(44) % 4)
    assert shard_data.fn(run).key == other


def test_a_label_out_of_range_is_found_in_any_row(tmp_path: Path) -> None:
    run = configured(tmp_path, np.r_[np.zeros(30_000, np.int64), 7])
    with pytest.raises(ConfigError, match=r"are 0\.\.7, but must be 0\.\.3, because output logits is 4 wide"):
        shard_data.fn(run)
    assert not run.shards.exists()


def test_bad_rows_stop_the_run_with_their_row_numbers(tmp_path: Path) -> None:
    label = np.r_[np.zeros(40), np.nan]
    with pytest.raises(DataError, match=r"data\.npz, row 41: label is missing"):
        shard_data.fn(configured(tmp_path, label))
    manifest = shard_data.fn(configured(tmp_path, label, bad_rows="skip"))
    assert (manifest.skipped, manifest.rows("train") + manifest.rows("evaluation")) == (1, 40)


def test_the_data_is_recorded_in_mlflow_with_its_digest_and_number_of_rows(tmp_path: Path) -> None:
    run, tracker = configured(tmp_path, np.arange(40) % 4), new_run()
    ids = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, RunIdentity(run_id="r", name="r", created_at="2026-01-01", model_sha256="", **ids))
    manifest = shard_data.fn(run)
    shard_data.fn(run)  # a retry: named once
    inputs = client(tracker).get_run(tracker.run_id).inputs.dataset_inputs
    digests = digests_of(manifest)
    sizes = {split: sum(file.bytes for file in manifest.files(split)) for split in ("train", "evaluation")}
    assert {(i.dataset.name, i.dataset.digest, i.dataset.profile) for i in inputs} == {
        ("data.npz/train", digests["train"][:36], f'{{"num_rows": 36, "num_bytes": {sizes["train"]}}}'),
        ("data.npz/evaluation", digests["evaluation"][:36], f'{{"num_rows": 4, "num_bytes": {sizes["evaluation"]}}}'),
    }
    assert len(inputs) == 2


def test_an_outage_of_mlflow_does_not_stop_the_sharding(tmp_path: Path) -> None:
    run = configured(tmp_path, np.arange(40) % 4)
    nowhere = {"mlflow_run_id": "f" * 32, "tracking_uri": "http://127.0.0.1:9"}
    write_record(run.identity, RunIdentity(run_id="r", name="r", created_at="2026-01-01", model_sha256="", **nowhere))
    assert shard_data.fn(run).rows("train") == 36
