"""The event log survives a crash whole, is followed by offset, and the heartbeat ends a process that is stuck."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onward.trainer.events import Beat, EventWriter, Heartbeat, Scalars, last_beat, read_events


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
