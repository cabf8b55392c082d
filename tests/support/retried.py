"""Run the task `train` with its retries, without Prefect's engine."""

from __future__ import annotations

from typing import Any

from prefect import State

from onward.tasks.train import train
from onward.trainer.errors import TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import TrainResult


def train_to_end(run: RunDir) -> TrainResult | State[Any]:
    """Repeat the task as Prefect does."""
    while True:
        try:
            return train.fn(run)
        except TrainingFailed as failed:
            if not failed.again:
                raise
