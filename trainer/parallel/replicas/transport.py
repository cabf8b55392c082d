"""Send gradient buckets to other ranks: with torch.distributed or MPI, in fp32 or compressed to half precision.

    main thread             backward pass ............................ reduce(): wait
                              | hook of the last gradient of a bucket    ^
    communication thread      +--> compress, all-to-all, all-gather -----+

torch.distributed runs plain all-reduces in the background (`Direct`); MPI, compression and Adasum need the thread.
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

from onward.trainer.distributed.mesh import message_device, new_group
from onward.trainer.errors import ConfigError, RuntimeUnavailable

if TYPE_CHECKING:
    from mpi4py import MPI

Job = Callable[[], None]
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUICK_POLLS = 20
POLL_S = 5e-5
"""Seconds between polls after the first QUICK_POLLS ones, so that the core is free for the backward pass."""
MOST_ELEMENTS = 1 << 28
"""Elements in one MPI call, whose count is a C int of 32 bits."""
CHUNK = 1 << 17
"""Elements converted at a time, so that temporary copies stay in the cache."""


class Carrier(Protocol):
    """Reduces gradient buckets over the replicas."""

    def begin(self, num_targets: float) -> None:
        """Begin a step in which this replica has this many targets. Collective, as all methods: the data axis."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Start to reduce a bucket of tensors of these lengths, in place; return a function that waits for it."""

    def close(self) -> None:
        """End the background communication."""


class Direct:
    """The all-reduce of torch.distributed, which runs in the background by itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin(self, num_targets: float) -> None:
        """Do nothing: a sum does not depend on the number of targets."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Sum over the group."""
        if self._group.size() == 1:
            return lambda: None
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class Summed:
    """The all-reduce of a channel, on a communication thread; compressed to half precision if configured."""

    def __init__(self, channel: Channel, *, compression: str, device: torch.device, timeout_s: float) -> None:
        self._channel = channel
        self._sum = CompressedAllReduce(channel, COMPRESSED[compression]).sum if compression != "none" else channel.sum
        self._thread = CommunicationThread(device, timeout_s=timeout_s)

    def begin(self, num_targets: float) -> None:
        """Do nothing: a sum does not depend on the number of targets."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Sum over the channel."""
        return self._thread.send(partial(self._sum, flat))

    def close(self) -> None:
        """End the thread and free the channel."""
        self._thread.close()
        self._channel.close()


class CommunicationThread:
    """A background thread that runs one job after another while the backward pass computes.

    After a job has failed, all later jobs fail with the same error.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._device, self._timeout_s = device, timeout_s
        # a daemon thread: an MPI call that never returns must not keep a failed process alive
        self._thread = threading.Thread(target=self._work, name="communication", daemon=True)
        self._thread.start()

    def send(self, job: Job) -> Job:
        """Queue a job; return a function that waits for it and raises its error, or RuntimeError after the time-out."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return partial(self._wait, done)

    def close(self) -> None:
        """End the thread after the jobs queued so far."""
        self._jobs.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        if self._device.type == "cuda":
            # the current GPU is a property of each thread
            torch.cuda.set_device(self._device)
        failed: BaseException | None = None
        # one thread and one queue: collectives must be called in the same order on every rank
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                if failed is not None:
                    raise failed
                job()
            # also what is not an Exception: the main thread would wait until the time-out for a job that will not end
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


# -- channels


class Channel(Protocol):
    """A group of ranks. All of them make the same calls in the same order, each from one thread.

    Tensors are contiguous and on this rank's device. RuntimeError when a peer has ended or does not answer in time.
    """

    rank: int
    """Position of this rank in the order in which the group's ranks were given; sources and peers are counted alike."""
    size: int

    def sum(self, tensor: Tensor) -> None:
        """All-reduce in place, with equal bits on every rank."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy the tensor of rank `source` to all ranks."""

    def all_to_all(self, input: Tensor, output: Tensor) -> None:
        """Send row i of `input` [size, ...] to rank i; row i of `output` is received from rank i."""

    def gather(self, row: Tensor, rows: Tensor) -> None:
        """All-gather: `rows` [size, ...] receives the row of every rank."""

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Swap tensors of one shape with another rank, which makes the same call; return the peer's."""

    def close(self) -> None:
        """Free the channel. Collective: all its ranks."""


def open_channel(transport: str, groups: Sequence[Sequence[int]], *, timeout_s: float) -> Channel | None:
    """Open the channel of this rank's group among disjoint `groups` of ranks; return None if it is in none of them.

    `transport`: "torch" or "mpi". Collective: every rank of the world, with the same groups. Raises
    RuntimeUnavailable when this MPI may not be called from several threads.
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
    # every rank creates every group, its own or not: torch's new_group is collective over the world
    joined = [new_group(group, timeout_s=timeout_s) for group in groups if len(group) > 1]
    return None if mine is None else TorchChannel(next((group for group in joined if group is not None), None), mine)


class TorchChannel:
    """A channel over torch.distributed: gloo or NCCL. group: None for a single rank; ranks: of the world, in order.

    torch numbers the ranks of a group in ascending order, Adasum gives them host by host. With ranks 0 and 3 on one
    host, 1 and 2 on another:

        given to the channel      0  3  1  2
        position in the channel   0  1  2  3
        rank in torch's group     0  3  1  2        self._rows: the position of each rank of the group is 0 2 3 1
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, list(ranks)
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
        # one call for all rows needs them in the order of torch's group; only Adasum, which makes no such call, has others
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
        self._comm, self._timeout_s = comm, timeout_s
        self.rank, self.size = comm.rank, comm.size

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
        deadline, polls = time.monotonic() + self._timeout_s, 0
        while not request.Test():
            polls += 1
            if time.monotonic() > deadline:
                raise _timed_out(self._timeout_s)
            if polls > QUICK_POLLS:
                time.sleep(POLL_S)


