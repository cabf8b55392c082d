"""Send gradient buckets to other ranks beside the backward pass: with torch.distributed or MPI, complete or compressed.

On CPUs a thread runs what consists of several steps, for MPI, compression and Adasum (`CommunicationThread`):

    main thread             backward pass ............................ reduce(): wait
                              | hook of the last gradient of a bucket    ^
    communication thread      +--> compress, all-to-all, all-gather -----+

On GPUs it is queued on a stream of its own, by the thread that runs the backward pass (`CommunicationStream`):

    that thread             queue kernels ... | hook: queue compress, all-to-all, all-gather | queue kernels ...
    default stream          backward kernels ================================================== wait
    communication stream                       ##== compress, all-to-all, all-gather ==##         ^ event

NCCL deadlocks unless all ranks start the operations of all their communicators in one order: two tensor-parallel ranks,
of which one starts the all-reduce of an activation first and the other that of a bucket, wait for each other. One
thread starts them in the order of the graph, which is the same on every rank; two threads would not. gloo and MPI
have a connection for each group, over which operations proceed independently.

The plain all-reduce of torch.distributed needs neither: it runs in the background by itself (`Direct`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.parallel.replicas.channels import Channel, timed_out
from onward.trainer.parallel.replicas.compression import COMPRESSED, CompressedAllReduce

Job = Callable[[], None]


class Carrier(Protocol):
    """Reduces gradient buckets over the replicas."""

    def begin(self, num_targets: float) -> None:
        """Begin a step in which this replica has this many targets. Collective, as all methods: the data axis."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Start to reduce a bucket [sum of `lengths`] in place; return a function that waits for it."""

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
        # one replica has nobody to add up with
        if self._group.size() == 1:
            return lambda: None
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class Summed:
    """The all-reduce of a channel, in the background; compressed to half precision if configured."""

    def __init__(self, channel: Channel, *, compression: str, device: torch.device, timeout_s: float) -> None:
        self._channel = channel
        self._sum = CompressedAllReduce(channel, COMPRESSED[compression]).sum if compression != "none" else channel.sum
        self._background = background(device, timeout_s=timeout_s)

    def begin(self, num_targets: float) -> None:
        """Do nothing: a sum does not depend on the number of targets."""

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Job:
        """Sum over the channel."""
        return self._background.send(partial(self._sum, flat))

    def close(self) -> None:
        """End the background communication and free the channel."""
        self._background.close()
        self._channel.close()


# -- the background


class Background(Protocol):
    """Runs jobs, which call collectives, beside the backward pass: one after another, in the order of `send`."""

    def send(self, job: Job) -> Job:
        """Take a job; return a function after which its result may be used. Raises the job's error, here or there."""

    def close(self) -> None:
        """End after the jobs sent so far."""


def background(device: torch.device, *, timeout_s: float) -> Background:
    """Return the way to run collectives in the background of a device: a stream on a GPU, a thread on the CPU."""
    return CommunicationStream(device) if device.type == "cuda" else CommunicationThread(timeout_s=timeout_s)


class CommunicationStream:
    """Runs each job at once in the calling thread; a GPU executes it on a stream of its own.

    A CPU has no streams, so there a job is complete when `send` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device) if device.type == "cuda" else self._streams.Stream()

    def send(self, job: Job) -> Job:
        """Queue the job's kernels after those queued so far; return a function that lets later kernels wait for it."""
        # the kernels that compute the gradients of the bucket
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            job()
        # an event and no synchronisation: the CPU goes on, and later kernels wait
        done = self._streams.Event()
        done.record(self._stream)
        return lambda: done.wait(self._streams.current_stream(self._device))

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class CommunicationThread:
    """A background thread that runs one job after another while the backward pass computes, on the CPU.

    After a job has failed, all later jobs fail with the same error.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._timeout_s = timeout_s
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
        # the end mark behind the jobs, which are still run
        self._jobs.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        failed: BaseException | None = None
        # one thread and one queue: collectives must be called in the same order on every rank
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                # later collectives would wait for ranks that have given up
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
            raise timed_out(self._timeout_s) from None
