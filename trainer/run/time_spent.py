"""TimeSpent: what one attempt of the training spends its time on, measured by laps of one clock.

    loop begins      start    step 1        step 2        evaluation      checkpoint     step 3
    |---- set-up ------|-- w s s s s s --|-- w s s s --|-- evaluation --|-- checkpoint --|-- w s s ...     w: data wait

Each lap ends where the next one begins, so that together they are the time since the loop began.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from onward.trainer.events import LAPS, EventWriter, Times

Lap: TypeAlias = Literal["setup", "steps", "evaluation", "checkpoint"]
EMIT_PERIOD_S = 1.0


class TimeSpent:
    """Adds up the laps of an attempt by the clock of this rank, and writes the sums as events "times".

    since: `time.monotonic()` when the loop began. compiled_s: returns the seconds of compilations so far, which count
    as `compile` and not as the lap that they are in; `data_wait` likewise.
    """

    def __init__(self, events: EventWriter, *, since: float, compiled_s: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(LAPS, 0.0)
        self._events, self._lap_from, self._compiled_s = events, since, compiled_s
        self._emitted_at, self._due, self._compiled_before = since, True, compiled_s()

    def lap(self, what: Lap, *, wait_s: float = 0.0) -> None:
        """End a lap. wait_s: how much of it the ranks waited for their samples, the mean over the ranks."""
        now, compiled = time.monotonic(), self._compiled_s()
        elapsed_s, compile_s = now - self._lap_from, compiled - self._compiled_before
        self._lap_from, self._compiled_before = now, compiled
        self.seconds["compile"] += compile_s
        self.seconds["data_wait"] += wait_s
        self.seconds[what] += elapsed_s - compile_s - wait_s
        self._due |= what != "steps"

    def emit(self, step: int, *, now: bool = False) -> None:
        """Write the sums: after an evaluation or a checkpoint, and else at most once in EMIT_PERIOD_S, or `now`."""
        if self._due or now or self._lap_from - self._emitted_at > EMIT_PERIOD_S:
            self._due, self._emitted_at = False, self._lap_from
            seconds = {name: round(value, 4) for name, value in self.seconds.items()}
            self._events.emit(Times(step=step, seconds=seconds))
