"""How gradients travel between ranks: by torch's backend or by MPI, as they are or as halves.

    hook of the last gradient of a bucket --> Courier (a thread) --> Channel --> other ranks
    backward pass goes on                     wait() <-- reduce()

Sums that torch's backend makes in the background by itself need no courier (`Direct`); MPI, halves and Adasum do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.distributed.mesh import new_group
from onward.trainer.errors import ConfigError, RuntimeUnavailable

if TYPE_CHECKING:
    from mpi4py import MPI

Job = Callable[[], None]
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUICK_POLLS = 20
POLL_S = 5e-5
"""A rank that has waited for QUICK_POLLS leaves the core to its backward pass for this long each time."""
MOST_ELEMENTS = 1 << 28
"""Of one MPI call, which counts in C ints."""
CHUNK = 1 << 17
"""Elements converted at a time: what is in between stays in the cache."""


class Carrier(Protocol):
    """Makes the gradients of all replicas one, bucket by bucket."""

    def begin(self, num_targets: float) -> None:
        """A step begins, in which this replica has so many targets. Collective, as all of these: the data axis."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Send a bucket of tensors of these lengths, which is changed in place. Returns what waits for the result."""

    def close(self) -> None:
        """Nothing will be sent any more."""


class Direct:
    """The sum by torch's backend, which makes it in the background by itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin(self, num_targets: float) -> None:
        """Nothing: a sum needs no weights."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Sum over the group."""
        if self._group.size() == 1:
            return lambda: None
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def close(self) -> None:
        """Nothing."""


class Summed:
    """The sum over the ranks of a channel, by a courier; as halves if `compression` says so."""

    def __init__(self, channel: Channel, *, compression: str, device: torch.device, timeout_s: float) -> None:
        self._channel = channel
        self._sum = Halves(channel, COMPRESSED[compression]).sum if compression != "none" else channel.sum
        self._courier = Courier(device, timeout_s=timeout_s)

    def begin(self, num_targets: float) -> None:
        """Nothing: a sum needs no weights."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Sum over the channel."""
        return self._courier.send(partial(self._sum, flat))

    def close(self) -> None:
        """End the thread, free the channel."""
        self._courier.close()
        self._channel.close()


class Courier:
    """A thread that does one job after the other while the backward pass computes.

    After a job that failed none is done: its error is every later one's.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._device, self._timeout_s = device, timeout_s
        # a daemon: an MPI call that never returns must not keep a process that has failed
        self._thread = threading.Thread(target=self._work, name="courier", daemon=True)
        self._thread.start()

    def send(self, job: Job) -> Job:
        """Have a job done after those sent before. Returns what waits for it, and raises its error, or RuntimeError
        when it has taken too long."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return partial(self._wait, done)

    def close(self) -> None:
        """Let the thread end after the jobs sent so far."""
        self._jobs.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        failed: BaseException | None = None
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                if failed is not None:
                    raise failed
                job()
            except BaseException as error:
                failed = error
                done.set_exception(error)
            else:
                done.set_result(None)

    def _wait(self, done: Future[None]) -> None:
        try:
            done.result(self._timeout_s)
        except TimeoutError:
            raise _timed_out(self._timeout_s) from None


# -- ranks that speak with each other


