"""When [stop] ends a run, as tables; real runs: tests/equivalence/test_ends_early.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError
from onward.trainer.run.outcomes.stopping import after_evaluation, command_to_go_on, is_out_of_time, reason_to_end
from onward.trainer.run.records import StopState


def configured(stop: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    settings = {"model": {"path": Path("m.onnx")}, "data": {"source": "d"}} | sections
    return build_config(settings | {"train": {"num_steps": 100, "evaluation_period": 10}, "stop": stop})


def ended_at(values: list[float], config: RunConfig) -> int | None:
    """The place of the evaluation after which the run ends; the first one is before the first step."""
    state = after_evaluation(StopState(), values[0], config.stop, config.checkpoint).model_copy(update={"latest": None})
    for place, value in enumerate(values[1:], start=1):
        state = after_evaluation(state, value, config.stop, config.checkpoint)
        if reason_to_end(state, config.stop, config.checkpoint):
            return place
    return None


ACCURACY = {"best_metric": "evaluation/accuracy"}


@pytest.mark.parametrize(
    ("stop", "values", "place"),
    [
        ({}, [1, 2, 3, 4], None),
        ({"patience": 2}, [0.9, 0.7, 0.5, 0.6, 0.5, 0.4], 4),
        ({"patience": 2}, [0.9, 0.7, 0.8, 0.6, 0.7, 0.5], None),
        ({"patience": 2, "minimum_gain": 0.01}, [0.9, 0.7, 0.5, 0.495, 0.48, 0.497], None),
        ({"patience": 2, "minimum_gain": 0.01}, [0.9, 0.7, 0.5, 0.495, 0.491, 0.3], 4),
        ({"patience": 1}, [0.9, 0.9], 1),  # an equal value is no improvement
        ({"patience": 2}, [0.9, math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 0.9, math.nan, 0.8], None),
        ({"target": 0.5}, [0.9, 0.7, 0.5, 0.4], 2),
        ({"target": 0.5}, [0.4, 0.7, 0.6], None),  # the file that came in does not count
        ({"target": 0.5}, [0.9, math.nan, 0.6], None),
        ({"target": -1.0, "patience": 1}, [0.9, 0.7, -2.0], 2),
    ],
)
def test_patience_and_target_follow_the_loss(stop: dict[str, Any], values: list[float], place: int | None) -> None:
    assert ended_at(values, configured(stop)) == place


@pytest.mark.parametrize(
    ("stop", "values", "place"),
    [
        ({"patience": 2}, [0.1, 0.7, 0.5, 0.7], 3),
        ({"target": 0.7}, [0.1, 0.6, 0.7], 2),
        ({"patience": 1}, [0.1, 0.6, 0.7, 0.7], 3),
    ],
)
def test_of_an_accuracy_the_greatest_is_the_best_without_saying_so(
    stop: dict[str, Any], values: list[float], place: int
) -> None:
    assert ended_at(values, configured(stop, checkpoint=ACCURACY)) == place


def test_the_time_limit_is_of_all_attempts_and_the_command_raises_it() -> None:
    config = configured({"max_hours": 2})
    assert not is_out_of_time(StopState(trained_s=7199.0), config.stop)
    assert is_out_of_time(StopState(trained_s=7200.0), config.stop)
    late = StopState(trained_s=7236.0)
    assert reason_to_end(late, config.stop, config.checkpoint) == "stop.max_hours = 2: 2.01 hours of training"
    assert command_to_go_on(late, config.stop, config.checkpoint, "0de1") == "onward resume 0de1 stop.max_hours=4.01"
    assert not is_out_of_time(StopState(trained_s=1e9), configured({}).stop)


def test_the_reason_has_the_numbers() -> None:
    config = configured({"patience": 3, "minimum_gain": 0.01, "target": 0.1})
    waiting = StopState(best=0.25, latest=0.3, evaluations_since=3)
    assert reason_to_end(waiting, config.stop, config.checkpoint) == (
        "stop.patience = 3: evaluation/loss did not improve on 0.25 by more than 0.01 in 3 evaluations"
    )
    assert command_to_go_on(waiting, config.stop, config.checkpoint, "r") == "onward resume r stop.patience=6"
    reached = StopState(best=0.1, latest=0.0625)
    assert reason_to_end(reached, config.stop, config.checkpoint) == "stop.target = 0.1: evaluation/loss is 0.0625"
    assert command_to_go_on(reached, config.stop, config.checkpoint, "r") == ""


NO_EVALUATION = {"num_steps": 9, "evaluation_period": 0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"stop": {"patience": 2}, "train": NO_EVALUATION},
            r"stop.patience 2 count evaluations, but train.evaluation_period is 0",
        ),
        (
            {"stop": {"patience": 2, "target": 0.5}, "train": NO_EVALUATION},
            r"stop.patience 2 and stop.target 0.5 count",
        ),
        ({"stop": {"minimum_gain": 0.1}}, r"stop.minimum_gain 0.1 has no effect without stop.patience"),
        ({"checkpoint": {"best_metric": "accuracy"}}, r"checkpoint.best_metric: no evaluation measures 'accuracy'"),
        ({"stop": {"patience": -1}}, r"stop.patience"),
        ({"stop": {"target": math.nan}}, r"stop.target"),
    ],
)
def test_what_cannot_be_followed_is_refused(sections: dict[str, Any], message: str) -> None:
    settings = {"model": {"path": Path("m.onnx")}, "data": {"source": "d"}, "train": {"num_steps": 9}} | sections
    with pytest.raises(ConfigError, match=message):
        build_config(settings)
