"""LiveFacts: what is known of a run while it runs, read from the files of its directory.

    phases.jsonl    phases and their times
    events.jsonl    steps, loss, evaluations, speed, checkpoints
    nodes/*.jsonl   memory of each node
    identity.json   name

Each call of `read` reads what was added since the one before, so that the log of a long run is read once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.tasks.shown.training_progress import Progress
from onward.trainer.errors import OnwardError
from onward.trainer.events import Event, Usage, event_of, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import RunIdentity, read_record
from onward.trainer.run.timing.phases import RECORDS, Note, Phase, PhaseStart

MOST_POINTS = 2048
"""Losses of which the curve is drawn; of a longer series every second one, every third one, ... is taken."""
PACE_S = 60.0
"""The time left is computed from the steps of this many seconds, with their evaluations and checkpoints."""
USAGE_PERIOD_S = 5.0
USAGE_BYTES = 1 << 14
"""Bytes at the end of a node's file that have its newest line."""


@dataclass(frozen=True)
class Change:
    """How the loss has changed: the mean of its newest fifth compared with that of the fifth before."""

    ratio: float
    """Such as -0.1: it is a tenth lower."""
    steps: int
    """Steps between the middles of the two."""


class LiveFacts:
    """What is known of a run. now_s: the clock, in seconds since 1970."""

    def __init__(self, *, now_s: Callable[[], float] = time.time) -> None:
        self.now_s = now_s
        self.name = ""
        self.phases: list[tuple[Phase, float]] = [("start", now_s())]
        """Each phase of the newest flow, and when it began, in seconds since 1970."""
        self.history = RunHistory(Path(), series=())
        """What the event log says."""
        self.attempt = 0
        """The newest attempt, whose ranks may still load the model and the data."""
        self.usage: dict[str, Mapping[str, float]] = {}
        """Node -> what is used of it."""
        self.note = ""
        """What this process does just now, such as a download with its progress; else ""."""
        self.phase_note = ""
        """How far the present phase is, if its task says it; else ""."""
        self.problem = ""
        """Why the files could not be read at the last attempt; else ""."""
        self._run: RunDir | None = None
        self._owner: int | None = None
        self._phases_offset = 0
        self._usage_due_at = -math.inf

    def attach(self, run: RunDir, name: str = "") -> None:
        """Read a run from now on. name: its name, which its directory may not have yet."""
        self._run = run
        self.name = name or run.root.name[-8:]
        self.history = RunHistory(run.events, series=("train/loss",))

    @property
    def progress(self) -> Progress:
        return Progress(self.history)

    @property
    def phase(self) -> Phase:
        return self.phases[-1][0]

    @property
    def is_training(self) -> bool:
        """Whether the ranks of the newest attempt are ready, or have been."""
        start = self.history.start
        # the newest attempt has an own start only when its ranks are ready; until then that of a former one is newest
        return start is not None and 0 < self.attempt == start.attempt

    def elapsed_s(self) -> list[tuple[Phase, float]]:
        """Return each phase that has begun, and the seconds that it has taken; the last one goes on."""
        ends = [*(at for _, at in self.phases[1:]), self.now_s()]
        return [(phase, max(0.0, end - at)) for (phase, at), end in zip(self.phases, ends, strict=True)]

    @property
    def epochs(self) -> float:
        """Return the epochs of the whole run; 0 as long as they are not known."""
        start = self.history.start
        return start.num_samples / start.num_rows if start and start.num_rows else 0.0

    @property
    def epoch(self) -> float:
        progress = self.progress
        return self.epochs * progress.step / progress.num_steps if progress.num_steps else 0.0

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Return step and training loss from the first to the newest step, `MOST_POINTS` or one more at most."""
        curve = self.history.curve("train/loss", newest=True)
        # every period-th point, so that the curve of a long run costs as much to draw as that of a short one
        period = 1 + len(curve.steps) // MOST_POINTS
        points = [*zip(curve.steps[::period], curve.values[::period], strict=True)]
        # the newest loss is shown as a number beside the curve, so the curve ends with it
        if (len(curve.steps) - 1) % period:
            points.append((curve.steps[-1], curve.values[-1]))
        return [(step, loss) for step, loss in points if math.isfinite(loss)]

    def remaining_s(self) -> float:
        """Return the seconds until the last step at the pace of the last minute; NaN while there is none."""
        steps = self.history.newest.logged.steps
        logged_s = self.history.newest.logged.values
        if len(steps) > 1:
            # the times are ascending, so the first line of the last minute is found by bisection
            first = bisect_left(logged_s, logged_s[-1] - PACE_S)
            # one line alone has no duration
            if steps[-1] > steps[first] and logged_s[-1] > logged_s[first]:
                step_s = (logged_s[-1] - logged_s[first]) / (steps[-1] - steps[first])
                return (self.history.num_steps - self.history.step) * step_s
        return self.progress.remaining_s

    def change(self) -> Change | None:
        """Return the trend of the loss; None for fewer than four losses."""
        losses = self.losses
        # the newest fifth against the fifth before; of few losses the two halves
        size = len(losses) // 5 or len(losses) // 2
        if size < 2:
            return None
        before = losses[-2 * size : -size]
        newest = losses[-size:]
        levels = [statistics.fmean(loss for _, loss in part) for part in (before, newest)]
        middles = [statistics.fmean(step for step, _ in part) for part in (before, newest)]
        # a ratio to zero means nothing
        if not levels[0] or not all(map(math.isfinite, levels)):
            return None
        return Change((levels[1] - levels[0]) / abs(levels[0]), round(middles[1] - middles[0]))

    def read(self) -> None:
        """Read what was written since the last call. An error is no error of the view: `problem` has it."""
        if self._run is None:
            return
        try:
            self._read(self._run)
            self.problem = ""
        except (OnwardError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _read(self, run: RunDir) -> None:
        if run.identity.exists():
            with contextlib.suppress(OnwardError):  # it is damaged, which `onward status` says
                self.name = read_record(run.identity, RunIdentity).name
        # before the events: an attempt is numbered before its ranks write the first line
        self.attempt = run.current_attempt
        for event, after in read_events(run.phases, self._phases_offset, RECORDS):
            # a line that is half-written is not yielded, and is read at the next call
            self._phases_offset = after
            self._add_phase(event)
        self.history.read()
        # there is a file for each node, and a new line every few seconds only
        if time.monotonic() >= self._usage_due_at:
            self._usage_due_at = time.monotonic() + USAGE_PERIOD_S
            self.usage = dict(filter(None, map(_newest_usage, sorted(run.nodes.glob("rank-*.jsonl")))))

    def _add_phase(self, event: Event) -> None:
        """Add a phase. The first one of another process, or behind an end, begins a flow of its own."""
        if isinstance(event, Note):
            self.phase_note = event.text
        if not isinstance(event, PhaseStart):
            return
        self.phase_note = ""
        # a resumed run has the phases of its former flows in the same file; the view shows those of the newest one
        if event.pid != self._owner or self.phase == "end" or event.kind == "start":
            self.phases = []
            self._owner = event.pid
        self.phases.append((event.kind, event.begin_ms / 1e3))


def curve(losses: list[tuple[int, float]], width: int) -> list[float]:
    """Return the mean loss in each of up to `width` equal parts of the steps; parts without a loss are left out."""
    if not losses:
        return []
    first = losses[0][0]
    last = losses[-1][0]
    # groupby joins neighbours only, which is enough because the steps ascend
    parts = itertools.groupby(losses, lambda point: min(width - 1, (point[0] - first) * width // max(1, last - first)))
    return [statistics.fmean(loss for _, loss in part) for _, part in parts]


def _newest_usage(path: Path) -> tuple[str, Mapping[str, float]] | None:
    """Return node and values of the newest line of a node's file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        # the file of a long run has megabytes, and its newest line is at the end
        file.seek(max(0, size - USAGE_BYTES))
        lines = file.read().split(b"\n")[:-1]  # behind the last newline a line may be half-written
    newest = event_of(lines[-1]) if lines else None
    return (newest.node, newest.values) if isinstance(newest, Usage) else None
