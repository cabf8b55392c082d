"""Concatenate tensors of different lengths on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_lists(own: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each tensor [n] or [n, width], those of all ranks in the order of ranks; on other ranks `own`.

    n may be 0, and then width and dtype do not count. Floating-point values arrive as fp64, others as int64. Without
    a process group it returns `own`. Collective: every rank of the default group, with as many tensors.
    """
    if not own or not dist.is_initialized():
        return list(own)
    device = own[0].device
    ranks = dist.get_world_size()
    # shapes first: a gather needs tensors of one shape
    shapes = torch.tensor(
        [(len(each), each.shape[1] if each.ndim > 1 else 0, not each.is_floating_point()) for each in own],
        device=device,
    )
    table = [torch.empty_like(shapes) for _ in range(ranks)]
    dist.all_gather(table, shapes)
    gathered = []
    for place, each in enumerate(own):
        # (n, width, whether integers) of each rank
        found = [tuple(rows[place].tolist()) for rows in table]
        length = max(n for n, _, _ in found)
        width, is_integer = max(((width, is_integer) for n, width, is_integer in found if n), default=(0, 0))
        # fp64 holds every fp32, and every int64 up to 2^53
        padded = torch.zeros(length, max(width, 1), dtype=torch.float64, device=device)
        if len(each):
            padded[: len(each)] = each.reshape(len(each), -1)
        # only rank 0 needs the lists, so that only it takes memory for all of them
        parts = [torch.empty_like(padded) for _ in range(ranks)] if dist.get_rank() == 0 else None
        # shorter lists are padded with rows that are cut off below
        dist.gather(padded, parts, dst=0)
        if parts is not None:
            together = torch.cat([part[:n] for part, (n, _, _) in zip(parts, found, strict=True)])
            together = together if width else together[:, 0]
            each = together.long() if is_integer else together
        gathered.append(each)
    return gathered
