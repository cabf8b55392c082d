"""Send tensors between the ranks of a group, over torch.distributed or MPI, with the same few calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.distributed import env_world
from onward.trainer.distributed.mesh import message_device, new_group
from onward.trainer.errors import ConfigError, RuntimeUnavailable

if TYPE_CHECKING:
    from mpi4py import MPI

QUICK_POLLS = 20
POLL_S = 5e-5
"""Seconds between polls after the first QUICK_POLLS ones, so that the core is free for the backward pass."""
MOST_ELEMENTS = 1 << 28
"""Elements in one MPI call, whose count is a C int of 32 bits."""


class Channel(Protocol):
    """A group of ranks. All of them make the same calls in the same order, each from one thread.

    Tensors are contiguous and on this rank's device. RuntimeError when a peer has ended or does not answer in time.
    """

    rank: int
    """Position of this rank in the order in which the group's ranks were given; sources and peers are counted alike."""
    size: int

    def sum(self, tensor: Tensor) -> None:
        """All-reduce a tensor [...] in place, with equal bits on every rank."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy the tensor [...] of rank `source` to all ranks."""

    def all_to_all(self, input: Tensor, output: Tensor) -> None:
        """Send row i of `input` [size, ...] to rank i; row i of `output` is received from rank i."""

    def gather(self, row: Tensor, rows: Tensor) -> None:
        """All-gather: `rows` [size, ...] receives the row of every rank."""

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Swap tensors [...] of one shape with another rank, which makes the same call; return the peer's."""

    def close(self) -> None:
        """Free the channel. Collective: all its ranks."""


def open_channel(transport: str, groups: Sequence[Sequence[int]], *, timeout_s: float) -> Channel | None:
    """Open the channel of this rank's group among disjoint `groups` of ranks; return None if it is in none of them.

    `transport`: "torch" or "mpi". Collective: every rank of the world, with the same groups. Raises
    RuntimeUnavailable when this MPI may not be called from several threads.
    """
    mine = next((group for group in groups if dist.get_rank() in group), None)
    if transport == "mpi":
        if env_world.is_given():
            raise RuntimeUnavailable(
                "parallel.transport = 'mpi' needs ranks that mpirun or `srun --mpi=pmix` has started, and these were "
                "started without MPI: use parallel.transport = 'torch'"
            )
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:  # a thread of its own sends while the main thread computes
            raise RuntimeUnavailable(
                f"this MPI grants thread level {MPI.Query_thread()} and parallel.transport = 'mpi' needs "
                f"{MPI.THREAD_SERIALIZED} (MPI_THREAD_SERIALIZED): a thread of its own calls it; use "
                "parallel.transport = 'torch'"
            )
        # the groups are disjoint, so that the smallest rank names one
        color = MPI.UNDEFINED if mine is None else min(mine)
        comm = MPI.COMM_WORLD.Split(color, 0 if mine is None else list(mine).index(dist.get_rank()))
        return None if mine is None else MPIChannel(comm, timeout_s=timeout_s)
    # every rank creates every group, its own or not: torch's new_group is collective over the world
    joined = [new_group(group, timeout_s=timeout_s) for group in groups if len(group) > 1]
    if mine is None:
        return None
    return TorchChannel(next((group for group in joined if group is not None), None), mine)


