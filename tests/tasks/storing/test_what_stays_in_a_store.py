"""What no start, no error and no loss on a machine may take out of a store, and how long a machine goes on sending."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.flows.running import from_store
from onward.tasks.checkpoint import CheckpointRetention
from onward.tasks.storing import run_sender
from onward.tasks.storing.run_sender import RunSender, begin_sending, send_rest
from onward.trainer.checkpoint.retention import announced
from onward.trainer.checkpoint.verification import verify
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import read_record
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
