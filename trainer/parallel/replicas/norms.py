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
    counted = _squares(gradients[True], device)
    # an infinity times 0 is NaN, so it is noticed as well
    return counted + 0.0 * _squares(gradients[False], device) if gradients[False] else counted


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
    found += [part for tensor in large for part in _row_norms(_in_memory_order(tensor))]
    return torch.cat(found).double().square().sum() if found else torch.zeros((), dtype=torch.float64, device=device)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements, flat, without a copy for weights in channels-last format."""
    # a sum of squares does not depend on the order of dimensions, but a copy costs memory
    dense = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return (tensor.permute(0, 2, 3, 1) if dense else tensor).reshape(-1)


def _row_norms(flat: Tensor) -> tuple[Tensor, ...]:
    """Return the norms of the full rows of ROW_ELEMENTS elements, and the other elements."""
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    num_rows, rest = divmod(flat.numel(), ROW_ELEMENTS)
    if not rest:
        return (torch.linalg.vector_norm(flat.view(num_rows, ROW_ELEMENTS), dim=1),)
    # fewer than a row of elements are squared one by one, in fp64
    rows, others = torch.split(flat, [num_rows * ROW_ELEMENTS, rest])
    return torch.linalg.vector_norm(rows.view(num_rows, ROW_ELEMENTS), dim=1), others
