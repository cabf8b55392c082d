"""The event log survives a crash whole, is followed by offset, and the heartbeat ends a process that is stuck."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onward.trainer.events import (
    RECORDS,
    Beat,
    CheckpointSaved,
    ConfusionMatrix,
    Ended,
    Evaluated,
    Event,
    EventWriter,
    Heartbeat,
    Histogram,
    NonFiniteLoss,
    ObjectPrecision,
    Scalars,
    Started,
    Times,
    Usage,
    last_beat,
    read_events,
)
from tests.support.ranks import ROOT


def write(path: Path, *steps: int, attempt: int = 1, rank: int = 0) -> None:
    writer = EventWriter(path, attempt=attempt, rank=rank)
    for step in steps:
        writer.scalars(step, loss=step / 10)
    writer.close()


def test_only_rank_0_writes(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", 1, rank=1)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_reader_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 1, 2)
    seen = list(read_events(path))
    assert [event.step for event, _ in seen] == [1, 2]
    write(path, 3)
    ((event, _),) = read_events(path, seen[-1][1])
    assert isinstance(event, Scalars)
    assert (event.step, event.values) == (3, {"train/loss": 0.3})


RECORDED = {
    Started: {
        "num_steps": 9,
        "num_samples": 288,
        "flops_per_sample": None,
        "resumed": "",
        "damaged": ["step-000000006"],
    },
    Scalars: {"values": {"train/loss": 0.5, "train/mfu": math.inf}},
    Evaluated: {"values": {"evaluation/loss": 1e-05}},
    ConfusionMatrix: {"loss": "", "counts": [[[3, 1], [0, 2]]]},
    ObjectPrecision: {
        "loss": "",
        "classes": [
            {
                "of_class": 1,
                "objects": 3,
                "map": 0.5,
                "map_50": 0.75,
                "map_small": 0.5,
                "map_medium": None,
                "map_large": None,
                "curve": [1.0, 0.5],
            }
        ],
    },
    Histogram: {"name": "weight/w", "counts": [1, 2], "edges": [-1.0, 0.0, 1.0]},
    NonFiniteLoss: {"text": "the evaluation loss is nan"},
    CheckpointSaved: {"path": "step-000000003"},
    Times: {"seconds": {"setup": 0.5}},
    Ended: {"status": "done", "ended_early": ""},
    Usage: {"node": "gpu-2", "values": {"cpu_utilization_percentage": 93.1}},
}


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record.__name__)
def test_each_event_is_a_line_with_the_fields_that_were_given_and_is_read_as_its_record(
    tmp_path: Path, record: type[Event]
) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", attempt=2, rank=0)
    writer.emit(record(step=3, **RECORDED[record]))
    writer.close()
    line = json.loads((tmp_path / "events.jsonl").read_bytes())
    kind = next(kind for kind, each in RECORDS.items() if each is record)
    assert list(line)[:4] == ["at_ms", "attempt", "step", "kind"]
    assert line == {"at_ms": line["at_ms"], "attempt": 2, "step": 3, "kind": kind, **RECORDED[record]}
    ((event, _),) = read_events(tmp_path / "events.jsonl")
    assert event == record(at_ms=line["at_ms"], attempt=2, step=3, **RECORDED[record])
    assert RECORDED.keys() == set(RECORDS.values())


def test_lines_of_earlier_and_of_newer_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"at_ms":1,"attempt":1,"step":0,"kind":"start","num_steps":9,"num_samples":288,"num_parameters":7}\n'
        '{"at_ms":2,"attempt":1,"step":4,"kind":"checkpoint","path":"step-000000004"}\n'
        '{"at_ms":3,"attempt":1,"step":4,"kind":"end","status":"stopped","mood":"good"}\n'
        '{"at_ms":4,"attempt":1,"step":5,"kind":"rollback","to":4}\n'
    )
    started, saved, ended, newer = (event for event, _ in read_events(path))
    assert started == Started(at_ms=1, attempt=1, step=0, num_steps=9, num_samples=288, num_parameters=7)
    assert isinstance(saved, CheckpointSaved)
    assert ended == Ended(at_ms=3, attempt=1, step=4, status="stopped")
    assert (type(newer), newer.step, newer.kind) == (Event, 5, "rollback")


def test_no_field_of_an_event_is_looked_up_by_its_text() -> None:
    """`event.fields["values"]` was possible before events were records, and no type checker sees a wrong name there."""
    sources = [path for folder in ("flows", "tasks", "trainer") for path in (ROOT / folder).rglob("*.py")]
    looked_up = re.compile(r"""\bfields(\.get\(|\[)f?["']""")
    assert [path.name for path in sources if looked_up.search(path.read_text())] == ["events.py"], "which reads lines"


@pytest.mark.parametrize("torn", [b"", b'{"at_ms": 1, "att', b"x" * 200_000])
def test_a_line_torn_by_a_crash_is_read_by_nobody_and_removed_by_the_next_attempt(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 1)
    with path.open("ab") as file:
        file.write(torn)
    assert [event.step for event, _ in read_events(path)] == [1]
    write(path, 2, attempt=2)
    assert [(event.step, event.attempt) for event, _ in read_events(path)] == [(1, 1), (2, 2)]
    assert torn == b"" or torn not in path.read_bytes()


def test_a_log_that_is_nothing_but_a_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"at_ms"')
    write(path, 1)
    assert [event.step for event, _ in read_events(path)] == [1]


def test_a_log_that_is_not_there_yet_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none")) == []


def test_lines_that_are_no_events_are_stepped_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"[]\nnonsense\n{}\n")
    write(path, 1)
    assert [event.step for event, _ in read_events(path)] == [1]


def test_a_process_stuck_holding_the_interpreter_is_ended_with_its_traceback(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from onward.trainer.events import Heartbeat\n"
        "beat = Heartbeat(Path(sys.argv[1])); beat.start(rank=0, timeout_s=0.5)\n"
        "def stuck():\n"
        "    import ctypes; ctypes.PyDLL(None).sleep(60)\n"  # PyDLL keeps the lock: no Python thread could act
        "stuck()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "heartbeat")], capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == 1
    assert "in stuck" in ended.stderr
    assert (tmp_path / "heartbeat").exists()


def test_before_its_start_the_heartbeat_only_remembers_the_step(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.beat(7)
    assert heartbeat.step == 7
    assert not (tmp_path / "heartbeat").exists()


def test_while_a_rank_compiles_the_job_may_be_silent_for_longer(tmp_path: Path) -> None:
    """Until the first step of the attempt is complete, and in evaluations; the launcher reads it in the file."""
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(path)
    try:
        heartbeat.start(rank=0, timeout_s=60, compile_timeout_s=900)
        assert replace(last_beat(path), step_s=0.0) == Beat(step=0, silence_s=902)
        heartbeat.beat(7)
        heartbeat.beat()
        assert last_beat(path).silence_s == 902
        heartbeat.beat(8)
        assert replace(last_beat(path), step_s=0.0) == Beat(step=8, silence_s=62)
        with heartbeat.compiling():
            assert last_beat(path).silence_s == 902
        assert last_beat(path).silence_s == 62
        heartbeat.new_shapes = True
        heartbeat.beat(9)
        assert replace(last_beat(path), step_s=0.0) == Beat(step=9, silence_s=902)
        heartbeat.start(rank=0, timeout_s=60)
        with heartbeat.compiling():
            heartbeat.beat(10)
            assert last_beat(path).silence_s == 62, "nothing is compiled"
    finally:
        heartbeat.stop()


def test_until_the_first_step_is_complete_the_job_may_be_silent_for_the_start_timeout(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(path)
    try:
        heartbeat.start(rank=0, timeout_s=5, start_timeout_s=180)
        assert last_beat(path) == Beat(step=0, silence_s=182), "imports, the model's file and its assembly take long"
        heartbeat.beat(7)
        assert last_beat(path).silence_s == 182
        heartbeat.beat(8)
        assert replace(last_beat(path), step_s=0.0) == Beat(step=8, silence_s=7)
        with heartbeat.compiling():
            assert last_beat(path).silence_s == 7
        heartbeat.start(rank=0, timeout_s=600, start_timeout_s=180)
        assert last_beat(path).silence_s == 602, "the longer of the two"
    finally:
        heartbeat.stop()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 1, "other": 2}'])
def test_a_heartbeat_file_that_is_being_written_says_nothing(tmp_path: Path, content: str) -> None:
    assert last_beat(tmp_path / "none") == Beat()
    (tmp_path / "heartbeat").write_text(content)
    assert last_beat(tmp_path / "heartbeat") == Beat()