def check_device(transport: str, device: torch.device) -> None:
    """Raise ConfigError for transport "mpi" on a GPU: the channel passes host memory to MPI."""
    if transport == "mpi" and device.type != "cpu":
        raise ConfigError(
            f"parallel.transport 'mpi' carries gradients of CPU ranks, but this one is on {device}; use 'torch' (NCCL)"
        )


def _timed_out(timeout_s: float) -> RuntimeError:
    # `failures.lost_a_peer` recognises this text: the cause is on another rank
    return RuntimeError(f"Timed out waiting {timeout_s:g} s for other ranks to send their gradients")


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor as bytes: MPI has no bf16 type."""
    return tensor.view(-1).view(torch.uint8).numpy()


# -- compression


class CompressedAllReduce:
    """All-reduces over a channel in half precision, adding in fp32, with equal bits on every rank.

        each rank   [ to 0 | to 1 | to 2 ] -- all-to-all --> its range of all ranks, added in fp32 -- all-gather --> all

    An all-reduce of half-precision tensors sends as many elements, but rounds the sum after each addition; here numbers
    are rounded twice. Buffers are kept between calls: allocating new pages takes longer than the arithmetic.
    """

    def __init__(self, channel: Channel, dtype: torch.dtype) -> None:
        self._channel, self._dtype = channel, dtype
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sum(self, flat: Tensor) -> None:
        """Sum in place. For overflows see `compress`. Collective: the channel."""
        # weights of fp64 or half precision: the format of the messages is made from fp32
        if flat.dtype != torch.float32:
            wide = flat.float()
            self.sum(wide)
            flat.copy_(wide)
            return
        size = self._channel.size
        length = 2 * -(-flat.numel() // (2 * size))  # even: each row of bytes begins at a multiple of 4
        stretches = [flat[rank * length : (rank + 1) * length] for rank in range(size)]
        sent, came = self._wires(size, compressed_bytes(length), flat.device)
        for stretch, wire in zip(stretches, sent, strict=True):
            compress(stretch, self._dtype, wire)
        self._channel.all_to_all(sent, came)
        own = stretches[self._channel.rank].zero_()
        for wire in came:  # in the order of ranks, wherever it is done
            add_decompressed(wire, self._dtype, own)
        # this rank, too, takes its own sum as it is after compression, so that all ranks have the same bits
        compress(own, self._dtype, sent[0])
        self._channel.gather(sent[0], came)
        for stretch, wire in zip(stretches, came, strict=True):
            add_decompressed(wire, self._dtype, stretch.zero_())

    def _wires(self, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._memory.numel() < 2 * rows * size:
            self._memory = torch.empty(2 * rows * size, dtype=torch.uint8, device=device)
        sent, came = self._memory[: 2 * rows * size].view(2, rows, size)
        return sent, came


def compressed_bytes(length: int) -> int:
    """Return the bytes of this many compressed values: the scale and two bytes per value."""
    return 4 + 2 * length


def compress(values: Tensor, dtype: torch.dtype, wire: Tensor) -> None:
    """Write fp32 values to the start of `wire`: a power of two, then each value divided by it in half precision.

    The power of two scales the greatest magnitude to just below 2^15. So no value overflows in fp16, and gradients of a
    mean loss, which are small, do not underflow: a value of 2^-29 times the greatest is still a normal fp16 number.
    Dividing by a power of two does not round. Infinity and NaN are kept, so that an overflow is detected.
    """
    greatest = torch.stack(torch.aminmax(values)).abs().max() if values.numel() else values.new_zeros(())
    # within the normal powers of two of fp32: the scale and its inverse are sent or used as fp32 numbers
    exponent = torch.frexp(greatest).exponent.sub(15).clamp(-126, 126)
    exponent = torch.where(greatest.isfinite(), exponent, 0)
    scale, inverse = (torch.ldexp(torch.ones_like(greatest), power) for power in (exponent, -exponent))
    wire[:4].view(torch.float32).copy_(scale)
    halves = wire[4 : compressed_bytes(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        half.copy_(part * inverse)


def add_decompressed(wire: Tensor, dtype: torch.dtype, values: Tensor) -> None:
    """Decompress what `compress` has written, and add it to fp32 values."""
    scale, halves = wire[:4].view(torch.float32), wire[4 : compressed_bytes(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        part.add_(half.float().mul_(scale))
