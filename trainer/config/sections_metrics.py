"""The settings of what is measured and of when a run ends early: `metrics` and [stop]."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt

from onward.trainer.config.section import Section


class StopConfig(Section):
    """When a run ends before its last step. It then saves a checkpoint and exports, as after the last step."""

    metric: str = ""
    """The metric that `patience` and `target` follow, such as `evaluation/accuracy`; empty = `checkpoint.best_metric`.
    """
    patience: NonNegativeInt = 0
    """End after this many evaluations in succession (every `train.evaluation_period` steps) without improvement; 0 =
    never. The evaluation before the first step is the first value to improve on."""
    minimum_gain: NonNegativeFloat = 0.0
    """A value counts as an improvement if it is better than the best one by more than this."""
    target: float | None = None
    """End at the first evaluation whose value is at least as good as this. Unset = no target."""
    max_hours: NonNegativeFloat = 0.0
    """End after so many hours of training over all attempts, at the end of a step; 0 = no limit. `onward resume RUN
    stop.max_hours=...` continues with a higher limit. The time after the last checkpoint of a killed attempt does not
    count."""
