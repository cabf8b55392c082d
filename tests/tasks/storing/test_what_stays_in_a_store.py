"""What no start, no error and no loss on a machine may take out of a store, and how long a machine goes on sending."""

from __future__ import annotations

import errno
import itertools
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.flows.running import flow_in_store, from_store
from onward.flows.running.from_store import fetch_named_run, fetch_run
from onward.tasks.checkpoint import CheckpointRetention
from onward.tasks.storing import run_sender, run_transfer
from onward.tasks.storing.run_sender import RunSender, begin_sending, send_rest
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import read_record, write_record
from onward.trainer.run.remote.object_store import Folder
from onward.trainer.run.remote.stored_run import Sending, StoredRun, record_in
from tests.support.stored_runs import LOG, RUN_ID, make_stored_run, save_step, send
from tests.support.workshop import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_store, "SILENT_S", 0.0)
    monkeypatch.setattr(run_sender, "RETRY_S", 0.05)
    monkeypatch.setattr(run_sender, "LOOK_S", 0.1)
    monkeypatch.setattr("onward.tasks.shown.mlflow_outages.PERIOD_S", 0.1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(tmp_path: Path, store: Path) -> RunDir:
    return make_stored_run(tmp_path / "home", str(store))


def stored_steps(store: Path) -> list[int]:
    """The steps of the complete checkpoints that the state names."""
    stored = StoredRun(f"{store}/{RUN_ID}")
    state = stored.state(stored.newest_sender())
    assert state is not None
    for each in state.checkpoints:
        assert {name.rpartition("/")[2] for name in stored.files.names(f"{each.key}/")} == {
            "manifest.json",
            *(f"rank-0000{number}.safetensors" for number in range(3)),
        }
    return [each.step for each in state.checkpoints]


def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that waits until threads have looked for what is to be sent so often."""
    seen: list[float] = []
    plain = RunSender._sends_all

    def counted(self: RunSender) -> bool:
        try:
            return plain(self)
        finally:
            seen.append(time.monotonic())

    monkeypatch.setattr(RunSender, "_sends_all", counted)
    return lambda number: until(lambda: len(seen) >= number, limit_s=60)


def test_a_flow_that_begins_deletes_nothing_of_what_is_stored(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    wait = passes(monkeypatch)
    sender = RunSender(run, LOG)  # of `onward resume`, which verifies gigabytes before its first offer
    wait(3)
    assert stored_steps(store) == [1, 2]
    assert read_record(record_in(run), Sending).stored == (1, 2)
    sender.finish()
    assert stored_steps(store) == [1, 2]


def test_a_checkpoint_that_is_offered_while_the_sender_looks_does_not_empty_the_store(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_stored_run(tmp_path / "home", str(store), keep_newest=1)
    save_step(run, 1)
    assert send(run)
    save_step(run, 2)
    second = verify(run.checkpoint(2)).info
    sent = threading.Event()
    least: list[int] = []
    offered = []
    plain = Folder.put

    def put(self: Folder, name: str, source: Path) -> None:
        if "step-000000002" in name:
            least.append(len(stored_steps(store)))
            sent.set()
        plain(self, name, source)

    monkeypatch.setattr(Folder, "put", put)
    sender = RunSender(run, LOG)
    transfer = sender._transfer
    records = transfer.send_records

    def offering() -> None:
        records()
        if not offered:
            offered.append(second)
            sender.offer([second])

    monkeypatch.setattr(transfer, "send_records", offering)
    sender.offer([verify(run.checkpoint(1)).info])
    assert sent.wait(60)
    assert sender.finish()
    assert min(least) == 1, "the first one is there until the second one is"
    assert stored_steps(store) == [2]


def test_what_the_local_disk_loses_stays_in_the_store(run: RunDir, store: Path) -> None:
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    shutil.rmtree(run.checkpoint(1))
    assert send(run)
    assert stored_steps(store) == [1, 2]
    shutil.rmtree(run.checkpoint(2))
    assert send(run)
    send_rest(run, LOG)
    assert stored_steps(store) == [1, 2]
    # the run begins again, and what it makes replaces what is there when there is enough of it
    save_step(run, 1)
    assert send(run)
    assert stored_steps(store) == [1, 2]
    for step in (3, 4):
        save_step(run, step)
        assert send(run)
    assert stored_steps(store) == [3, 4]


def test_a_checkpoint_that_is_damaged_here_stays_in_the_store(run: RunDir, store: Path) -> None:
    save_step(run, 1)
    assert send(run)
    file = run.checkpoint(1) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    retention = CheckpointRetention(run, read_config(run, "given").checkpoint, LOG)
    retention.kept = ()  # so that it is verified again
    retention.update()
    assert retention.kept == ()
    assert send(run)
    assert stored_steps(store) == [1]


def test_a_store_that_is_empty_has_no_run_of_a_name(store: Path) -> None:
    now = RunConfig(model=ModelConfig(path=store), data=DataConfig(source="digits"), train=TrainConfig(num_steps=9))
    assert fetch_named_run(str(store), "nightly", now) is None
    with pytest.raises(ConfigError, match="no run has the name or id nightly; there are: none"):
        fetch_run(f"{store}/nightly")


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin_sending(run, str(store), LOG)
    save_step(run, 1)
    full = [3]

    def write(path: Path, record: Sending) -> None:
        if full[0]:
            full[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_record(path, record)

    monkeypatch.setattr(run_transfer, "write_record", write)
    with caplog.at_level(logging.INFO), RunSender(run, LOG) as sender:
        sender.offer([verify(run.checkpoint(1)).info])
        assert sender.finish(patience_s=60)
    assert caplog.text.count("nothing can be sent to the store; training goes on") == 1
    assert stored_steps(store) == [1]


def test_a_model_that_was_moved_away_is_said_and_the_rest_is_sent(
    run: RunDir, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_step(run, 1)
    (tmp_path / "home" / "model.onnx").unlink()
    assert send(run)
    assert f"{tmp_path}/home/model.onnx is gone, and not in the store" in caplog.text
    assert stored_steps(store) == [1]
    (tmp_path / "home" / "model.onnx").write_bytes(b"it is back")
    assert send(run), "a later flow sends it"
    state = StoredRun(f"{store}/{RUN_ID}").state(1)
    assert state is not None
    assert [each.name for each in state.inputs] == ["model.onnx"]


def test_a_sender_that_was_given_up_writes_nothing_beside_the_next_one(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(run_sender.os, "kill", lambda pid, number: killed.append(number))
    begin_sending(run, str(store), LOG)
    save_step(run, 1)
    hangs, answers = threading.Event(), threading.Event()
    plain = Folder.put

    def put(self: Folder, name: str, source: Path) -> None:
        if threading.current_thread() is first and not hangs.is_set():
            hangs.set()
            answers.wait(60)
        plain(self, name, source)

    monkeypatch.setattr(Folder, "put", put)
    before = set(threading.enumerate())
    with RunSender(run, LOG) as sender:
        [first] = [each for each in set(threading.enumerate()) - before if each.name == "store"]
        sender.offer([verify(run.checkpoint(1)).info])
        assert hangs.wait(60)
    # the flow ends, and its last sender waits for the thread that hangs
    with RunSender(run, LOG, ends=True) as last:
        last.offer([verify(run.checkpoint(1)).info])
        assert last.finish(patience_s=0.5) is False
    assert not (store / RUN_ID / "000001" / "state.json").exists() or not stored_steps(store)
    answers.set()
    first.join(60)
    assert not first.is_alive()
    send_rest_of = RunSender(run, LOG, ends=True)
    send_rest_of.offer([verify(run.checkpoint(1)).info])
    assert send_rest_of.finish()
    assert stored_steps(store) == [1]
    assert read_record(record_in(run), Sending).ended
    assert killed == []


def test_a_sender_that_was_given_up_does_not_stop_its_process_when_another_machine_goes_on(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(run_sender.os, "kill", lambda pid, number: killed.append(number))
    save_step(run, 1)
    assert send(run)
    wait = passes(monkeypatch)
    with RunSender(run, LOG):  # of a checkpoint task that has raised an error
        wait(1)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "other"))
    fetch_run(f"{store}/{RUN_ID}")
    until(lambda: not [each for each in threading.enumerate() if each.name == "store"], limit_s=60)
    assert killed == []


def test_a_run_that_goes_on_is_not_taken_for_ended(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    send_rest(run, LOG)
    stored = StoredRun(f"{store}/{RUN_ID}")
    assert (ended := stored.state(1)) is not None
    assert ended.ended
    begin_sending(run, str(store), LOG)
    assert (begun := stored.state(1)) is not None
    assert not begun.ended
    assert not read_record(record_in(run), Sending).ended
    send_rest(run, LOG)
    # so does a machine that has taken it over, from its first moment
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "other"))
    fetch_run(f"{store}/{RUN_ID}")
    assert (taken := stored.state(2)) is not None
    assert not taken.ended


def test_signs_of_life_are_given_every_period_and_go_on_after_any_error(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_sending(run, str(store), LOG)
    monkeypatch.setattr(flow_in_store, "ALIVE_PERIOD_S", 0.2)
    errors = [RuntimeUnavailable("it does not answer"), ValueError("a fault of a library")]
    tried: list[float] = []
    plain = StoredRun.give_sign_of_life

    def give(self: StoredRun, number: int, count: int) -> None:
        tried.append(time.monotonic())
        if errors:
            raise errors.pop()
        plain(self, number, count)

    monkeypatch.setattr(StoredRun, "give_sign_of_life", give)
    with flow_in_store.signs_of_life(run):
        until(lambda: len(tried) >= 4, limit_s=60)
    assert all(after - before > 0.15 for before, after in itertools.pairwise(tried))
    assert StoredRun(f"{store}/{RUN_ID}").sign_of_life(1)


def test_a_number_that_two_machines_have_created_is_that_of_the_later_one(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(run_sender.os, "kill", lambda pid, number: killed.append(number))
    save_step(run, 1)
    assert send(run)
    # a server that ignores If-None-Match
    stored = StoredRun(f"{store}/{RUN_ID}")
    other = stored.sender(1).model_copy(update={"token": "other", "host": "otherhost"})
    stored.files.write("000001.json", other.model_dump_json().encode())
    save_step(run, 2)
    with RunSender(run, LOG) as sender:
        sender.offer([verify(run.checkpoint(2)).info])
        assert not sender.finish()
    assert "otherhost goes on with the run since" in caplog.text
    assert stored_steps(store) == [1]
    assert killed == [signal.SIGTERM]
