"""Adafactor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.trainer.distributed.weights import Placement, Weight, slices
from onward.trainer.optim.moments import Group, count_step
from onward.trainer.optim.rules.rule import NormedRule, dims_of, gradients_of, spread
from onward.trainer.optim.weight_settings import WeightSettings

DECAY_EXPONENT = 0.8
SMALLEST_SCALE = 1e-3
LARGEST_UPDATE = 1.0
"""Of the paper, its section 9, as torch.optim.Adafactor has them by default: the exponent c of the decay 1 - t^-c of
the mean squares; ε₂, the least RMS of a weight by which its step is scaled; d, the largest RMS of an update before."""


@dataclass(frozen=True)
class _Update:
    """One weight in one step."""

    of: Weight
    number: int
    gradient: Tensor
    """Contiguous; overwritten with the update."""
    state: dict[str, Tensor]
    group: Group

    @property
    def is_factored(self) -> bool:
        return "row" in self.state


class Adafactor(NormedRule):
    """Adafactor (Shazeer, Stern 2018, https://arxiv.org/abs/1804.04235) as torch.optim.Adafactor computes it.

    Of a matrix with gradient G [R, C] (the last two dimensions of a larger tensor), β̂ = 1 - t^-0.8:

        r ← β̂r + (1-β̂)·mean of G² along rows [R];  c ← β̂c + (1-β̂)·mean along columns [C];  V = r c' / max(mean r, ε)
        U = G / √max(V, ε²);  w ← (1 - ηλ)w - min(η, 1/√t)·max(ε₂, RMS(w)) · U / max(1, RMS(U)/d)

    For vectors V is not factored. So a matrix has R + C numbers of state in place of Adam's 2 R C. The rate is relative
    to the size of the weight; the usual one is 1e-2.

    Means and RMS are those of the full weight: sums over the ranks that hold its parts. Collective.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient. Collective: every rank of the axes that shard the weights."""
        # all groups together, so that each kind of sum takes one collective for all weights
        by_group = [self._updates(group) for group in self.param_groups]
        updates = [update for each in by_group for update in each]
        factored = [update for update in updates if update.is_factored]
        self._update_factors(factored)
        means = self._means_of_rows(factored)
        for update in updates:
            self._divide(update, means.get(update.number))
        # the gradients hold U from here on
        lengths, sizes = self.full_norms([[update.gradient for update in each] for each in by_group])
        for update, length, size in zip(updates, lengths[self.places], sizes[self.places], strict=True):
            settings: WeightSettings = update.group["settings"]
            t = update.group["updates"]
            rate = update.group["lr"]
            # an RMS is the norm over the root of the number of elements
            root = math.sqrt(max(math.prod(update.of.placement.shape), 1))
            step = (length / root).clamp(min=SMALLEST_SCALE) * min(rate, 1.0 / math.sqrt(t))
            step = step / (size / (root * LARGEST_UPDATE)).clamp(min=1.0)
            if settings.weight_decay:
                update.of.tensor.mul_(1.0 - rate * settings.weight_decay)
            update.of.tensor.sub_(update.gradient.mul_(step.to(update.gradient.dtype)))

    def _updates(self, group: Group) -> list[_Update]:
        """Count the step."""
        states = count_step(self, group)
        gradients = [gradient.contiguous() for gradient in gradients_of(group)]
        rows = zip(group["weights"], group["numbers"], gradients, states, strict=True)
        return [_Update(*row, group) for row in rows]

    def _update_factors(self, updates: Sequence[_Update]) -> None:
        squares = [update.gradient.square() for update in updates]
        for field, dim in (("row", -1), ("column", -2)):
            # sums are added up over the ranks, and become means by the length of the full dimension
            sums = self._sum(updates, [square.sum(dim) for square in squares], field)
            for update, total in zip(updates, sums, strict=True):
                total /= update.of.placement.shape[dim]
                # lerp by 1 - β̂: β̂ · old + (1 - β̂) · new
                update.state[field].lerp_(total, self._new_share(update.group))

    def _means_of_rows(self, updates: Sequence[_Update]) -> dict[int, Tensor]:
        """Return number of a weight -> mean of its full `row` along the last dimension, kept with length 1."""
        sums = []
        for update in updates:
            shape = update.of.placement.shape
            local = update.of.placement.local_shape
            # ranks that hold other columns hold the same rows: each counts its share of them
            sums.append(update.state["row"].sum(-1) * (local[-1] / shape[-1] / shape[-2]))
        totals = self._sum(updates, sums, "mean")
        return {update.number: total.unsqueeze(-1) for update, total in zip(updates, totals, strict=True)}

    def _sum(self, updates: Sequence[_Update], local: list[Tensor], field: str) -> list[Tensor]:
        """Return this rank's part of the sums over all parts of each weight, of tensors with the dims of a field."""
        parts = self._context.parts
        # weights that this rank holds in full keep their own sums
        found = list(local)
        chosen = [place for place, update in enumerate(updates) if parts.share(update.number)[1] > 1]
        places = [_placement(updates[place].of.placement, field) for place in chosen]
        full = []
        for place, placement in zip(chosen, places, strict=True):
            # each rank fills in its part of the full rows or columns: the sum adds what overlaps and places what does
            # not
            full.append(spread(local[place], placement))
        totals = parts.sum(full, [updates[place].number for place in chosen])
        for place, placement, total in zip(chosen, places, totals, strict=True):
            for held, box in placement.boxes():
                found[place][slices(held)] = total[slices(box)]
        return found

    def _divide(self, update: _Update, mean: Tensor | None) -> None:
        """Overwrite the gradient with U."""
        settings: WeightSettings = update.group["settings"]
        if mean is None:
            variance = update.state["variance"]
            variance.lerp_(update.gradient.square(), self._new_share(update.group))
        else:
            row = update.state["row"] / mean.clamp(min=settings.epsilon)
            variance = row.unsqueeze(-1) * update.state["column"].unsqueeze(-2)
        update.gradient.mul_(variance.clamp(min=settings.epsilon**2).rsqrt_())

    def _new_share(self, group: Group) -> float:
        return float(group["updates"] ** -DECAY_EXPONENT)


def adafactor_state(settings: WeightSettings, ndim: int) -> tuple[str, ...]:
    """Return the fields of the state: mean squares of rows and columns, or of each element of a vector."""
    return ("step", "variance") if ndim < 2 else ("step", "row", "column")


def _placement(of: Placement, field: str) -> Placement:
    """Return the placement of this rank's part of a field, or of the means of rows."""
    ndim = len(of.shape)
    return of.of_dims(range(ndim - 2) if field == "mean" else dims_of(field, ndim))
