"""Gather rows of all replicas with exact gradients, for losses that compare every sample of a step with every other.

    replica 0   rows [2, D] --.                     .-- all [5, D], its own from row 0
                               >--- all-reduce ----<
    replica 1   rows [3, D] --'                     `-- all [5, D], its own from row 2

Each replica differentiates its own part of the loss, which reads the rows of all; the gradient of a row is the sum of
what all replicas compute for it: the backward pass is an all-reduce of the same size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gathered_rows(one: Tensor, other: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Return two tensors [B, D] of all replicas [sum of B, D], and where the own rows begin.

    Replicas may have different numbers of rows, also none. Without a group, or without gradients (in evaluation, where
    a replica may have a batch alone), the own rows are all. Collective: every rank of the group.
    """
    if group is None or group.size() == 1 or not torch.is_grad_enabled():
        return one, other, 0
    counts = torch.zeros(group.size(), dtype=torch.int64, device=one.device)
    counts[group.rank()] = len(one)
    dist.all_reduce(counts, group=group)
    sizes = counts.tolist()
    at = sum(sizes[: group.rank()])
    both = _Gathered.apply(torch.stack([one, other], 1), sum(sizes), at, group)  # type: ignore[no-untyped-call]
    return both[:, 0], both[:, 1], at


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, total: int, at: int, group: dist.ProcessGroup) -> Tensor:
        context.at = at
        context.number = len(rows)
        context.group = group
        everything = rows.new_zeros(total, *rows.shape[1:])
        everything[at : at + len(rows)] = rows
        dist.all_reduce(everything, group=group)  # zeros and one part: the numbers of rows differ
        return everything

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # all_reduce writes in place, and the gradient is not this function's own
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient[context.at : context.at + context.number], None, None, None
