"""What is gone of an event log is said: damaged lines, and the steps that were logged and are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.tasks.attempts.log_damage import damage_of_log
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.events import Evaluated, EventWriter, Started, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import write_record

PERIOD = 5


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 200 steps whose second attempt went on from step 100."""
    found = RunDir(tmp_path)
    model, data = ModelConfig(path=tmp_path / "m.onnx"), DataConfig(source="digits")
    train = TrainConfig(num_steps=200, log_period=PERIOD)
    write_record(found.config, RunConfig(model=model, data=data, train=train))
    for number, (first, last) in enumerate(((1, 123), (101, 200)), 1):
        events = EventWriter(found.events, attempt=number, rank=0)
        events.emit(Started(step=first - 1, num_steps=200))
        for step in range(first, last + 1):
            if step % PERIOD == 0 or step == last:
                events.scalars(step, loss=1.0 / step)
            if step % 50 == 0:
                events.emit(Evaluated(step=step, values={"evaluation/loss": 1.0}))
        events.close()
    found.checkpoint(200).mkdir(parents=True)
    return found


def test_of_a_whole_log_nothing_is_gone(run: RunDir) -> None:
    assert str(damage_of_log(run)) == ""
    with run.events.open("ab") as file:
        file.write(b'{"at_ms": 17000')  # a line that is being written, or that a kill has cut off
    assert str(damage_of_log(run)) == ""


@pytest.mark.parametrize(
    "line",
    [
        b"\0" * 60,
        b"\xff\xfe garbage",
        b"",
        b"[" * 5000,
        b'{"at_ms": 1, "attempt": 1, "step": "12", "kind": "scalars", "values": {}}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": "scalars", "values": {"train/loss": "low"}}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": "scalars", "values": 7}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": "scalars"}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": "start", "num_steps": "many"}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": "confusion"}',
        b'{"at_ms": 1, "attempt": 1, "step": 12, "kind": ["scalars"]}',
    ],
)
def test_a_line_that_is_no_event_is_counted_with_the_step_that_it_was(run: RunDir, line: bytes) -> None:
    lines = run.events.read_bytes().splitlines()
    lines[7] = line
    run.events.write_bytes(b"\n".join(lines) + b"\n")
    assert str(damage_of_log(run)) == (
        "events.jsonl has 1 damaged line, the first is line 8, and lacks the metrics of 1 step (35); "
        "the checkpoints do not depend on it"
    )
    assert len(list(read_events(run.events))) == len(lines) - 1


def test_steps_that_were_cut_out_or_off_are_named(run: RunDir) -> None:
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines[:3], *lines[13:-5]]))
    found = damage_of_log(run)
    assert (found.lines, found.gaps) == (0, ((15, 55), (185, 200)))
    assert "lacks the metrics of 13 steps (15 to 55, 185 to 200)" in str(found)


def test_a_deleted_log_lacks_all_steps_up_to_the_newest_checkpoint(run: RunDir) -> None:
    run.events.unlink()
    assert str(damage_of_log(run)).startswith("events.jsonl is gone, and with it the metrics of 40 steps (5 to 200);")


def test_steps_before_the_start_of_the_first_attempt_were_never_logged(run: RunDir) -> None:
    run.events.unlink()
    events = EventWriter(run.events, attempt=1, rank=0)
    events.emit(Started(step=150, num_steps=200))
    for step in range(155, 201, PERIOD):
        events.scalars(step, loss=1.0)
    events.close()
    assert str(damage_of_log(run)) == ""
