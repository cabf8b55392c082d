"""Sum the gradients of all replicas in flat buckets, which are sent while the backward pass still runs.

With several replicas, or several micro-batches, the `.grad` of every trained weight is a view into a flat bucket, in
reverse graph order:

    graph         embedding [32]   layer.weight [40]   layer.bias [8]   head [24]
    bucket 0      | head 24 | layer.bias 8 |
    bucket 1      | layer.weight 40 | embedding 32 |

    backward      head ------------------------------> embedding
    bucket 0      ####|==== all-reduce ====|                     # gradients are computed
    bucket 1              ####|==== all-reduce ====|             = sum over the data axis
    reduce()                                       waits for the rest

A bucket is sent once all its gradients are computed, and in the order of the buckets. That order never changes, so a
resumed run reduces exactly as the first one did (torch's DDP rebuilds its buckets after the first iteration).

With one replica and one micro-batch there is nothing to send and nothing to add to: each gradient is the tensor that
the backward pass has made.

A weight that several stages hold is in a bucket of the first of them only: the others add their gradients there after
the backward pass and get the sum back (`copies.TiedGradients`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.mesh import backend_of
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Weight
from onward.trainer.parallel.replicas.adasum import Adasum
from onward.trainer.parallel.replicas.channels import check_device, open_channel
from onward.trainer.parallel.replicas.copies import ReplicatedWeights, TiedGradients
from onward.trainer.parallel.replicas.norms import gradient, local_squares
from onward.trainer.parallel.replicas.transport import Carrier, Direct, Job, Summed

log = logging.getLogger(__name__)

BUCKET_BYTES = {"gloo": (4 << 20, 4 << 20), "nccl": (1 << 20, 25 << 20)}
"""Backend -> size of the first bucket and of the others. Large enough that the latency of
a message does not matter; NCCL's links, a hundred times faster, need longer messages for that. Its numbers are those of
torch's DDP. The first one is smaller, so that it is sent early: nothing else is being sent then."""


