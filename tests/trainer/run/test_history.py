"""RunHistory: what a run's event log says, over attempts that repeat steps, while the log grows."""

from __future__ import annotations

import math
from pathlib import Path

from onward.tasks.shown.training_progress import Progress
from onward.trainer.events import CheckpointSaved, Ended, Evaluated, EventWriter, Scalars, Started, Times
from onward.trainer.run.history import TAIL_BYTES, RunHistory


def attempt(log: Path, number: int, first: int, last: int, *, ends: bool = False) -> None:
    """An attempt that makes the steps first to last; the losses of attempt 2 are above 200."""
    events = EventWriter(log, attempt=number, rank=0)
    events.emit(Started(step=first - 1, num_steps=20))
    events.emit(Times(step=first - 1, seconds={"setup": 2.0}))
    for step in range(first, last + 1):
        events.scalars(step, loss=100.0 * number + step, learning_rate=0.5)
    events.emit(Evaluated(step=last, values={"evaluation/loss": float(number)}))
    events.emit(CheckpointSaved(step=last, path=f"step-{last:09d}"))
    events.emit(Times(step=last, seconds={"setup": 2.0, "steps": 9.0, "future": 1.0}))
    if ends:
        events.emit(Ended(step=last, status="done"))
    events.close()


def test_the_steps_that_an_attempt_repeats_are_once_in_a_curve(tmp_path: Path) -> None:
    attempt(tmp_path / "events.jsonl", 1, 1, 5)
    attempt(tmp_path / "events.jsonl", 2, 4, 7, ends=True)
    history = RunHistory.of(tmp_path / "events.jsonl")
    first = [(step, 100.0 + step) for step in range(1, 6)]
    assert history.curve("train/loss").points() == [*first, (6, 206.0), (7, 207.0)]
    newest = [(step, 200.0 + step) for step in range(4, 8)]
    assert history.curve("train/loss", newest=True).points() == [*first[:3], *newest]
    assert history.attempts[1].series["train/loss"].points() == first
    assert history.curve("train/absent").points() == []
    assert history.values == {"train/loss": 207.0, "train/learning_rate": 0.5, "evaluation/loss": 2.0}
    assert [event.step for event in history.checkpoints] == [5, 7]
    assert [(number, known.end is not None) for number, known in history.attempts.items()] == [(1, False), (2, True)]


def test_the_log_is_followed_and_a_resumed_attempt_begins_at_an_earlier_step(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    history = RunHistory(log)
    assert list(history.follow()) == []
    assert (history.step, history.num_steps, history.newest.number) == (0, 0, 0)
    attempt(log, 1, 1, 5)
    assert len(list(history.follow())) == history.num_events == 10
    assert (history.step, history.num_steps, history.newest.number) == (5, 20, 1)
    events = EventWriter(log, attempt=2, rank=0)
    events.emit(Started(step=3, num_steps=30))
    events.close()
    (started,) = history.follow()
    assert (started, history.step, history.last_step, history.num_steps) == (history.start, 3, 5, 30)
    history.read()
    assert history.num_events == 11


def test_a_share_of_the_peak_that_is_called_wrong_is_none_of_its_attempt(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    history = RunHistory(log)
    for number, shares in ((1, (0.5, 0.6)), (2, (0.9, math.nan))):
        writer = EventWriter(log, attempt=number, rank=0)
        for step, share in enumerate(shares, 1):
            writer.emit(Scalars(step=step, values={"train/loss": 1.0, "train/mfu": share}))
        writer.emit(Scalars(step=3, values={"train/loss": 1.0}))
        writer.close()
    history.read()
    assert [list(attempt.series) for attempt in history.attempts.values()] == [
        ["train/loss", "train/mfu"],
        ["train/loss"],
    ]
    assert math.isnan(Progress(history).newest("mfu"))
    assert Progress(history).summary("FINISHED").costs == {"mfu": 0.55}


def test_only_the_series_that_are_asked_for_are_kept_and_the_laps_as_they_were_logged(tmp_path: Path) -> None:
    attempt(tmp_path / "events.jsonl", 1, 1, 5)
    known = RunHistory.of(tmp_path / "events.jsonl", series=("train/loss",)).attempts[1]
    assert list(known.series) == ["train/loss"]
    assert [(lap.step, lap.seconds["setup"], lap.seconds["steps"]) for lap in known.laps] == [
        (0, 2.0, 0.0),
        (5, 2.0, 9.0),
    ]
    assert known.seconds == known.laps[-1].seconds
    assert known.laps[-1].at_ms == known.last_ms


def test_the_tail_of_a_long_log_has_the_newest_values_and_lines_that_are_no_events_are_numbered(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    attempt(log, 1, 1, 2000)
    assert log.stat().st_size > 2 * TAIL_BYTES
    tail = RunHistory.of_tail(log)
    assert (tail.step, tail.values["train/loss"], tail.num_steps) == (2000, 2100.0, 0)
    assert tail.num_events < 1000
    lines = log.read_bytes().splitlines()
    lines[2] = lines[5] = b"damaged"
    log.write_bytes(b"\n".join(lines) + b"\n")
    assert RunHistory.of(log).damaged_lines == [3, 6]
    assert RunHistory.of_tail(tmp_path / "absent.jsonl").num_events == 0
