"""Write checkpoints while training goes on: copy the weights to host memory, then hash and write in a thread.

    main thread    step 100 | copy |  step 101   step 102   step 103  | poll: event "checkpoint" | step 104
    thread                         +--> hash, write, fsync, rename -->+

Training waits for the copy alone, and the thread has a low priority: on a CPU it would otherwise hold up the threads
that compute the next steps, which wait for each other. On a GPU the host does not wait even for the copy: the copies to
pinned memory are queued behind the kernels of step 100 and before those of step 101, so they read the weights of step
100, and the thread waits for them. What makes a checkpoint complete is the same as in `save`: the rename after all
ranks have written.

One checkpoint is in flight at a time, and host memory is taken for one copy of what this rank writes. The thread's
collectives have a process group of their own, with gloo: it works on the host, where collectives of two groups need no
common order, and nothing else uses that group.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from onward.trainer.checkpoint.consistency import check_copies
from onward.trainer.checkpoint.manifest import Beat
from onward.trainer.checkpoint.rank_file import RankFile, chunks
from onward.trainer.checkpoint.save import write
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.write_plan import TensorPart, make_write_plan
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.distributed.preflight import free_memory
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ReplicasDiffer
from onward.trainer.events import CheckpointSaved, EventWriter
from onward.trainer.quantities import gib
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine.priority import lower_priority

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two looks at the thread while the main thread waits for it."""


class CheckpointWriter:
    """Writes the checkpoints of one attempt, in the background where `checkpoint.background` allows it.

    memory_gib: `parallel.memory_gib`. timeout_s: of the collectives. Collective, as `save` and `close`: every rank of
    the world.
    """

    def __init__(
        self,
        run: RunDir,
        settings: CheckpointConfig,
        memory_gib: float,
        timeout_s: float,
        *,
        attempt: int,
        mpi: MPIContext,
        events: EventWriter,
    ) -> None:
        self._settings = settings
        self._memory_gib = memory_gib
        self._mpi = mpi
        self._events = events
        self._write = partial(write, run, attempt=attempt, mpi=mpi)
        self._refusal: str | None = None
        """Why nothing is written in the background; "" = it is; None before the first save, which decides."""
        self._copy = HostCopy(mpi.device)
        self._began = time.monotonic()
        """When the newest checkpoint began, or else the attempt."""
        self._in_flight: Future[Path] | None = None
        self._step = 0
        """Of the checkpoint in flight."""
        self._beats = 0
        """Signs of life of the thread."""
        self._group: dist.ProcessGroup | None = None
        if mpi.world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            # a group of its own: the thread's collectives must not meet those of the training
            self._group = dist.new_group(timeout=timeout, backend="gloo")

    def is_due(self) -> bool:
        """Return whether `checkpoint.minutes` have passed since the last one; False on every rank but rank 0.

        Clocks differ, so the ranks must agree on what rank 0 returns.
        """
        limit_s = 60 * self._settings.minutes
        return self._mpi.rank == 0 and 0 < limit_s <= time.monotonic() - self._began

    def compare_copies(self, parts: Mapping[str, TensorPart], *, step: int, beat: Beat) -> None:
        """Raise ReplicasDiffer unless all ranks that hold a piece hold the same bits of it. Collective: every rank."""
        try:
            check_copies(parts, self._mpi, step=step, beat=beat)
        except ReplicasDiffer:
            self.wait(beat)  # for the checkpoint before, from which a retry resumes
            raise

    def save(self, state: TrainState, parts: Mapping[str, TensorPart], *, beat: Beat, last: bool = False) -> None:
        """Save what `parts` hold now, and raise as `save.save`, or at a later call what goes wrong in the background.

        Raises ReplicasDiffer rather than save copies that differ: every resume would start from them. Waits for the
        checkpoint before. last: training does not go on, so this one is not copied, and is waited for.
        """
        self.compare_copies(parts, step=state.step, beat=beat)
        self._events.sync()  # first: a resumed run does not emit the events of earlier steps again
        self.wait(beat)
        plan = make_write_plan(parts, self._mpi)
        file = RankFile(plan.by_rank[self._mpi.rank])
        work = partial(self._write, state=state, plan=plan, file=file, group=self._group)
        self._step = state.step
        self._in_flight = Future()
        self._began = time.monotonic()
        # in this thread: the bytes come from the weights themselves, which do not change meanwhile
        if last or self._refuses(file.num_bytes):
            _settle(self._in_flight, partial(work, content=file.read(parts), beat=beat))
            self.poll()
            return
        self._copy.take(file, parts)
        work = partial(_beside_training, partial(work, content=self._copy.content(), beat=self._count))
        # a daemon thread: a disk that never answers must not keep a failed process alive
        threading.Thread(target=_settle, args=(self._in_flight, work), name="checkpoint", daemon=True).start()

    def poll(self) -> None:
        """Emit the event of a checkpoint that is complete by now; raise the error of one that failed."""
        if self._in_flight is not None and self._in_flight.done():
            done = self._in_flight
            self._in_flight = None
            self._events.emit(CheckpointSaved(step=self._step, path=done.result().name))

    def wait(self, beat: Beat) -> None:
        """Wait for the checkpoint in flight, and poll. Without progress in the thread there is no heartbeat either."""
        seen = -1
        while self._in_flight is not None and not self._in_flight.done():
            if seen != self._beats:
                seen = self._beats
                beat()
            wait([self._in_flight], POLL_S)
        self.poll()

    def close(self, beat: Beat) -> None:
        """Wait, and free the host memory and the process group."""
        self.wait(beat)
        self._copy.free()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _count(self) -> None:
        self._beats += 1

    def _refuses(self, num_bytes: int) -> bool:
        if self._refusal is None:
            self._refusal = background_refusal(self._settings.background, self._memory_gib, self._mpi, num_bytes)
            how = f"while training waits: {self._refusal}" if self._refusal else "in the background"
            if self._mpi.rank == 0:  # which speaks for all: they have agreed
                log.info("checkpoints (%s of rank 0) are written %s", gib(num_bytes), how)
        return bool(self._refusal)