class Reducer:
    """Holds the weights of one rank's stages and sums their gradients over all ranks (ZeRO 0).

    weights: all that this rank stores, in graph order; the same names on the replicas of its stages and on the
    tensor-parallel ranks; may be empty. shared: name -> pipeline coordinates that hold it, for every weight of the
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
        self._statistics = [weight for weight in self.weights if is_statistic(weight.tensor)]
        self._retention = _flat([torch.full_like(w.tensor, w.retention, dtype=torch.float64) for w in self._statistics])
        self._before = self._retention
        """Values of the running statistics at the beginning of the step, flat."""
        self._num_batchnorm_updates = 0
        self._replicated = ReplicatedWeights(self.weights, mesh)
        # ReplicatedWeights, TiedGradients and the carrier call collectives when they are made: the same order on every
        # rank
        self._tied = TiedGradients(self._trained, shared=shared, mesh=mesh, timeout_s=timeout_s)
        self._carrier = _carrier(config, mesh, mpi, timeout_s=timeout_s)

        assert len({*self.weights}) == len(self.weights), "two weights of one name and stage"
        first, most = BUCKET_BYTES[backend_of(self._group, mpi.device)]
        # tensor-parallel ranks must fill the same buckets, so the sizes of the full weights decide
        scale = mesh.get_group("tensor").size()
        own = [weight for weight in self._trained if weight.name not in shared]
        tied = [weight for weight in self._trained if self._tied.is_first(weight)]
        # tied gradients are complete only after the backward pass: their buckets are sent last, in `reduce`
        early = [_Bucket(members) for members in _pack(own[::-1], first * scale, most * scale)]
        late = [_Bucket(members) for members in _pack(tied[::-1], most * scale, most * scale)]
        self._buckets = early + late
        if mpi.rank == 0 and self._group.size() > 1:
            log.info(
                "gradients are summed over %d replicas by %s in %d buckets, the first up to %g MiB, the others up to "
                "%g MiB",
                *(self._group.size(), backend_of(self._group, mpi.device), len(self._buckets)),
                *(first / 2**20, most / 2**20),
            )
        self._num_early = len(early)
        self._in_buckets = {*own, *tied}
        # copies of a tied weight that are not the first: their gradients are sent to the first one, not in a bucket
        self._other_copies = [weight for weight in self._trained if weight not in self._in_buckets]
        # gradients that CUDA graphs compute are in memory that the next replay overwrites
        self._may_adopt = self._group.size() == 1 and mpi.device.type == "cpu"
        self._adopts = False
        """Whether the gradients of this step are the tensors that the backward pass makes."""
        self.num_sent = 0
        """Buckets whose all-reduce has started in this step."""
        self._num_backwards = 0
        # a hook that runs after autograd has added to `.grad`; the buckets of tied weights wait for other stages in
        # `reduce`
        if self._group.size() > 1:
            for bucket in early:
                for place, weight in enumerate(bucket.weights):
                    weight.tensor.register_post_accumulate_grad_hook(self._gradient_hook(bucket, place))  # type: ignore[no-untyped-call]

    def begin(self, num_backwards: int, num_targets: float = 1.0, num_batchnorm_updates: int = 1) -> None:
        """Begin a step: set the gradients to zero, in place, and remember the running statistics.

        Each stage of this rank will run `num_backwards` backward passes. What the last of them completes is sent at
        once, the rest in `reduce`. num_targets: of this replica; Adasum weights hosts by it. num_batchnorm_updates:
        how often this replica will update its running statistics.
        """
        self._before = _flat([weight.tensor for weight in self._statistics])
        # padding micro-batches update nothing, so replicas may differ in it
        self._num_batchnorm_updates = num_batchnorm_updates
        self._num_backwards = num_backwards
        self.num_sent = 0
        self._carrier.begin(num_targets)
        # torch would add the second gradient of a weight to the first one in place, though two first ones can be views
        # of one tensor (those of a and b in a.view(4) + b.view(4)); so several are added in buckets
        self._adopts = self._may_adopt and num_backwards == 1
        if self._adopts:
            for weight in self._trained:
                weight.tensor.grad = None
        else:
            # they are in no bucket, so that zeroing a bucket does not zero them
            for weight in self._other_copies:
                weight.tensor.grad = torch.zeros_like(weight.tensor, requires_grad=False)
        for bucket in self._buckets:
            bucket.begin(adopts=self._adopts)

    def reduce(self) -> Tensor:
        """Complete the gradients: sum over replicas and over stages that share a weight. Merge running statistics.

        Returns this rank's part of the squared global norm (see `local_squares`), which `sum` adds up. Collective:
        every rank of the world.
        """
        # from here on hooks do nothing: a backward pass outside of a step must not send a bucket
        self._num_backwards = 0
        if self._adopts:
            _separate(self._trained)
        # buckets with a weight that no backward pass of this rank reached: the other replicas may have sent them
        self._send(self._num_early)
        self._tied.gather()
        self._send(len(self._buckets))
        self._merge_statistics()
        for bucket in self._buckets:
            bucket.wait()
        self._replicated.equalise(weight for weight in self._replicated.weights if weight in self._in_buckets)
        self._tied.broadcast()
        # the replicas hold the same gradients by now, so each squares only some of them
        return local_squares(self._trained[self._group.rank() :: self._group.size()], self._device)

    def undo(self) -> None:
        """Restore the running statistics of `begin`: a skipped update must change nothing."""
        self._set_statistics(self._before)

    def regather(self) -> None:
        """Let the next forward pass read the weights as they are now: without ZeRO it reads them in any case."""

    def close(self) -> None:
        """End the background communication. Collective: every rank of the world."""
        self._carrier.close()

    def multiply(self, factor: float) -> None:
        """Multiply every gradient in place; unscaling and clipping are one multiplication."""
        flat = [bucket.gradients for bucket in self._buckets if bucket.gradients is not None]
        gradients = flat + [gradient(weight) for weight in (self._trained if self._adopts else self._other_copies)]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _gradient_hook(self, bucket: _Bucket, place: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._num_backwards == 0:  # a backward pass outside of a step
                return
            bucket.arrivals[place] += 1
            assert bucket.arrivals[place] <= self._num_backwards, "more backward passes than `begin` announced"
            # every backward pass of the step adds to the gradient, so only the last one completes it
            if bucket.arrivals[place] == self._num_backwards:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send_ready()

        return hook

    def _send_ready(self) -> None:
        # in the order of the buckets, in whatever order they filled: collectives must match across replicas
        ready = self.num_sent
        while ready < self._num_early and self._buckets[ready].missing == 0:
            ready += 1
        self._send(ready)

    def _send(self, until: int) -> None:
        for bucket in self._buckets[self.num_sent : until]:
            bucket.send(self._carrier)
        self.num_sent = max(self.num_sent, until)

    def _merge_statistics(self) -> None:
        """Set running statistics as if one rank had run the micro-batches of all replicas, one replica after another.

        An update s <- r s + (1 - r) new is linear in s, with the retention r. So n updates of one replica come to
        s <- r^n s + added. What a replica added decays with the updates of the replicas after it.
        """
        if self._group.size() > 1 and self._statistics:
            # on the device: reading the counts would wait for it
            counts = torch.zeros(self._group.size(), dtype=torch.float64, device=self._device)
            # a sum of vectors with one entry each is an all-gather
            counts.narrow(0, self._group.rank(), 1).fill_(self._num_batchnorm_updates)
            dist.all_reduce(counts, group=self._group)
            now = _flat([weight.tensor for weight in self._statistics])
            own, later, total = (
                self._retention.pow(number).to(now.dtype)
                for number in (self._num_batchnorm_updates, counts[self._group.rank() + 1 :].sum(), counts.sum())
            )
            # what this replica added, decayed by the updates of the replicas that come after it
            added = later * (now - own * self._before)
            dist.all_reduce(added, group=self._group)
            self._set_statistics(total * self._before + added)
        self._replicated.broadcast(weight.tensor for weight in self._replicated.weights if is_statistic(weight.tensor))

    def _set_statistics(self, flat: Tensor) -> None:
        tensors = [weight.tensor for weight in self._statistics]
        if tensors:
            torch._foreach_copy_(tensors, _views(flat, tensors))


class _Bucket:
    """A few weights, and the flat tensor that their gradients are views of."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.missing = 0
        """Weights whose gradient is not complete in this step."""
        self.arrivals: list[int] = []
        """For each weight, the backward passes that have added to its gradient."""
        self.gradients: Tensor | None = None
        """Flat; None in a step whose gradients are adopted."""
        self._wait: Job | None = None

    def begin(self, *, adopts: bool) -> None:
        """Set the gradients to zero, or drop them."""
        self.missing, self.arrivals = len(self.weights), [0] * len(self.weights)
        if adopts:
            self.gradients = None
        elif self.gradients is not None:
            # in place and not `grad = None`, which would make autograd replace the views into the bucket
            self.gradients.zero_()
        else:
            tensors = [weight.tensor for weight in self.weights]
            total = sum(tensor.numel() for tensor in tensors)
            self.gradients = torch.zeros(total, dtype=tensors[0].dtype, device=tensors[0].device)
            parts = torch.split(self.gradients, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.grad = _strided_like(part, tensor)

    def send(self, carrier: Carrier) -> None:
        if self.gradients is not None:
            self._wait = carrier.start(self.gradients, [weight.tensor.numel() for weight in self.weights])

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


def _carrier(config: ParallelConfig, mesh: DeviceMesh, mpi: MPIContext, *, timeout_s: float) -> Carrier:
    """Return the configured way to reduce buckets over the data axis. Collective: every rank of the world."""
    transport = config.transport
    compression = config.compression
    check_device(transport, mpi.device)
    group = mesh.get_group("data")
    if group.size() == 1 or (config.reduction, transport, compression) == ("sum", "torch", "none"):
        return Direct(group)
    if config.is_adasum:
        return Adasum(
            mesh=mesh,
            mpi=mpi,
            transport=transport,
            compression=compression,
            timeout_s=timeout_s,
            every_rank_apart=config.reduction == "adasum_all",
        )
    # not the mesh's group, in which the main thread sums running statistics at the same time
    columns = mesh.mesh.flatten(1, 2).transpose(1, 2).flatten(0, 1).tolist()  # [pipeline x tensor, data]
    channel = open_channel(transport, columns, timeout_s=timeout_s)
    assert channel is not None
    return Summed(channel, compression=compression, device=mpi.device, timeout_s=timeout_s)


def _separate(weights: Sequence[Weight]) -> None:
    """Give each weight a gradient in memory of its own: a copy where two are views of one tensor, else zeros."""
    seen: set[int] = set()
    for weight in weights:
        if weight.tensor.grad is None:  # no backward pass reached it
            weight.tensor.grad = torch.zeros_like(weight.tensor, requires_grad=False)
            continue
        # multiplying one of two gradients in the same memory would change the other one as well
        memory = weight.tensor.grad.untyped_storage().data_ptr()
        if memory in seen:
            weight.tensor.grad = weight.tensor.grad.clone()
        seen.add(memory)


def is_statistic(tensor: Tensor) -> bool:
    """Return whether a stored tensor is a running statistic."""
    return not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into a flat tensor, one of the shape of each of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _strided_like(flat: Tensor, tensor: Tensor) -> Tensor:
    """Return a flat tensor in the shape of another one, and with its strides if those are dense (channels-last)."""
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), flat.storage_offset())


def _pack(weights: list[Weight], first: int, most: int) -> list[list[Weight]]:
    """Split weights into runs of one dtype whose full sizes sum up to `most` bytes, those of the first one to `first`.

    A larger weight is alone.
    """
    packs: list[list[Weight]] = []
    size = 0
    for weight in weights:
        # of the full weight, as the limits are scaled for it
        num_bytes = math.prod(weight.placement.shape) * weight.tensor.element_size()
        limit = first if len(packs) == 1 else most
        # flat tensors have one type
        if not packs or size + num_bytes > limit or packs[-1][0].tensor.dtype != weight.tensor.dtype:
            packs.append([])
            size = 0
        packs[-1].append(weight)
        size += num_bytes
    return packs
