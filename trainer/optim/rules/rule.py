"""What all update rules share: groups of weights, the state of each weight, and the walk over both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, slices
from onward.trainer.optim.moments import Group, in_fp32, segments
from onward.trainer.optim.weight_settings import WeightSettings

State = Callable[[WeightSettings, int], tuple[str, ...]]
"""Settings and number of dimensions of a weight -> the fields of its state."""


def dims_of(field: str, ndim: int) -> tuple[int, ...]:
    """Return the dimensions of a weight that a field of its state has: all, but for counts and sums of rows."""
    dims = tuple(range(ndim))
    match field:
        case "step":
            return ()
        case "row":
            return dims[:-1]
        case "column":
            return (*dims[:-2], dims[-1])
        case _:
            return dims


class OtherParts(Protocol):
    """The ranks that hold the other parts of this rank's weights (trainer/parallel/part_sums.py)."""

    def squares(self, squares: Tensor) -> Tensor:
        """Return the squared norms of full weights, given those [..., weights] of this rank's parts."""

    def sum(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Return the sum of each tensor [...] over the ranks that hold parts of the weight of that number."""

    def share(self, number: int) -> tuple[int, int]:
        """Return (number of this rank among those that hold parts of a weight, how many they are)."""


class NoOtherParts:
    """For a rank that holds its weights in full."""

    def squares(self, squares: Tensor) -> Tensor:
        """Return the argument."""
        return squares

    def sum(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Return the argument."""
        return list(tensors)

    def share(self, number: int) -> tuple[int, int]:
        """Return that this rank is the only one."""
        return 0, 1


@dataclass(frozen=True)
class UpdateContext:
    """What an update needs besides its own tensors."""

    seed: int
    """Seed of stochastic rounding."""
    parts: OtherParts
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
            for field in state(group["settings"], weight.ndim):
                dims = dims_of(field, weight.ndim)
                dtype = state_dtype(field, config, weight.dtype)
                if len(dims) == weight.ndim > 0:  # in the order of the weight's elements in memory
                    state_of = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
                else:
                    shape = [weight.shape[dim] for dim in dims]
                    dtype = torch.float32 if field == "step" else dtype
                    state_of = torch.zeros(shape, dtype=dtype, device=weight.device)
                optimizer.state[weight][field] = state_of


def state_dtype(field: str, config: OptimizerConfig, of_weight: torch.dtype) -> torch.dtype:
    """Return the type of a field of the state."""
    return torch.bfloat16 if config.moments == "bf16" and field.startswith("moment_") else of_weight


def gradients_of(group: Group) -> list[Tensor]:
    """Return the gradients of a group's weights, each of the shape of its weight's local part."""
    # a missing gradient would shift this list against those of the weights and their states
    gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
    assert len(gradients) == len(group["params"]), "a weight has no gradient"
    return gradients


def spread(local: Tensor, placement: Placement) -> Tensor:
    """Return zeros of the shape of a full tensor, with this rank's part of it, [*placement.local_shape], filled in."""
    full = torch.zeros(placement.shape, dtype=local.dtype, device=local.device)
    for held, box in placement.boxes():
        full[slices(box)] = local[slices(held)]
    return full


class ElementwiseRule(Rule, ABC):
    """A rule that computes each element of a weight from the same element of its gradient and moments."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            gradients = [gradient.contiguous() for gradient in gradients_of(group)]
            for batch in segments(self, group, gradients):
                with in_fp32(batch, seed=self._context.seed, step=group["updates"]) as moments:
                    weights = [each.weight for each in batch]
                    given = [each.gradient for each in batch]
                    self.update(group, weights, given, *moments)

    @abstractmethod
    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and moments in place, segment by segment. Gradients may be overwritten.

        group: of `group["updates"]` updates, this one included.
        """


class NormedRule(Rule):
    """A rule that needs norms of full weights and of their updates."""

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        super().__init__(groups, config, context)
        # made once, because an index that is a list would be copied to the GPU in every step, and the host would wait
        device = next((weight.device for group in groups for weight in group["params"]), None)
        self.places = torch.tensor([number for group in groups for number in group["numbers"]], device=device).long()
        """Group by group, the place of each weight in the order given."""

    def full_norms(self, updates: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the L2 norms [weights] of full weights and of their updates, fp64, in the order given.

        updates: this rank's parts, group by group. fp64 keeps the square roots exact. Collective.
        """
        squares = torch.zeros(2, len(self.places), dtype=torch.float64, device=self.places.device)
        weights = [group["params"] for group in self.param_groups]
        for row, lists in zip(squares, (weights, updates), strict=True):
            if norms := [torch.stack(torch._foreach_norm(tensors)) for tensors in lists if tensors]:
                # the norms are group by group; the sum over the ranks needs one order on all of them
                row[self.places] = torch.cat([norm.double() for norm in norms]).square()
        # squares add up over the parts of a weight, norms do not
        lengths, sizes = self._context.parts.squares(squares).sqrt()
        return lengths, sizes


def counted(*fields: str) -> State:
    """Return the state of a rule that counts its updates and has these fields for every weight."""
    return lambda settings, ndim: ("step", *fields)
