"""A run and its store: what is sent, in which order, what a cut, an outage and another machine leave."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from onward.flows.running import flow_in_store, from_store
from onward.flows.running.from_store import fetch_run, is_in_store
from onward.tasks.storing import run_sender
from onward.tasks.storing.run_sender import RunSender, begin_sending, send_rest
from onward.trainer.checkpoint.retention import announced, list_checkpoints
from onward.trainer.checkpoint.verification import verify
from onward.trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Fenced,
    RuntimeUnavailable,
    StorageUnavailable,
)
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RunIdentity, read_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies
from onward.trainer.run.remote.object_store import Folder
from onward.trainer.run.remote.stored_run import Sending, StoredRun, record_in
from tests.support.stored_runs import LOG, RUN_ID, holds_its_values, make_stored_run, save_step, send


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_store, "SILENT_S", 0.0)
    monkeypatch.setattr(run_sender, "RETRY_S", 0.05)
    monkeypatch.setattr("onward.tasks.shown.mlflow_outages.PERIOD_S", 0.1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(tmp_path: Path, store: Path) -> RunDir:
    return make_stored_run(tmp_path / "home", str(store))


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "other") -> Path:
    """The home of a machine with an empty disk."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / name))
    return tmp_path / name


def files_in(store: Path) -> set[str]:
    return {path.relative_to(store / RUN_ID).as_posix() for path in store.rglob("*") if path.is_file()}


