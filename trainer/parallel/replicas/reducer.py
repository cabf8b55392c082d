"""Gradients of all replicas become one: flat buckets, sent while the backward pass still runs.

Every trained weight's `.grad` is a view into a flat bucket. A bucket is sent as soon as its last gradient is
there, in an order that never changes, so a resumed run reduces exactly as the first did (torch's DDP rebuilds its
buckets after the first iteration and does not).

    backward:   head ------------------------------> embedding
    bucket 0    ####|==== all-reduce ====|
    bucket 1            ####|==== all-reduce ====|
    reduce()                                     waits for what is left

A weight that several stages hold is in a bucket of the first of them alone: the others send theirs there when the
backward pass is over, and get the result back. What several ranks hold has the same bits on all of them.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.config.sections import ParallelConfig
from onward.trainer.distributed.processes import MPIContext, new_group
from onward.trainer.distributed.weights import Weight
from onward.trainer.parallel.replicas.adasum import Adasum
from onward.trainer.parallel.replicas.transport import Carrier, Direct, Job, Summed, check_device, open_channel

BUCKET_BYTES = 4 << 20
"""Large enough that latency does not count, small enough that the first leaves early."""
STRETCH = 4096
"""Elements whose squares are added in fp32; what they come to is added in fp64."""


class Reducer:
    """Owns the gradients of one rank's stages and makes those of all ranks one (ZeRO 0).

    weights: all that this rank stores, in graph order; the same names on the replicas of its stages and on the ranks
    that divide them, and possibly none. shared: name -> pipeline coordinates that hold it, for every weight of the
    model that several stages hold. timeout_s: longest wait for other ranks.
    Collective: every rank of the world makes one.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        mesh: DeviceMesh,
        mpi: MPIContext,
        config: ParallelConfig,
        shared: Mapping[str, Sequence[int]],
        timeout_s: float,
    ) -> None:
        self.weights = list(weights)
        self._group = mesh.get_group("data")
        self._device = mpi.device
        self._trained = [weight for weight in self.weights if weight.trained]
        self._statistics = [weight for weight in self.weights if _is_statistic(weight)]
        self._before: list[Tensor] = []
        self._num_moves = 0
        self._common = CommonTensors(self.weights, mesh)
        self._tied = TiedGradients(self._trained, shared=shared, mesh=mesh, timeout_s=timeout_s)
        self._carrier = _carrier(config, mesh, mpi, timeout_s=timeout_s)

        # ranks that divide weights pack them alike, so it is the size of the whole that counts
        most = BUCKET_BYTES * mesh.get_group("tensor").size()
        own = [weight for weight in self._trained if weight.name not in shared]
        led = [weight for weight in self._trained if self._tied.leads(weight)]
        early, late = ([_Bucket(members) for members in _pack(group[::-1], most)] for group in (own, led))
        self._buckets = early + late
        self._num_early = len(early)
        self._led = {id(weight) for weight in (*own, *led)}
        self._gradients = [bucket.gradients for bucket in self._buckets]
        for weight in self._trained:
            if id(weight) not in self._led:
                weight.tensor.grad = torch.zeros_like(weight.tensor, requires_grad=False)
                self._gradients.append(gradient(weight))
        self.num_sent = 0
        """Buckets on their way, or there, in this step."""
        self._num_backwards = 0
        for bucket in early:
            for place, weight in enumerate(bucket.weights):
                weight.tensor.register_post_accumulate_grad_hook(self._arrived(bucket, place))  # type: ignore[no-untyped-call]

    def begin(self, num_backwards: int, num_targets: float = 1.0, num_moves: int = 1) -> None:
        """A step begins: gradients to zero, in place; running statistics are remembered.

        Each stage of this rank will see `num_backwards` backward passes; what the last of them completes is sent at
        once, what they leave out in `reduce`. num_targets: of this replica; Adasum weighs hosts by it. num_moves: how
        often this replica's running statistics will move.
        """
        self._before = [weight.tensor.clone() for weight in self._statistics]
        self._num_moves = num_moves
        self._num_backwards, self.num_sent = num_backwards, 0
        self._carrier.begin(num_targets)
        for tensor in self._gradients:
            tensor.zero_()
        for bucket in self._buckets:
            bucket.missing, bucket.arrivals = len(bucket.weights), [0] * len(bucket.weights)

    def reduce(self) -> Tensor:
        """Complete the gradients of all ranks: replicas, and stages that share a weight. Join the statistics.

        Returns the global L2 norm (see `global_norm`). Collective: every rank of the world.
        """
        self._num_backwards = 0
        self._send(self._num_early)
        self._tied.gather()
        self._send(len(self._buckets))
        self._join_statistics()
        for bucket in self._buckets:
            bucket.wait()
        self._common.spread(gradient(weight) for weight in self._common.weights if id(weight) in self._led)
        self._tied.spread()
        # replicas hold the same gradients by now: each measures its share of them
        return global_norm(self._trained[self._group.rank() :: self._group.size()], self._device)

    def undo(self) -> None:
        """Put the running statistics back to what they were at `begin`: a skipped update changes nothing."""
        for weight, before in zip(self._statistics, self._before, strict=True):
            weight.tensor.copy_(before)

    def close(self) -> None:
        """No gradient will be sent any more. Collective: every rank of the world."""
        self._carrier.close()

    def multiply(self, factor: float) -> None:
        """Scale every gradient in place: un-scaling and clipping are one multiplication."""
        if factor != 1.0:
            for tensor in self._gradients:
                tensor.mul_(factor)

    def sum(self, *numbers: float | Tensor) -> list[float]:
        """Sum a few numbers over all ranks. Collective: every rank of the world."""
        return sum_over_world(numbers, self._device)

    def _arrived(self, bucket: _Bucket, place: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._num_backwards == 0:  # not within a step
                return
            bucket.arrivals[place] += 1
            assert bucket.arrivals[place] <= self._num_backwards, "more backward passes than `begin` was told"
            if bucket.arrivals[place] == self._num_backwards:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send_ready()

        return hook

    def _send_ready(self) -> None:
        # in index order, whatever order they filled in: collectives must match across replicas
        ready = self.num_sent
        while ready < self._num_early and self._buckets[ready].missing == 0:
            ready += 1
        self._send(ready)

    def _send(self, until: int) -> None:
        for bucket in self._buckets[self.num_sent : until]:
            bucket.send(self._carrier)
        self.num_sent = max(self.num_sent, until)

    def _join_statistics(self) -> None:
        """As if the replicas' micro-batches had come one after the other, in their order, to one rank.

        A move s <- r s + (1 - r) new is linear. So n moves of one replica are s <- r^n s + what it adds, and what each
        adds decays with the moves of those after it.
        """
        tensors = [weight.tensor for weight in self._statistics]
        if self._group.size() > 1 and tensors:
            moves = torch.zeros(self._group.size(), device=self._device)
            moves[self._group.rank()] = self._num_moves
            dist.all_reduce(moves, group=self._group)
            own, later, all_ = self._num_moves, int(moves[self._group.rank() + 1 :].sum()), int(moves.sum())
            pairs = list(zip(self._statistics, self._before, strict=True))
            adds = [w.remains**later * (w.tensor - w.remains**own * before).flatten() for w, before in pairs]
            flat = torch.cat(adds)
            dist.all_reduce(flat, group=self._group)
            for (weight, before), added in zip(pairs, _parts(flat, tensors), strict=True):
                weight.tensor.copy_(weight.remains**all_ * before + added)
        self._common.spread(weight.tensor for weight in self._common.weights if _is_statistic(weight))


class TiedGradients:
    """Sums the gradients of weights of which several stages hold a copy each.

    weights: the trained ones of this rank. shared: name -> pipeline coordinates of its holders, the same on every
    rank. The first holder's first copy leads: sums come together in it, and results leave from it, so that all copies
    get the same bits. Collective: every rank of the world makes one.
    """

    def __init__(
        self, weights: Iterable[Weight], *, shared: Mapping[str, Sequence[int]], mesh: DeviceMesh, timeout_s: float
    ) -> None:
        ranks = mesh.mesh.flatten(1, 2)  # [pipeline, data, tensor]
        groups = {}
        for holders in sorted({tuple(sorted(holders)) for holders in shared.values()}):
            columns = ranks[list(holders)].flatten(1).T.tolist() if len(holders) > 1 else []
            joined = [new_group(column, timeout_s=timeout_s) for column in columns]
            groups[holders] = next((group for group in joined if group is not None), None)
        copies: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.name in shared:
                copies.setdefault(weight.name, []).append(weight)
        self._copies = [(copies[name], groups[tuple(sorted(shared[name]))]) for name in sorted(copies)]
        self._leads = {id(held[0]) for held, group in self._copies if group is None or group.rank() == 0}

    def leads(self, weight: Weight) -> bool:
        """Whether this copy is the one that the others are summed into."""
        return id(weight) in self._leads

    def sum(self) -> None:
        """Give every copy the sum of all. Collective: every rank of the pipeline axis."""
        self.gather()
        self.spread()

    def gather(self) -> None:
        """Sum all copies into the leading one; the others are then undefined. Collective: as `sum`."""
        for (first, *others), group in self._copies:
            for other in others:
                gradient(first).add_(gradient(other))
            if group is not None:
                dist.reduce(gradient(first), group=group, group_dst=0)

    def spread(self) -> None:
        """Copy the leading one to all others. Collective: as `sum`."""
        for (first, *others), group in self._copies:
            if group is not None:
                dist.broadcast(gradient(first), group=group, group_src=0)
            for other in others:
                gradient(other).copy_(gradient(first))


class CommonTensors:
    """Weights of which all tensor-parallel ranks hold the same part: these must stay the same, bit by bit.

    Their gradients are equal in exact arithmetic. But a sum over replicas adds in an order that depends on where in
    a buffer a number lies, and neighbours may differ in that. Collective: the tensor axis.
    """

    def __init__(self, weights: Sequence[Weight], mesh: DeviceMesh) -> None:
        self._group = mesh.get_group("tensor")
        self.weights: list[Weight] = []
        if self._group.size() > 1 and weights:
            places = [zlib.crc32(repr((weight.name, weight.placement)).encode()) for weight in weights]
            own = torch.tensor(places, device=weights[0].tensor.device)
            table = [torch.empty_like(own) for _ in range(self._group.size())]
            dist.all_gather(table, own, group=self._group)
            alike = (torch.stack(table) == own).all(0).tolist()
            self.weights = [weight for weight, same in zip(weights, alike, strict=True) if same]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors, which belong to `weights`, from the first rank to the others. Collective: as the class."""
        given = list(tensors)
        if self._group.size() > 1 and given:
            dist._broadcast_coalesced(self._group, given, BUCKET_BYTES, 0)  # type: ignore[attr-defined]


def global_norm(weights: Iterable[Weight], device: torch.device) -> Tensor:
    """L2 norm of the gradients that count, over all ranks, in fp64: a scalar on `device`, equal on all.

    It is not finite if any gradient is not, counted or not. Where ranks hold the same gradients, each may give a part
    of them, as long as together they give all. Collective: every rank of the world; one without weights gives none.
    """
    squares = [_square(gradient(weight)) * weight.counted for weight in weights]  # ∞ x 0 is not finite either
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


def gradient(weight: Weight) -> Tensor:
    """The gradient of a trained weight, which must be there."""
    assert weight.tensor.grad is not None, f"{weight.name} has no gradient"
    return weight.tensor.grad


class _Bucket:
    """Some weights, and one flat tensor that holds their gradients."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.missing = 0
        self.arrivals: list[int] = []
        """Of each weight: backward passes that have left their part."""
        self._wait: Job | None = None
        tensors = [weight.tensor for weight in weights]
        total = sum(tensor.numel() for tensor in tensors)
        self.gradients = torch.zeros(total, dtype=tensors[0].dtype, device=tensors[0].device)
        for tensor, part in zip(tensors, _parts(self.gradients, tensors), strict=True):
            tensor.grad = part

    def send(self, carrier: Carrier) -> None:
        self._wait = carrier.start(self.gradients, [weight.tensor.numel() for weight in self.weights])

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


def _carrier(config: ParallelConfig, mesh: DeviceMesh, mpi: MPIContext, *, timeout_s: float) -> Carrier:
    """What the configuration asks for. Collective: the world."""
    transport, compression = config.transport, config.compression
    check_device(transport, mpi.device)
    group = mesh.get_group("data")
    if group.size() == 1 or (config.reduction, transport, compression) == ("sum", "torch", "none"):
        return Direct(group)
    if config.reduction == "adasum":
        return Adasum(
            mesh=mesh,
            mpi=mpi,
            transport=transport,
            compression=compression,
            timeout_s=timeout_s,
            ranks_per_host=config.adasum_ranks,
        )
    # a channel of its own: statistics are summed by the main thread at the same time, in the mesh's group
    columns = mesh.mesh.flatten(1, 2).transpose(1, 2).flatten(0, 1).tolist()  # [pipeline x tensor, data]
    channel = open_channel(transport, columns, timeout_s=timeout_s)
    assert channel is not None
    return Summed(channel, compression=compression, device=mpi.device, timeout_s=timeout_s)


def _is_statistic(weight: Weight) -> bool:
    return not isinstance(weight.tensor, nn.Parameter) and weight.tensor.is_floating_point()


def _square(tensor: Tensor) -> Tensor:
    """Sum of squares, fp64. One sum in fp32 over 16 million elements is wrong in the fourth digit, so it is many."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    rows = flat[: flat.numel() // STRETCH * STRETCH].view(-1, STRETCH)
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1), flat[rows.numel() :].abs()])
    return norms.double().square().sum()


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a flat tensor, one for each of `like`, of its shape."""
    ends = itertools.accumulate(tensor.numel() for tensor in like)
    return [flat[end - tensor.numel() : end].view_as(tensor) for tensor, end in zip(like, ends, strict=True)]


def _pack(weights: list[Weight], most: int) -> list[list[Weight]]:
    """Consecutive weights of one dtype, up to `most` bytes of the whole ones together (a larger one stands alone)."""
    packs: list[list[Weight]] = []
    size = 0
    for weight in weights:
        bytes_ = math.prod(weight.placement.shape) * weight.tensor.element_size()
        if not packs or size + bytes_ > most or packs[-1][0].tensor.dtype != weight.tensor.dtype:
            packs.append([])
            size = 0
        packs[-1].append(weight)
        size += bytes_
    return packs
