"""What is gone of the event log of a run: lines that are no events, and steps without metrics.

The log is no part of what is trained: a run whose log was cut or damaged resumes with the same bits. But its curves
have gaps then, and whoever reads them must know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.trainer.checkpoint.retention import list_checkpoints, step_in
from onward.trainer.errors import ConfigError, RecordError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory

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
        config = read_config(run, "given")
    except ConfigError:
        return LogDamage()
    # before the log, which a running job goes on with
    saved = [step_in(path.name) for path in list_checkpoints(run)]
    try:
        history = RunHistory.of(run.events, series=())
    except RecordError:  # it is not a file
        history = RunHistory(run.events)
    lines = history.damaged_lines
    logged = {step for attempt in history.attempts.values() for step in attempt.logged.steps}
    first = history.attempts.get(1)
    begin = 0 if not config.checkpoint.load else None
    if first and first.start:
        begin = first.start.step
    last = max(history.last_step, *saved, 0)
    if begin is None:
        begin = min(logged, default=last)
    gaps = tuple(_gaps(logged, begin, last, config.train.log_period))
    steps = sum((end - start) // config.train.log_period + 1 for start, end in gaps)
    return LogDamage(len(lines), lines[0] if lines else 0, gaps, steps, absent=not run.events.is_file())


def _gaps(logged: Iterable[int], begin: int, last: int, period: int) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of the multiples of `period` behind `begin`, up to `last`, that are missing."""
    later = (step for step in logged if step > begin)
    multiples = sorted(step for step in later if step % period == 0)
    before = begin // period * period
    # the multiple behind the last step closes a gap that reaches to the end
    for step in (*multiples, last // period * period + period):
        if step > before + period:
            yield before + period, step - period
        before = step
