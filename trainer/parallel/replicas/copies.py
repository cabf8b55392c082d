"""Keep the copies of a weight on several ranks equal, bit by bit.

    tied weight, pipeline 2                       replicated weight, tensor 2

    stage 0: embedding   stage 1: head            tensor rank 0        tensor rank 1
        grad 0               grad 1                  grad                 grad (equal but for rounding)
        grad 0 + grad 1  <---  gather                  |---- broadcast ----->|
          |---- broadcast ----->|

`TiedGradients` is for a weight that several pipeline stages hold, `ReplicatedWeights` for one that all
tensor-parallel ranks hold in full.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.distributed.mesh import new_group
from onward.trainer.distributed.weights import Weight
from onward.trainer.parallel.replicas.norms import gradient

BROADCAST_BYTES = 4 << 20
"""Tensors are broadcast in messages of this size."""


class TiedGradients:
    """Sums the gradients of weights of which several stages hold a copy each.

    weights: the trained ones of this rank. shared: name -> pipeline coordinates that hold it, the same on every rank.
    The copies are summed into the first copy of the first coordinate, and the sum is broadcast from there, so that all
    copies get the same bits. Collective: every rank of the world makes one.
    """

    def __init__(
        self, weights: Iterable[Weight], *, shared: Mapping[str, Sequence[int]], mesh: DeviceMesh, timeout_s: float
    ) -> None:
        ranks = mesh.mesh.flatten(1, 2)  # [pipeline, data, tensor]
        groups = {}
        # every rank creates all groups in the same order, as new_group requires
        for holders in sorted({tuple(sorted(holders)) for holders in shared.values()}):
            # a column: the ranks of one replica and tensor coordinate that hold the weight
            columns = ranks[list(holders)].flatten(1).T.tolist() if len(holders) > 1 else []
            joined = [new_group(column, timeout_s=timeout_s) for column in columns]
            groups[holders] = next((group for group in joined if group is not None), None)
        copies: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.name in shared:
                copies.setdefault(weight.name, []).append(weight)
        # sorted by name: every rank calls the collectives of a group in the same order
        self._copies = [(copies[name], groups[tuple(sorted(shared[name]))]) for name in sorted(copies)]
        self._first: set[Weight] = set()
        for held, group in self._copies:
            if group is None or group.rank() == 0:
                self._first.add(held[0])

    def is_first(self, weight: Weight) -> bool:
        """Return whether the other copies are summed into this one."""
        return weight in self._first

    def sum(self) -> None:
        """Give every copy the sum of all. Collective: every rank of the pipeline axis."""
        self.gather()
        self.broadcast()

    def gather(self) -> None:
        """Sum all copies into the first one; the others are undefined afterwards. Collective: as `sum`."""
        for (first, *others), group in self._copies:
            for other in others:
                gradient(first).add_(gradient(other))
            if group is not None:
                dist.reduce(gradient(first), group=group, group_dst=0)

    def broadcast(self) -> None:
        """Copy the first copy to all others. Collective: as `sum`."""
        for (first, *others), group in self._copies:
            if group is not None:
                dist.broadcast(gradient(first), group=group, group_src=0)
            for other in others:
                gradient(other).copy_(gradient(first))


class ReplicatedWeights:
    """The weights of which all tensor-parallel ranks hold the same part, and which must stay equal bit by bit.

    Their gradients are equal in exact arithmetic. But an all-reduce over the replicas adds in an order that depends on
    the position of a number in the buffer, so the ranks may differ by rounding. With sequence parallelism each rank
    has a part of some of them, the gradient from its own rows. Collective: the tensor axis.
    """

    def __init__(self, weights: Sequence[Weight], mesh: DeviceMesh) -> None:
        self._group = mesh.get_group("tensor")
        self.weights: list[Weight] = []
        if self._group.size() > 1 and weights:
            # a checksum of name and placement says whether the other ranks hold the same part
            own = torch.tensor(
                [zlib.crc32(repr((weight.name, weight.placement)).encode()) for weight in weights],
                device=weights[0].tensor.device,
            )
            table = [torch.empty_like(own) for _ in range(self._group.size())]
            dist.all_gather(table, own, group=self._group)
            equal = (torch.stack(table) == own).all(0).tolist()
            self.weights = [weight for weight, same in zip(weights, equal, strict=True) if same]

    def equalise(self, weights: Iterable[Weight]) -> None:
        """Give all ranks the same gradients of `weights`: the sums of partial ones, else those of the first rank.

        Collective: as the class.
        """
        given = [weight for weight in weights if self._group.size() > 1]
        # one message for all partial gradients
        if parts := [gradient(weight) for weight in given if weight.partial]:
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=self._group)
            sums = flat.split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])
        # these are equal but for rounding, so that any rank's will do
        self.broadcast(gradient(weight) for weight in given if not weight.partial)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors, which belong to `weights`, from the first rank to the others. Collective: as the class."""
        given = list(tensors)
        if self._group.size() > 1 and given:
            dist._broadcast_coalesced(self._group, given, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