def test_another_machine_gets_the_run_from_the_store(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save_step(run, step)
    assert send(run)
    send_rest(run, LOG)
    stored = {name.split("/")[2][:14] for name in files_in(store) if "checkpoints" in name}
    assert stored == {"step-000000002", "step-000000003"}, "those that the run keeps"
    events = run.events.read_bytes()
    (tmp_path / "home").rename(tmp_path / "lost")

    home = elsewhere(tmp_path, monkeypatch)
    assert is_in_store(f"{store}/stored-1")
    found = fetch_run(f"{store}/stored-1")
    assert found.root == home / "runs" / RUN_ID
    assert [path.name for path in list_checkpoints(found)] == ["step-000000003"], "the newest; none is the best"
    assert holds_its_values(found, 3)
    assert found.events.read_bytes() == events
    assert found.current_attempt == 1
    given = read_config(found, "given")
    assert given.model.path == tmp_path / "home" / "model.onnx", "config.json is as it was"
    local = with_copies(given, read_record(found.remote, LocalCopies))
    assert local.model.path.read_bytes() == b"a model of the first machine"
    assert local.model.path.is_relative_to(found.root)
    assert fetch_run(f"{store}/{RUN_ID}").root == found.root, "the second time it is here"
    # it goes on here, and a third machine gets it from both
    save_step(found, 4)
    assert send(found)
    send_rest(found, LOG)
    elsewhere(tmp_path, monkeypatch, "third")
    third = fetch_run(f"{store}/{RUN_ID}")
    assert [path.name for path in list_checkpoints(third)] == ["step-000000004"]
    assert holds_its_values(third, 4)
    assert third.events.read_bytes() == found.events.read_bytes()
    assert with_copies(given, read_record(third.remote, LocalCopies)).model.path.is_file()
    assert read_record(record_in(third), Sending).number == 3


def test_the_manifest_comes_after_the_files_and_the_state_after_the_manifest(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for method in ("put", "create", "write"):
        plain = getattr(Folder, method)

        def noted(self: Folder, name: str, what: object, plain: object = plain) -> None:
            order.append(name.rpartition("/")[2])
            plain(self, name, what)  # type: ignore[operator]

        monkeypatch.setattr(Folder, method, noted)
    save_step(run, 1)
    assert send(run)
    of_checkpoint = [name for name in order if name.startswith("rank-") or name in ("manifest.json", "state.json")]
    ranks = [f"rank-0000{number}.safetensors" for number in range(3)]
    first = of_checkpoint.index(ranks[0])
    assert of_checkpoint[first : first + 5] == [*ranks, "manifest.json", "state.json"]


def test_an_upload_that_was_cut_goes_on_with_the_files_that_are_missing(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    sent: list[str] = []
    plain = Folder.put

    def cut_at_the_second(self: Folder, name: str, source: Path) -> None:
        if len(sent) == 1:
            raise KeyboardInterrupt  # a kill: nothing is cleaned up
        sent.append(name)
        plain(self, name, source)

    monkeypatch.setattr(Folder, "put", cut_at_the_second)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert not send(run)
    assert len([name for name in files_in(store) if "rank-" in name]) == 1
    assert not [name for name in files_in(store) if name.endswith("manifest.json") and "checkpoints" in name]

    def noted(self: Folder, name: str, source: Path) -> None:
        sent.append(name)
        plain(self, name, source)

    monkeypatch.setattr(Folder, "put", noted)
    assert send(run)
    assert [name[-21:-12] for name in sent] == ["ank-00000", "ank-00001", "ank-00002"]
    assert read_record(record_in(run), Sending).stored == (1,)


def test_a_file_that_a_cut_has_left_with_other_content_is_sent_again(run: RunDir, store: Path) -> None:
    save_step(run, 1)
    begin_sending(run, str(store), LOG)
    info = verify(run.checkpoint(1)).info
    there = store / RUN_ID / "000001" / "checkpoints" / f"step-000000001-{info.digest[:12]}" / "rank-00001.safetensors"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"x" * (run.checkpoint(1) / "rank-00001.safetensors").stat().st_size)
    shutil.copy(run.checkpoint(1) / "manifest.json", run.root / "kept")
    run.announced.unlink(missing_ok=True)
    assert send(run)
    assert there.read_bytes() == (run.checkpoint(1) / "rank-00001.safetensors").read_bytes()


def test_what_is_not_kept_leaves_the_store_and_its_manifest_first(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    plain = Folder.remove

    def noted(self: Folder, names: list[str]) -> None:
        removed.extend(names)
        plain(self, names)

    monkeypatch.setattr(Folder, "remove", noted)
    for step in (1, 2, 3):
        save_step(run, step)
        assert send(run)
    of_first = [name.rpartition("/")[2] for name in removed if "step-000000001" in name]
    assert of_first[0] == "manifest.json"
    assert len(of_first) == 4
    assert read_record(record_in(run), Sending).stored == (2, 3)


def test_nothing_is_deleted_before_it_is_known_what_is_kept(run: RunDir, store: Path) -> None:
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    before = files_in(store)
    sender = RunSender(run, LOG)
    time.sleep(0.5)
    assert sender.finish()
    assert files_in(store) == before
    assert read_record(record_in(run), Sending).stored == (1, 2)


def test_a_machine_that_another_one_has_replaced_changes_nothing_more(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(run_sender.os, "kill", lambda pid, number: killed.append(number))
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    elsewhere(tmp_path, monkeypatch)
    other = fetch_run(f"{store}/{RUN_ID}")
    save_step(other, 3, salt=100)
    assert send(other)
    before = {name: (store / RUN_ID / name).read_bytes() for name in files_in(store)}
    # the first machine was only cut off: it has made the same step, with other content
    save_step(run, 3)
    with caplog.at_level(logging.ERROR):
        sender = RunSender(run, LOG)
        sender.offer(tuple(verify(path).info for path in list_checkpoints(run)))
        sender.finish()
    assert "goes on with the run since" in caplog.text
    assert len(killed) == 1, "its flow is stopped"
    after = {name: (store / RUN_ID / name).read_bytes() for name in files_in(store)}
    changed = {name for name in before if after.get(name) != before[name] and not name.endswith("alive")}
    assert changed == set()
    with pytest.raises(ConfigError, match="goes on with the run since"):
        begin_sending(run, str(store), LOG)
    # what counts is what the second machine has sent
    third = elsewhere(tmp_path, monkeypatch, "third") and fetch_run(f"{store}/{RUN_ID}")
    assert holds_its_values(RunDir(third.root), 3) is False
    assert verify(third.checkpoint(3)).info.digest == verify(other.checkpoint(3)).info.digest


def test_of_two_machines_that_want_the_run_one_gets_it(run: RunDir, store: Path, tmp_path: Path) -> None:
    save_step(run, 1)
    assert send(run)
    stored = StoredRun(f"{store}/{RUN_ID}")
    won = []

    def claim(number: int) -> None:
        mine = RunDir(tmp_path / str(number))
        sender = read_record(record_in(run), Sending).sender.model_copy(update={"token": str(number)})
        try:
            stored.claim(mine, Sending(url=stored.location, number=2, sender=sender))
            won.append(number)
        except Fenced:
            pass

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_a_store_that_is_away_is_said_and_gets_everything_later(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin_sending(run, str(store), LOG)
    plain = Folder.write
    away = [True]

    def write(self: Folder, name: str, content: bytes) -> None:
        if away[0]:
            raise RuntimeUnavailable("s3://bucket cannot be written: EndpointConnectionError")
        plain(self, name, content)

    monkeypatch.setattr(Folder, "write", write)
    save_step(run, 1)
    info = verify(run.checkpoint(1)).info
    with caplog.at_level(logging.INFO):
        sender = RunSender(run, LOG)
        sender.offer([info])
        assert sender.finish(patience_s=0.5) is False
        assert caplog.text.count("training goes on, and what is to be stored is sent later") == 1
        assert "not everything is in the store" in caplog.text
        away[0] = False
        assert send(run)
    assert read_record(record_in(run), Sending).stored == (1,)


def test_a_new_run_is_refused_without_its_store_and_a_resumed_one_goes_on(
    run: RunDir, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(self: Folder, name: str, content: bytes) -> None:
        raise RuntimeUnavailable("it cannot be written")

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "create", away)
        with pytest.raises(RuntimeUnavailable, match=r"checkpoint\.store: it cannot be written"):
            begin_sending(run, str(store), LOG)
        assert not record_in(run).exists()
    begin_sending(run, str(store), LOG)
    monkeypatch.setattr(Folder, "create", away)
    begin_sending(run, str(store), LOG)
    assert "the run goes on" in caplog.text


def test_damaged_files_in_the_store_are_never_loaded(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_step(run, step)
    assert send(run)
    [newest] = (store / RUN_ID).glob("*/checkpoints/step-000000002*/rank-00001.safetensors")
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    elsewhere(tmp_path, monkeypatch)
    found = fetch_run(f"{store}/{RUN_ID}")
    assert [path.name for path in list_checkpoints(found)] == ["step-000000001"]
    assert [info.step for info in announced(found)] == [1]
    assert "not used" in capsys.readouterr().err

    [older] = (store / RUN_ID).glob("*/checkpoints/step-000000001*/manifest.json")
    older.unlink()
    elsewhere(tmp_path, monkeypatch, "third")
    with pytest.raises(CheckpointError, match=r"all checkpoints in the store are damaged"):
        fetch_run(f"{store}/{RUN_ID}")
    assert not (tmp_path / "third" / "runs" / RUN_ID).exists()

    [config] = (store / RUN_ID).glob("000001/files/*/config.json")
    config.write_text(config.read_text().replace("9", "8"))
    elsewhere(tmp_path, monkeypatch, "fourth")
    with pytest.raises(DataError, match=r"config\.json is damaged"):
        fetch_run(f"{store}/{RUN_ID}")


def test_a_state_that_names_files_outside_is_refused(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    path = store / RUN_ID / "000001" / "state.json"
    state = json.loads(path.read_text())
    state["files"]["../../escaped"] = state["files"]["config.json"]
    path.write_text(json.dumps(state))
    home = elsewhere(tmp_path, monkeypatch)
    with pytest.raises(DataError, match="not inside of a run directory"):
        fetch_run(f"{store}/{RUN_ID}")
    assert not list(home.rglob("escaped"))


def test_what_is_no_run_in_a_store_is_said_with_those_there_are(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    elsewhere(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"no run has the name or id mlp-1; there are: stored-1 \({RUN_ID}\)"):
        fetch_run(f"{store}/mlp-1")
    (tmp_path / "other" / "runs" / RUN_ID).mkdir(parents=True)
    with pytest.raises(ConfigError, match="an earlier copy of the run"):
        fetch_run(f"{store}/{RUN_ID}")


def test_a_run_that_lives_is_not_taken(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    monkeypatch.setattr(from_store, "SILENT_S", 5.0)
    monkeypatch.setattr(flow_in_store, "ALIVE_PERIOD_S", 0.2)
    with flow_in_store.signs_of_life(run):
        elsewhere(tmp_path, monkeypatch)
        with pytest.raises(ConfigError, match=r"the run is trained on .*: stop it there"):
            fetch_run(f"{store}/{RUN_ID}")
    assert StoredRun(f"{store}/{RUN_ID}").newest_sender() == 1, "nothing was claimed"


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    home = elsewhere(tmp_path, monkeypatch)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageUnavailable, match=r"stored-1 in .* has .* kB, but .* has 1 kB free"):
        fetch_run(f"{store}/{RUN_ID}")
    assert [path.name for path in home.glob("runs/*")] == [f".{RUN_ID}.lock"]
    assert StoredRun(f"{store}/{RUN_ID}").newest_sender() == 1, "nothing was claimed"


def test_a_name_that_is_taken_here_is_given_another(
    run: RunDir, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run, 1)
    assert send(run)
    home = elsewhere(tmp_path, monkeypatch)
    home.mkdir()
    from_store.take_name("stored", "another-run", wanted="stored-1")
    found = fetch_run(f"{store}/stored-1")
    assert read_record(found.identity, RunIdentity).name == "stored-2"
