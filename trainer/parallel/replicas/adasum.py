"""Combine the gradients of replicas by Adasum: the mean of parallel gradients, the sum of orthogonal ones.

Adasum combines the gradients a and b of one weight on two hosts (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021; `AdasumAllReduce` of ORT training), each weight by itself:

    adasum(a, b) = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b          a factor is 1 where ‖·‖² < √(smallest double)

It is the mean of a and b if they are equal, and their sum if they are orthogonal. More than two hosts are combined in
a binary tree of pairs. If their number is not a power of two, each host beyond it is first combined with one of the
others, and receives the result at the end:

    5 hosts     0 1 2 3 4   ->   04 1 2 3   ->   041 23   ->   all,   then the result is sent to 4

The operands are *mean* gradients, each over the targets of one host. Inside a host the gradients of the replicas are
summed, as for one large batch. The reducer passes gᵣ = (sum over the targets of replica r) / N, where N is the number
of targets of the step on all replicas, so that Σ gᵣ is the mean over all of them. If replica r has nᵣ targets, the
operand of host H is

    a_H = Σ gᵣ · N / Σ nᵣ     over the replicas r of H; 0 if the host has no target, and then Adasum ignores it

So the result is a_H if these are equal on all hosts, and Σ a_H if they are orthogonal. A loss scale is a common factor
of all gradients, and the result is multiplied by it.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import share
from onward.trainer.parallel.replicas.channels import Channel, open_channel
from onward.trainer.parallel.replicas.compression import COMPRESSED, add_decompressed, compress, compressed_bytes
from onward.trainer.parallel.replicas.transport import Job, background

SMALLEST_SQUARE = math.sqrt(sys.float_info.min)
CHUNK = 1 << 20
"""Elements that are converted to fp64 at a time."""


class Adasum:
    """Reduce buckets as `transport.Carrier` describes: a sum inside each host, Adasum between the hosts.

    The ranks of a host share the work: each of the first ones combines one range of the bucket with the other hosts.
    Their number is the number of replicas of the smallest host. every_rank_apart: treat each rank as a host.
    compression: of the messages between hosts. Collective: every rank of the world makes one.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        mpi: MPIContext,
        transport: str,
        compression: str,
        timeout_s: float,
        every_rank_apart: bool = False,
    ) -> None:
        ranks = mesh.mesh.flatten(1, 2).tolist()  # [pipeline][data][tensor]
        hosts = list(range(mpi.world_size)) if every_rank_apart else _hosts(mpi)
        self._hosts = _replicas_by_host([row[0] for row in ranks[0]], hosts)
        self._num_owners = min(len(replicas) for replicas in self._hosts)
        stages = range(len(ranks))
        parts = range(len(ranks[0][0]))

        def channel(replica_groups: Sequence[Sequence[int]]) -> Channel | None:
            groups = []
            for replicas in replica_groups:
                for stage in stages:
                    groups += [[ranks[stage][replica][part] for replica in replicas] for part in parts]
            return open_channel(transport, groups, timeout_s=timeout_s)

        owners = [replicas[: self._num_owners] for replicas in self._hosts]
        # every rank opens all channels in this order, because opening one is collective over the world
        self._replicas = channel([[replica for replicas in self._hosts for replica in replicas]])
        self._host = channel(self._hosts)
        self._owners = channel(owners)
        self._across = channel([list(group) for group in zip(*owners, strict=True)])
        self._parts = open_channel(transport, [row for stage in ranks for row in stage], timeout_s=timeout_s)
        self._own_host = next(
            number for number, group in enumerate(self._hosts) if mesh.get_local_rank("data") in group
        )
        self._dtype = COMPRESSED.get(compression)
        self._scale: Tensor = torch.ones((), dtype=torch.float64, device=mpi.device)
        self._background = background(mpi.device, timeout_s=timeout_s)

    def begin(self, num_targets: float) -> None:
        """Begin a step in which this replica has `num_targets` targets. Collective: the data axis."""
        self._background.send(partial(self._weigh, num_targets))

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Start to reduce a bucket [sum of `lengths`] in place; return a function that waits for it."""
        return self._background.send(partial(self._combine, flat, lengths))

    def close(self) -> None:
        """End the background communication and free the channels. Collective: every rank of the world."""
        self._background.close()
        for channel in (self._replicas, self._host, self._owners, self._across, self._parts):
            if channel is not None:
                channel.close()

    def _weigh(self, num_targets: float) -> None:
        """Compute N / Σ nᵣ of this host."""
        assert self._replicas is not None
        counts = _gathered(self._replicas, torch.full_like(self._scale, num_targets))  # host by host
        before = sum(len(replicas) for replicas in self._hosts[: self._own_host])
        own = counts[before : before + len(self._hosts[self._own_host])].sum()
        self._scale = torch.where(own > 0, counts.sum() / own, 0.0)

    def _combine(self, flat: Tensor, lengths: Sequence[int]) -> None:
        assert self._host is not None
        # a sum, not Adasum: the replicas of a host are one large batch
        self._host.sum(flat)
        # a single host has the mean over all targets already
        if len(self._hosts) == 1:
            return
        # from a part of the mean over all targets to the mean over the targets of this host
        flat.mul_(self._scale)
        stretches = [share(flat.numel(), owner, self._num_owners) for owner in range(self._num_owners)]
        if self._across is not None:
            start, stop = stretches[self._host.rank]
            self._tree(self._across, Layout(lengths, start, stop), flat[start:stop])
        for owner, (start, stop) in enumerate(stretches):
            # replicas of a host hold the same sum, so each range is combined by one of them and copied to the others
            self._host.broadcast(flat[start:stop], owner)

    def _tree(self, across: Channel, layout: Layout, vector: Tensor) -> None:
        """Combine the vectors of all hosts in place; the result has the same bits on every host."""
        # the greatest power of two that is not above the number of hosts
        power = 1 << (across.size.bit_length() - 1)
        rank = across.rank
        late = rank + power if rank < power else rank - power  # who joins whom beyond the power of two
        if late < across.size:
            # the first ones take over the vectors of the hosts beyond the power of two
            self._pair(across, layout, vector, late)
        distance = 1
        # partners differ in one bit: after log2(power) rounds each has combined with all
        while rank < power and distance < power:
            self._pair(across, layout, vector, rank ^ distance)
            distance *= 2
        if late < across.size:
            result = across.exchange(vector, late)
            vector.copy_(result if rank >= power else vector)

    def _pair(self, across: Channel, layout: Layout, vector: Tensor, peer: int) -> None:
        # the complete vectors are exchanged: the factors need products of both
        other = self._swap(across, vector, peer)
        # the same order on both sides, because the factors and the sum must be rounded alike
        first, second = (vector, other) if across.rank < peer else (other, vector)
        # each of the two computes one half, and both use both: hosts with other processors round alike
        middle = vector.numel() // 2
        mine = layout.products(first, second, *((0, middle) if across.rank < peer else (middle, vector.numel())))
        products = mine + across.exchange(mine, peer)
        for channel in (self._owners, self._parts):  # the other stretches, and other ranks' parts of divided weights
            assert channel is not None
            products = _gathered(channel, products).sum(0)
        layout.add(first, second, factors(products), into=vector)

    def _swap(self, across: Channel, vector: Tensor, peer: int) -> Tensor:
        """Exchange vectors with the peer and return the peer's.

        If messages are compressed, this rank's vector is replaced by its rounded copy, which is what the peer receives.
        """
        if self._dtype is None:
            return across.exchange(vector, peer)
        sent = torch.empty(compressed_bytes(vector.numel()), dtype=torch.uint8, device=vector.device)
        compress(vector.float(), self._dtype, sent)
        came = torch.zeros_like(vector, dtype=torch.float32)
        add_decompressed(across.exchange(sent, peer), self._dtype, came)
        # both sides must compute with the same numbers, or the copies of a weight would differ between hosts
        own = torch.zeros_like(came)
        add_decompressed(sent, self._dtype, own)
        vector.copy_(own)
        return came.to(vector.dtype)


def _gathered(channel: Channel, row: Tensor) -> Tensor:
    rows = row.new_empty(channel.size, *row.shape)
    channel.gather(row, rows)
    return rows


class Layout:
    """The positions of the tensors of a bucket (of `lengths`, one after the other) in its range `start` to `stop`."""

    def __init__(self, lengths: Sequence[int], start: int, stop: int) -> None:
        self._places: list[tuple[int, int]] = []
        # positions relative to the range: a tensor may begin before it, or lie outside
        offset = -start
        for length in lengths:
            self._places.append((max(0, offset), min(stop - start, offset + length)))
            offset += length

    def products(self, a: Tensor, b: Tensor, start: int, stop: int) -> Tensor:
        """Return (a·a, a·b, b·b) of each tensor over elements `start` to `stop` of the range: [tensors, 3] in fp64."""
        table = torch.zeros(len(self._places), 3, dtype=torch.float64, device=a.device)
        for row, (first, last) in zip(table, self._places, strict=True):
            for low, high in _chunks(max(first, start), min(last, stop)):
                # fp64: products of millions of fp32 numbers would lose the small ones
                x = a[low:high].double()
                y = b[low:high].double()
                row += torch.stack([x.dot(x), x.dot(y), y.dot(y)])
        return table

    def add(self, a: Tensor, b: Tensor, by: tuple[Tensor, Tensor], *, into: Tensor) -> None:
        """Write a times its factor plus b times its factor, tensor by tensor. `into` may be `a` or `b`.

        a, b, into: [stop - start], this range of the bucket. by: the factors of a and b, [tensors] each.
        """
        # an empty interval belongs to a tensor outside of the range
        for (first, last), one, other in zip(self._places, *by, strict=True):
            if first < last:
                torch.add(a[first:last] * one, b[first:last] * other, out=into[first:last])


def factors(products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a and of b, [n] each, from (a·a, a·b, b·b) [n, 3]."""
    aa, ab, bb = products.unbind(1)
    one, other = (torch.where(square < SMALLEST_SQUARE, 1.0, 1.0 - ab / (2.0 * square)) for square in (aa, bb))
    return one, other


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, CHUNK):
        yield low, min(low + CHUNK, stop)


def _hosts(mpi: MPIContext) -> list[int]:
    """Return a number for the host of each rank, equal for ranks of one host. Collective: every rank of the world."""
    # a checksum, because tensors are exchanged and not texts
    own = torch.tensor([zlib.crc32(mpi.host.encode())], device=mpi.device)
    table = [torch.empty_like(own) for _ in range(mpi.world_size)]
    dist.all_gather(table, own)
    return [int(host) for host in table]


def _replicas_by_host(first_ranks: Sequence[int], hosts: Sequence[int]) -> list[list[int]]:
    """Return the replicas of each host.

    A replica counts to the host of its first rank, even if it spans several: all ranks that hold parts of a weight must
    form the same pairs.
    """
    found: dict[int, list[int]] = {}
    for replica, rank in enumerate(first_ranks):
        found.setdefault(hosts[rank], []).append(replica)
    return list(found.values())
