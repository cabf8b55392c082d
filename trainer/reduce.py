"""Gradients of all replicas become one: flat buckets, summed while the backward pass still runs.

Every trainable parameter's `.grad` is a view into a flat bucket. A bucket is sent as soon as its last
gradient is there, in an order that never changes, so a resumed run reduces exactly as the first did
(torch's DDP rebuilds its buckets after the first iteration and does not).

    backward:   head ------------------------------> embedding
    bucket 0    ####|==== all-reduce ====|
    bucket 1            ####|==== all-reduce ====|
    reduce()                                     waits for what is left
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.errors import TrainingFailed

BUCKET_BYTES = 4 << 20
"""Large enough that latency does not count, small enough that the first leaves early."""


class Reducer:
    """Owns the gradients of one replica and sums them over `group` (the data axis of the mesh).

    parameters: those that require gradients, in graph order; buffers: running statistics, averaged
    over the replicas at each step so that all of them evaluate and save the same.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._before: list[Tensor] = []
        self._alone = group.size() == 1
        self._buckets = [_Bucket(members) for members in _pack(list(parameters)[::-1])]
        self.num_sent = 0
        """Buckets on their way, or there, in this step."""
        self._armed = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived(bucket))  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Set every gradient to zero, in place; remember the buffers."""
        self._before = [buffer.clone() for buffer in self._buffers]
        for bucket in self._buckets:
            bucket.gradients.zero_()

    def undo(self) -> None:
        """Put the buffers back to what they were at `clear`: a skipped update changes nothing."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    def arm(self) -> None:
        """The next backward pass is the last of this step: send each bucket as it fills."""
        self._armed, self.num_sent = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def reduce(self) -> Tensor:
        """Sum what has not been sent yet, wait for all, average the buffers.

        Returns the global L2 norm of the summed gradients, a scalar on the device; it is infinite or
        NaN on every replica if it was on one. Collective: every rank of the data axis.
        """
        if not self._armed:  # a replica without samples in a ragged last step still takes part
            self.arm()
        self._send(len(self._buckets))
        statistics = self._average_buffers()
        for bucket in self._buckets:
            bucket.wait()
        statistics()
        self._armed = False
        norms = [torch.linalg.vector_norm(bucket.gradients) for bucket in self._buckets]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def multiply(self, factor: float) -> None:
        """Scale every gradient in place: un-scaling and clipping are one multiplication."""
        if factor != 1.0:
            for bucket in self._buckets:
                bucket.gradients.mul_(factor)

    def sum(self, *values: float | Tensor) -> list[float]:
        """Sum a few numbers over the replicas. Collective: every rank of the data axis."""
        numbers = torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in values])
        if not self._alone:
            numbers = numbers.to(self._device)
            dist.all_reduce(numbers, group=self._group)
        return numbers.tolist()

    def check_agreement(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if any of `tensors` differs between replicas: they must never drift apart.

        Compares a checksum of each tensor's bits. Collective: every rank of the data axis.
        """
        if self._alone or not tensors:
            return
        sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).to(self._device)
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
        drifted = [name for name, differs in zip(tensors, (low != high).tolist(), strict=True) if differs]
        if drifted:
            raise TrainingFailed(
                f"{len(drifted)} of {len(tensors)} tensors differ between {self._group.size()} replicas that must be "
                f"equal, {drifted[0]} first; the newest checkpoint is from before that"
            )

    @property
    def _device(self) -> torch.device:
        return self._buckets[0].gradients.device

    def _arrived(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._armed:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send_ready()

        return hook

    def _send_ready(self) -> None:
        # in index order, whatever order they filled in: collectives must match across replicas
        ready = self.num_sent
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._send(ready)

    def _send(self, until: int) -> None:
        for bucket in self._buckets[self.num_sent : until]:
            bucket.send(self._group, alone=self._alone)
        self.num_sent = max(self.num_sent, until)

    def _average_buffers(self) -> Callable[[], None]:
        if self._alone or not self._buffers:
            return lambda: None
        flat = torch.cat([buffer.flatten() for buffer in self._buffers])
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def store() -> None:
            work.wait()
            for buffer, part in zip(self._buffers, _parts(flat.div_(self._group.size()), self._buffers), strict=True):
                buffer.copy_(part)

        return store


class _Bucket:
    """Some parameters, and one flat tensor that holds their gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = 0
        self._work: dist.Work | None = None
        total = sum(parameter.numel() for parameter in parameters)
        self.gradients = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, _parts(self.gradients, parameters), strict=True):
            parameter.grad = part

    def send(self, group: dist.ProcessGroup, *, alone: bool) -> None:
        self._work = None if alone else dist.all_reduce(self.gradients, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a flat tensor, one for each of `like`, of its shape."""
    ends = itertools.accumulate(tensor.numel() for tensor in like)
    return [flat[end - tensor.numel() : end].view_as(tensor) for tensor, end in zip(like, ends, strict=True)]


def _pack(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, up to BUCKET_BYTES together (a larger one stands alone)."""
    packs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if not packs or size + bytes_ > BUCKET_BYTES or packs[-1][0].dtype != parameter.dtype:
            packs.append([])
            size = 0
        packs[-1].append(parameter)
        size += bytes_
    return packs


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of the bits as integers, each weighted by its place: equal tensors agree, swaps do not."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
    return (bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum()