class Channel(Protocol):
    """Some ranks that speak with each other. All of them make the same calls in the same order, from one thread each.

    Tensors are contiguous and on this rank's device. RuntimeError when a peer is gone or silent.
    """

    rank: int
    """Among them, in the order they were given."""
    size: int

    def sum(self, tensor: Tensor) -> None:
        """Over all ranks, in place, with the same bits on each."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """That of rank `source` to all."""

    def deal(self, rows: Tensor, came: Tensor) -> None:
        """Row i of `rows` [size, ...] goes to rank i; `came` gets what the ranks have sent here, in their order."""

    def gather(self, row: Tensor, rows: Tensor) -> None:
        """`rows` [size, ...] gets the rows of all ranks, in their order."""

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """With one other rank, which calls it too: its tensor, of the same shape."""

    def close(self) -> None:
        """Free it; no rank of it will call again. Collective."""


def open_channel(transport: str, groups: Sequence[Sequence[int]], *, timeout_s: float) -> Channel | None:
    """The channel of this rank's group among disjoint `groups` of ranks; None when it is in none of them.

    `transport`: "torch" or "mpi". Collective: every rank of the world, with the same groups. Raises
    RuntimeUnavailable when MPI may not be called by several threads.
    """
    mine = next((group for group in groups if dist.get_rank() in group), None)
    if transport == "mpi":
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:  # a thread of its own sends while the main thread computes
            raise RuntimeUnavailable(
                f"this MPI grants thread level {MPI.Query_thread()} and parallel.transport = 'mpi' needs "
                f"{MPI.THREAD_SERIALIZED} (MPI_THREAD_SERIALIZED): a thread of its own calls it; use "
                "parallel.transport = 'torch'"
            )
        color = MPI.UNDEFINED if mine is None else min(mine)
        comm = MPI.COMM_WORLD.Split(color, 0 if mine is None else list(mine).index(dist.get_rank()))
        return None if mine is None else MPIChannel(comm, timeout_s=timeout_s)
    joined = [new_group(group, timeout_s=timeout_s) for group in groups if len(group) > 1]
    return None if mine is None else TorchChannel(next((group for group in joined if group is not None), None))


class TorchChannel:
    """By torch's backend: gloo or NCCL. `group`: None for a rank on its own."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def sum(self, tensor: Tensor) -> None:
        """See Channel, as for all of these."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self._group is not None:
            dist.broadcast(tensor, group=self._group, group_src=source)

    def deal(self, rows: Tensor, came: Tensor) -> None:
        if self._group is None:
            came.copy_(rows)
        else:
            dist.all_to_all_single(came, rows, group=self._group)

    def gather(self, row: Tensor, rows: Tensor) -> None:
        if self._group is None:
            rows.copy_(row)
        else:
            dist.all_gather(list(rows.unbind()), row, group=self._group)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        came = torch.empty_like(tensor)
        both = [
            dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, came, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return came

    def close(self) -> None:
        """Nothing: the group goes with the world's."""


class MPIChannel:
    """By MPI, whose blocking collectives are its fast ones, and have no time-outs.

    So all ranks meet first, in a barrier that is polled up to the deadline; what then blocks has all its peers there.
    One that stops right then leaves the courier's thread inside MPI, and `Courier` gives up on that.
    """

    def __init__(self, comm: MPI.Comm, *, timeout_s: float) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self.rank, self.size = comm.rank, comm.size

    def sum(self, tensor: Tensor) -> None:
        """See Channel, as for all of these."""
        from mpi4py import MPI

        wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        for part in torch.split(wide.view(-1), MOST_ELEMENTS):
            self._meet()
            self._comm.Allreduce(MPI.IN_PLACE, part.numpy())
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._meet()
        self._comm.Bcast(_bytes(tensor), source)

    def deal(self, rows: Tensor, came: Tensor) -> None:
        self._meet()
        self._comm.Alltoall(_bytes(rows), _bytes(came))

    def gather(self, row: Tensor, rows: Tensor) -> None:
        self._meet()
        self._comm.Allgather(_bytes(row), _bytes(rows))

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        came = torch.empty_like(tensor)
        requests = [self._comm.Irecv(_bytes(came), peer), self._comm.Isend(_bytes(tensor), peer)]
        for request in requests:
            self._poll(request)
        return came

    def close(self) -> None:
        self._comm.Free()

    def _meet(self) -> None:
        self._poll(self._comm.Ibarrier())

    def _poll(self, request: MPI.Request) -> None:
        deadline, polls = time.monotonic() + self._timeout_s, 0
        while not request.Test():
            polls += 1
            if time.monotonic() > deadline:
                raise _timed_out(self._timeout_s)
            if polls > QUICK_POLLS:
                time.sleep(POLL_S)


