"""The event log: one JSON line per event, appended by rank 0; and the heartbeat that shows a job's progress.

MLflow, TensorBoard and the live view are filled from the log, through run/history.py. A line is

    {"at_ms": 1767225600000, "attempt": 1, "step": 12, "kind": "scalars", "values": {"train/loss": 0.5}}

Each kind of event is a record (event_records.py). A line of a kind that a newer version has added is a plain `Event`;
fields that a newer version has added are passed over, and fields that earlier versions did not write have defaults. A
resumed attempt repeats the steps after its checkpoint. A line that a crash cut off is removed when the next attempt
opens the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from onward.trainer.bounds import RECORD_BYTES, NotAFile, opened, read_bounded
from onward.trainer.errors import RecordError
from onward.trainer.event_records import LAPS as LAPS
from onward.trainer.event_records import RECORDS as RECORDS
from onward.trainer.event_records import CheckpointSaved as CheckpointSaved
from onward.trainer.event_records import ClassPrecision as ClassPrecision
from onward.trainer.event_records import ConfusionMatrix as ConfusionMatrix
from onward.trainer.event_records import Ended as Ended
from onward.trainer.event_records import Evaluated as Evaluated
from onward.trainer.event_records import Event as Event
from onward.trainer.event_records import Histogram as Histogram
from onward.trainer.event_records import Int64 as Int64
from onward.trainer.event_records import NonFiniteLoss as NonFiniteLoss
from onward.trainer.event_records import ObjectPrecision as ObjectPrecision
from onward.trainer.event_records import Scalars as Scalars
from onward.trainer.event_records import Started as Started
from onward.trainer.event_records import Times as Times
from onward.trainer.event_records import Usage as Usage

log = logging.getLogger(__name__)


class EventWriter:
    """Appends events to the log on rank 0. announces: whether train.log gets the sentences of the events."""

    def __init__(self, path: Path, *, attempt: int, rank: int, announces: bool = True) -> None:
        self._attempt = attempt
        self._announces = announces
        self._file: IO[bytes] | None = _open_for_appending(path) if rank == 0 else None

    def emit(self, event: Event) -> None:
        """Append one event and flush it to the operating system. Fields that were not given are not written."""
        if self._file is None:
            return
        line = {"at_ms": time.time_ns() // 1_000_000, "attempt": self._attempt, "step": event.step, "kind": event.kind}
        line |= event.model_dump(exclude_unset=True)
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        # the monitor reads the log while training runs; fsync, which is slow, is left to `sync`
        self._file.flush()
        if self._announces and (text := event.sentence()):
            log.info("%s", text)

    def scalars(self, step: int, **values: float) -> None:
        """Append training metrics of one step; each becomes `train/<name>`."""
        self.emit(Scalars(step=step, values={f"train/{name}": value for name, value in values.items()}))

    def sync(self) -> None:
        """Fsync the log. Call before a checkpoint: a run resumed from it does not repeat the events before it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Fsync and close the log."""
        self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_for_appending(path: Path) -> IO[bytes]:
    """Open the log for appending, without a last line that a crash left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    size = file.seek(0, os.SEEK_END)
    position = size
    while position:  # search the last newline, backwards in blocks of 64 KiB
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position != size:
        file.truncate(position)
    return file


def read_events(
    path: Path, offset: int = 0, records: Mapping[str, type[Event]] = RECORDS
) -> Iterator[tuple[Event, int]]:
    """Yield the event of each complete line from byte `offset` on, with the byte offset after it; skip other lines.

    Call again with the last offset to follow a growing log. records: kind -> record.
    """
    return ((event, after) for event, after in read_lines(path, offset, records) if event)


def read_lines(
    path: Path, offset: int = 0, records: Mapping[str, type[Event]] = RECORDS
) -> Iterator[tuple[Event | None, int]]:
    """Yield the same as `read_events`, and None for each complete line that is not an event."""
    try:
        log = opened(path)
    except FileNotFoundError:
        return
    except NotAFile as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    with log as file:
        file.seek(offset)
        # the last line may be half-written; it is read by the next call
        while (line := file.readline(RECORD_BYTES.most)).endswith(b"\n"):
            offset += len(line)
            yield event_of(line, records), offset


