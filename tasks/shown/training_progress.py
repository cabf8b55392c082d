"""The progress of a training, a view of its history; used by the monitor and by the live view in the terminal."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import Literal

from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import MetricsSummary

COSTS = ("tokens_per_s", "tflops", "mfu", "memory_bytes")
"""Scalars of a line that it need not have."""
SHOWN = tuple(f"train/{name}" for name in ("samples_per_s", "data_wait", *COSTS))
"""Metrics whose medians are in the summary."""


class Progress:
    """The progress of the training, from the events so far; `str()` is one line for the log.

    history: with the series of `SHOWN`.
    """

    def __init__(self, history: RunHistory) -> None:
        self._history = history

    @property
    def step(self) -> int:
        return self._history.step

    @property
    def num_steps(self) -> int:
        return self._history.num_steps

    def newest(self, name: str) -> float:
        """Return the newest value of `train/NAME`; NaN before the first one."""
        return self._history.values.get(f"train/{name}", math.nan)

    @property
    def remaining_s(self) -> float:
        """Return the seconds left at the newest speed; NaN while the speed is unknown."""
        start = self._history.start
        if start is None or not start.num_samples:
            return math.nan
        # the mean over the run, because the last step of an epoch may be smaller
        samples_per_step = start.num_samples / max(1, start.num_steps)
        return (self.num_steps - self.step) * samples_per_step / (self.newest("samples_per_s") or math.nan)

    @property
    def percent(self) -> float:
        return 100.0 * self.step / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        return f"step {self.step}/{self.num_steps}, {self.pace()}"

    def pace(self) -> str:
        """Return loss, speed, data wait and time left as text, as far as they are known."""
        shown = {
            "loss {:.4g}": self.newest("loss"),
            "{:.4g} samples/s": self.newest("samples_per_s"),
            "{:.4g} tokens/s": self.newest("tokens_per_s"),
            "MFU {:.1%}": self.newest("mfu"),
            "data wait {:.1%}": self.newest("data_wait"),
        }
        parts = [text.format(value) for text, value in shown.items() if not math.isnan(value)]
        if not math.isnan(self.remaining_s):
            minutes, seconds = divmod(round(self.remaining_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
        # before the first logged step nothing is known
        return ", ".join(parts) or "starting"

    def summary(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> MetricsSummary:
        """Return the record for a training that ended as `status`. Speed and wait are the medians over all steps."""
        history = self._history
        before_training = (event for event in history.evaluations if event.step == 0)
        first = next((event.values for event in before_training if event.values), {})
        last = max(history.evaluations, key=lambda event: event.step, default=None)
        last_values = last.values if last else {}
        end = history.newest.end
        speeds = [speed for speed in self._all("samples_per_s") if speed]
        ended_early = end.ended_early if end else ""
        return MetricsSummary(
            status=status,
            step=self.step,
            num_events=history.num_events,
            first=first,
            last=last_values,
            samples_per_s=statistics.median(speeds or [0.0]),
            data_wait=statistics.median(self._all("data_wait") or [0.0]),
            costs=self._summed_costs(),
            ended_early=ended_early,
        )

    def _all(self, name: str) -> list[float]:
        """Return all values of `train/NAME`, those of repeated steps included."""
        # steps that were made again cost time again, so they count
        parts = (attempt.series.get(f"train/{name}") for attempt in self._history.attempts.values())
        return list(itertools.chain.from_iterable(series.values for series in parts if series))

    def _summed_costs(self) -> dict[str, float]:
        costs = {name: list(filter(None, self._all(name))) for name in COSTS}
        summed = {name: statistics.median(values) for name, values in costs.items() if values}
        # of memory the peak matters, and not the median
        if costs["memory_bytes"]:
            summed["memory_bytes"] = max(costs["memory_bytes"])
        stalls = [attempt.seconds["checkpoint"] for attempt in self._history.attempts.values() if attempt.seconds]
        if stalls:
            summed["checkpoint_stall_s"] = sum(stalls)
        return summed


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