def check_device(transport: str, device: torch.device) -> None:
    """Raises ConfigError for MPI between GPUs, whose memory it is not given."""
    if transport == "mpi" and device.type != "cpu":
        raise ConfigError(
            f"parallel.transport 'mpi' carries gradients of CPU ranks, but this one is on {device}; use 'torch' (NCCL)"
        )


def _timed_out(timeout_s: float) -> RuntimeError:
    # the words tell `distributed.lost_a_peer` that some other rank is to blame
    return RuntimeError(f"Timed out waiting {timeout_s:g} s for other ranks to send their gradients")


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A contiguous tensor's memory, for MPI, which does not know bf16."""
    return tensor.view(-1).view(torch.uint8).numpy()


# -- halves


class Halves:
    """Sums over a channel, sent as halves, added in fp32, with the same bits on every rank.

        each rank   [ for 0 | for 1 | for 2 ]  --deal-->  its stretch of all ranks, added in fp32  --gather-->  all

    As many elements travel as in an all-reduce of halves, which would round the sum at each of its hops instead of
    twice. Memory is kept from sum to sum: to be given new pages takes longer than the arithmetic.
    """

    def __init__(self, channel: Channel, dtype: torch.dtype) -> None:
        self._channel, self._dtype = channel, dtype
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sum(self, flat: Tensor) -> None:
        """In place. See `to_halves` for overflow. Collective: the channel."""
        if flat.dtype != torch.float32:
            wide = flat.float()
            self.sum(wide)
            flat.copy_(wide)
            return
        size = self._channel.size
        length = 2 * -(-flat.numel() // (2 * size))  # even: each row of bytes begins at a multiple of 4
        stretches = [flat[rank * length : (rank + 1) * length] for rank in range(size)]
        sent, came = self._wires(size, halves_size(length), flat.device)
        for stretch, wire in zip(stretches, sent, strict=True):
            to_halves(stretch, self._dtype, wire)
        self._channel.deal(sent, came)
        own = stretches[self._channel.rank].zero_()
        for wire in came:  # in the order of ranks, wherever it is done
            add_halves(wire, self._dtype, own)
        to_halves(own, self._dtype, sent[0])
        self._channel.gather(sent[0], came)
        for stretch, wire in zip(stretches, came, strict=True):
            add_halves(wire, self._dtype, stretch.zero_())

    def _wires(self, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._memory.numel() < 2 * rows * size:
            self._memory = torch.empty(2 * rows * size, dtype=torch.uint8, device=device)
        sent, came = self._memory[: 2 * rows * size].view(2, rows, size)
        return sent, came


def halves_size(length: int) -> int:
    """Bytes of so many values as halves."""
    return 4 + 2 * length


def to_halves(values: Tensor, dtype: torch.dtype, wire: Tensor) -> None:
    """Write fp32 values to bytes: a power of two, and each value over it. `wire` may be longer.

    The power brings the greatest magnitude just below 2^15, so that nothing overflows in fp16, and gradients of a
    mean loss, which are small, do not vanish in it: what is 2^-29 of the greatest still has all its digits. Powers of
    two round nothing. Infinity and NaN go over as they are: an overflow must be seen, not mended.
    """
    greatest = torch.stack(torch.aminmax(values)).abs().max() if values.numel() else values.new_zeros(())
    exponent = torch.frexp(greatest).exponent.sub(15).clamp(-126, 126)
    exponent = torch.where(greatest.isfinite(), exponent, 0)
    scale, inverse = (torch.ldexp(torch.ones_like(greatest), power) for power in (exponent, -exponent))
    wire[:4].view(torch.float32).copy_(scale)
    halves = wire[4 : halves_size(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        half.copy_(part * inverse)


def add_halves(wire: Tensor, dtype: torch.dtype, values: Tensor) -> None:
    """Add what `to_halves` was given, but for rounding, to fp32 values."""
    scale, halves = wire[:4].view(torch.float32), wire[4 : halves_size(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        part.add_(half.float().mul_(scale))
