"""The monitor task on real MLflow stores and event files, with an event log written by the test."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import socket
import struct
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from onward.flows.run_state.costs import cost_line
from onward.flows.run_state.run_status import describe
from onward.infra.mlflow.mlflow_store import TrackingUnavailable
from onward.infra.mlflow.model_package import Point
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.monitor import monitor
from onward.tasks.shown.event_shipping import Cursor, Shipper
from onward.tasks.shown.mlflow_tags import parameters
from onward.tasks.shown.training_progress import Progress
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.events import (
    RECORDS,
    CheckpointSaved,
    ConfusionMatrix,
    Evaluated,
    EventWriter,
    Histogram,
    Scalars,
    Started,
    Usage,
)
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, EndingKind
from onward.trainer.run.records import AttemptResult, MetricsSummary, Record, RunIdentity, read_record, write_record
from tests.support.stores import client, free_port, new_run, new_store, points, points_of


def make_run(root: Path, tracker: Tracker) -> RunDir:
    """A run directory as configure leaves it."""
    run = RunDir(root)
    model, data = ModelConfig(path=root / "m.onnx"), DataConfig(source="digits")
    write_record(run.config, RunConfig(model=model, data=data, train=TrainConfig(num_steps=10)))
    identify(run, tracker)
    return run


def identify(run: RunDir, tracker: Tracker) -> None:
    identity = RunIdentity(run_id="r", name="r", created_at="", model_sha256="")
    where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, identity.model_copy(update=where))


def attempt(run: RunDir, *, first: int, last: int, status: str = "") -> None:
    """Log steps first..last as the loop does; with a status the attempt ends, without one it is killed."""
    number = run.begin_attempt()
    events = EventWriter(run.events, attempt=number, rank=0)
    events.emit(Started(step=first - 1, num_steps=10, num_samples=320, num_parameters=7))
    if first == 1:
        events.emit(Evaluated(step=0, values={"evaluation/loss": 2.0}))
    for step in range(first, last + 1):
        events.scalars(step, loss=1 / step + number / 1000, samples_per_s=100.0 + step)
        if step % 5 == 0:
            events.emit(Evaluated(step=step, values={"evaluation/loss": 1 / step}))
            events.emit(Histogram(step=step, name="weight/w", counts=[1, 2, 3], edges=[-1.0, 0.0, 1.0, 2.0]))
            events.emit(CheckpointSaved(step=step, path=f"step-{step:09d}"))
    events.close()
    if status:
        result = AttemptResult.model_validate(
            {"attempt": number, "status": status, "step": last, "samples_seen": 1, "metrics": {}, "elapsed_s": 1}
        )
        write_record(run.result(number), result)


def ended(run: RunDir, number: int, kind: EndingKind) -> AttemptEnding:
    """The record of how an attempt ended, as the task train writes it."""
    ending = AttemptEnding(
        attempt=number,
        kind=kind,
        sentence="rank 1 on h0 failed: CUDA out of memory",
        action="it goes on from the checkpoint of step 5 in 5 s, retry 1 of 2",
        step=5,
        began_ms=1,
        detected_ms=2,
        ended_ms=3,
    )
    write_record(run.ending(number), ending)
    return ending


def wait_until(true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up_at, "it never became true"
        time.sleep(0.02)


def loss(step: int, number: int) -> tuple[int, float]:
    return step, 1 / step + number / 1000


# -- the task


def test_a_resumed_run_is_one_curve_in_mlflow_and_has_a_summary(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    attempt(run, first=1, last=7)
    attempt(run, first=6, last=10, status="done")
    run.close_log()

    summary = monitor.fn(run)

    assert points(tracker, "train/loss") == [loss(step, 1) for step in range(1, 8)] + [
        loss(step, 2) for step in range(8, 11)
    ]
    assert points(tracker, "evaluation/loss") == [(0, 2.0), (5, 0.2), (10, 0.1)]
    assert client(tracker).get_run(tracker.run_id).info.status == "FINISHED"
    assert summary == read_record(run.metrics, MetricsSummary)
    assert (summary.status, summary.step, summary.first, summary.last, summary.samples_per_s) == (
        *("FINISHED", 10, {"evaluation/loss": 2.0}, {"evaluation/loss": 0.1}),
        106.0,  # the median of 101..107 and 106..110
    )


def test_a_resume_after_damage_is_said_on_the_terminal_and_in_mlflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    attempt(run, first=1, last=7)
    watching = threading.Thread(target=monitor.fn, args=(run,), kwargs={"tick_s": 0.02}, daemon=True)
    watching.start()
    wait_until(lambda: len(points(tracker, "train/loss")) == 7)
    events = EventWriter(run.events, attempt=2, rank=0)
    resumed = "goes on from step 5 (step-000000005); steps 6 to 7 are made again; 1 newer checkpoint is damaged"
    events.emit(Started(step=5, num_steps=10, num_samples=320, resumed=resumed, damaged=["step-000000006"]))
    events.close()
    wait_until(lambda: f"attempt 2 {resumed}" in caplog.text)
    # the log of events has it as well, at a level that other tests of this process may have set
    said = [each for each in caplog.records if resumed in each.message and each.name.startswith("onward.tasks")]
    assert [each.levelname for each in said] == ["WARNING"]
    run.close_log()
    watching.join()
    assert client(tracker).get_run(tracker.run_id).data.tags["onward.resumed"] == resumed


def test_how_an_attempt_ended_is_in_mlflow_before_the_next_one_ends_and_in_the_status_of_the_run(
    tmp_path: Path,
) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)

    def shown() -> dict[str, str]:
        tags = client(tracker).get_run(tracker.run_id).data.tags
        return {name: tags.get(name, "") for name in ("onward.attempts", "onward.ending.kind", "onward.ending")}

    attempt(run, first=1, last=5)
    watching = threading.Thread(target=monitor.fn, args=(run,), kwargs={"tick_s": 0.02}, daemon=True)
    watching.start()
    first = ended(run, 1, "out_of_memory")
    sentence = (
        "attempt 1 ended at step 5: rank 1 on h0 failed: CUDA out of memory; it goes on from the checkpoint of step 5 "
        "in 5 s, retry 1 of 2"
    )
    assert str(first) == sentence
    wait_until(lambda: shown()["onward.ending"] == sentence)
    assert (shown()["onward.attempts"], shown()["onward.ending.kind"]) == ("1", "out_of_memory")
    assert describe(run).ending == f"out_of_memory: {sentence}"
    attempt(run, first=6, last=10, status="done")
    second = ended(run, 2, "done")
    run.close_log()
    watching.join()
    expected = {"onward.attempts": "2", "onward.ending.kind": "done", "onward.ending": str(second)}
    assert shown() == expected
    assert describe(run).ending == f"done: {second}"


@pytest.mark.parametrize(("last", "status"), [("done", "FINISHED"), ("stopped", "KILLED"), ("", "FAILED")])
def test_mlflow_gets_the_status_of_the_newest_attempt(tmp_path: Path, last: str, status: str) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    attempt(run, first=1, last=3, status="stopped")
    attempt(run, first=4, last=5, status=last)
    run.close_log()
    assert monitor.fn(run).status == status
    assert client(tracker).get_run(tracker.run_id).info.status == status


def test_during_training_points_arrive_and_the_status_is_running_again(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    tracker.set_status("FAILED")  # the attempt before
    watching = threading.Thread(target=monitor.fn, args=(run,), kwargs={"tick_s": 0.02}, daemon=True)
    watching.start()
    attempt(run, first=1, last=4)
    wait_until(lambda: len(points(tracker, "train/loss")) == 4)
    wait_until(lambda: client(tracker).get_run(tracker.run_id).info.status == "RUNNING")
    attempt(run, first=5, last=10, status="done")
    run.close_log()  # at once: what was just written is still shipped
    watching.join()
    assert len(points(tracker, "train/loss")) == 10
    assert client(tracker).get_run(tracker.run_id).info.status == "FINISHED"


def test_the_usage_of_every_node_is_sent_once_and_files_are_artifacts(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    run.packages.write_text("torch==2.13\n")
    run.profile.mkdir()
    for name in ("rank-00000.csv", "rank-00000.trace.json.gz", ".rank-00001.csv.1.partial"):
        (run.profile / name).write_bytes(b"x")
    for attempt_number in (1, 2):
        attempt(run, first=5 * attempt_number - 4, last=5 * attempt_number, status="done" * (attempt_number - 1))
        for rank, node in ((0, "gpu-1"), (8, "gpu-2")):
            writer = EventWriter(run.usage_of(rank), attempt=attempt_number, rank=0)
            writer.emit(Usage(step=attempt_number, node=node, values={"cpu_utilization_percentage": 50.0 + rank}))
            writer.close()
        run.close_log()
        monitor.fn(run)
    assert points(tracker, "system/gpu-1/cpu_utilization_percentage") == [(1, 50.0), (2, 50.0)]
    assert points(tracker, "system/gpu-2/cpu_utilization_percentage") == [(1, 58.0), (2, 58.0)]
    assert [file.path for file in client(tracker).list_artifacts(tracker.run_id, "environment")] == [
        "environment/packages.txt"
    ]
    assert [file.path for file in client(tracker).list_artifacts(tracker.run_id, "profile")] == [
        "profile/rank-00000.csv",
        "profile/rank-00000.trace.json.gz",
    ]


def test_after_a_lasting_outage_the_next_monitor_sends_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, Tracker(f"http://127.0.0.1:{free_port()}", "unknown"))
    attempt(run, first=1, last=10, status="done")
    run.close_log()
    with caplog.at_level(logging.WARNING, "onward.tasks.monitor"):
        summary = monitor.fn(run, patience_s=0.1)
    assert summary.last == {"evaluation/loss": 0.1}  # which needs no MLflow
    assert "metrics stay in the event log" in caplog.text
    assert "`onward resume` of this run sends the rest" in caplog.text

    tracker = new_run()
    identify(run, tracker)
    monitor.fn(run)
    assert points(tracker, "train/loss") == [loss(step, 1) for step in range(1, 11)]


def test_a_full_disk_is_logged_once_and_only_tensorboard_files_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    run.tensorboard.write_text("a file where TensorBoard's directory should be")
    attempt(run, first=1, last=10, status="done")
    run.close_log()
    full = [OSError(errno.ENOSPC, "No space left on device")] * 2

    def write(path: Path, record: Record) -> None:
        if path == run.cursor and full:
            raise full.pop()
        write_record(path, record)

    monkeypatch.setattr("onward.tasks.shown.event_shipping.write_record", write)
    monkeypatch.setattr("onward.tasks.shown.mlflow_outages.PERIOD_S", 0.01)
    with caplog.at_level(logging.WARNING):
        assert monitor.fn(run).status == "FINISHED"
    assert points(tracker, "train/loss") == [loss(step, 1) for step in range(1, 11)]
    assert caplog.text.count("metrics stay in the event log until MLflow can be reached again: [Errno 28]") == 1
    assert caplog.text.count("nothing more goes to TensorBoard until this run is resumed") == 1


# -- shipping


def test_a_log_that_lost_its_end_is_read_from_the_beginning_and_no_point_is_sent_twice(
    tmp_path: Path,
) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    attempt(run, first=1, last=8)
    assert Shipper(run, tracker).ship() == 18  # loss and speed of 8 steps, 2 evaluations
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join(lines[:6]))  # the disk kept steps 1 to 4, the cursor says 8
    attempt(run, first=5, last=10)
    assert run.events.stat().st_size > read_record(run.cursor, Cursor).offset  # so the size does not tell
    Shipper(run, tracker).ship()
    assert [step for step, _ in points(tracker, "train/loss")] == list(range(1, 11))
    assert points(tracker, "train/loss")[4] == loss(5, 1)


@pytest.mark.parametrize("gone", ["", "cursor.json", "events.jsonl"])
def test_a_run_directory_that_was_put_back_from_a_copy_sends_no_point_twice(tmp_path: Path, gone: str) -> None:
    tracker = new_run()
    run = make_run(tmp_path / "run", tracker)
    attempt(run, first=1, last=4)
    Shipper(run, tracker).ship()
    shutil.copytree(run.root, tmp_path / "copy")
    for _ in range(3):
        attempt(run, first=5, last=8)
        Shipper(run, tracker).ship()
        shutil.rmtree(run.root)
        shutil.copytree(tmp_path / "copy", run.root)
        if gone:
            (run.root / gone).unlink()
    attempt(run, first=5, last=10, status="done")
    Shipper(run, tracker).ship()
    found = Counter(points_of(tracker))
    assert {step for key, step in found if key == "train/loss"} == set(range(1, 11))
    assert set(found.values()) == {1}


def test_an_older_copy_of_the_database_gets_what_was_sent_since_and_a_removed_one_nothing(tmp_path: Path) -> None:
    tracker = new_run(new_store(tmp_path / "store"))
    run = make_run(tmp_path, tracker)
    database, older = tmp_path / "store/mlflow/mlflow.db", tmp_path / "older.db"
    attempt(run, first=1, last=4)
    shipper = Shipper(run, tracker)
    shipper.ship()
    shutil.copyfile(database, older)
    attempt(run, first=5, last=7)
    shipper.ship()
    database.unlink()  # SQLite itself would go on writing to it
    attempt(run, first=8, last=10, status="done")
    with pytest.raises(TrackingUnavailable, match=r"mlflow\.db was removed: put it back"):
        shipper.ship()
    with pytest.raises(TrackingUnavailable, match="was removed"):
        Tracker(tracker.tracking_uri, tracker.run_id).set_status("FINISHED")
    assert not database.exists(), "no empty one takes its place"
    older.rename(database)
    shipper.ship()
    assert [step for step, _ in points(tracker, "train/loss")] == list(range(1, 11))
    older.write_bytes(database.read_bytes())
    older.replace(database)
    assert Shipper(run, tracker).ship() == 0, "in another process, too: MLflow says what it has"
    assert [step for step, _ in points(tracker, "train/loss")] == list(range(1, 11))


def test_a_database_that_is_none_is_one_sentence_with_what_to_do_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = new_run(new_store(tmp_path / "store"))
    database = tmp_path / "store/mlflow/mlflow.db"
    for content, text in ((b"no database " * 1000, "file is not a database"), (b"", "no such table")):
        database.write_bytes(content)
        with pytest.raises(TrackingUnavailable) as caught:
            tracker.log_batch([Point("loss", 1.0, 1, 1)])
        assert f"the MLflow database {database} is damaged (" in str(caught.value)
        assert text in str(caught.value)
        assert "move it away, and a new one is made" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_a_new_mlflow_run_of_the_same_run_gets_all_points(tmp_path: Path) -> None:
    first, second = new_run(), new_run()
    run = make_run(tmp_path, first)
    attempt(run, first=1, last=10)
    Shipper(run, first).ship()
    Shipper(run, second).ship()
    assert points(first, "train/loss") == points(second, "train/loss") == [loss(step, 1) for step in range(1, 11)]


def test_more_points_than_one_batch_arrive_in_the_order_of_the_log(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    events = EventWriter(run.events, attempt=1, rank=0)
    for step in range(1, 601):
        events.scalars(step, loss=float(step), rate=0.5, norm=1.5)
    events.close()
    assert Shipper(run, tracker).ship() == 1800
    assert Shipper(run, tracker).ship() == 0
    for key, value in (("loss", None), ("rate", 0.5), ("norm", 1.5)):
        assert points(tracker, f"train/{key}") == [(step, value or float(step)) for step in range(1, 601)]


def test_values_that_are_no_numbers_and_torn_lines_are_skipped(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    events = EventWriter(run.events, attempt=1, rank=0)
    events.emit(Scalars(step=1, values={"c": 1.0, "@/d": math.nan}))
    events.close()
    with run.events.open("ab") as file:
        # such a line is damaged as a whole
        line = {"at_ms": 1, "attempt": 1, "step": 2, "kind": "scalars", "values": {"a": None, "b": "text", "c": 2.0}}
        file.write(json.dumps(line).encode() + b"\n")
        file.write(b'{"at_ms": 1, "torn\n')
    assert Shipper(run, tracker).ship() == 2
    assert points(tracker, "c") == [(1, 1.0)]
    assert math.isnan(points(tracker, "_/d")[0][1])


# -- TensorBoard


def test_tensorboard_has_every_step_once_after_two_attempts_and_two_monitors(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    attempt(run, first=1, last=7)
    run.close_log()
    monitor.fn(run)
    attempt(run, first=6, last=10, status="done")
    monitor.fn(run)

    entries = [entry for path in run.tensorboard.iterdir() for entry in EventFileLoader(str(path)).Load()]
    losses = [(entry.step, entry.wall_time) for entry in entries for v in entry.summary.value if v.tag == "train/loss"]
    shapes = [
        (entry.step, make_ndarray(v.tensor).tolist())
        for entry in entries
        for v in entry.summary.value
        if v.tag == "weight/w"
    ]
    assert [step for step, _ in losses] == list(range(1, 11))
    assert all(abs(wall_time - time.time()) < 600 for _, wall_time in losses)
    buckets = [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]  # from, to, count
    assert shapes == [(5, buckets), (10, buckets)]


def test_an_empty_report_to_writes_no_tensorboard_files(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    report_to(run)
    attempt(run, first=1, last=2, status="done")
    run.close_log()
    monitor.fn(run)
    assert not run.tensorboard.exists()


# -- Weights & Biases


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Real wandb that writes files, with a login that must not be in them."""
    import wandb

    wandb.teardown()  # it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "5ec4e7" * 7)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "of-wandb"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "of-wandb"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "of-wandb"))
    yield
    wandb.teardown()


