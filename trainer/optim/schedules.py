"""Learning rate schedules: pure functions of the step, so there is no state to save."""

from __future__ import annotations

import math
from collections.abc import Callable

from onward.trainer.config.sections.training import OptimizerConfig, ScheduleConfig

DECAY: dict[str, Callable[[float], float]] = {
    "none": lambda p: 1.0,
    "constant": lambda p: 1.0,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "linear": lambda p: 1.0 - p,
    "poly": lambda p: math.sqrt(1.0 - p),
}
"""Schedule mode -> factor at progress p in [0, 1] after the warm-up."""


def learning_rate(step: int, *, optimizer: OptimizerConfig, schedule: ScheduleConfig, num_steps: int) -> float:
    """Return the learning rate of weight update `step`, counted from 1 to `num_steps`.

        factor 1 |        .
                 |     .     .
                 |  .           .   linear
           floor |.                .
                 +--------+--------+---   r = step / num_steps
                 0        w        1

    With r = step / num_steps and w = warmup_ratio the factor is r/w up to w. From there on it falls with
    p = (r-w)/(1-w + 1/num_steps) from 1 towards `floor`, which the step after the last one would reach: an update at
    rate 0 would be wasted. In compatible modes the last update has rate 0, and cosine and poly use p = r, so the rate
    jumps at the end of the warm-up, as in ORT training (orttraining, models/runner/training_util.h).
    """
    # at most 1, because cosine would rise again and the root in poly would be of a negative number
    progress = min(step / num_steps, 1.0)
    warmup = schedule.warmup_ratio
    curve = schedule.mode.removesuffix("_compatible")
    compatible = schedule.is_compatible
    is_warming_up = progress < warmup or (progress == warmup and not compatible)
    if schedule.mode != "none" and is_warming_up:
        return optimizer.learning_rate * progress / warmup
    if not compatible:
        progress = (progress - warmup) / (1.0 - warmup + 1.0 / num_steps)
    elif curve == "linear":
        progress = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    # the decay goes from 1 to 0, the factor from 1 to `floor`
    factor = schedule.floor + (1.0 - schedule.floor) * DECAY[curve](progress)
    return optimizer.learning_rate * factor
