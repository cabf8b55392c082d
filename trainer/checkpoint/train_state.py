"""The position of a training, and whether a configuration can continue from it. Needs no torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError
from onward.trainer.run.outcomes.stopping import after_evaluation
from onward.trainer.run.records import AttemptResult, Record, StopState

Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


class TrainState(Record):
    """The position of a training: together with the tensors, all that decides how it continues."""

    step: Count
    """Weight updates made."""
    samples_seen: Count
    scaler: dict[str, float]
    """State of the loss scaler."""
    metrics: dict[str, float]
    """The last evaluation."""
    evaluated_at: int = 0
    """The step of that evaluation."""
    best: float | None = None
    """The best `checkpoint.best_metric` of the evaluations after the first step; None before there is one."""
    best_at: Count = 0
    """The step of that evaluation, the first of equals."""
    stop: StopState = StopState()
    """What decides whether the run ends before its last step (run/outcomes/stopping.py)."""

    @property
    def position(self) -> dict[str, Any]:
        """Return what decides how training continues beside the tensors; not the times and the metrics."""
        stop = self.stop.model_dump(exclude={"trained_s"})
        return {"step": self.step, "samples_seen": self.samples_seen, "scaler": self.scaler, "stop": stop}

    @property
    def is_best(self) -> bool:
        """Whether the evaluation at this very step is better than all before it."""
        return self.best_at == self.step > 0

    def evaluated(self, metrics: dict[str, float], config: CheckpointConfig) -> TrainState:
        """Return this position with the metrics of its evaluation. NaN is never the best."""
        evaluated = self.model_copy(update={"metrics": metrics, "evaluated_at": self.step})
        rank = config.rank_of(metrics)
        if self.step == 0 or math.isnan(rank):  # at step 0 the file is as it came in, and is never saved
            return evaluated
        # of equal values the first one stays the best
        if self.best is None or rank < config.rank_of({config.best_metric: self.best}):
            return evaluated.model_copy(update={"best": metrics[config.best_metric], "best_at": self.step})
        return evaluated

    def counted(self, stop: StopConfig, checkpoint: CheckpointConfig) -> TrainState:
        """Return this position after its evaluation has counted for [stop]."""
        counted = after_evaluation(self.stop, self.metrics[checkpoint.best_metric], stop, checkpoint)
        # a run makes at least one step, also if the file that came in reaches the target
        return self.model_copy(update={"stop": counted if self.step else counted.model_copy(update={"latest": None})})

    def advance(self, samples: int, scaler: dict[str, float], *, trained_s: float = 0.0) -> TrainState:
        """Return the position one step and `samples` samples later, after `trained_s` seconds of all attempts."""
        # the metrics stay those of the last evaluation; `evaluated_at` has its step
        moved = {"step": self.step + 1, "samples_seen": self.samples_seen + samples, "scaler": scaler}
        return self.model_copy(update=moved | {"stop": self.stop.model_copy(update={"trained_s": trained_s})})

    def result(
        self, *, attempt: int, status: Literal["done", "stopped"], elapsed_s: float, ended_early: str
    ) -> AttemptResult:
        """Return the record of an attempt that ends at this position. ended_early: see `AttemptResult`."""
        return AttemptResult(
            attempt=attempt,
            status=status,
            step=self.step,
            samples_seen=self.samples_seen,
            metrics=self.metrics,
            elapsed_s=elapsed_s,
            ended_early=ended_early,
            stop=self.stop,
        )

    def as_start(self) -> TrainState:
        """Return this position for another run, which counts its evaluations and hours from here on."""
        return self.model_copy(update={"stop": StopState(), "best": None, "best_at": 0})

    def check_reachable(self, source: str, train: TrainConfig, *, num_rows: int) -> None:
        """Raise ConfigError when a training with these settings and `num_rows` rows has no such position."""
        num_steps = train.steps_of_run(num_rows)
        num_samples = train.samples_of_run(num_rows)
        batch_size = train.global_batch_size
        left = num_samples - self.samples_seen
        # samples left divided by the batch size must be the steps left; another batch size breaks this equation
        if left < 0 or self.step + math.ceil(left / batch_size) != num_steps:
            raise ConfigError(
                f"{source} is at step {self.step} after {self.samples_seen:,} samples, which this configuration cannot "
                f"reach: it makes {num_steps} steps of {batch_size} = {num_samples:,} samples; keep the batch size the "
                "checkpoint was saved with, and train for at least as many samples"
            )
