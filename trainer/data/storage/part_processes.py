"""Make the parts of shards with all cores of this machine: in other processes and in this one.

this process      takes a step, makes it, takes the next one ...
thread 1          takes a step, sends it, waits  ---stdin--->  python -m onward.trainer.data.storage.part_program FOLDER
thread 2          ...                            <--stdout---  Reply, one line of JSON

This process begins at once, and the others take steps when they are ready, which takes them two seconds. Where one of
them ends without a reply, killed for its memory for instance, its step is made again in a new process.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from onward.trainer.data.images.image_computer import ImageComputer
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.written_parts import PartMaker, PartStep, RunSteps, StepResult
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.machine.this_machine import free_host_memory, usable_cores
from onward.trainer.run.records import Record

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""A step in which so many processes end is not begun again."""
LEAST_CORES = 3
"""The threads of one process read ahead, parse and wait for the disk, and use two (tests/bench/sharding_cores.py)."""
PROCESS_BYTES = 1 << 29
"""Memory that a process takes, about."""
READY = b"ready\n"
"""What a process prints once it can make steps."""
LOG_LETTERS = 500
"""Of the end of what a process has printed, in a message."""


class Reply(Record):
    """What a process answers to a step."""

    result: StepResult | None = None
    os_error: tuple[int, str, str] | None = None
    """Number, text and file of an OSError, such as of a full disk."""


@dataclass(frozen=True)
class PartProcesses:
    """Runs steps in several processes, of which this is one."""

    num: int = 0
    """0 = one for each core, as far as there is memory."""
    most_parts: int = 1000

    def can_divide(self, recipe: Recipe) -> bool:
        """Return whether several processes would be faster; images are decoded by threads on all cores."""
        return self._num() > 1 and not any(isinstance(each, ImageComputer) for each in recipe.computers)

    def _num(self) -> int:
        if self.num:
            return self.num
        num = min(usable_cores(), free_host_memory() // PROCESS_BYTES)
        return num if num >= LEAST_CORES else 1

    @contextmanager
    def opened(self, maker: PartMaker) -> Iterator[RunSteps]:
        """Start the other processes, and end them with the context."""
        queues = _Queues()
        others = [_Process(maker, number, queues) for number in range(1, self._num())]
        try:
            for other in others:
                other.start()
            yield partial(_run, maker, queues)
        finally:
            # first, so that no thread puts a new process in the place of one that is ended here
            queues.stopped.set()
            for other in others:
                other.end()


def _run(maker: PartMaker, queues: _Queues, steps: Iterable[PartStep]) -> Iterator[tuple[int, StepResult]]:
    """Yield the number of each step with its result. Raises RuntimeUnavailable, OSError."""
    left = 0
    for step in steps:
        queues.waiting.put((left, step))
        left += 1
    while left:
        # this process makes a step, too, as long as some wait
        with suppress(queue.Empty):
            item = queues.waiting.get_nowait()
            assert item
            queues.done.put((item[0], maker.make(item[1])))
        for number, result in queues.results():
            left -= 1
            if result.problems:
                # steps that have begun are waited for: of several problems the first in order counts
                left -= queues.drop_waiting()
            yield number, result


THIS_MACHINE = PartProcesses()
"""All cores of this machine."""


class _Queues:
    """What the threads share: steps that wait, each with its number, and what is done. None ends a thread."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[tuple[int, PartStep] | None] = queue.Queue()
        self.done: queue.Queue[tuple[int, StepResult] | Exception] = queue.Queue()
        self.stopped = threading.Event()

    def results(self) -> Iterator[tuple[int, StepResult]]:
        """Wait for a result, and yield all that there are. Raises what a thread has raised."""
        while True:
            item = self.done.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if self.done.empty():
                return

    def drop_waiting(self) -> int:
        """Remove the steps that wait, and return how many they were."""
        dropped = 0
        with suppress(queue.Empty):
            while True:
                self.waiting.get_nowait()
                dropped += 1
        return dropped


class _Process:
    """Passes steps to another process in a thread, and starts a new one in the place of one that ended."""

    def __init__(self, maker: PartMaker, number: int, queues: _Queues) -> None:
        self._thread = threading.Thread(target=self._pass_steps, name=f"parts-{number}", daemon=True)
        self._folder = maker.folder
        self._log = maker.folder / f"process-{number}.log"
        self._queues = queues
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to take steps."""
        self._process = self._new_process()
        self._thread.start()

    def _pass_steps(self) -> None:
        try:
            # steps are for who makes them at once, and not for a process that is still starting
            if not self._is_ready():
                log.warning("shards are written by one process less, which does not start: %s", self._last_words())
                return
            while (item := self._queues.waiting.get()) is not None and not self._queues.stopped.is_set():
                number, step = item
                self._queues.done.put((number, self._made(step)))
        except Exception as error:
            if not self._queues.stopped.is_set():
                self._queues.done.put(error)

    def end(self) -> None:
        """End the process, whatever it does."""
        if not self._process:
            return
        self._process.kill()
        # a thread that waits for a step gets none
        self._queues.waiting.put(None)
        self._thread.join()
        # the thread may have started another process after the first kill
        self._process.kill()
        self._process.communicate()

    def _is_ready(self) -> bool:
        """Wait until the process can make steps; False if it ends instead."""
        assert self._process
        assert self._process.stdout
        return self._process.stdout.readline() == READY or self._queues.stopped.is_set()

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace")[-LOG_LETTERS:].strip()
        return text or "without a message, as the kernel ends a process when memory is short"

    def _new_process(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "onward.trainer.data.storage.part_program", str(self._folder)]
        with self._log.open("ab") as output:
            # Ctrl-C in a terminal is for this process, which ends the others
            return subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )

    def _made(self, step: PartStep) -> StepResult:
        for _ in range(MOST_DEATHS):
            assert self._process
            if line := _answer(self._process, step):
                reply = Reply.model_validate_json(line)
                if reply.os_error:
                    raise OSError(*reply.os_error)
                assert reply.result
                return reply.result
            self._process.communicate()
            status = self._process.returncode
            if self._queues.stopped.is_set():
                break
            log.warning("a process that writes shards ended with status %d; another makes its part again", status)
            self._process = self._new_process()
            if not self._is_ready():
                break
        raise RuntimeUnavailable(
            f"{MOST_DEATHS} processes ended in the same part of the data, the last with status {status}: "
            f"{self._last_words()}"
        )


def _answer(process: subprocess.Popen[bytes], step: PartStep) -> bytes:
    """Return the line with which a process answers; empty if it has ended."""
    assert process.stdin
    assert process.stdout
    try:
        _write_line(process.stdin, step.model_dump_json())
    except BrokenPipeError:
        return b""
    line = process.stdout.readline()
    # a process that was killed may have left a part of a line
    return line if line.endswith(b"\n") else b""


def _write_line(file: IO[bytes], text: str) -> None:
    file.write(text.encode() + b"\n")
    file.flush()
