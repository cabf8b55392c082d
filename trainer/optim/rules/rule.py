"""What all update rules share: groups of weights, the state of each weight, and the walk over both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group, in_fp32, segments
from onward.trainer.optim.weight_settings import WeightSettings

TotalSquares = Callable[[Tensor], Tensor]
"""[2, weights] squared norms of this rank's parts of weights and directions -> those of the full weights."""
Dims = tuple[int, ...]
"""Dimensions of a weight."""
State = Callable[[WeightSettings, int], dict[str, Dims]]
"""Settings and number of dimensions of a weight -> field of its state -> the dimensions of the weight that it has:
all for a moment, () for one number."""


@dataclass(frozen=True)
class UpdateContext:
    """What an update needs besides its own tensors."""

    seed: int
    """Seed of stochastic rounding."""
    total_squares: TotalSquares
    state: State


class Rule(torch.optim.Optimizer):
    """An update rule over groups of weights. All state exists before the first step, so it can be saved at any time."""

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        self._config = config
        self._context = context
        super().__init__(groups, {"lr": config.learning_rate})
        make_state(self, config, context.state)


def make_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig, state: State) -> None:
    """Create the state of every weight, zeros."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            for field, dims in state(group["settings"], weight.ndim).items():
                shape = [weight.shape[dim] for dim in dims]
                dtype = torch.float32 if field == "step" else state_dtype(field, config, weight.dtype)
                optimizer.state[weight][field] = torch.zeros(shape, dtype=dtype, device=weight.device)


def state_dtype(field: str, config: OptimizerConfig, of_weight: torch.dtype) -> torch.dtype:
    """Return the type of a field of the state."""
    return torch.bfloat16 if config.moments == "bf16" and field.startswith("moment_") else of_weight


def gradients_of(group: Group) -> list[Tensor]:
    """Return the gradients of a group's weights."""
    gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
    assert len(gradients) == len(group["params"]), "a weight has no gradient"
    return gradients


class ElementwiseRule(Rule, ABC):
    """A rule that computes each element of a weight from the same element of its gradient and moments."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            gradients = [gradient.contiguous() for gradient in gradients_of(group)]
            for batch in segments(self, group, gradients):
                with in_fp32(batch, seed=self._context.seed, step=group["updates"]) as moments:
                    weights, given = [each.weight for each in batch], [each.gradient for each in batch]
                    self.update(group, weights, given, *moments)

    @abstractmethod
    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and moments in place, segment by segment. Gradients may be overwritten.

        group: of `group["updates"]` updates, this one included.
        """


def all_dims(*names: str) -> State:
    """Return the state of a rule that counts its updates and keeps tensors of the shape of the weight."""

    def state(settings: WeightSettings, ndim: int) -> dict[str, Dims]:
        return {"step": (), **{name: tuple(range(ndim)) for name in names}}

    return state
