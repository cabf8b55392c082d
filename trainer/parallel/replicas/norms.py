"""Sums over all ranks: the norm of the gradients, and a few numbers of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.distributed.weights import Weight

ROW_ELEMENTS = 4096
"""Elements whose squares the CPU sums in fp32; the sums of such rows are added in fp64."""


def gradient(weight: Weight) -> Tensor:
    """Return the gradient of a trained weight, which must exist."""
    assert weight.tensor.grad is not None, f"{weight.name} has no gradient"
    return weight.tensor.grad


def local_squares(weights: Iterable[Weight], device: torch.device) -> Tensor:
    """Return the sum of squares of the counted gradients among these: an fp64 scalar on `device`.

    It is not finite if any gradient is not, counted or not. Summed over all ranks, of which those that hold the same
    gradients pass disjoint subsets of them, it is the square of the global L2 norm.
    """
    gradients: dict[bool, list[Tensor]] = {True: [], False: []}
    for weight in weights:
        gradients[weight.counted].append(gradient(weight).detach())
    counted, others = (_squares(gradients[kind], device) for kind in (True, False))
    # an infinity times 0 is NaN, so it is noticed as well
    return counted + 0.0 * others


def sum_over_world(numbers: Sequence[float | Tensor], device: torch.device) -> list[float]:
    """Sum a few numbers over all ranks, in fp64. Collective: every rank of the world.

    One all-reduce, and one read of the device, which waits for everything computed so far.
    """
    # `full` passes a number of the host to a kernel; a tensor made on the host would be copied, and waited for
    totals = torch.stack(
        [
            number.to(device, torch.float64)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=torch.float64, device=device)
            for number in numbers
        ]
    )
    if dist.get_world_size() > 1:
        dist.all_reduce(totals)
    return totals.tolist()


def _squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of some tensors, fp64. One fp32 sum over 16 million elements is wrong in the fourth
    digit."""
    # A GPU computes all norms in a few kernels. The CPU converts one element after the other to fp64, which takes less
    # time than the row-wise sums only for small tensors.
    small: list[Tensor] = []
    large: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel():  # ZeRO leaves some ranks empty shards
            (large if tensor.device.type == "cpu" and tensor.numel() >= ROW_ELEMENTS else small).append(tensor)
    # squared in fp64: a norm of fp32 numbers is representable where its square may overflow
    found = [torch.stack(torch._foreach_norm(small, dtype=torch.float64))] if small else []
    found += [_row_norms(_in_memory_order(tensor)) for tensor in large]
    return torch.cat(found).square().sum() if found else torch.zeros((), dtype=torch.float64, device=device)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements, flat, without a copy for weights in channels-last format."""
    dense = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return (tensor.permute(0, 2, 3, 1) if dense else tensor).reshape(-1)


def _row_norms(flat: Tensor) -> Tensor:
    """Return the norms of the full rows of ROW_ELEMENTS elements, then the magnitudes of the other elements, fp64."""
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    rows = flat[: flat.numel() // ROW_ELEMENTS * ROW_ELEMENTS].view(-1, ROW_ELEMENTS)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1), flat[rows.numel() :].abs()]).double()
