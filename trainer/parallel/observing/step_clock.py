"""StepClock: where the time of one attempt goes on this rank, as parts that add up to the time since the loop began.

    loop begins     start    step 1                                               evaluation     checkpoint     step 2
    |---- setup -----|-- data wait | pipeline | gradient reduction | optimizer --|- evaluation -|- checkpoint -|-- ...
                     |-------------------------- steps --------------------------|

A part is a `with clock("pipeline"):` block of the loop. Time outside of all blocks belongs to the set-up until
`begin_steps` is called, and to the steps from then on. While torch's profiler records, each block is a range of it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from torch.profiler import record_function

from onward.trainer.events import LAPS, EventWriter, Times

Part: TypeAlias = Literal["data wait", "pipeline", "gradient reduction", "optimizer", "evaluation", "checkpoint"]
OUTSIDE_OF_STEPS = ("evaluation", "checkpoint")
EMIT_PERIOD_S = 1.0


class StepClock:
    """Adds up the parts of an attempt by the clock of this rank, and writes the sums as events "times".

    began_at: `time.monotonic()` when the loop began. compiled_s: returns the seconds of compilations so far, which
    count as `compile` and not as the part that they are in.
    """

    def __init__(self, *, began_at: float, compiled_s: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(LAPS, 0.0)
        """Sum -> seconds of this attempt."""
        self.in_steps_s = 0.0
        """Seconds of the steps, with their compilations and the waiting for samples."""
        self._began_at = began_at
        self._compiled_s = compiled_s
        self._sum = "setup"
        self._marked_at = began_at
        self._compiled_before = compiled_s()
        self._emitted_at = began_at
        self._is_due = True
        self._trained_before_s = 0.0
        self._counts_hours = False
        self._step_began_at: float | None = None
        # three: one slow step must not make the limit of the heartbeat long for good
        self._recent_steps_s: deque[float] = deque(maxlen=3)

    @contextlib.contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        """Count the time of a block as a part."""
        self.mark()
        # the enclosing sum goes on after the block
        outer = self._sum
        self._sum = part if part in OUTSIDE_OF_STEPS else "steps"
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        with record_function(part) if profiled else contextlib.nullcontext():
            yield
        self.mark()
        self._sum = outer
        # evaluations and checkpoints are long, so the sums are written after each
        self._is_due |= part in OUTSIDE_OF_STEPS

    def mark(self) -> None:
        """Add the time since the last mark to the sum that it belongs to."""
        now = time.monotonic()
        compiled = self._compiled_s()
        elapsed_s = now - self._marked_at
        # a compilation happens inside a part, and would hide what the part takes in other steps
        compile_s = compiled - self._compiled_before
        self._marked_at = now
        self._compiled_before = compiled
        self.seconds["compile"] += compile_s
        self.seconds[self._sum] += elapsed_s - compile_s
        if self._sum == "steps":
            self.in_steps_s += elapsed_s

    def waited(self, wait_s: float) -> None:
        """Count a part of the time of the steps as waiting for samples; wait_s: the mean over the ranks."""
        # moved and not added: the sums still add up to the elapsed time
        self.seconds["data_wait"] += wait_s
        self.seconds["steps"] -= wait_s

    def begin_steps(self, *, trained_before_s: float = 0.0, counts_hours: bool = False) -> None:
        """End the set-up.

        trained_before_s: `trained_s` of the attempts before this one. counts_hours: whether this rank counts it.
        """
        self.mark()
        self._sum = "steps"
        self._trained_before_s = trained_before_s
        self._counts_hours = counts_hours

    def begin_step(self) -> float:
        """Begin a step; return the longest time from one step to the next among the last three, 0 without any."""
        now = time.monotonic()
        if self._step_began_at is not None:
            self._recent_steps_s.append(now - self._step_began_at)
        self._step_began_at = now
        return max(self._recent_steps_s, default=0.0)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the loop began."""
        return time.monotonic() - self._began_at

    @property
    def trained_s(self) -> float:
        """Return the seconds of training of all attempts; 0 on a rank that does not count them."""
        return self._trained_before_s + self.elapsed_s if self._counts_hours else 0.0

    def emit(self, events: EventWriter, step: int, *, now: bool = False) -> None:
        """Write the sums: after an evaluation or a checkpoint, and else at most once in EMIT_PERIOD_S, or `now`."""
        self.mark()
        if self._is_due or now or self._marked_at - self._emitted_at > EMIT_PERIOD_S:
            self._is_due = False
            self._emitted_at = self._marked_at
            seconds = {name: round(value, 4) for name, value in self.seconds.items()}
            events.emit(Times(step=step, seconds=seconds))
