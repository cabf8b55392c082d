"""Read what a run has left: its weights, its exported file, its points in MLflow, and the states in Prefect."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from onward.infra.mlflow.tracking import Tracker
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, ExportedModel, RunIdentity, read_record
from tests.soak.account import Result
from tests.support.stores import points_of as stored_points

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

BY_THE_CLOCK = ("system/", "perf/checkpoint_stall_s")
"""Prefixes of metrics that are recorded every so many seconds, and so at other steps in each run."""
Points = Mapping[tuple[str, int], int]
"""(Metric, step) -> how many points MLflow has."""


def result_of(run: RunDir, *, undisturbed: Points, steps_made: int = 0, elapsed_s: float = 0.0) -> Result:
    """Return what an exported run has left, compared with the points of the undisturbed run."""
    newest, exported, points = newest_complete(run), read_record(run.exported, ExportedModel), points_of(run)
    assert newest is not None, "a run that has exported a file has a checkpoint"
    digest = hashlib.sha256()
    for file in sorted(newest.manifest.files, key=lambda file: file.name):
        digest.update(file.sha256.encode())
    # a run that is stopped logs its last step, which need not be a multiple of train.log_period
    stops = set(_stopped_at(run))
    extra = [key for key in points if key not in undisturbed and key[1] not in stops]
    return Result(
        run_id=run.root.name,
        weights=digest.hexdigest(),
        model=exported.sha256,
        step=newest.info.step,
        points=sum(points.values()),
        points_lost=sum(1 for key in undisturbed if key not in points),
        points_doubled=sum(number - 1 for number in points.values()) + len(extra),
        steps_made=steps_made,
        elapsed_s=elapsed_s,
    )


def points_of(run: RunDir) -> Points:
    """Return how often each metric has a value for a step in MLflow, but for metrics that follow the clock."""
    identity = read_record(run.identity, RunIdentity)
    points = stored_points(Tracker(identity.tracking_uri, identity.mlflow_run_id))
    return collections.Counter(point for point in points if not point[0].startswith(BY_THE_CLOCK))


def _stopped_at(run: RunDir) -> list[int]:
    results = [read_record(path, AttemptResult) for path in run.attempts.glob("*/result.json")]
    return [result.step for result in results if result.status == "stopped"]


def flow_runs() -> list[FlowRun]:
    """Return all flow runs of the Prefect server that the environment names, the oldest first."""
    from prefect.client.orchestration import get_client

    from onward.flows.running.local_run import mark_orphaned_runs_crashed

    mark_orphaned_runs_crashed()  # as the next command would do
    found: list[FlowRun] = []
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(limit=200, offset=len(found)):
            found += page
    return sorted(found, key=lambda run: (run.created is None, run.created))