def report_to(run: RunDir, *places: str) -> None:
    config = RunConfig.model_validate_json(run.config.read_bytes())
    monitored = config.monitor.model_copy(update={"report_to": places})
    write_record(run.config, config.model_copy(update={"monitor": monitored}))


def written_by_wandb(run: RunDir) -> list[Any]:
    """The records in wandb's offline files: blocks of 32 KiB with (checksum, length, kind) before each part."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    records = []
    for path in sorted((run.root / "wandb").glob("offline-run-*/run-*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            part, place = data[place + 7 : place + 7 + length], place + 7 + length
            whole = part if kind in (1, 2) else whole + part  # 1: a record; 2, 3, 4: its first, middle, last part
            if kind in (1, 4):
                records.append(WandbRecord.FromString(whole))
    return records


def rows_in_wandb(run: RunDir) -> list[dict[str, Any]]:
    rows = [record.history.item for record in written_by_wandb(run) if record.HasField("history")]
    return [{"/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.mark.usefixtures("offline")
def test_weights_and_biases_has_every_step_once_after_two_attempts_and_two_monitors(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    report_to(run, "wandb")
    hooks = sys.exit, sys.excepthook
    attempt(run, first=1, last=7)
    run.close_log()
    monitor.fn(run)
    attempt(run, first=6, last=10, status="done")
    monitor.fn(run)

    rows = rows_in_wandb(run)
    losses = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [loss(step, 1) for step in range(1, 8)] + [loss(step, 2) for step in range(8, 11)]
    evaluations = [(row["_step"], row["evaluation/loss"]) for row in rows if "evaluation/loss" in row]
    assert evaluations == [(0, 2.0), (5, 0.2), (10, 0.1)]
    assert [row["_step"] for row in rows if "weight/w/values" in row] == [5, 10]
    assert all(abs(row["_timestamp"] - time.time()) < 600 for row in rows)
    assert not run.tensorboard.exists()
    assert (sys.exit, sys.excepthook) == hooks
    (begun,) = (record.run for record in written_by_wandb(run) if record.HasField("run"))
    assert (begun.run_id, begun.project, begun.display_name, begun.resume) == ("r", "onward", "r", True)
    assert begun.notes == f"Report: {run.report}"


@pytest.mark.usefixtures("offline")
def test_weights_and_biases_gets_metrics_and_the_parameters_of_mlflow_and_no_more(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, new_run())
    report_to(run, "wandb")
    attempt(run, first=1, last=2, status="done")
    run.close_log()
    monitor.fn(run)

    records = written_by_wandb(run)
    assert {record.WhichOneof("record_type") for record in records} == {
        *("header", "run", "telemetry", "summary", "history", "exit")
    }
    (begun,) = (record.run for record in records if record.HasField("run"))
    sent = {entry.key: json.loads(entry.value_json) for entry in begun.config.update}
    config = RunConfig.model_validate_json(run.config.read_bytes())
    assert sent == {"_wandb": {}, **parameters(config)}
    folder = run.root / "wandb"
    files = b"".join(file.read_bytes() for file in folder.glob("offline-run-*/run-*.wandb"))
    for secret in ("5ec4e7", socket.gethostname(), "wandb_internal"):
        assert secret.encode() not in files, secret
    assert not [file for file in folder.glob("offline-run-*/files/*") if file.is_file()], "no packages, no code"


def test_a_server_of_weights_and_biases_that_cannot_be_reached_ends_nothing_and_the_run_is_in_files(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    run = make_run(tmp_path, new_run())
    report_to(run, "wandb", "tensorboard")
    attempt(run, first=1, last=3, status="done")
    run.close_log()
    with caplog.at_level(logging.INFO):
        assert monitor.fn(run).status == "FINISHED"
    assert "cannot be reached ([Errno 111] Connection refused): this run is written to files" in caplog.text
    assert "offline-run-*` sends what is written there" in caplog.text
    assert [row["_step"] for row in rows_in_wandb(run) if "train/loss" in row] == [1, 2, 3]
    assert list(run.tensorboard.iterdir())


def test_an_error_of_a_board_is_logged_once_and_ends_that_board_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onward.infra.weights_and_biases.login_problem", lambda: "the login is gone")
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    report_to(run, "wandb", "tensorboard")
    attempt(run, first=1, last=3, status="done")
    run.close_log()
    assert monitor.fn(run).status == "FINISHED"
    said = "nothing more goes to Weights & Biases until this run is resumed: the login is gone"
    assert caplog.text.count(said) == 1
    assert len(points(tracker, "train/loss")) == 3
    assert list(run.tensorboard.iterdir())


# -- how far it is


def events_of(*lines: tuple[int, str, dict[str, object]]) -> Progress:
    history = RunHistory(Path())
    for step, kind, fields in lines:
        history.add(RECORDS[kind](attempt=1, step=step, **fields))
    return Progress(history)


START = (0, "start", {"num_steps": 100, "num_samples": 6400})


@pytest.mark.parametrize(
    ("progress", "text", "percent"),
    [
        (events_of(), "step 0/0, starting", 0.0),
        (events_of(START), "step 0/100, starting", 0.0),
        (
            events_of(START, (25, "scalars", {"values": {"train/loss": 0.123456, "train/samples_per_s": 640.0}})),
            "step 25/100, loss 0.1235, 640 samples/s, 0:00:08 left",
            25.0,
        ),
        (
            events_of(START, (25, "scalars", {"values": {"train/samples_per_s": 640.0, "train/data_wait": 0.0123}})),
            "step 25/100, 640 samples/s, data wait 1.2%, 0:00:08 left",
            25.0,
        ),
        (
            events_of(START, (1, "scalars", {"values": {"train/samples_per_s": 0.5}})),
            "step 1/100, 0.5 samples/s, 3:31:12 left",
            1.0,
        ),
        (  # a resumed attempt begins behind where the last one died, and makes those steps again
            events_of(
                *(START, (30, "scalars", {"values": {"train/loss": 1.0, "train/samples_per_s": 640.0}})),
                (20, "start", {"num_steps": 100, "num_samples": 6400}),
            ),
            "step 20/100, loss 1, 640 samples/s, 0:00:08 left",
            20.0,
        ),
    ],
)
def test_progress_as_text_and_percent(progress: Progress, text: str, percent: float) -> None:
    assert str(progress) == text
    assert progress.percent == percent


def test_the_summary_has_the_median_of_the_waits_for_data() -> None:
    lines = [(step, "scalars", {"values": {"train/data_wait": step / 100}}) for step in (1, 2, 90)]
    assert events_of(START, *lines).summary("FINISHED").data_wait == 0.02


COSTS = {"tokens_per_s": 5000.0, "tflops": 0.25, "mfu": 0.31, "memory_bytes": 2.0**31}
SPEED = {"samples_per_s": 10.0, **COSTS}


def test_the_progress_and_the_summary_say_what_training_costs() -> None:
    lines = [
        (step, "scalars", {"values": {f"train/{name}": part * value for name, value in SPEED.items()}})
        for step, part in ((1, 0.5), (2, 1.0), (3, 1.0))
    ]
    stalls = [(2, "times", {"seconds": {"checkpoint": 1.0}}), (3, "times", {"seconds": {"checkpoint": 2.5}})]
    found = events_of(START, *lines, *stalls)
    assert "10 samples/s, 5000 tokens/s, MFU 31.0%," in found.pace()
    summary = found.summary("FINISHED")
    assert summary.costs == {**COSTS, "checkpoint_stall_s": 2.5}, "medians, the greatest memory, the last sum"
    line = "10 samples/s, 5000 tokens/s, 0.25 TFLOP/s, MFU 31.0%, 2 GiB a rank, data wait 0.0%, checkpoint stall 2.5 s"
    assert cost_line(summary) == line
    # a run of an earlier version has none of these, and one that was refused before its first line has nothing to say
    assert cost_line(summary.model_copy(update={"costs": {}})) == "10 samples/s, data wait 0.0%"
    assert cost_line(events_of(START).summary("FAILED")) == cost_line(None) == ""


# -- Prefect


@pytest.mark.slow
def test_artifacts_show_the_progress_and_the_confusion_matrix(tmp_path: Path) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.testing.utilities import prefect_test_harness

    run = make_run(tmp_path, new_run())
    attempt(run, first=1, last=5)
    ended(run, 1, "out_of_memory")
    run.shards.mkdir()
    manifest = ShardManifest(key="", format="arrow", columns=(), train=(), evaluation=())
    write_record(run.shards / "manifest.json", manifest)
    log = EventWriter(run.events, attempt=1, rank=0)
    log.emit(ConfusionMatrix(step=5, loss="", counts=[[3, 1], [0, 2]]))
    log.close()
    attempt(run, first=6, last=6, status="stopped")
    run.close_log()

    @flow(name=f"shown-{uuid.uuid4().hex[:6]}")
    def shown() -> str:
        return monitor(run).status

    with prefect_test_harness(server_startup_timeout=120):
        assert shown() == "KILLED"
        with get_client(sync_client=True) as prefect:
            artifacts = prefect.read_artifacts()
    found = {artifact.key: artifact.data for artifact in artifacts}
    assert found.keys() == {"training", "classes", "attempts", "loss"}
    assert json.loads(found["attempts"]) == [
        {
            "attempt": 1,
            "kind": "out_of_memory",
            "began at step": 0,
            "ended at step": 5,
            "what happened": "rank 1 on h0 failed: CUDA out of memory",
            "what followed": "it goes on from the checkpoint of step 5 in 5 s, retry 1 of 2",
        }
    ]
    assert found["training"] == 60.0
    assert "| 0 | 3 | 1 |" in found["classes"], "the confusion matrix is a page of the run"
