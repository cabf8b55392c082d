"""Adam and AdamW."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group, count_step, in_fp32, segments
from onward.trainer.optim.rules.rule import Rule, UpdateContext, gradients_of
from onward.trainer.optim.weight_settings import WeightSettings


class Adam(Rule):
    """Adam with decoupled weight decay, in both modes of ORT training.

    m ← αm + (1-α)g;  v ← βv + (1-β)g²;  c1 = 1-αᵗ, c2 = 1-βᵗ (both 1 without bias correction)

    "pytorch":      w ← w - η·( (m/c1) / (√(v/c2) + ε) + λw )             = AdamW (Loshchilov, Hutter 2019)
    "huggingface":  u = η·√c2/c1 · m / (√v + ε);  w ← w - u - ηλ(w - u)   = (w - u)(1 - ηλ)

    Source: orttraining, cuda/optimizer/adam.cu, modes 0 and 1. Computed in one pass over memory by torch's fused AdamW
    kernel. With t = ∞ it makes no bias correction; the second mode is the kernel with ε/√c2 in place of ε and without
    decay, followed by a multiplication.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        super().__init__(groups, config, context)
        self._decays_after = config.name == "adam" and config.weight_decay_mode == "huggingface"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group: Group) -> None:
        """Update the weights of one group from their gradients."""
        gradients = gradients_of(group)
        if self._config.moments == "fp32":  # nothing to round, and nothing to split
            states = count_step(self, group)
            fields = ([state[field] for state in states] for field in ("step", "moment_1", "moment_2"))
            if states:
                self._update(group, group["params"], gradients, *fields)
            return
        for batch in segments(self, group, gradients):
            with in_fp32(batch, seed=self._context.seed, step=group["updates"]) as moments:
                weights, given, steps = zip(*((each.weight, each.gradient, each.step) for each in batch), strict=True)
                self._update(group, list(weights), list(given), list(steps), *moments)

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        gradients: list[Tensor],
        steps: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
    ) -> None:
        settings: WeightSettings = group["settings"]
        epsilon = settings.epsilon
        decay = settings.weight_decay
        if not settings.bias_correction:
            # β^∞ = 0 makes both corrections 1
            steps = [torch.full_like(steps[0], math.inf)] * len(steps)
        elif self._decays_after:
            # the kernel adds ε to √(v/c2); this mode adds it to √v
            epsilon /= math.sqrt(1.0 - settings.beta ** group["updates"])
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=settings.alpha,
            beta2=settings.beta,
            weight_decay=0.0 if self._decays_after else decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )
        # (w - u)(1 - ηλ): the update is decayed, too
        if self._decays_after and decay:
            torch._foreach_mul_(weights, 1.0 - group["lr"] * decay)
