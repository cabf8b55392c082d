"""Reduce-scatter gradients on the CPU while the backward pass goes on, in half the bytes of gloo's own.

FSDP2 waits for each reduce-scatter; on a GPU only a stream waits, on a CPU the thread that computes. And gloo's
reduce-scatter is an all-reduce of which each rank keeps its part: twice the bytes.

    gloo's, 2 ranks        backward of unit 2 | all-reduce, waited for | backward of unit 1 | all-reduce ...
    this one               backward of unit 2 | backward of unit 1     | backward of unit 0     | sums
                                              '-- all-to-all --' sums  '-- all-to-all --' sums

Each rank receives its part of every rank's gradients and adds them up, in the order of gloo's ring, so that the sums
have the bits of gloo's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

RING_SEGMENT_BYTES = 1 << 20
"""The longest message of gloo's ring."""


class BackgroundScatter:
    """A reduce-scatter for FSDP2 (`FSDPModule.set_custom_reduce_scatter`) that returns before the result is there.

    Whoever reads what it has written calls `wait` before. FSDP itself reads nothing of it, unless it adds to the
    gradients of an earlier pass, or sums over a second axis of the mesh.

    One is under way at a time. It holds the gradients of a unit twice, as sent and as received. at_once: wait for the
    result, for hybrid sharding, which sums it over the other groups of shards next.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._under_way: _UnderWay | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the gradients of the next unit, once those of the one before need none."""
        self.wait()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Begin to sum row i of the input [ranks x output] over the ranks, into the output of rank i. Collective."""
        assert op == dist.ReduceOp.SUM, op
        self.wait()
        # row i: this rank's part of the gradients of rank i
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        assert work is not None
        self._under_way = _UnderWay(work, input_tensor, received, output_tensor, group.rank(), group.size())
        if self._at_once:
            self.wait()

    def wait(self) -> None:
        """Complete what is under way, if anything is."""
        if self._under_way is not None:
            self._under_way.finish()
            self._under_way = None


class _UnderWay(NamedTuple):
    work: dist.Work
    sent: Tensor
    """Kept until it has been sent."""
    received: Tensor
    output: Tensor
    rank: int
    size: int

    @torch.no_grad()
    def finish(self) -> None:
        self.work.wait()
        rows = self.received.view(self.size, -1)
        # piece by piece, in the order in which gloo would have added each
        for start, stop, order in ring_order(self.output.numel(), self.output.element_size(), self.rank, self.size):
            first, *others = (rows[source, start:stop] for source in order)
            total = self.output.view(-1)[start:stop]
            # the first sum is written to the output, so nothing is copied
            torch.add(first, others[0], out=total) if others else total.copy_(first)
            for other in others[1:]:
                total.add_(other)


def ring_order(length: int, element_size: int, rank: int, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (start, stop, ranks in the order in which gloo adds them) of pieces of a rank's part of `length` elements.

    gloo's ring divides size x length elements into `size` chunks of whole segments of the message, which are a little
    longer than `length` if it is not even. Chunk i goes around the ring from rank i - 1 downwards and ends at rank i.
    (gloo/allreduce.cc, `ring`.)
    """
    num_bytes = size * length * element_size
    num_segments = size * -(-max(-(-num_bytes // RING_SEGMENT_BYTES), 2 * size) // size)
    segment = -(-num_bytes // (num_segments * element_size))
    chunk = num_segments // size * segment
    for number in range(size):
        start, stop = (min(max(end - rank * length, 0), length) for end in (number * chunk, (number + 1) * chunk))
        if start < stop:
            yield start, stop, [(number - back) % size for back in range(1, size + 1)]