class TorchChannel:
    """A channel over torch.distributed: gloo or NCCL. group: None for a single rank; ranks: of the world, in order.

    torch numbers the ranks of a group in ascending order, Adasum gives them host by host. With ranks 0 and 3 on one
    host, 1 and 2 on another:

        given to the channel      0  3  1  2
        position in the channel   0  1  2  3
        rank in torch's group     0  3  1  2        self._rows: the position of each rank of the group is 0 2 3 1
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._rows = sorted(range(self.size), key=self._ranks.__getitem__)

    def sum(self, tensor: Tensor) -> None:
        """All-reduce in place. For this and the other methods see Channel."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self._group is not None:
            dist.broadcast(tensor, group=self._group, src=self._ranks[source])

    def all_to_all(self, input: Tensor, output: Tensor) -> None:
        # rows lie in the order of torch's group; only Adasum, which makes no such call, gives ranks in another order
        assert self._rows == list(range(self.size)), f"all-to-all between the unsorted ranks {self._ranks}"
        if self._group is None:
            output.copy_(input)
        else:
            dist.all_to_all_single(output, input, group=self._group)

    def gather(self, row: Tensor, rows: Tensor) -> None:
        if self._group is None:
            rows.copy_(row)
        else:
            dist.all_gather([rows[place] for place in self._rows], row, group=self._group)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        assert self._group is not None
        sent = tensor.to(message_device(self._group, tensor.device))
        came = torch.empty_like(sent)
        both = [
            dist.P2POp(dist.isend, sent, group=self._group, peer=self._ranks[peer]),
            dist.P2POp(dist.irecv, came, group=self._group, peer=self._ranks[peer]),
        ]
        # both in one batch: with NCCL two single calls, in the same order on both sides, would wait for each other
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return came.to(tensor.device)

    def close(self) -> None:
        """Do nothing: the group is destroyed with the world."""


class MPIChannel:
    """A channel over MPI. It calls blocking collectives, which are faster than non-blocking ones but have no time-out.

    Therefore a non-blocking barrier comes before every collective and is polled until the deadline. After it all ranks
    are about to make the blocking call. If one ends just then, `CommunicationThread` stops waiting for the call.
    """

    def __init__(self, comm: MPI.Comm, *, timeout_s: float) -> None:
        self._comm = comm
        self._timeout_s = timeout_s
        self.rank = comm.rank
        self.size = comm.size

    def sum(self, tensor: Tensor) -> None:
        """All-reduce in place. For this and the other methods see Channel."""
        from mpi4py import MPI

        # MPI adds no bf16 or fp16 numbers
        wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        for part in torch.split(wide.view(-1), MOST_ELEMENTS):
            self._meet()
            self._comm.Allreduce(MPI.IN_PLACE, part.numpy())
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._meet()
        self._comm.Bcast(_bytes(tensor), source)

    def all_to_all(self, input: Tensor, output: Tensor) -> None:
        self._meet()
        self._comm.Alltoall(_bytes(input), _bytes(output))

    def gather(self, row: Tensor, rows: Tensor) -> None:
        self._meet()
        self._comm.Allgather(_bytes(row), _bytes(rows))

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        came = torch.empty_like(tensor)
        # without a barrier before it: non-blocking calls can be polled themselves
        requests = [self._comm.Irecv(_bytes(came), peer), self._comm.Isend(_bytes(tensor), peer)]
        for request in requests:
            self._poll(request)
        return came

    def close(self) -> None:
        self._comm.Free()

    def _meet(self) -> None:
        self._poll(self._comm.Ibarrier())

    def _poll(self, request: MPI.Request) -> None:
        deadline = time.monotonic() + self._timeout_s
        polls = 0
        # a peer mostly answers within a few polls, which a sleep would delay
        while not request.Test():
            polls += 1
            if time.monotonic() > deadline:
                raise timed_out(self._timeout_s)
            if polls > QUICK_POLLS:
                time.sleep(POLL_S)


def check_device(transport: str, device: torch.device) -> None:
    """Raise ConfigError for transport "mpi" on a GPU: the channel passes host memory to MPI."""
    if transport == "mpi" and device.type != "cpu":
        raise ConfigError(
            f"parallel.transport 'mpi' carries gradients of CPU ranks, but this one is on {device}; use 'torch' (NCCL)"
        )


def timed_out(timeout_s: float) -> RuntimeError:
    # `failures.lost_a_peer` recognises this text: the cause is on another rank
    return RuntimeError(f"Timed out waiting {timeout_s:g} s for other ranks to send their gradients")


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor as bytes: MPI has no bf16 type."""
    return tensor.view(-1).view(torch.uint8).numpy()