def event_of(line: bytes, records: Mapping[str, type[Event]] = RECORDS) -> Event | None:
    """Return the event of a line of the log; None if the line is no event, or lacks a field that has no default."""
    try:
        fields = json.loads(line)
        if not {"at_ms", "attempt"} <= fields.keys():  # the writer has always set them
            return None
        return records.get(fields["kind"], Event).model_validate(fields, strict=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class Beat:
    """The content of the heartbeat file."""

    step: int = 0
    """The step that rank 0 is in."""
    silence_s: float = 0.0
    """How long the job may be silent from now on; 0 = not said."""
    step_s: float = 0.0
    """The longest of the last steps, with the evaluation and the checkpoint behind it; 0 before the second step."""


def last_beat(path: Path) -> Beat:
    """Return the content of a heartbeat file; step 0 if there is none, or if it is being written just now."""
    try:
        return Beat(**json.loads(read_bounded(path, RECORD_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Beat()


class Heartbeat:
    """Shows that the job makes progress: writes a file (rank 0) and re-arms this rank's watchdog (all ranks).

    If `beat` is not called for some time, the watchdog writes the traceback of every thread and ends the process, even
    if it is inside a C call that holds the GIL. The time is `timeout_s`; `start_timeout_s`, if that is longer, while
    the rank imports, loads and assembles the model and makes its first step; and `compile_timeout_s` while it compiles:

        start   evaluation   step 1   step 2   step 3   evaluation   step 4   last step, with fewer samples
        start_timeout_s ------------->|
        compile_timeout_s ----------->|                 |---------->|        |----------------------------->
    """

    MARGIN_S = 2.0
    """Seconds that the launcher waits longer than the watchdogs in the ranks, which write tracebacks first."""

    def __init__(self, path: Path) -> None:
        self.step = 0
        """The current step, for the error record."""
        self.new_shapes = False
        """Whether the next step has other shapes than those before it, for which a rank compiles again."""
        self.longest_step_s = 0.0
        """What a step took at most, of the last ones."""
        self.step_before = last_beat(path).step
        """The step that the former attempt was last in; 0 without one."""
        self._path = path
        self._writes = False
        self._timeout_s = self._start_timeout_s = self._compile_timeout_s = 0.0
        self._compiles = False
        self._first_step: int | None = None
        self._traceback: IO[str] = sys.stderr
        self._touched_at = -math.inf
        self._touched_limit_s = 0.0

    def start(
        self,
        *,
        rank: int,
        timeout_s: float,
        start_timeout_s: float = 0.0,
        compile_timeout_s: float = 0.0,
        traceback: IO[str] | None = None,
    ) -> None:
        """Arm the watchdog; rank 0 also begins to write the file.

        compile_timeout_s: 0 if nothing is compiled. traceback: the file for the watchdog's tracebacks; None = stderr.
        """
        self._writes = rank == 0
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._compile_timeout_s = compile_timeout_s
        self._traceback = traceback or sys.stderr
        self.beat()

    def beat(self, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
        """Call at least once in every step, evaluation batch and checkpoint file. longest_step_s: of the last steps."""
        if step is not None:
            self.longest_step_s = longest_step_s
            self.step = step
            self._first_step = step if self._first_step is None else self._first_step
        limit_s = self._limit_s()
        # steps may take less than a millisecond
        recent = time.monotonic() - self._touched_at < 0.2 and limit_s == self._touched_limit_s
        if recent or not self._timeout_s:
            return
        self._touched_at = time.monotonic()
        self._touched_limit_s = limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._traceback)
        if self._writes:
            beat = Beat(self.step, limit_s + self.MARGIN_S, self.longest_step_s)
            self._path.write_text(json.dumps(asdict(beat)))

    def _limit_s(self) -> float:
        """Return how long the job may be silent from now on."""
        starts = self._first_step is None or self.step == self._first_step
        compiles = starts or self.new_shapes or self._compiles
        return max(
            self._timeout_s,
            self._start_timeout_s if starts else 0.0,
            self._compile_timeout_s if compiles else 0.0,
        )

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Allow `compile_timeout_s` between heartbeats inside a block, if anything is compiled at all."""
        before = self._compiles
        self._compiles = True
        self.beat()
        yield
        self._compiles = before
        self.beat()

    def stop(self) -> None:
        """Disarm the watchdog."""
        self._timeout_s = 0.0
        faulthandler.cancel_dump_traceback_later()
