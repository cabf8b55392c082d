"""RunHistory: the event log of a run, folded once; progress, reports, live view and accounts of time are views of it.

    events.jsonl --> RunHistory --> attempts   1: start, series, laps, checkpoints
                                               2: start, series, laps, checkpoints, end
                                --> curve()    one series over all attempts, which repeat steps
                                --> evaluations, confusions, newest values, step

A long log has millions of lines, so series and laps are arrays of numbers.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.trainer.events import (
    LAPS,
    CheckpointSaved,
    ConfusionMatrix,
    Ended,
    Evaluated,
    Event,
    ObjectPrecision,
    Scalars,
    Started,
    Times,
    read_lines,
)

MFU = "train/mfu"
TAIL_BYTES = 1 << 16
"""Bytes at the end of a log that have its newest values."""


@dataclass
class Series:
    """One number by step, in the order of the steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def extend(self, other: Series) -> None:
        """Append the values of another series behind the last step of this one."""
        # the first value of a step counts: what a resumed attempt made again is passed over
        begin = bisect_right(other.steps, self.steps[-1]) if self.steps else 0
        self.steps += other.steps[begin:]
        self.values += other.values[begin:]

    def cut(self, step: int) -> None:
        """Remove the values behind a step."""
        end = bisect_right(self.steps, step)
        del self.steps[end:], self.values[end:]

    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))