def background_refusal(wanted: bool | str, memory_gib: float, mpi: MPIContext, num_bytes: int) -> str:
    """Return why this rank does not copy `num_bytes` to write them in the background; "" = it does.

    wanted: `checkpoint.background`. memory_gib: `parallel.memory_gib`.
    """
    if wanted != "auto":
        return "" if wanted else "checkpoint.background = false"
    if mpi.device.type == "cpu" and memory_gib:
        return "the copy would not count towards parallel.memory_gib"
    # half of what is free, since the page cache of the files that are written wants some as well
    free = free_memory(torch.device("cpu")) // mpi.local_size
    if 2 * num_bytes > free:
        return f"a copy takes {num_bytes:,} bytes, and {free:,} are free for each rank of this host"
    return ""


def _beside_training(work: Callable[[], Path]) -> Path:
    """Return what `work` does, with a low priority of this thread from here on."""
    lower_priority()
    return work()


def _settle(future: Future[Path], work: Callable[[], Path]) -> None:
    """Run `work`, and give the future its result or its error."""
    try:
        future.set_result(work())
    # also what is not an Exception: the main thread would wait for a result that does not come
    except BaseException as error:
        future.set_exception(error)


class HostCopy:
    """A copy of all pieces that one rank writes, in host memory that is kept from one checkpoint to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._taken: torch.cuda.Event | None = None

    def take(self, file: RankFile, parts: Mapping[str, TensorPart]) -> None:
        """Copy the present values. On a GPU this only queues the copies, on the stream that computes the values."""
        if len(self._memory) != file.num_bytes:
            self.free()
            self._memory = torch.empty(file.num_bytes, dtype=torch.uint8)
            self._pinned = self._device.type == "cuda" and _pin(self._memory)
        file.copy(parts, self._memory)
        if self._device.type == "cuda":
            self._taken = torch.cuda.current_stream(self._device).record_event()

    def content(self) -> Iterator[memoryview]:
        """Yield the bytes, after the copies have ended; in any thread."""
        if self._taken is not None:
            torch.cuda.set_device(self._device)  # a property of each thread
            self._taken.synchronize()
        yield from chunks(self._memory)

    def free(self) -> None:
        """Free the memory."""
        if self._pinned:
            unpin_memory(self._memory.data_ptr())
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False


def _pin(memory: Tensor) -> bool:
    """Pin memory for copies from a GPU, without which they are right but slow; return whether that was granted."""
    try:
        # torch's allocator of pinned memory would round up to the next power of two
        pin_memory(memory.data_ptr(), memory.nbytes)
    except RuntimeError as error:
        log.warning("checkpoints are copied to memory that is not pinned: %s", error)
        return False
    return True
