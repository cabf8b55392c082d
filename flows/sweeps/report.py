"""Show a sweep in Prefect and in MLflow, where the trials' runs are the children of its run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from prefect.artifacts import create_table_artifact

from onward.flows.sweeps.outcome import table_of
from onward.infra.mlflow.mlflow_store import TrackingError, TrackingUnavailable
from onward.infra.mlflow.model_package import Point
from onward.infra.mlflow.tracking import Tracker
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.recorded.sweep_records import Sweep, Trial
from onward.trainer.run.records import RunIdentity, read_record

log = logging.getLogger(__name__)

VALUE = "trial"
"""The prefix of the metric by which trials are compared, in the sweep's MLflow run and in those of the trials."""


def start_run(identity: RunIdentity, plan: Sweep) -> tuple[str, str]:
    """Create the sweep's MLflow run, or find it; return its id and the address of its page.

    Raises RuntimeUnavailable when MLflow refuses or cannot be reached.
    """
    tags = {"onward.sweep": plan.sweep_id, "mlflow.note.content": _note(plan, identity)}
    params: dict[str, Any] = {f"tried.{key}": ", ".join(map(str, values)) for key, values in plan.choices.items()}
    for key, bounds in plan.ranges.items():
        params[f"tried.{key}"] = f"{bounds.kind}({bounds.low:g}, {bounds.high:g})"
    params |= {"num_trials": plan.num_trials, "metric": plan.metric, "greatest_is_best": plan.greatest}
    try:
        return Tracker(identity.tracking_uri).start_run(
            plan.experiment, key=plan.sweep_id, name=plan.name, tags=tags, params=params
        )
    except TrackingUnavailable as error:
        raise RuntimeUnavailable(
            f"{error}; start it, or set MLFLOW_TRACKING_URI or monitor.tracking_uri (empty = Onward's own store)"
        ) from None
    except TrackingError as error:
        raise RuntimeUnavailable(str(error)) from None


def _note(plan: Sweep, identity: RunIdentity) -> str:
    tried = " and ".join(f"`{key}`" for key in plan.tried)
    note = f"{plan.num_trials} trials of {tried}, compared by `{plan.metric}`"
    return note + (f" · [in Prefect]({identity.prefect_url})" if identity.prefect_url else "")


def ending(trial: Trial, plan: Sweep) -> str:
    """Return how a trial ended, as a clause."""
    if trial.value is not None:
        return f"{plan.metric} {trial.value:.6g} in {trial.elapsed_s:.1f} s"
    return trial.reason if trial.status == "pruned" else f"{trial.status}: {trial.reason}"


def record(tracker: Tracker, trial: Trial, plan: Sweep) -> None:
    """Record the value of a trial in its own MLflow run, and in the sweep's at the trial's number.

    Repeated for trials that had ended before: equal points are stored once. When MLflow cannot be reached, the value
    is recorded after the next trial, or when the sweep is resumed.
    """
    key = f"{VALUE}/{plan.metric}"
    with _tolerant():
        if trial.value is not None:
            tracker.log_batch([Point(key, trial.value, trial.ended_at_ms, trial.number)])
        if trial.run.identity.exists():
            # in both runs: the sweep's has the curve over trials, and the trial's can be sorted by it
            own = Tracker(tracker.tracking_uri, read_record(trial.run.identity, RunIdentity).mlflow_run_id)
            if trial.value is not None:
                own.log_batch([Point(key, trial.value, trial.ended_at_ms, trial.step)])
            own.set_tags({"onward.trial.status": trial.status, "onward.trial.reason": trial.reason[:5000]})


def show(tracker: Tracker, plan: Sweep, trials: Sequence[Trial], best: Trial | None) -> None:
    """Show the table of all trials on the flow run's page in Prefect, and the best one in the sweep's MLflow run."""
    heads, rows = table_of(trials, plan.metric, best.number if best else 0)
    entries = [
        {**dict(zip(heads, row, strict=True)), "reason": trial.reason} for row, trial in zip(rows, trials, strict=True)
    ]
    with contextlib.suppress(Exception):  # a missing table must not fail the sweep
        create_table_artifact(entries, key="sweep", description=f"The trials of {plan.name}")
    if best is None or best.value is None:
        return
    with _tolerant():
        tracker.log_batch([Point(f"best/{plan.metric}", best.value, best.ended_at_ms, 0)])
        tags = {f"onward.best.{key}": str(value) for key, value in best.settings.items()}
        tracker.set_tags({"onward.best_trial": str(best.number), **tags})


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    try:
        yield
    except TrackingError as error:
        log.warning(
            "the sweep's records in MLflow are incomplete; `onward sweep --resume` adds what is missing: %s", error
        )
