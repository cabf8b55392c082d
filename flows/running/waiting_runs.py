"""Of the scheduled runs of a deployment that wait for a running one, at most the newest stays.

    running since 02:00          waiting: 03:00   04:00   05:00
                                     Cancelled  Cancelled   starts when the running one has ended

Prefect starts waiting runs in no certain order. All of a schedule would do the same on the same data, so the newest
does for all. Runs that somebody has started, and those with other parameters, are not cancelled; nor is a run that has
begun, however late: where a start takes longer than the interval of a schedule, no run would ever train.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prefect.client.orchestration import get_client

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.schemas.objects import FlowRun

AUTO = "auto-scheduled"
"""The tag by which Prefect marks the runs that a schedule creates."""


def superseded(waiting: Iterable[FlowRun]) -> list[tuple[FlowRun, FlowRun]]:
    """Return (run, the newer one in its place) for each waiting run of a schedule but the newest."""
    by_parameters: dict[str, list[FlowRun]] = {}
    for run in waiting:
        # a run that a person has started is wanted, and waits
        if AUTO in run.tags and run.expected_start_time:
            # runs with other parameters do other work, and do not stand for each other
            by_parameters.setdefault(json.dumps(run.parameters, sort_keys=True, default=str), []).append(run)
    found: list[tuple[FlowRun, FlowRun]] = []
    for runs in by_parameters.values():
        *older, newest = sorted(runs, key=lambda run: (run.expected_start_time, run.id))
        found += [(run, newest) for run in older]
    return found


def reason(newer: FlowRun) -> str:
    """Return why a waiting run was cancelled."""
    at = f"{newer.expected_start_time:%Y-%m-%d %H:%M:%S} UTC" if newer.expected_start_time else "later"
    return f"skipped: it waited for another run of its deployment, and the run scheduled for {at} takes its place"


def cancel_superseded(deployment_id: UUID) -> int:
    """Cancel the waiting runs of a deployment that a newer one supersedes; return their number."""
    from prefect.states import Cancelled

    found = superseded(_waiting(deployment_id))
    with get_client(sync_client=True) as client:
        for run, newer in found:
            state = client.read_flow_run(run.id).state
            if state is not None and state.is_scheduled():  # it may have begun meanwhile
                cancelled: object = Cancelled(message=reason(newer))
                client.set_flow_run_state(run.id, cancelled)  # type: ignore[arg-type]
    return len(found)


def _waiting(deployment_id: UUID) -> Sequence[FlowRun]:
    """Return the runs of a deployment whose time has come and that have not begun."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter

    now = datetime.datetime.now(datetime.UTC).isoformat()
    asked = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": {"before_": now}}
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [str(deployment_id)]}}),
            flow_run_filter=FlowRunFilter.model_validate(asked),
        )
    # a run that has begun before, such as one to be retried, has a start
    return [run for run in found if run.start_time is None]
