"""onward gc: what it removes by its rules, what it leaves and why. Real directories, a real MLflow store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onward.flows.cli import app
from onward.flows.collection.flow_runs import database
from onward.flows.collection.found import find
from onward.flows.collection.removal import collect
from onward.flows.collection.rules import FILES, Rules
from onward.infra.mlflow.tracking import Tracker
from onward.infra.servers import services
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run import directory
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import Membership
from onward.trainer.run.records import AttemptResult, ExportedModel, RunIdentity, write_record
from tests.support.stores import new_store
from tests.support.workshop import Workshop, finished, until

OLD_S = 50 * 86400.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    # the machine's own may hold a directory of a process that another test kills
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home"


def make(home: Path, name: str, *, status: str = "done", old: bool = True, model: str = "m.onnx") -> RunDir:
    """A run of a home, as its tasks leave it; "" as status: it has failed."""
    run = RunDir(home / "runs" / name)
    sections = {"model": ModelConfig(path=home / model), "data": DataConfig(source="digits")}
    write_record(run.config, RunConfig(**sections, train=TrainConfig(num_steps=10)))
    created = f"2026-01-{len(list((home / 'runs').iterdir())):02d}"
    identity = RunIdentity(run_id=name, name=name, created_at=created, model_sha256="", tracking_uri=local(home))
    write_record(run.identity, identity)
    number = run.begin_attempt()
    if status:
        facts = {"attempt": number, "status": status, "step": 10, "samples_seen": 1, "metrics": {}, "elapsed_s": 1}
        write_record(run.result(number), AttemptResult.model_validate(facts))
    if status == "done":
        known = {"sha256": "", "step": 10, "parity": 0.0, "before": {}, "after": {}, "changed": 1}
        write_record(run.exported, ExportedModel.model_validate({"path": run.export / "m.onnx", **known}))
    shards = home / "shards" / f"key-{name}"
    shards.mkdir(parents=True)
    (shards / "manifest.json").write_text("{}")
    (shards / "train-0.arrow").write_bytes(bytes(1000))
    run.shards.symlink_to(shards, target_is_directory=True)
    run.lock.touch()
    if old:
        age(run.root, shards)
    return run


def age(*folders: Path) -> None:
    """Make directories look 50 days old."""
    before = time.time() - OLD_S
    for folder in folders:
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (before, before), follow_symlinks=False)


def local(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"


def checkpoint(run: RunDir, name: str) -> Path:
    path = run.checkpoints / name
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    age(run.root)
    return path


def reasons(home: Path, rules: Rules) -> dict[str, str]:
    return {Path(each.name).name: each.why for each in find(rules, ("run", "shards", "checkpoint")).kept}


ALL = Rules(keep=0, states=("exported", "failed", "interrupted", "stopped", "trained"))


def test_the_list_changes_nothing_and_yes_removes_exactly_what_is_listed(home: Path) -> None:
    runs = {name: make(home, name) for name in ("a", "b", "c")}
    make(home, "young", old=False)
    before = sorted(home.rglob("*"))
    found = find(Rules(keep=2))  # young and c
    assert sorted(path for path in home.rglob("*") if path.name != "runs.index") == before
    assert [(each.kind, Path(each.name).name) for each in found.items] == [
        *(("run", "a"), ("run", "b"), ("shards", "key-a"), ("shards", "key-b"))
    ]
    assert found.bytes == sum(each.bytes for each in found.items) > 2000
    removed = collect(Rules(keep=2))
    assert [each.name for each in removed.items] == [each.name for each in found.items]
    assert not runs["a"].root.exists()
    assert runs["c"].root.exists()
    assert sorted(path.name for path in (home / "shards").iterdir()) == ["key-c", "key-young"]
    assert find(Rules(keep=2)).items == ()


def test_what_is_running_resumable_or_needed_stays_and_the_reason_is_said(home: Path) -> None:
    running, resumable, trial, start, strange = (
        *(make(home, "running"), make(home, "resumable", status=""), make(home, "trial"), make(home, "start")),
        make(home, "strange"),
    )
    checkpoint(resumable, "step-000000010")
    make(home, "follower", model="runs/start/export/model.onnx", old=False)
    (strange.root / "notes.txt").write_text("mine")
    (home / "sweeps" / "s").mkdir(parents=True)
    write_record(trial.trial, Membership(sweep_id="s", number=1, mlflow_run_id=""))
    (home / "runs" / "unknown").mkdir()
    (home / "shards" / "mine").mkdir()
    for run in (strange, trial):
        age(run.root)
    with running.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        why = reasons(home, ALL)
        assert [Path(each.name).name for each in collect(ALL, ("run", "shards", "checkpoint")).items] == []
    assert why.pop("follower").startswith("it was changed 0.0 days ago")
    assert why == {
        "running": "it is running",
        "resumable": "`onward resume` can continue it (--resumable)",
        "trial": "the sweep s has not ended",
        "start": "the configuration of follower names a file in it",
        "strange": "Onward did not write notes.txt",
        "unknown": "it has neither identity.json nor config.json, so it is not known to be a run",
        "mine": "it has no manifest.json, so it is not known to be shards",
    }
    rules = Rules(keep=0, states=("interrupted", "failed"), resumable=True)
    assert [Path(each.name).name for each in collect(rules, ("run",)).items] == ["resumable"]
    assert start.root.exists()


def test_what_onward_writes_into_a_run_directory_is_known() -> None:
    written = re.findall(r"^ {8}(\w[\w.]*)", directory.__doc__ or "", re.MULTILINE)
    assert {"code.json", "accepted.json", "attempts"} < set(written)
    assert set(written) <= FILES


def test_only_runs_of_the_given_states_and_ages_go(home: Path) -> None:
    for name, status in (("done", "done"), ("stopped", "stopped"), ("killed", "")):
        make(home, name, status=status)

    def listed(**rules: Any) -> list[str]:
        return [Path(each.name).name for each in find(Rules(keep=0, **rules), ("run",)).items]

    assert listed() == ["done"]
    assert listed(states=("stopped", "interrupted")) == ["killed", "stopped"]
    assert listed(days=60.0) == []


def test_a_run_that_begins_after_the_list_was_made_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.flows.collection import removal

    run, other = make(home, "a"), make(home, "b")

    def find_then_touch(*arguments: Any) -> Any:
        found = find(*arguments)
        run.heartbeat.touch()
        return found

    monkeypatch.setattr(removal, "find", find_then_touch)
    done = collect(Rules(keep=0), ("run", "shards"))
    assert run.root.exists()
    assert (home / "shards" / "key-a").exists()
    assert not other.root.exists()
    assert {Path(each.name).name: each.why for each in done.kept}["a"].startswith("it was changed 0.0 days ago")
    assert {Path(each.name).name: each.why for each in done.kept}["key-a"] == "a run uses it now"


@pytest.mark.slow
def test_damaged_checkpoints_and_records_of_deleted_ones_go(home: Path) -> None:
    new_store(home)
    run = make(home, "a")
    kept, damaged = checkpoint(run, "step-000000010"), checkpoint(run, "step-000000020.damaged")
    tracker = Tracker(local(home))
    tracker.start_run("tests", key="a", name="a", tags={}, params={})
    elsewhere = home.parent / "other-machine" / "step-000000001"
    for step, path in ((10, kept), (20, run.checkpoint(20)), (1, elsewhere)):
        tracker.record_checkpoint(step, path=path, bytes=1, digest=str(step), metrics={}, best=False)
    rules = Rules(keep=10)
    assert [(each.kind, each.why) for each in find(rules).items] == [
        ("checkpoint", "damaged, set aside 50 days ago"),
        ("mlflow", "1 records of checkpoints that are deleted"),
    ]
    collect(rules)
    assert not damaged.exists()
    experiment = tracker._client.get_experiment_by_name("tests")
    assert experiment
    left = tracker._client.search_logged_models([experiment.experiment_id])
    assert sorted(model.tags["path"] for model in left) == sorted([str(kept), str(elsewhere)])
    assert find(rules).items == ()


def test_an_unknown_state_or_kind_is_refused_with_the_choices(home: Path) -> None:
    for words, text in ((["--states", "old"], "--states: unknown old; choose"), (["--what", "all"], "--what: unknown")):
        assert text in str(CliRunner().invoke(app, ["gc", *words]).exception)
    assert isinstance(CliRunner().invoke(app, ["gc", "--what", "x"]).exception, ConfigError)
    shown = CliRunner().invoke(app, ["gc"]).stdout
    assert shown == "0 would be removed, 0.0 MB\n"


@pytest.mark.slow
@pytest.mark.usefixtures("only_servers")
def test_with_a_prefect_server_that_does_not_start_no_run_is_listed(home: Path) -> None:
    database().parent.mkdir(parents=True)
    database().write_bytes(b"garbage " * 1000)
    with pytest.raises(RuntimeUnavailable, match=r"(?s)prefect server does not start.*file is not a database"):
        find(Rules())
    assert find(Rules(), ("shards", "checkpoint", "mlflow", "temporary")).items == ()


# -- a home of real runs


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def counts(home: Path, tables: tuple[str, ...]) -> Mapping[str, int]:
    with contextlib.closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        return {name: database.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("only_servers")
def test_of_a_home_of_real_runs_the_old_ones_go_with_their_flow_runs_and_the_newest_can_still_be_exported(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = str(workshop.root / "config.toml")
    short = ("train.num_steps=60", "train.evaluation_period=30", "checkpoint.period=10", "checkpoint.keep_newest=1")
    short += ("export.alias=",)  # the first version of a name would get it, and its run would stay
    first = Path(workshop.onward("run", config, *short, "data.evaluation_fraction=0.2")["directory"])
    second = Path(workshop.onward("run", config, *short)["directory"])
    tables = ("flow_run", "task_run", "log", "flow_run_state")
    until(lambda: not services.running(workshop.home), limit_s=60)  # it writes logs until its end
    before = counts(workshop.home, tables)
    listed = workshop.onward("gc", "--days", "0", "--keep", "1")
    assert not listed["removed"]
    assert counts(workshop.home, tables) == before
    assert first.exists()
    # its model is the newest version of none: the second run has registered another one
    kinds = {each["kind"] for each in listed["items"]}
    assert {"run", "mlflow", "prefect"} <= kinds, listed
    done = finished(workshop.start("gc", "--days", "0", "--keep", "1", "--yes"))
    assert done["removed"]
    assert [each["name"] for each in done["items"] if each["kind"] == "run"] == [str(first)]
    assert second.exists()
    until(lambda: not services.running(workshop.home), limit_s=60)  # it deletes the logs after its answer
    after = counts(workshop.home, tables)
    assert after["flow_run"] == before["flow_run"] - 1
    assert 0 < after["task_run"] < before["task_run"]
    assert 0 < after["log"] < before["log"]
    assert workshop.onward("gc", "--days", "0", "--keep", "1")["items"] == []
    exported = workshop.onward("export", second.name, "-o", str(tmp_path / "again.onnx"))
    assert Path(exported["path"]).exists()
    workshop.onward("run", config, *short)  # the databases still work
