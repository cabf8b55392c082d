"""SweepDir: the directory of a sweep, and the records of its trials; each trial is a run with a directory of its own.

    SWEEP_DIR/
        lock                 the process of the flow that works on the sweep, which holds a flock on it
        flow.log             log of the flow, between its trials
        sweep.json           Sweep: the configuration, what is tried, and by which metric trials are compared
        identity.json        RunIdentity: the MLflow run above those of the trials
        trials/0001.json     Trial: its settings and its run directory; once it has ended, its result
        result.json          SweepResult: the best trial's exported file

The records are the only state. A trial without one has not begun, one that is `running` goes on in its run directory
from its newest checkpoint, and any other is never repeated. The values of a trial depend on sweep.json and the trials
before it alone, so a sweep that was killed and resumed tries what one without interruption would have tried.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import PathInside, RunDir, onward_home
from onward.trainer.run.records import Record, read_record, record_if_written

log = logging.getLogger(__name__)

Status: TypeAlias = Literal["running", "complete", "pruned", "failed"]


class Range(Record):
    """The values between two bounds, of which a sweep tries some."""

    kind: Literal["log", "uniform", "int"]
    """`log`: the logarithm is distributed evenly. `int`: whole numbers."""
    low: float
    high: float


class Sweep(Record):
    """What a sweep tries, and how its trials are compared."""

    sweep_id: str
    name: str
    """Its name in Prefect, MLflow and `onward sweep --list`; trial 2 of `mlp-15` is called `mlp-15-2`."""
    config_name: str = ""
    """The configuration's name; "" for a sweep of an earlier version."""
    created_at: str
    """ISO 8601, UTC."""
    settings: dict[str, Any]
    """The configuration as nested settings, with absolute paths; each trial replaces some of them."""
    choices: dict[str, tuple[Any, ...]]
    """Setting -> the values to try."""
    ranges: dict[str, Range]
    """Setting -> the range to choose values from. Without one, the trials are all combinations of the choices."""
    num_trials: int
    seed: int
    """The seed of the choice of values in ranges."""
    prune: bool
    """Whether a trial that is worse than the median of those before it ends early."""
    metric: str
    """The metric that decides: `checkpoint.best_metric`."""
    greatest: bool
    """Whether a greater value is better."""
    experiment: str
    """The MLflow experiment."""
    tracking_uri: str
    """The MLflow store of the sweep and of all its trials."""

    @property
    def tried(self) -> tuple[str, ...]:
        """The settings in which trials differ."""
        return (*self.choices, *self.ranges)


class Trial(Record):
    """One trial of a sweep; without a result as long as it is running."""

    number: int
    """From 1."""
    run_id: str
    """The name of its run directory."""
    settings: dict[str, Any]
    """The settings in which trials differ -> their values in this one."""
    status: Status = "running"
    value: float | None = None
    """The metric of the checkpoint that would be exported; None unless the trial is complete."""
    step: int = 0
    elapsed_s: float = 0.0
    """Wall time of its training loop, summed over attempts."""
    reason: str = ""
    """Why it was pruned or failed; else ""."""
    ended_at_ms: int = 0

    @property
    def run(self) -> RunDir:
        return RunDir(onward_home() / "runs" / self.run_id)


class Membership(Record):
    """That a run is a trial of a sweep: trial.json in its run directory."""

    sweep_id: str
    number: int
    mlflow_run_id: str
    """The sweep's MLflow run, of which the trial's is a child."""
    exports: bool = False
    """Whether this is the best trial, the only one that is exported."""


class Pruned(Record):
    """Why a trial ends before its last step: pruned.json in its run directory."""

    step: int
    reason: str


class SweepResult(Record):
    """How a sweep ended."""

    best: int
    """The number of the best trial."""
    model: Path
    """Its exported file, verified."""
    sha256: str
    registered: str
    """Name and version in MLflow's model registry; "" if it is not registered."""
    promotion: str
    """What became of `export.alias`, and why; "" without an alias."""


@dataclass(frozen=True)
class SweepDir:
    """The paths and records of one sweep."""

    root: Path

    @classmethod
    def of(cls, sweep_id: str) -> SweepDir:
        """Return the directory of a sweep of this home."""
        return cls(onward_home() / "sweeps" / sweep_id)

    lock = PathInside("lock")
    sweep = PathInside("sweep.json")
    identity = PathInside("identity.json")
    result = PathInside("result.json")

    def trial(self, number: int) -> Path:
        return self.root / "trials" / f"{number:04d}.json"

    def trials(self) -> tuple[Trial, ...]:
        """Return the trials that have begun, in their order."""
        return tuple(read_record(path, Trial) for path in sorted((self.root / "trials").glob("*.json")))


def all_sweeps() -> list[SweepDir]:
    """Return the sweeps under the home directory, newest first; a damaged one is left out, and logged."""
    found: list[tuple[str, SweepDir]] = []
    # a directory without sweep.json is one that was being made when its process was killed
    for path in (onward_home() / "sweeps").glob("*/sweep.json"):
        try:
            found.append((read_record(path, Sweep).created_at, SweepDir(path.parent)))
        except OnwardError as error:
            log.warning("this sweep is left out: %s", error)
    return [each for _, each in sorted(found, key=lambda pair: pair[0], reverse=True)]


def membership(run: RunDir) -> Membership | None:
    """Return of which sweep a run is a trial; None if it is of none."""
    return record_if_written(run.trial, Membership)


def best_of(trials: tuple[Trial, ...], *, greatest: bool) -> Trial | None:
    """Return the complete trial with the best value, the first of equals; None without one."""
    sign = -1.0 if greatest else 1.0
    # the number comes second, so that of equal values the first trial wins
    complete = [(sign * each.value, each.number, each) for each in trials if each.value is not None]
    return min(complete, default=(None, None, None))[-1]


def describe_settings(settings: dict[str, Any]) -> str:
    """Return settings in one line, such as `optimizer.learning_rate=0.001`."""
    return " ".join(f"{key}={shown(value)}" for key, value in settings.items())


def shown(value: Any) -> str:
    """Return a value as a table shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
