"""SGD with momentum."""

from __future__ import annotations

import torch

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.rule import UpdateContext, make_state
from onward.trainer.optim.weight_settings import WeightSettings


def sgd(groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> torch.optim.SGD:
    """Return SGD: g ← g + λw; b ← momentum·b + g; w ← w - η·(g + momentum·b if nesterov else b).

    This is torch's SGD, with momentum buffers made before the first step, so that they can always be saved.
    """
    # torch's own keys, for momentum by pattern
    groups = [{**group, "momentum": group["settings"].momentum} for group in groups]
    optimizer = torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    make_state(optimizer, config, context.state)
    return optimizer


def sgd_state(settings: WeightSettings, ndim: int) -> tuple[str, ...]:
    """Return the fields of the state: a velocity where there is momentum."""
    return ("momentum_buffer",) if settings.momentum else ()
