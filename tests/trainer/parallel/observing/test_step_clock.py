"""The parts of the clock add up to the time since the loop began, with compilations and waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.events import EventWriter, read_events
from onward.trainer.parallel.observing import step_clock
from onward.trainer.parallel.observing.step_clock import StepClock


class Time:
    """What `time.monotonic` and the compiler's clock say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.compiled = 100.0, 0.0
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: self.now)

    def __call__(self) -> float:
        return self.compiled

    def compile(self, seconds: float) -> None:
        self.now += seconds
        self.compiled += seconds


def test_parts_compilations_and_waits_add_up_to_the_time_since_the_loop_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time = Time(monkeypatch)
    clock = StepClock(began_at=time.now, compiled_s=time)
    time.now += 5.0
    clock.begin_steps()
    with clock("evaluation"):
        time.compile(2.0)
        time.now += 1.0
    with clock("data wait"):
        time.now += 0.5
    with clock("pipeline"):
        time.compile(4.0)
        time.now += 3.0
    clock.waited(0.5)
    time.now += 0.25  # outside of all blocks
    with clock("checkpoint"):
        time.now += 1.5
    events = EventWriter(tmp_path / "events.jsonl", attempt=1, rank=0)
    clock.emit(events, 1)
    events.close()
    assert clock.seconds == {
        "setup": 5.0,
        "compile": 6.0,
        "data_wait": 0.5,
        "steps": 3.25,
        "evaluation": 1.0,
        "checkpoint": 1.5,
    }
    assert sum(clock.seconds.values()) == time.now - 100.0 == clock.elapsed_s
    assert clock.in_steps_s == 0.5 + 7.0 + 0.25, "an update takes its compilation and its wait"
    (event,) = [event for event, _ in read_events(tmp_path / "events.jsonl")]
    assert event.kind == "times"


def test_the_sums_are_written_after_an_evaluation_and_else_once_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time = Time(monkeypatch)
    clock = StepClock(began_at=time.now, compiled_s=time)
    events = EventWriter(tmp_path / "events.jsonl", attempt=1, rank=0)
    clock.begin_steps()
    clock.emit(events, 0)
    for step in range(1, 8):
        time.now += 0.4
        if step == 2:
            with clock("evaluation"):
                time.now += 0.1
        clock.emit(events, step)
    clock.emit(events, 7, now=True)
    events.close()
    assert [event.step for event, _ in read_events(tmp_path / "events.jsonl")] == [0, 2, 5, 7]


def test_hours_count_on_the_rank_that_decides_and_a_step_lasts_until_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch)
    counting = StepClock(began_at=time.now, compiled_s=time)
    other = StepClock(began_at=time.now, compiled_s=time)
    counting.begin_steps(trained_before_s=30.0, counts_hours=True)
    other.begin_steps(trained_before_s=30.0)
    steps = []
    for seconds in (1.0, 9.0, 2.0, 1.0, 1.0, 1.0):
        steps.append(counting.begin_step())
        time.now += seconds
    assert steps == [0.0, 1.0, 9.0, 9.0, 9.0, 2.0], "of the last three"
    assert (counting.trained_s, other.trained_s) == (45.0, 0.0)
