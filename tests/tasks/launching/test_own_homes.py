"""What a host with a home of its own gets of a run: by digest, no more than it lacks, and nothing that is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.tasks.launching.own_homes import _question, _with_data, own_homes
from onward.tasks.storing.run_sender import begin_sending
from onward.trainer.attempt.own_home import RECORDS, HostInputs, bring
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.stored_run import Sending, record_in
from tests.support.s3_server import s3_server
from tests.support.shards import make_shards
from tests.support.stored_runs import LOG, holds_its_values, make_stored_run, save_step, send


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "directory":
        yield str(tmp_path / "store")
    else:
        with s3_server(tmp_path / "s3", monkeypatch):
            yield "s3://bucket/store"


@pytest.fixture
def wanted(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostInputs:
    """What the head host asks of another one. Its home is moved to `head` then, so that the path is free."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    run = make_stored_run(tmp_path / "home", store)
    begin_sending(run, store, LOG)
    values = np.arange(40, dtype=np.float32)
    np.savez(tmp_path / "data.npz", x=values.reshape(20, 2), label=np.arange(20) % 2)
    data = DataConfig(source=str(tmp_path / "data.npz"), rows_per_shard=5, evaluation_fraction=0.2)
    directory, _, _ = make_shards(data, None, tmp_path / "made")
    run.shards.symlink_to(directory)
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    sending = read_record(record_in(run), Sending)
    records = {name: (run.root / name).read_text() for name in RECORDS if (run.root / name).exists()}
    question = _question(run, sending).model_copy(update={"records": {**records, "attempt": "3"}})
    found = _with_data(run, sending, question)
    (tmp_path / "home").rename(tmp_path / "head")
    return found


def test_a_host_gets_what_ranks_read_and_the_second_time_only_what_changed(wanted: HostInputs, tmp_path: Path) -> None:
    first = bring(wanted)
    assert first.problems == ()
    run = RunDir(wanted.run)
    assert run.own_home.exists()
    assert run.current_attempt == 3
    config = read_config(run)
    assert config.model.path.is_relative_to(run.root / "inputs")
    assert config.model.path.read_bytes() == b"a model of the first machine"
    assert [path.name for path in list_checkpoints(run)] == ["step-000000001", "step-000000002"]
    assert holds_its_values(run, 2)
    head = open_shards(tmp_path / "head" / "runs" / run.root.name / "shards", "train")
    rows = np.arange(head.num_rows)
    np.testing.assert_array_equal(open_shards(run.shards, "train").read(rows)["x"], head.read(rows)["x"])
    again = bring(wanted)
    assert (again.problems, again.bytes) == ((), 0)
    # a kill has left a part of one, and another step that is not in the store
    shutil.copytree(run.checkpoint(2), run.checkpoint(3))
    (run.checkpoint(2) / "manifest.json").unlink()
    assert bring(wanted).bytes > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000000001", "step-000000002"]
    assert holds_its_values(run, 2)
    assert bring(wanted.model_copy(update={"leave": True})).problems == ()
    assert not run.root.exists()


def test_what_is_damaged_in_the_store_or_leads_out_of_the_directory_is_refused(wanted: HostInputs) -> None:
    [given] = wanted.inputs
    [(name, file)] = given.files.items()
    other = given.model_copy(update={"files": {name: file.model_copy(update={"sha256": "0" * 64})}})
    [problem] = bring(wanted.model_copy(update={"inputs": (other,)})).problems
    assert "does not get what it needs: " in problem
    assert "is damaged: it has SHA-256 " in problem
    out = given.model_copy(update={"files": {"../../outside": file}})
    [problem] = bring(wanted.model_copy(update={"inputs": (out,)})).problems
    assert "is not inside of a run directory" in problem


def test_a_run_of_the_host_itself_is_left_alone(wanted: HostInputs) -> None:
    wanted.run.mkdir(parents=True)
    (wanted.run / "config.json").write_text("its own")
    (wanted.run / "own_home").write_text("a file of its own")
    for leave in (False, True):
        [problem] = bring(wanted.model_copy(update={"leave": leave})).problems
        assert problem.startswith("has a run of its own in ")
    assert (wanted.run / "config.json").read_text() == "its own"


def test_what_a_kill_has_left_of_the_beginning_is_gone_on_with(wanted: HostInputs) -> None:
    wanted.run.mkdir(parents=True)
    (wanted.run / ".own_home.77.partial").touch()
    assert bring(wanted).problems == ()
    assert holds_its_values(RunDir(wanted.run), 2)


def test_a_host_that_shares_the_directory_gets_nothing(wanted: HostInputs, tmp_path: Path) -> None:
    (tmp_path / "head").rename(tmp_path / "home")
    before = {path: path.stat().st_mtime_ns for path in wanted.run.rglob("*")}
    (wanted.run / wanted.name).write_text(wanted.nonce)
    assert bring(wanted).shares_home
    (wanted.run / wanted.name).unlink()
    assert {path: path.stat().st_mtime_ns for path in wanted.run.rglob("*")} == before
    assert own_homes(RunDir(wanted.run)) == [], "without a hostfile there is no other host"
