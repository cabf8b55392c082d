"""Decide whether a run ends before its last step: pure functions of [stop] and of values that all ranks share.

    evaluation of      step 0   10     20     30     40     50      patience = 2, minimum_gain = 0.01
    loss               0.900  0.700  0.500  0.495  0.480  0.497
    best               0.900  0.700  0.500  0.500  0.480  0.480     0.495 gains 0.005 only, 0.480 gains 0.02
    evaluations_since  0      0      0      1      0      1

The state is a part of every checkpoint, so a run that was killed and resumed ends at the same step.
"""

from __future__ import annotations

import math

from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.run.records import StopState


def after_evaluation(state: StopState, value: float, stop: StopConfig, checkpoint: CheckpointConfig) -> StopState:
    """Return the state after an evaluation in which the metric of [stop] had this value. NaN is no improvement."""
    if math.isnan(value):
        improved = False
    else:
        improved = state.best is None or _gain(value, state.best, checkpoint) > stop.minimum_gain
    return state.model_copy(
        update={
            "best": value if improved else state.best,
            "latest": value,
            "evaluations_since": 0 if improved else state.evaluations_since + 1,
        }
    )


def reason_to_end(state: StopState, stop: StopConfig, checkpoint: CheckpointConfig) -> str:
    """Return why a run in this state ends before its last step, "" if it goes on.

    It is one sentence that begins with the setting: "stop.patience = 2: evaluation/loss ...".
    """
    name = checkpoint.best_metric
    # the target before the patience: reaching it is a success, and is said as one
    if stop.target is not None and state.latest is not None and _gain(state.latest, stop.target, checkpoint) >= 0:
        return f"stop.target = {stop.target:g}: {name} is {state.latest:.6g}"
    if 0 < stop.patience <= state.evaluations_since:
        gain = f" by more than {stop.minimum_gain:g}" if stop.minimum_gain else ""
        best = "NaN" if state.best is None else f"{state.best:.6g}"
        return (
            f"stop.patience = {stop.patience}: {name} did not improve on {best}{gain} in {state.evaluations_since} "
            "evaluations"
        )
    if is_out_of_time(state, stop):
        return f"stop.max_hours = {stop.max_hours:g}: {state.trained_s / 3600:.3g} hours of training"
    return ""


def is_out_of_time(state: StopState, stop: StopConfig) -> bool:
    """Return whether the training has taken as long as `stop.max_hours` allows."""
    return 0 < stop.max_hours * 3600 <= state.trained_s


def command_to_go_on(state: StopState, stop: StopConfig, checkpoint: CheckpointConfig, run_id: str) -> str:
    """Return the command that lets a run which has ended in this state train for as long again; "" after a target."""
    setting = reason_to_end(state, stop, checkpoint).partition(" = ")[0]
    limits = {
        # the counters go on, so the new limit is the old one on top of what was used
        "stop.max_hours": state.trained_s / 3600 + stop.max_hours,
        "stop.patience": state.evaluations_since + stop.patience,
    }
    return f"onward resume {run_id} {setting}={limits[setting]:.4g}" if setting in limits else ""


def _gain(value: float, over: float, checkpoint: CheckpointConfig) -> float:
    return value - over if checkpoint.greatest_is_best else over - value
