"""LAMB."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group, Segment, in_fp32, segments
from onward.trainer.optim.rules.adaptive import update_moments
from onward.trainer.optim.rules.rule import NormedRule, UpdateContext, gradients_of
from onward.trainer.optim.weight_settings import WeightSettings


class Lamb(NormedRule):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning"), with limits on the trust ratio.

    m, v, c1, c2 as in Adam;  d = λw + (m/c1) / (√(v/c2) + ε)
    w ← w - η·clamp(‖w‖/‖d‖, *trust_ratio)·d, the clamp being 1 when either norm is 0.

    Each norm is that of one full weight: the squares of its parts are summed over the ranks, once per step.
    Source: orttraining, cuda/optimizer/lamb.cu. A step overwrites the gradients with the directions, which would need
    as much memory again.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        super().__init__(groups, config, context)
        limits = [each.trust_ratio for group in groups for each in [group["settings"]] * len(group["params"])]
        # [2, weights], in the order given
        self._limits = torch.empty(2, len(limits), dtype=torch.float64, device=self.places.device)
        self._limits[:, self.places] = self._limits.new_tensor(limits).view(-1, 2).t()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient. Collective: every rank of the axes that shard the weights."""
        directions = [self._directions(group) for group in self.param_groups]
        lengths, norms = self.full_norms(directions)
        ratios = (lengths / norms).clamp(*self._limits)
        # a weight of zeros would never change (ratio 0), and a direction of zeros would divide by 0
        ratios = torch.where((lengths > 0) & (norms > 0), ratios, 1.0).float()
        in_groups = ratios[self.places].split_with_sizes([len(direction) for direction in directions])
        for group, direction, own in zip(self.param_groups, directions, in_groups, strict=True):
            if direction:
                # the ratio of a full weight holds for this rank's part of it as well
                torch._foreach_mul_(direction, list(own.unbind()))
                torch._foreach_add_(group["params"], direction, alpha=-group["lr"])

    def _directions(self, group: Group) -> list[Tensor]:
        # the gradients themselves where they are contiguous: they are overwritten
        directions = [gradient.contiguous() for gradient in gradients_of(group)]
        for batch in segments(self, group, directions):
            with in_fp32(batch, seed=self._context.seed, step=group["updates"]) as moments:
                self._turn(group, batch, *moments)
        return directions

    def _turn(self, group: Group, batch: list[Segment], first: list[Tensor], second: list[Tensor]) -> None:
        """Overwrite the gradients with the directions d."""
        settings: WeightSettings = group["settings"]
        corrected = settings.bias_correction
        updates = group["updates"]
        gradients = [segment.gradient for segment in batch]
        update_moments(settings, gradients, first, second)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1.0 - settings.beta**updates) if corrected else 1.0)
        torch._foreach_add_(root, settings.epsilon)
        # the gradients are not needed any more: their memory takes the directions
        torch._foreach_copy_(gradients, first)
        torch._foreach_div_(gradients, root)
        torch._foreach_div_(gradients, 1.0 - settings.alpha**updates if corrected else 1.0)
        # after the quotient: decoupled decay, which the moments do not see, but the trust ratio does
        torch._foreach_add_(gradients, [segment.weight for segment in batch], alpha=settings.weight_decay)
