"""The event log: one JSON line per event, appended by rank 0; and the heartbeat that shows a job's progress.

MLflow, TensorBoard and the live view are filled from the log. A line is

    {"at_ms": 1767225600000, "attempt": 1, "step": 12, "kind": "scalars", "values": {"train/loss": 0.5}}

Kinds: `start` (an attempt begins at `step`; `num_steps`, `num_samples`, `num_parameters`, `compute`: the type of the
products; `num_rows`: the samples of an epoch; `flops_per_sample`: forward and backward, of a sample of mean length,
null if they cannot be counted; `peak_flops_per_s`: of all ranks, null if it is not known; `compile`: why
`graph.compile` "auto" is what it is, in a sentence, else ""; `resumed`: from which checkpoint and what is made again,
in a sentence, else ""; `damaged`: newer checkpoints that were not used),
`scalars` (`values`), `evaluation` (`values`), `confusion` (`loss`: its
output if there are several, else ""; `counts`: targets by [class][predicted class], of yes-or-no labels by
[label][is][predicted]), `histogram` (`name`, `counts`, `edges`), `bad_values` (`text`: where an evaluation loss became
NaN or infinite), `checkpoint` (`path`), `times` (`seconds`: what the attempt has spent its
time on so far, see parallel/step_clock.py), `end` (`status`; `ended_early`: why, if [stop] ended the run before its
last step, else "").
Among the scalars is what training has cost since the line before (parallel/throughput.py): `train/samples_per_s`,
`train/step_s`, `train/data_wait`, the share of the time in which ranks waited for their next samples, the mean over the
ranks; and, where they are known, `train/tokens_per_s`, `train/tflops`, `train/mfu`, `train/memory_bytes`.
A resumed attempt repeats the steps after its checkpoint; readers keep the first line of each (key, step). A line that a
crash cut off is removed when the next attempt opens the log.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from onward.trainer.bounds import RECORD_BYTES, NotAFile, opened, read_bounded
from onward.trainer.errors import RecordError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One line of the log."""

    at_ms: int
    attempt: int
    step: int
    kind: str
    fields: dict[str, Any]


class EventWriter:
    """Appends events to the log on rank 0; on the other ranks its methods do nothing.

    announces: whether train.log gets a sentence for those of them that have one. Files of other events, which have the
    same form, have none.
    """

    def __init__(self, path: Path, *, attempt: int, rank: int, announces: bool = True) -> None:
        self._attempt, self._announces = attempt, announces
        self._file: IO[bytes] | None = _open_for_appending(path) if rank == 0 else None

    def emit(self, kind: str, step: int, **fields: Any) -> None:
        """Append one event and flush it to the operating system."""
        if self._file is not None:
            at_ms = time.time_ns() // 1_000_000
            line = {"at_ms": at_ms, "attempt": self._attempt, "step": step, "kind": kind, **fields}
            self._file.write(json.dumps(line, separators=(",", ":"), default=float).encode() + b"\n")
            # the monitor reads the log while training runs; fsync, which is slow, is left to `sync`
            self._file.flush()
            if self._announces and (text := sentence(kind, step, fields)):
                log.info("%s", text)

    def scalars(self, step: int, **values: float) -> None:
        """Append training metrics of one step; each becomes `train/<name>`."""
        self.emit("scalars", step, values={f"train/{name}": float(value) for name, value in values.items()})

    def histogram(self, step: int, name: str, counts: Sequence[int], edges: Sequence[float]) -> None:
        """Append one histogram: `len(edges) == len(counts) + 1`."""
        self.emit("histogram", step, name=name, counts=list(counts), edges=list(edges))

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


def sentence(kind: str, step: int, fields: Mapping[str, Any]) -> str:
    """Return what train.log says of an event; "" for those of every few steps."""
    if kind == "start":
        begins = f"begins at step {step} of {fields.get('num_steps', 0)}; {fields.get('resumed') or 'it is a new run'}"
        return begins + (f"; {why}" if (why := fields.get("compile")) else "")
    if kind == "evaluation":
        return f"step {step}: " + ", ".join(f"{key} {value:.4g}" for key, value in fields["values"].items())
    if kind == "checkpoint":
        return f"step {step}: saved {fields.get('path', '')}"
    return f"step {step}: {fields.get('status', '')}" if kind == "end" else ""


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


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[Event, int]]:
    """Yield each complete line from byte `offset` on, with the byte offset after it.

    Call again with the last offset to follow a growing log. Lines that are not events are skipped.
    """
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
            if event := event_of(line):
                yield event, offset


def event_of(line: bytes) -> Event | None:
    """Return the event of a line of the log; None if it is none, or if readers cannot use it."""
    try:
        raw = json.loads(line)
        found = Event(raw.pop("at_ms"), raw.pop("attempt"), raw.pop("step"), raw.pop("kind"), raw)
        whole = all(type(each) is int for each in (found.at_ms, found.attempt, found.step))
        fits = all(_FIELDS[name](found.fields[name]) for name in _NEEDED.get(found.kind, ()))
        fits = fits and isinstance(found.fields.get("num_steps", 0), int)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if whole and fits and isinstance(found.kind, str) else None


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(each, int | float) for each in values.values())


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "values": _are_numbers,
    "seconds": _are_numbers,
    "loss": lambda value: isinstance(value, str),
    "counts": lambda value: isinstance(value, list),
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("scalars", "evaluation", "usage"), ("values",)),
    **{"confusion": ("loss", "counts"), "times": ("seconds",)},
}
"""Kind of event -> the fields without which nobody can read it."""


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
        self._touched_at, self._touched_limit_s = -math.inf, 0.0

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
        self._writes, self._timeout_s = rank == 0, timeout_s
        self._start_timeout_s, self._compile_timeout_s = start_timeout_s, compile_timeout_s
        self._traceback = traceback or sys.stderr
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """Call at least once in every step, evaluation batch and checkpoint file."""
        if step is not None:
            self.step = step
            self._first_step = step if self._first_step is None else self._first_step
        limit_s = self._limit_s()
        # steps may take less than a millisecond
        recent = time.monotonic() - self._touched_at < 0.2 and limit_s == self._touched_limit_s
        if recent or not self._timeout_s:
            return
        self._touched_at, self._touched_limit_s = time.monotonic(), limit_s
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
        before, self._compiles = self._compiles, True
        self.beat()
        yield
        self._compiles = before
        self.beat()

    def stop(self) -> None:
        """Disarm the watchdog."""
        self._timeout_s = 0.0
        faulthandler.cancel_dump_traceback_later()
