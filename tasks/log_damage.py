"""What is gone of the event log of a run: lines that are no events, and steps without metrics.

The log is no part of what is trained: a run whose log was cut or damaged resumes with the same bits. But its curves
have gaps then, and whoever reads them must know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.trainer.bounds import NotAFile, opened
from onward.trainer.checkpoint.retention import list_checkpoints, step_in
from onward.trainer.errors import ConfigError
from onward.trainer.events import Scalars, Started, event_of
from onward.trainer.run.directory import RunDir, read_settings

MOST_NAMED = 5
"""Gaps that a sentence names."""


@dataclass(frozen=True)
class LogDamage:
    """What is gone of an event log."""

    lines: int = 0
    """Complete lines that are no events."""
    first_line: int = 0
    """The number of the first of them, from 1."""
    gaps: tuple[tuple[int, int], ...] = ()
    """(first, last) of the steps that were logged, and are gone."""
    steps: int = 0
    """How many steps that are."""
    absent: bool = False
    """Whether the file is gone."""

    def __str__(self) -> str:
        """Return a sentence; "" if nothing is gone."""
        found = []
        if self.lines:
            found.append(f"has {self.lines} damaged line{'s' * (self.lines > 1)}, the first is line {self.first_line}")
        if self.gaps:
            named = [f"{first} to {last}" if last > first else str(first) for first, last in self.gaps[:MOST_NAMED]]
            more = f" and {len(self.gaps) - MOST_NAMED} more gaps" if len(self.gaps) > MOST_NAMED else ""
            steps = f"{self.steps} step{'s' * (self.steps > 1)} ({', '.join(named)}{more})"
            found.append(f"{'is gone, and with it' if self.absent else 'lacks'} the metrics of {steps}")
        return f"events.jsonl {', and '.join(found)}; the checkpoints do not depend on it" if found else ""


def damage_of_log(run: RunDir) -> LogDamage:
    """Return what is gone of a run's event log. Raises RecordError when it is no file.

    Every step up to the newest checkpoint, and up to the last one in the log, has a line if its number is a multiple of
    train.log_period: the log is on the disk before a checkpoint is.
    """
    try:
        config = read_settings(run)
    except ConfigError:
        return LogDamage()
    saved = [step_in(path.name) for path in list_checkpoints(run)]  # before the log, which a running job goes on with
    lines, first_line, number, begin, last = 0, 0, 0, 0 if not config.checkpoint.load else None, max(saved, default=0)
    logged = set[int]()
    try:
        log = opened(run.events)
    except (FileNotFoundError, NotAFile):
        log = None
    if log is not None:
        with log as file:
            for number, line in enumerate(file, 1):
                event = event_of(line) if line.endswith(b"\n") else None
                if event is None:
                    lines, first_line = lines + line.endswith(b"\n"), first_line or number
                    continue
                last = max(last, event.step)
                if isinstance(event, Started) and event.attempt == 1:
                    begin = event.step
                elif isinstance(event, Scalars):
                    logged.add(event.step)
    if begin is None:
        begin = min(logged, default=last)
    gaps = tuple(_gaps(logged, begin, last, config.train.log_period))
    steps = sum((end - start) // config.train.log_period + 1 for start, end in gaps)
    return LogDamage(lines, first_line if lines else 0, gaps, steps, absent=log is None)


def _gaps(logged: Iterable[int], begin: int, last: int, period: int) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of the multiples of `period` behind `begin`, up to `last`, that are missing."""
    before = begin // period * period
    for step in (
        *sorted(each for each in logged if each % period == 0 and each > begin),
        last // period * period + period,
    ):
        if step > before + period:
            yield before + period, step - period
        before = step