@dataclass
class AttemptHistory:
    """The events of one attempt."""

    number: int
    start: Started | None = None
    """None if no step was begun."""
    end: Ended | None = None
    """None unless it ended by itself, with a checkpoint."""
    series: dict[str, Series] = field(default_factory=dict)
    """Metric -> its values in this attempt."""
    logged: Series = field(default_factory=Series)
    """Step -> when its metrics were logged, in seconds since 1970."""
    last_ms: int = 0
    """The time of the last event, in milliseconds since 1970."""
    last_step: int = 0
    _laps: array[float] = field(default_factory=lambda: array("d"))
    """Time in milliseconds, step and the seconds of `LAPS`, of one event after the other."""

    def add_laps(self, event: Times) -> None:
        """Append the sums of an event "times"."""
        # flat numbers in place of records: a long run has millions of lines
        self._laps.extend((event.at_ms, event.step, *(event.seconds.get(name, 0.0) for name in LAPS)))

    @property
    def laps(self) -> list[Times]:
        """Return the events "times" in their order."""
        size = 2 + len(LAPS)
        rows = (self._laps[place : place + size] for place in range(0, len(self._laps), size))
        return [
            Times(at_ms=int(row[0]), step=int(row[1]), seconds=dict(zip(LAPS, row[2:], strict=True))) for row in rows
        ]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the sums of the last event "times"; {} before the first one."""
        return dict(zip(LAPS, self._laps[-len(LAPS) :], strict=True)) if self._laps else {}


class RunHistory:
    """The events of a run so far. log: the event log; offset: the byte from which it is read.

    series: the metrics whose values are kept for all steps; None = all. Of the others only the newest value is known.
    """

    def __init__(self, log: Path, *, offset: int = 0, series: Container[str] | None = None) -> None:
        self.attempts: dict[int, AttemptHistory] = {}
        """Number -> attempt, in the order of the log."""
        self.starts: list[Started] = []
        self.step = 0
        """The last step of the newest attempt. It may be less than an earlier attempt has reached."""
        self.num_events = 0
        self.damaged_lines: list[int] = []
        """The numbers of the lines that are not events, from 1."""
        self.values: dict[str, float] = {}
        """Metric of the training or of an evaluation -> newest value."""
        self.evaluations: list[Evaluated] = []
        self.checkpoints: list[CheckpointSaved] = []
        """Also deleted ones."""
        self.confusions: dict[str, ConfusionMatrix] = {}
        """Output of a loss -> newest confusion matrix."""
        self.precisions: dict[str, ObjectPrecision] = {}
        """Name of a loss of detected objects -> newest precisions."""
        self._log = log
        self._offset = offset
        self._series = series

    @classmethod
    def of(cls, log: Path, *, offset: int = 0, series: Container[str] | None = None) -> RunHistory:
        """Return the history of a log as it is now; an empty one if there is no log."""
        history = cls(log, offset=offset, series=series)
        history.read()
        return history

    @classmethod
    def of_tail(cls, log: Path) -> RunHistory:
        """Return the history of the last `TAIL_BYTES` of a log, which is quick for the log of a long run."""
        size = log.stat().st_size if log.exists() else 0
        return cls.of(log, offset=max(0, size - TAIL_BYTES), series=())

    def follow(self) -> Iterator[Event]:
        """Add each event that was logged since the last call, and yield it."""
        for event, after in read_lines(self._log, self._offset):
            self._offset = after
            if event is None:
                # lines are counted from 1, as editors do
                self.damaged_lines.append(1 + self.num_events + len(self.damaged_lines))
            else:
                self.add(event)
                yield event

    def read(self) -> None:
        """Add the events that were logged since the last call."""
        for _ in self.follow():
            pass

    def add(self, event: Event) -> None:
        """Add the next event."""
        # the order of the log is the order of the attempts
        if event.attempt not in self.attempts:
            self.attempts[event.attempt] = AttemptHistory(event.attempt)
        attempt = self.attempts[event.attempt]
        # a clock that was set back must not make time negative
        attempt.last_ms = max(attempt.last_ms, event.at_ms)
        attempt.last_step = max(attempt.last_step, event.step)
        self.num_events += 1
        self.step = max(self.step, event.step)
        match event:
            case Started():
                self.starts.append(event)
                attempt.start = attempt.start or event
                # a resumed attempt begins at an earlier step than the last one has reached, and makes those steps again
                self.step = event.step
            case Scalars():
                attempt.logged.append(event.step, event.at_ms / 1e3)
                self._add_values(attempt, event)
            case Evaluated():
                self.evaluations.append(event)
                self._add_values(attempt, event)
            case ConfusionMatrix():
                self.confusions[event.loss] = event
            case ObjectPrecision():
                self.precisions[event.loss] = event
            case CheckpointSaved():
                self.checkpoints.append(event)
            case Times():
                attempt.add_laps(event)
            case Ended():
                attempt.end = event

    def _add_values(self, attempt: AttemptHistory, event: Scalars | Evaluated) -> None:
        self.values |= event.values
        for name, value in event.values.items():
            if self._series is None or name in self._series:
                series = attempt.series.setdefault(name, Series())
                # a step that overflows is tried again, and logs some metrics again
                if not series.steps or event.step > series.steps[-1]:
                    series.append(event.step, value)
        # the peak of the attempt was wrong from its start
        if math.isnan(event.values.get(MFU, 0.0)):
            attempt.series.pop(MFU, None)

    @property
    def newest(self) -> AttemptHistory:
        """Return the newest attempt; one without events if there is none."""
        return next(reversed(self.attempts.values()), AttemptHistory(0))

    @property
    def start(self) -> Started | None:
        """Return the start of the newest attempt that has begun a step."""
        return self.starts[-1] if self.starts else None

    @property
    def num_steps(self) -> int:
        """Return the weight updates of the whole run; 0 as long as they are not known."""
        return self.start.num_steps if self.start else 0

    @property
    def last_step(self) -> int:
        """Return the greatest step of all attempts."""
        return max((attempt.last_step for attempt in self.attempts.values()), default=0)

    def curve(self, metric: str, *, newest: bool = False) -> Series:
        """Return a metric over all attempts; an empty series if the log has none.

        Of a step that was made again, the first value is kept, as in MLflow. newest: a resumed attempt replaces the
        values behind the step that it has begun from.
        """
        curve = Series()
        for attempt in self.attempts.values():
            if newest and attempt.start:
                curve.cut(attempt.start.step)
            curve.extend(attempt.series.get(metric, Series()))
        return curve
