"""The account of a run's time: a pure function from the records of when things happened to where the time went.

    flow     start  configure ... data | train                                                      | export     | end
    attempt                            | launch  set-up | steps, ...  X          | set-up | steps ... |
    account  start-up ---------------------------------->|kept | lost |- recovery ------->| steps ...  |ending|export|

X: the attempt dies. Its steps behind the checkpoint that the next attempt resumes from are lost work, since they are
made again; from its death until that attempt begins its first step it is recovery. Inside of an attempt the laps of
rank 0's clock are counted (parallel/observing/step_clock.py), outside of it the beginnings of the flow's phases
(phases.py). What the laps do not add up to, compared with the time between their events, stands by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onward.trainer.events import Times
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import AttemptHistory, RunHistory
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.records import Record
from onward.trainer.run.timing.phases import PhaseStart, phases

PARTS: Mapping[str, str] = {
    "start-up": "until the first step: checks, rehearsal, shards, launch of the ranks, loading of model and data",
    "compile": "torch.compile",
    "data wait": "the ranks waited for samples, the mean over the ranks",
    "steps": "forward, backward, communication and update",
    "evaluation": "on the evaluation data, during the training",
    "checkpoint stall": "the training waited for a checkpoint",
    "lost work": "what an attempt did after its last checkpoint, before it died; it was repeated",
    "recovery": "from the death of an attempt until the next one began its first step",
    "ending": "the ranks ended, and the last metrics and checkpoints were read",
    "export": "export, verification, variants, registration",
    "approval": "somebody was asked whether the model may be promoted",
}
"""Part -> what it is."""
PART_OF_LAP = {
    "setup": "start-up",
    "compile": "compile",
    "data_wait": "data wait",
    "steps": "steps",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint stall",
}
"""Lap of an attempt -> part."""
BEFORE_TRAINING = ("start", "configure", "preflight", "data")


class TimeAccount(Record):
    """Where the time of a run went, in seconds."""

    began_ms: int
    ended_ms: int
    wall_s: float
    """The time in which a flow of the run ran."""
    idle_s: float
    """Between its flows: after it was stopped or killed, until it was resumed."""
    parts: Mapping[str, float]
    """A name of `PARTS` -> seconds."""
    of_start_up: Mapping[str, float]
    """What the part start-up consists of -> seconds."""
    repeated_steps: int
    """Steps that were made more than once."""
    unaccounted_s: float
    """`wall_s` without the sum of the parts."""


@dataclass(frozen=True)
class AttemptTimes:
    """When things happened in one attempt."""

    logged: AttemptHistory
    laps: Sequence[Times]
    """The laps of `logged`."""
    ending: AttemptEnding | None
    """None while the attempt runs, or if nothing noticed its end."""

    @property
    def began_ms(self) -> int:
        """Return when the attempt was launched."""
        if self.ending:
            return self.ending.began_ms
        start = self.logged.start
        setup_s = self.laps[0].seconds["setup"] if self.laps else 0.0
        return start.at_ms - round(1000 * setup_s) if start else self.logged.last_ms

    @property
    def last_ms(self) -> int:
        """Return when the last event was logged."""
        return self.logged.last_ms or self.began_ms


@dataclass
class _Flow:
    begins: list[PhaseStart]
    end_ms: int


def time_account(run: RunDir, history: RunHistory, now_ms: int | None = None) -> TimeAccount | None:
    """Return the account of a run; None if it has not begun, or an earlier version has trained it.

    now_ms: the time, of a run that is running; None for one that is not.
    """
    return account(phases(run), attempt_times(history, endings(run)), now_ms)


def attempt_times(history: RunHistory, ended: Sequence[AttemptEnding]) -> list[AttemptTimes]:
    """Return the times of all attempts that have an event or an ending."""
    endings = {ending.attempt: ending for ending in ended}
    # an attempt that died before its first event has an ending only, and one that nothing noticed has events only
    numbers = sorted(history.attempts.keys() | endings.keys())
    attempts = [history.attempts.get(number, AttemptHistory(number)) for number in numbers]
    return [AttemptTimes(attempt, attempt.laps, endings.get(attempt.number)) for attempt in attempts]


def account(
    begins: Sequence[PhaseStart], attempts: Sequence[AttemptTimes], now_ms: int | None = None
) -> TimeAccount | None:
    """Return the account that these records give; None without any. now_ms: see `time_account`."""
    if any(attempt.logged.start and not attempt.laps for attempt in attempts):
        return None  # the laps of an earlier version are not known
    flows = _flows(begins, attempts, now_ms)
    if not flows:
        return None
    # the attempts are consumed in their order while the flows are walked through
    walk = _Walk(attempts, running=now_ms is not None)
    for place, flow in enumerate(flows):
        walk.flow(flow, resumed=place + 1 < len(flows))
    began_ms = flows[0].begins[0].begin_ms
    ended_ms = flows[-1].end_ms
    wall_s = sum(flow.end_ms - flow.begins[0].begin_ms for flow in flows) / 1000
    return TimeAccount(
        began_ms=began_ms,
        ended_ms=ended_ms,
        wall_s=wall_s,
        idle_s=(ended_ms - began_ms) / 1000 - wall_s,
        parts=walk.parts,
        of_start_up={name: seconds for name, seconds in walk.of_start_up.items() if seconds},
        repeated_steps=walk.repeated,
        # shown and not hidden: a great rest means that a clock is missing
        unaccounted_s=wall_s - sum(walk.parts.values()),
    )


def _flows(begins: Sequence[PhaseStart], attempts: Sequence[AttemptTimes], now_ms: int | None) -> list[_Flow]:
    """Divide the phases among flows; each ends with its line `end`, or with its last sign of life."""
    flows: list[_Flow] = []
    open_by = 0
    for begin in begins:
        # each flow is one process; a process that has written `end` begins another flow, as in a notebook
        if begin.pid != open_by:
            flows.append(_Flow([], 0))
        flows[-1].begins.append(begin)
        open_by = 0 if begin.kind == "end" else begin.pid
    if not flows and attempts:  # trained by hand: the attempts alone
        flows = [_Flow([PhaseStart(step=0, began_ms=attempts[0].began_ms, kind="train", pid=0)], 0)]
    for flow, following in itertools.zip_longest(flows, flows[1:]):
        last = flow.begins[-1]
        # a killed flow has no `end`; it lived at least until the newest sign of life before the next flow began
        limit_ms = following.begins[0].begin_ms if following else math.inf
        ended_ms = [attempt.ending.ended_ms for attempt in attempts if attempt.ending]
        signs = [last.begin_ms, *(attempt.last_ms for attempt in attempts), *ended_ms]
        alive_ms = max(sign for sign in signs if sign <= limit_ms)
        flow.end_ms = alive_ms
        if last.kind == "end":
            flow.end_ms = last.begin_ms
        elif following is None and now_ms is not None:  # it is running
            flow.end_ms = now_ms
    return flows


class _Walk:
    """Walks through the flows of a run, and adds each stretch of time to a part."""

    def __init__(self, attempts: Sequence[AttemptTimes], *, running: bool) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.of_start_up: dict[str, float] = {}
        self.repeated = 0
        self._left = list(attempts)
        self._running = running
        self._recovers = False
        """Whether an attempt has died, and the next one has not begun its first step."""

    def flow(self, flow: _Flow, *, resumed: bool) -> None:
        """Add a flow. resumed: whether another flow follows."""
        # a phase lasts until the next one begins
        ends = [*(begin.begin_ms for begin in flow.begins[1:]), flow.end_ms]
        for begin, end_ms in zip(flow.begins, ends, strict=True):
            if begin.kind in BEFORE_TRAINING:
                self._start_up(begin.kind, end_ms - begin.begin_ms)
            elif begin.kind == "train":
                self._train(begin.begin_ms, end_ms, resumed=resumed)
            elif begin.kind != "end":
                self.parts[begin.kind] += (end_ms - begin.begin_ms) / 1000

    def _start_up(self, what: str, elapsed_ms: float) -> None:
        if self._recovers:
            self.parts["recovery"] += elapsed_ms / 1000
        else:
            self.parts["start-up"] += elapsed_ms / 1000
            self.of_start_up[what] = self.of_start_up.get(what, 0.0) + elapsed_ms / 1000

    def _train(self, begin_ms: int, end_ms: int, *, resumed: bool) -> None:
        at_ms = begin_ms
        # attempts of later flows stay for those
        while self._left and self._left[0].began_ms < end_ms:
            attempt = self._left.pop(0)
            at_ms = self._attempt(attempt, at_ms, end_ms, followed=bool(self._left))
        # behind a death nothing follows only if the run has failed for good: then it is its ending
        follows = self._recovers and (resumed or bool(self._left))
        self.parts["recovery" if follows else "ending"] += (end_ms - at_ms) / 1000

    def _attempt(self, attempt: AttemptTimes, at_ms: int, end_ms: int, *, followed: bool) -> int:
        """Add an attempt of a flow that ended at `end_ms`, and what was before it since `at_ms`; return its end."""
        start = attempt.logged.start
        ending = attempt.ending
        saved = attempt.logged.end is not None
        # an attempt without a record runs only if it is the newest one
        has_ended = followed or saved or ending is not None
        runs = self._running and not has_ended
        detected_ms = ended_ms = end_ms if runs else attempt.last_ms
        if ending:
            # never behind the end of the phase, so that no time is counted twice
            detected_ms = min(ending.detected_ms, end_ms)
            ended_ms = min(ending.ended_ms, end_ms)
        if start is None:
            self._start_up("launch", attempt.began_ms - at_ms)
            if runs:
                self._start_up("launch", ended_ms - attempt.began_ms)
            else:  # it died before its first step
                self.parts["recovery" if self._recovers else "lost work"] += (ended_ms - attempt.began_ms) / 1000
                self._recovers = True
            return ended_ms
        # `start` is logged when the set-up is done, so the launch ended that much earlier
        setup_ms = 1000 * attempt.laps[0].seconds["setup"]
        kept = self._kept(attempt)
        self._start_up("launch", start.at_ms - at_ms - setup_ms)
        self._start_up("set-up", setup_ms)
        # steps behind the checkpoint from which the next attempt goes on are made a second time
        if kept is not None:
            self.repeated += max(0, attempt.logged.last_step - max(kept, start.step))
        for before, now in itertools.pairwise(attempt.laps):
            # a lap counts as a whole; with a checkpoint at step 0 all of the work is lost
            is_kept = kept is None or (kept > 0 and now.step <= kept)
            for name, part in PART_OF_LAP.items():
                self.parts[part if is_kept else "lost work"] += now.seconds.get(name, 0) - before.seconds.get(name, 0)
        # from the last line of the clock to the end: nothing says what the ranks did, so their state decides
        tail = "ending" if saved else "steps" if runs else "lost work"
        self.parts[tail] += (detected_ms - attempt.laps[-1].at_ms) / 1000
        # a stop that was asked for is no failure from which the run recovers
        asked = ending is None or ending.kind in ("done", "stopped")
        self._recovers = not runs and not (saved and asked)
        self.parts["recovery" if self._recovers and followed else "ending"] += (ended_ms - detected_ms) / 1000
        return ended_ms

    def _kept(self, attempt: AttemptTimes) -> int | None:
        """Return the step up to which an attempt's work was kept; None = all of it."""
        # the earliest start counts, because a later attempt may have fallen back to an older checkpoint
        starts = [following.logged.start.step for following in self._left if following.logged.start]
        if starts:
            return min(starts)
        return None if attempt.logged.end or attempt.ending is None else attempt.ending.checkpoint
