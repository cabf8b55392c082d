"""The outcome of a sweep, read from its directory alone: what `onward sweep` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from onward.flows.run_state.runs import Named, chosen, is_running
from onward.trainer.run.directory import RunDir
from onward.trainer.run.names import short_id
from onward.trainer.run.recorded.sweep_records import Sweep, SweepDir, SweepResult, Trial, all_sweeps, best_of, shown
from onward.trainer.run.records import Record, RunIdentity, read_record, record_if_written

SweepState = Literal["running", "exported", "interrupted", "failed"]


class SweepOutcome(Record):
    """The trials of a sweep, and the best one."""

    sweep_id: str
    name: str
    state: SweepState
    """`interrupted`: it has trials left, or its best one is not exported yet; `onward sweep --resume` goes on.
    `failed`: no trial is complete."""
    created_at: str
    """ISO 8601, UTC."""
    metric: str
    """The metric by which trials are compared."""
    greatest: bool
    """Whether a greater value is better."""
    num_trials: int
    trials: tuple[Trial, ...]
    """Those that have begun."""
    best: int
    """The number of the best complete trial so far; 0 without one."""
    model: str
    """The best trial's exported file; "" as long as it is not exported."""
    sha256: str
    registered: str
    """Name and version in MLflow's model registry; "" if it is not registered."""
    promotion: str
    """What became of `export.alias`, and why; "" without an alias."""
    directory: str
    mlflow_run_id: str
    """The MLflow run above those of the trials."""
    tracking_uri: str
    prefect_url: str


def outcome_of(folder: SweepDir) -> SweepOutcome:
    """Return the state of a sweep, read from its directory alone."""
    plan = read_record(folder.sweep, Sweep)
    trials = folder.trials()
    identity = record_if_written(folder.identity, RunIdentity)
    result = record_if_written(folder.result, SweepResult)
    # of the trials that are complete, so that a running sweep has a best one, too
    best = best_of(trials, greatest=plan.greatest)
    all_ended = len(trials) == plan.num_trials and all(trial.status != "running" for trial in trials)
    state: SweepState = "interrupted"
    if is_running(RunDir(folder.root)):
        state = "running"
    elif result:
        state = "exported"
    elif all_ended and best is None:
        state = "failed"
    # "" of a record that is not written yet
    exported = {name: str(getattr(result, name, "")) for name in ("model", "sha256", "registered", "promotion")}
    links = {name: getattr(identity, name, "") for name in ("mlflow_run_id", "tracking_uri", "prefect_url")}
    return SweepOutcome(
        sweep_id=plan.sweep_id,
        name=plan.name,
        state=state,
        created_at=plan.created_at,
        metric=plan.metric,
        greatest=plan.greatest,
        num_trials=plan.num_trials,
        trials=trials,
        best=best.number if best else 0,
        directory=str(folder.root),
        **exported,
        **links,
    )


def table_of(trials: Sequence[Trial], metric: str, best: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and the rows of the table of trials: settings, metric, steps, duration, status, reason."""
    # all trials have the same settings, with values of their own
    keys = list(trials[0].settings) if trials else []
    heads = ("trial", *keys, metric, "steps", "seconds", "status", "run")
    rows = []
    for trial in trials:
        settings = [shown(trial.settings[key]) for key in keys]
        value = "" if trial.value is None else f"{trial.value:.6g}"
        status = f"{trial.status}, the best" if trial.number == best else trial.status
        costs = (str(trial.step), f"{trial.elapsed_s:.1f}")
        rows.append((str(trial.number), *settings, value, *costs, status, short_id(trial.run_id)))
    return heads, rows


def find_sweep(text: str) -> SweepDir:
    """Return the sweep that `text` names: `last`, its name, the end of its id, or a configuration's name (the newest).

    Raises ConfigError, which lists the newest sweeps.
    """
    plans = [(each, read_record(each.sweep, Sweep)) for each in all_sweeps()]
    known = [Named(each, each.root.name, plan.name, plan.config_name or plan.name) for each, plan in plans]
    return chosen(text, known, kind="sweep")
