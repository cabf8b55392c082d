"""Muon: orthogonalised momentum for the matrices of hidden layers, AdamW for everything else.

ranks that hold parts of matrices A and B (tensor parallel, ZeRO), 2 here

          momentum, locally     sum of zero-filled parts     Newton-Schulz           sum, then own part
rank 0    A0        B0          A         B                  of A                    A0        B0
rank 1    A1        B1          A         B                            of B          A1        B1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.trainer.config.sections.training import MuonConfig
from onward.trainer.distributed.weights import Weight, slices
from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.adam import Adam
from onward.trainer.optim.rules.rule import gradients_of, spread
from onward.trainer.optim.weight_settings import WeightSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; chosen by Keller Jordan so that small singular values grow fastest."""
ITERATIONS = 5
"""Enough for singular values between 0.7 and 1.2; more take time and gain nothing."""
SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class Direction:
    """What is to be orthogonalised of one matrix: this rank's part of it."""

    of: Weight
    number: int
    local: Tensor
    group: Group


class Muon(Adam):
    """Muon (Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) as torch.optim.Muon computes it.

    Of a matrix W [out, in] with gradient G:

        B ← μB + (1-μ)G;  D = (1-μ)G + μB with nesterov, else B;  O = NS(D)
        W ← (1 - ηλ)W - η·s·O,   s = √max(1, out/in), or 0.2·√max(out, in) for `match_rms_adamw` (Liu et al. 2025,
                                 https://arxiv.org/abs/2502.16982, with which the rates of AdamW can be used)
        NS: X = D/‖D‖; 5 times: A = XX', X ← aX + (bA + cA²)X           (of X' where out > in)

    The usual rate is 0.02, with momentum 0.95. All other weights are updated by AdamW with a rate of its own.

    Each matrix is orthogonalised in full, with the arithmetic of one rank: ranks that hold parts of it add them up, one
    of them computes, and all take their part of the result, in turn for several matrices. Collective.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient. Collective: every rank of the axes that shard the weights."""
        directions: list[Direction] = []
        for group in self.param_groups:
            if group["settings"].rule == "muon":
                directions += self._directions(group)
            else:
                self.update_group(group)
        # on all ranks in the same order, and as many at a time as there are ranks to compute them
        directions.sort(key=lambda direction: direction.number)
        sizes = [self._context.parts.share(direction.number)[1] for direction in directions]
        # a matrix that one rank holds in full needs no communication
        for direction in [each for each, size in zip(directions, sizes, strict=True) if size == 1]:
            self._move(direction, self._orthogonal(direction, direction.local))
        sharded = [each for each, size in zip(directions, sizes, strict=True) if size > 1]
        for start in range(0, len(sharded), max(sizes, default=1)):
            self._update_together(sharded[start : start + max(sizes)])

    def _directions(self, group: Group) -> list[Direction]:
        """Update the momentum, and return what is to be orthogonalised."""
        momentum = group["settings"].momentum
        gradients = gradients_of(group)
        buffers = [self.state[weight]["momentum_buffer"] for weight in group["params"]]
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum) if self._config.nesterov else buffers
        rows = zip(group["weights"], group["numbers"], directions, strict=True)
        return [Direction(of, number, local, group) for of, number, local in rows]

    def _update_together(self, directions: Sequence[Direction]) -> None:
        """Update matrices of which this rank holds parts. Collective."""
        parts = self._context.parts
        numbers = [direction.number for direction in directions]
        # the parts do not overlap, so that the sum of zero-filled parts is the matrix itself, without rounding
        full = parts.sum([spread(each.local, each.of.placement) for each in directions], numbers)
        for place, direction in enumerate(directions):
            rank, size = parts.share(direction.number)
            # the others compute other matrices
            own = place % size == rank
            full[place] = self._orthogonal(direction, full[place]) if own else torch.zeros_like(full[place])
        # all but one rank add zeros: the second sum is a broadcast of each result
        for direction, result in zip(directions, parts.sum(full, numbers), strict=True):
            local = torch.empty_like(direction.local)
            for held, box in direction.of.placement.boxes():
                local[slices(held)] = result[slices(box)]
            self._move(direction, local)

    def _orthogonal(self, direction: Direction, full: Tensor) -> Tensor:
        outputs = direction.of.outputs or 0
        moved = full.movedim(outputs, 0)
        # contiguous: the bits of a product depend on the order of its operands in memory
        result = orthogonalised(moved.flatten(1).contiguous(), self._config.muon)
        return result.view(moved.shape).movedim(0, outputs).to(full.dtype)

    def _move(self, direction: Direction, orthogonal: Tensor) -> None:
        settings: WeightSettings = direction.group["settings"]
        rate = direction.group["lr"]
        weight = direction.of.tensor
        shape = direction.of.placement.shape
        outputs = direction.of.outputs or 0
        rows = shape[outputs]
        columns = math.prod(shape) // max(shape[outputs], 1)
        if self._config.muon.scale == "original":
            factor = math.sqrt(max(1.0, rows / max(columns, 1)))
        else:
            factor = 0.2 * math.sqrt(max(rows, columns))
        weight.mul_(1.0 - rate * settings.weight_decay)
        weight.add_(orthogonal, alpha=-rate * factor)


def orthogonalised(matrix: Tensor, config: MuonConfig) -> Tensor:
    """Return the Newton-Schulz iterate of a matrix [out, in]: UV' of its singular value decomposition, roughly."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if config.arithmetic == "bf16" else matrix.clone()
    is_tall = x.shape[0] > x.shape[1]
    # the gram matrix of the shorter side is the smaller one
    x = x.T if is_tall else x
    # the iteration converges for singular values of at most 1
    x.div_(x.norm().clamp(min=SMALLEST_NORM))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).contiguous()


def muon_state(settings: WeightSettings, ndim: int) -> tuple[str, ...]:
    """Return the fields of the state: a momentum, or the two moments of AdamW."""
    return ("momentum_buffer",) if settings.rule == "muon" else ("step", "moment_1", "moment_2")
