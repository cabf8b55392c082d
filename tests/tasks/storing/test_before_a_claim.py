"""What is decided before a machine claims a run in a store, because no other machine could go on with it afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onward.flows.run_state.run_status import is_finished
from onward.flows.running import from_store
from onward.flows.running.from_store import fetch_named_run, fetch_run
from onward.tasks.storing import run_sender
from onward.tasks.storing.run_sender import begin_sending, send_rest
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.errors import ConfigError
from onward.trainer.run.adjustments import Adjustments
from onward.trainer.run.allowed_code import AllowedCode
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.kept_settings import write_settings
from onward.trainer.run.outcomes.run_ending import RunEnding
from onward.trainer.run.records import AttemptResult, read_record, write_record
from onward.trainer.run.remote.stored_run import Sending, StoredRun, record_in
from tests.support.stored_runs import LOG, RUN_ID, make_stored_run, save_step, send


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_store, "SILENT_S", 0.0)
    monkeypatch.setattr(run_sender, "RETRY_S", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of the first machine; the test is on the second."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "second"))
    return make_stored_run(tmp_path / "home", str(store))


def claimed(store: Path) -> int:
    return StoredRun(f"{store}/{RUN_ID}").newest_sender()


def finish(run: RunDir) -> None:
    """Leave what a flow leaves that has exported a file and sent all."""
    result = AttemptResult(attempt=1, status="done", step=9, samples_seen=9, metrics={}, elapsed_s=1.0)
    write_record(run.result(1), result)
    run.exported.parent.mkdir(parents=True)
    run.exported.write_text("{}")
    write_record(run.flow_ending, RunEnding(status="completed"))
    send_rest(run, LOG)


def with_changes(config: RunConfig, changes: dict[str, dict[str, object]]) -> RunConfig:
    return RunConfig.model_validate({name: {**dict(value), **changes.get(name, {})} if name in changes else value
                                     for name, value in config})  # fmt: skip


def test_other_settings_are_refused_and_claim_nothing(run: RunDir, store: Path, tmp_path: Path) -> None:
    save_step(run, 1)
    assert send(run)
    now = with_changes(read_config(run, "given"), {"optimizer": {"learning_rate": 0.5}})
    with pytest.raises(ConfigError, match=r"stored-1 began with optimizer\.learning_rate = .* now it is 0\.5"):
        fetch_named_run(str(store), "stored-1", now)
    with pytest.raises(ConfigError, match=r"keeps the settings that it began with, but for \[stop\]"):
        fetch_run(f"{store}/stored-1", lambda _: ["train.num_steps=20"])
    assert claimed(store) == 1
    assert not (tmp_path / "second" / "runs" / RUN_ID).exists()
    begin_sending(run, str(store), LOG)  # the first machine may go on


def test_data_that_is_not_here_is_refused_and_claims_nothing(run: RunDir, store: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("a\n1\n")
    config = read_config(run, "given").model_copy(update={"data": DataConfig(source=str(data))})
    write_settings(run, config)
    save_step(run, 1)
    assert send(run)
    data.rename(tmp_path / "elsewhere.csv")
    with pytest.raises(ConfigError, match=rf"data\.source: there is no {data} here\nstored-1 goes on only with"):
        fetch_run(f"{store}/stored-1")
    assert claimed(store) == 1
    (tmp_path / "elsewhere.csv").rename(data)
    assert read_record(record_in(fetch_run(f"{store}/stored-1")), Sending).number == 2


def test_python_from_a_store_is_executed_if_it_is_here_too_or_permitted(
    run: RunDir, store: Path, tmp_path: Path
) -> None:
    loss = tmp_path / "loss.py"
    loss.write_text("def loss(): ...\n")
    write_record(run.code, AllowedCode(files={str(loss): sha256(loss)}))
    save_step(run, 1)
    assert send(run)
    loss.write_text("def loss(): return 1\n")
    permitted = "use `onward resume STORE/RUN --allow-code`"
    with pytest.raises(ConfigError, match=rf"Python .* not on this machine: {loss}, SHA-256 .*; .* {permitted}"):
        fetch_run(f"{store}/stored-1")
    with pytest.raises(ConfigError, match="executes Python from the store"):
        fetch_named_run(str(store), "stored-1", read_config(run, "given"))
    assert claimed(store) == 1
    assert fetch_run(f"{store}/stored-1", allow_code=True).code.exists()
    assert claimed(store) == 2


def test_python_that_a_store_does_not_record_is_refused_in_a_finished_run_too(
    run: RunDir, store: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ops.py"
    file.write_text("")
    write_settings(run, with_changes(read_config(run, "given"), {"model": {"converters": (file,)}}))
    run.code.unlink(missing_ok=True)
    save_step(run, 9)
    assert send(run)
    with pytest.raises(ConfigError, match=rf"{file}, SHA-256 unknown; .* use `onward resume STORE/RUN --allow-code`"):
        fetch_run(f"{store}/stored-1")
    finish(run)
    with pytest.raises(ConfigError, match=rf"{file}, SHA-256 unknown; .* use `onward resume STORE/RUN --allow-code`"):
        fetch_run(f"{store}/stored-1")
    assert claimed(store) == 1
    assert not (tmp_path / "second" / "runs" / RUN_ID).exists()


def test_python_that_a_store_gets_after_the_first_look_is_refused(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)

    def add_code(*_: object) -> None:
        write_record(run.code, AllowedCode(files={str(tmp_path / "loss.py"): "ab" * 32}))
        assert send(run)

    monkeypatch.setattr(from_store, "_wait_for_silence", add_code)
    with pytest.raises(ConfigError, match="executes Python from the store"):
        fetch_run(f"{store}/stored-1")
    assert not (tmp_path / "second" / "runs" / RUN_ID).exists()


def test_a_run_that_is_finished_comes_as_a_copy_and_is_not_claimed(run: RunDir, store: Path) -> None:
    save_step(run, 9)
    assert send(run)
    finish(run)
    config = read_config(run, "given")
    copy = fetch_named_run(str(store), "stored-1", config)
    assert copy is not None
    assert claimed(store) == 1
    assert not record_in(copy).exists()
    assert is_finished(copy, config.stop, config.checkpoint)
    assert fetch_run(f"{store}/{RUN_ID}").root == copy.root, "it is still what the store has"
    # the copy itself is not what goes on, because the first machine may
    with pytest.raises(ConfigError, match="goes on with the run since"):
        begin_sending(copy, str(store), LOG)
    assert not record_in(copy).exists()
    begin_sending(run, str(store), LOG)
    with pytest.raises(ConfigError, match="an earlier copy of the run"):
        fetch_run(f"{store}/{RUN_ID}")


def test_a_finished_run_goes_on_with_a_higher_limit(run: RunDir, store: Path) -> None:
    save_step(run, 5)
    write_settings(run, with_changes(read_config(run, "given"), {"stop": {"max_hours": 1.0}}))
    assert send(run)
    finish(run)
    early = read_record(run.result(1), AttemptResult).model_copy(update={"ended_early": "max_hours"})
    write_record(run.result(1), early)
    send_rest(run, LOG)
    found = fetch_run(f"{store}/{RUN_ID}", lambda _: ["stop.max_hours=2"])
    assert read_record(record_in(found), Sending).number == 2


def test_a_layout_for_hosts_of_the_other_cluster_is_dropped(run: RunDir, store: Path, tmp_path: Path) -> None:
    save_step(run, 1)
    layout = Adjustments(micro_batch_divisor=1, skip_steps=(3,), data=1, hostfile=str(run.root / "hosts-left"))
    write_record(run.adjusted, layout)
    assert send(run)
    shutil.rmtree(tmp_path / "home" / "runs")
    found = fetch_run(f"{store}/{RUN_ID}")
    assert read_record(found.adjusted, Adjustments) == Adjustments(skip_steps=(3,))
    assert read_config(found, "given").launch.hostfile == ""
