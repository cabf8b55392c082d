"""The pace of a training: read off its event log, and kept under a key that holds what decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.events import CheckpointSaved, Event, Scalars, Started, Times
from onward.trainer.run.history import RunHistory
from onward.trainer.run.timing.step_timing import Pace, key_of, pace_of, settings_of_pace


def start(step: int = 0, attempt: int = 1) -> Event:
    return Started(attempt=attempt, step=step, num_steps=9)


def line(step: int, step_s: float, wait: float = 0.25, attempt: int = 1) -> Event:
    return Scalars(attempt=attempt, step=step, values={"train/step_s": step_s, "train/data_wait": wait})


def times(step: int, **seconds: float) -> Event:
    return Times(attempt=1, step=step, seconds=seconds)


def pace(events: list[Event], *, batch: int, first_steps: int = 1) -> Pace | None:
    history = RunHistory(Path())
    for event in events:
        history.add(event)
    return pace_of(history, batch=batch, first_steps=first_steps)


def test_the_first_steps_do_not_count_and_the_median_of_the_others_does() -> None:
    found = pace([start(), *(line(step, s) for step, s in enumerate((9.0, 5.0, 1.0, 2.0, 8.0), 1))], batch=6)
    assert found is not None
    assert (found.step_s, found.steps, found.samples_per_s, found.data_wait) == (3.5, 4, 6 / 3.5, 0.25)
    found = pace([start(), *(line(step, s) for step, s in enumerate((9.0, 5.0, 1.0), 1))], batch=6, first_steps=2)
    assert found is not None
    assert (found.step_s, found.steps) == (1.0, 1)


def test_a_line_of_many_steps_that_holds_the_first_one_is_left_out_if_there_is_another() -> None:
    found = pace([start(), line(10, 9.0), line(20, 2.0)], batch=1)
    assert found is not None
    assert (found.step_s, found.steps) == (2.0, 10)
    alone = pace([start(), line(4, 9.0)], batch=1)
    assert alone is not None
    assert (alone.step_s, alone.steps) == (9.0, 4)
    assert pace([start(), times(0, setup=1.0)], batch=1) is None


def test_the_newest_attempt_counts_from_where_it_has_begun() -> None:
    events = [start(), line(1, 50.0), line(2, 50.0), start(step=7, attempt=2), line(8, 40.0, attempt=2)]
    events += [line(9, 3.0, attempt=2)]
    found = pace(events, batch=1)
    assert found is not None
    assert (found.step_s, found.steps) == (3.0, 1)


def test_evaluations_checkpoints_and_loading_are_read_off_the_times() -> None:
    events = [
        start(),
        times(0, setup=4.0, compile=2.0, evaluation=0.0, checkpoint=0.0),
        times(0, setup=4.0, compile=2.0, evaluation=5.0, checkpoint=0.0),
        line(1, 1.0),
        times(1, setup=4.0, compile=2.0, evaluation=8.0, checkpoint=0.0),
        CheckpointSaved(attempt=1, step=1),
        CheckpointSaved(attempt=1, step=2),
        times(2, setup=4.0, compile=2.0, evaluation=8.0, checkpoint=1.0),
    ]
    found = pace(events, batch=1)
    assert found is not None
    assert (found.setup_s, found.compile_s, found.evaluation_s, found.checkpoint_s) == (4.0, 2.0, 3.0, 0.5)


# -- the key


def config(**sections: dict[str, Any]) -> RunConfig:
    given: dict[str, dict[str, Any]] = {
        "model": {"path": Path("m.onnx")},
        "data": {"source": "digits"},
        "train": {"num_steps": 4, "global_batch_size": 8},
    }
    return build_config({name: given.get(name, {}) | sections.get(name, {}) for name in given.keys() | sections.keys()})


KEY = key_of("structure", settings_of_pace(config()), "machine")


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"global_batch_size": 16}},
        {"train": {"gradient_accumulation_steps": 2}},
        {"parallel": {"data": 2}},
        {"parallel": {"zero": 1, "data": 2}},
        {"precision": {"compute": "bf16"}},
        {"graph": {"compile": True}},
        {"recompute": {"mode": "whole"}},
        {"optimizer": {"name": "lamb"}},
        {"launch": {"threads_per_rank": 1}},
        {"model": {"freeze": ("a*",)}},
        {"lora": {"weights": ("a*",)}},
        {"data": {"image_size": 64}},
        {"average": {"kind": "ema"}},
    ],
    ids=str,
)
def test_what_changes_the_time_of_a_step_changes_the_key(sections: dict[str, dict[str, Any]]) -> None:
    assert key_of("structure", settings_of_pace(config(**sections)), "machine") != KEY


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"num_steps": 400, "seed": 3, "log_period": 10, "evaluation_period": 7}},
        {"optimizer": {"learning_rate": 0.5, "weight_decay": 0.1}},
        {"schedule": {"mode": "cosine", "warmup_ratio": 0.5}},
        {"checkpoint": {"period": 7}},
        {"export": {"variants": ("fp16",)}},
        {"data": {"source": "other.npz"}},
        {"launch": {"retries": 9}},
        {"stop": {"max_hours": 1.0}},
        {"monitor": {"experiment": "other"}},
    ],
    ids=str,
)
def test_what_does_not_change_it_keeps_the_key(sections: dict[str, dict[str, Any]]) -> None:
    assert key_of("structure", settings_of_pace(config(**sections)), "machine") == KEY


def test_another_structure_or_machine_has_another_key() -> None:
    assert (
        len(
            {
                KEY,
                key_of("other", settings_of_pace(config()), "machine"),
                key_of("structure", settings_of_pace(config()), "other"),
            }
        )
        == 3
    )
