"""The progress of a training, computed from its event log; used by the monitor and by the live view in the terminal."""

from __future__ import annotations

import math
import statistics
import time
from typing import Literal

from onward.trainer.events import Event
from onward.trainer.run.records import MetricsSummary

COSTS = ("tokens_per_s", "tflops", "mfu", "memory_bytes")
"""Scalars of a line that it need not have."""


class Progress:
    """The progress of the training, from the events so far; `str()` is one line for the log."""

    def __init__(self) -> None:
        self.step = self.num_steps = self.num_events = 0
        self.loss = self.samples_per_s = self.data_wait = math.nan
        self.ended_early = ""
        self._samples_per_step = math.nan
        self._speeds: list[float] = []
        self._waits: list[float] = []
        self._costs: dict[str, list[float]] = {}
        self._stalls: dict[int, float] = {}
        self._first: dict[str, float] = {}
        self._last: tuple[int, dict[str, float]] = (-1, {})

    def add(self, event: Event) -> None:
        """Update the progress with the next event."""
        self.num_events += 1
        # A resumed attempt begins at an earlier step than the last one has reached, and has those steps to make again.
        self.step = event.step if event.kind == "start" else max(self.step, event.step)
        values = event.fields.get("values", {})
        if event.kind == "start":
            self.num_steps, self.ended_early = event.fields.get("num_steps", 0), ""
            self._samples_per_step = event.fields.get("num_samples", math.nan) / max(1, self.num_steps)
        elif event.kind == "end":
            self.ended_early = event.fields.get("ended_early", "")
        elif event.kind == "scalars":
            self.loss = values.get("train/loss", self.loss)
            if speed := values.get("train/samples_per_s"):
                self.samples_per_s = speed
                self._speeds.append(speed)
            if (wait := values.get("train/data_wait")) is not None:
                self.data_wait = wait
                self._waits.append(wait)
            for name in COSTS:
                if cost := values.get(f"train/{name}"):
                    self._costs.setdefault(name, []).append(cost)
        elif event.kind == "times":  # of an attempt so far
            self._stalls[event.attempt] = event.fields.get("seconds", {}).get("checkpoint", 0.0)
        elif event.kind == "evaluation":
            if event.step == 0 and not self._first:
                self._first = values
            if event.step > self._last[0]:
                self._last = (event.step, values)

    @property
    def remaining_s(self) -> float:
        """Return the seconds left at the newest speed; NaN while the speed is unknown."""
        return (self.num_steps - self.step) * self._samples_per_step / self.samples_per_s

    @property
    def percent(self) -> float:
        return 100.0 * self.step / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        return f"step {self.step}/{self.num_steps}, {self.pace()}"

    def pace(self) -> str:
        """Return loss, speed, data wait and time left as text, as far as they are known."""
        parts = [] if math.isnan(self.loss) else [f"loss {self.loss:.4g}"]
        if not math.isnan(self.samples_per_s):
            parts.append(f"{self.samples_per_s:.4g} samples/s")
        if "tokens_per_s" in self._costs:
            parts.append(f"{self._costs['tokens_per_s'][-1]:.4g} tokens/s")
        if "mfu" in self._costs:
            parts.append(f"MFU {self._costs['mfu'][-1]:.1%}")
        if not math.isnan(self.data_wait):
            parts.append(f"data wait {self.data_wait:.1%}")
        if not math.isnan(self.remaining_s):
            minutes, seconds = divmod(round(self.remaining_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
        return ", ".join(parts) or "starting"

    def summary(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> MetricsSummary:
        """Return the record for a training that ended as `status`. Speed and wait are the medians over all steps."""
        return MetricsSummary(
            status=status,
            step=self.step,
            num_events=self.num_events,
            first=self._first,
            last=self._last[1],
            samples_per_s=statistics.median(self._speeds or [0.0]),
            data_wait=statistics.median(self._waits or [0.0]),
            costs=self._summed_costs(),
            ended_early=self.ended_early,
        )

    def _summed_costs(self) -> dict[str, float]:
        medians = {name: statistics.median(values) for name, values in self._costs.items()}
        memory = {"memory_bytes": max(self._costs["memory_bytes"])} if "memory_bytes" in medians else {}
        stall = {"checkpoint_stall_s": sum(self._stalls.values())} if self._stalls else {}
        return medians | memory | stall


class Periodic:
    """Returns True when called, at most once in `period_s`."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._due_at = -math.inf

    def __call__(self) -> bool:
        if (now := time.monotonic()) < self._due_at:
            return False
        self._due_at = now + self.period_s
        return True
