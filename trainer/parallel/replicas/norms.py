"""Sums over all ranks: the norm of the gradients, and a few numbers of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.distributed.weights import Weight

ROW_ELEMENTS = 4096
"""Elements whose squares are summed in fp32; the sums of such rows are added in fp64."""


def gradient(weight: Weight) -> Tensor:
    """Return the gradient of a trained weight, which must exist."""
    assert weight.tensor.grad is not None, f"{weight.name} has no gradient"
    return weight.tensor.grad


def global_norm(weights: Iterable[Weight], device: torch.device) -> Tensor:
    """Return the L2 norm of the counted gradients of all ranks: an fp64 scalar on `device`, equal on all ranks.

    It is not finite if any gradient is not, counted or not. Ranks that hold the same gradients may pass disjoint
    subsets of them. Collective: every rank of the world, with an empty list where it has none.
    """
    # an infinity in an uncounted gradient times 0 is NaN, so it is noticed as well
    squares = [_square(gradient(weight)) * weight.counted for weight in weights]
    total = torch.stack([part.to(device) for part in squares]).sum() if squares else torch.zeros((), device=device)
    total = total.double()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def sum_over_world(numbers: Sequence[float | Tensor], device: torch.device) -> list[float]:
    """Sum a few numbers over all ranks, in fp64. Collective: every rank of the world."""
    totals = torch.stack([torch.as_tensor(number, dtype=torch.float64).cpu() for number in numbers])
    if dist.get_world_size() > 1:
        totals = totals.to(device)
        dist.all_reduce(totals)
    return totals.tolist()


def _square(tensor: Tensor) -> Tensor:
    """Return the sum of squares, fp64. One fp32 sum over 16 million elements is wrong in the fourth digit."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    rows = flat[: flat.numel() // ROW_ELEMENTS * ROW_ELEMENTS].view(-1, ROW_ELEMENTS)
    # squared in fp64: a norm of fp32 numbers is representable where its square may overflow
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1), flat[rows.numel() :].abs()])
    return norms.double().square().sum()
