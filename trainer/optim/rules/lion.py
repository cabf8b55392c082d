"""Lion."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.rule import ElementwiseRule
from onward.trainer.optim.weight_settings import WeightSettings


class Lion(ElementwiseRule):
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675): the sign of an interpolated momentum.

    w ← w - η·( sign(αm + (1-α)g) + λw );  m ← βm + (1-β)g

    Each element moves by η in every step, so the usual rate is a tenth of Adam's (1e-4), and the usual weight decay ten
    times Adam's. Where two layouts round a gradient near 0 differently, its sign and so a step of η may differ.
    """

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and moments in place."""
        (moment,) = moments
        settings: WeightSettings = group["settings"]
        # a new tensor: the moment itself is interpolated with another factor below
        direction = torch._foreach_lerp(moment, gradients, 1.0 - settings.alpha)
        torch._foreach_sign_(direction)
        if settings.weight_decay:
            torch._foreach_mul_(weights, 1.0 - group["lr"] * settings.weight_decay)
        torch._foreach_add_(weights, direction, alpha=-group["lr"])
        torch._foreach_lerp_(moment, gradients, 1.0 - settings.beta)
