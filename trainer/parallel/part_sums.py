"""Sum over the ranks that hold the other parts of a weight: norms, row sums, whole matrices.

a weight [4, 4] over tensor 2 x ZeRO 2            each rank fills in its part of zeros [4, 4]; the sum over both
                                                  axes is the full matrix, exactly, on all four
    tensor 0   tensor 1                           x x . .     . . x x     . . . .     . . . .
    # # | # #   shard 0                           x x . .  +  . . x x  +  . . . .  +  . . . .
    # # | # #                                     . . . .     . . . .     x x . .     . . x x
    ----+----                                     . . . .     . . . .     x x . .     . . x x
    # # | # #   shard 1
    # # | # #
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.distributed.weights import Placement, Weight


class PartSums:
    """Sums over the axes that shard each of this rank's trained weights. Weights are numbered in their order.

    weights: before ZeRO sharded them; held: what this rank holds of them; placements: of those which are sharded over
    the tensor axis. All calls are collective: every rank of the axes that shard the weights, with equal numbers.
    """

    def __init__(
        self, weights: Sequence[Weight], held: Sequence[Weight], mesh: DeviceMesh, placements: Mapping[str, Placement]
    ) -> None:
        pairs = [(part, weight) for part, weight in zip(held, weights, strict=True) if weight.trained]
        # by the tensor: the placement of a part may be that of the weight, and the other ranks' parts empty
        by_zero = [part.tensor is not weight.tensor for part, weight in pairs]
        by_tensor = [weight.name in placements for _, weight in pairs]
        device = next((part.tensor.device for part, _ in pairs), None)
        # masks are copied to the device of the weights once: the host waits for a copy
        self._axes = [
            (mesh.get_group(axis), sharded, torch.tensor(sharded, dtype=torch.bool, device=device))
            for axis, sharded in (("shard", by_zero), ("tensor", by_tensor))
            if mesh.get_group(axis).size() > 1
        ]

    def squares(self, squares: Tensor) -> Tensor:
        """Return the squared norms of the full weights, given those [..., weights] of this rank's parts."""
        for group, _, mask in self._axes:
            # replicated weights must not be counted once per rank, so they go in as 0 and come out as they were
            parts = torch.where(mask, squares, 0.0)
            dist.all_reduce(parts, group=group)
            squares = torch.where(mask, parts, squares)
        return squares

    def sum(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Return the sum of each tensor over the ranks that hold parts of the weight of that number.

        tensors: [...] each; those of one weight have the same shape on all ranks.
        """
        found = list(tensors)
        for group, sharded, _ in self._axes:
            chosen = [place for place, number in enumerate(numbers) if sharded[number]]
            if not chosen:
                continue
            # one message for all of them
            flat = torch.cat([found[place].reshape(-1) for place in chosen])
            dist.all_reduce(flat, group=group)
            pieces = torch.split(flat, [found[place].numel() for place in chosen])
            for place, piece in zip(chosen, pieces, strict=True):
                found[place] = piece.view(found[place].shape)
        return found

    def share(self, number: int) -> tuple[int, int]:
        """Return (number of this rank among those that hold parts of a weight, how many they are)."""
        rank = 0
        size = 1
        for group, sharded, _ in self._axes:
            if sharded[number]:
                # like the digits of a number: ZeRO's rank first, the tensor rank last
                rank = rank * group.size() + group.rank()
                size = size * group.size()
        return rank, size
