"""List, pause, resume, delete and start the deployments that `onward deploy` has made."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from onward.flows.configuration import prefect_client
from onward.flows.deploying.deployment_limits import forget
from onward.trainer.errors import ConfigError
from onward.trainer.run.record_base import Record

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

FLOW = "train-onnx"


class DeploymentFacts(Record):
    """A deployment, and the newest of its runs."""

    name: str
    deployment_id: str
    schedule: str
    """When it runs, in words; "by hand" without a schedule."""
    paused: bool
    next_at: str = ""
    """When the next run is scheduled, ISO 8601; "" if none is."""
    running: int = 0
    waiting: int = 0
    """Runs whose time has come, and that wait for the running one."""
    last_run: str = ""
    """Id of the newest run that has begun."""
    last_state: str = ""
    last_at: str = ""
    """When that run began, ISO 8601."""


def deployments() -> list[DeploymentFacts]:
    """Return all deployments of the flow, by name. Needs a reachable Prefect server."""
    from prefect.client.schemas.filters import FlowFilter

    with prefect_client() as client:
        flows = FlowFilter.model_validate({"name": {"any_": [FLOW]}})
        found: list[DeploymentResponse] = []
        while page := client.read_deployments(flow_filter=flows, limit=200, offset=len(found)):
            found += page
        return [_facts(client, each) for each in sorted(found, key=lambda each: each.name)]


def delete(name: str) -> DeploymentFacts:
    """Delete a deployment with its schedules and the runs that have not begun; return what it was.

    Its finished runs stay, and a run that has begun goes on. Raises ConfigError for an unknown name.
    """
    with prefect_client() as client:
        found = _named(client, name)
        facts = _facts(client, found)
        # the facts are read before: afterwards there is nothing left to ask
        client.delete_deployment(found.id)
    # the record of limits goes last, because a run that just begins reads it
    forget(facts.deployment_id)
    return facts


def run_now(name: str) -> str:
    """Start a run of a deployment, paused or not; return its id. Raises ConfigError for an unknown name."""
    with prefect_client() as client:
        return str(client.create_flow_run_from_deployment(_named(client, name).id).id)


def set_paused(name: str, *, paused: bool) -> DeploymentFacts:
    """Stop the schedules of a deployment, or start them again. A run that has begun goes on."""
    with prefect_client() as client:
        found = _named(client, name)
        if paused:
            client.pause_deployment(found.id)
        else:
            client.resume_deployment(found.id)
        return _facts(client, _named(client, name))


def _named(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """Return the deployment `NAME` or `train-onnx/NAME`. Raises ConfigError with the names that exist."""
    from prefect.exceptions import ObjectNotFound

    short = name.removeprefix(f"{FLOW}/")
    try:
        return client.read_deployment_by_name(f"{FLOW}/{short}")
    except ObjectNotFound:
        known = ", ".join(each.name for each in deployments()) or "none"
        raise ConfigError(f"there is no deployment {short!r}; there are: {known}") from None


def _facts(client: SyncPrefectClient, found: DeploymentResponse) -> DeploymentFacts:
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    def runs(*types: str, sort: FlowRunSort) -> list[FlowRun]:
        return client.read_flow_runs(
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [str(found.id)]}}),
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": types}}}),
            sort=sort,
        )

    now = datetime.datetime.now(datetime.UTC)
    # by time, so that the first one in the future is the next one
    scheduled = runs("SCHEDULED", sort=FlowRunSort.EXPECTED_START_TIME_ASC)
    times = [run.expected_start_time for run in scheduled if run.expected_start_time]
    begun = runs(
        *("RUNNING", "COMPLETED", "FAILED", "CANCELLED", "CANCELLING", "CRASHED", "PAUSED"),
        sort=FlowRunSort.START_TIME_DESC,
    )
    # one that was skipped while it waited has an end, and never began
    started = [run for run in begun if run.start_time]
    begun = [run for run in started if run.run_count]
    paused = found.paused
    # each schedule has a switch of its own, and with all of them off nothing begins by itself either
    if found.schedules and not any(schedule.active for schedule in found.schedules):
        paused = True
    next_at = next((_iso(at) for at in times if at > now), "")
    waiting = sum(at <= now for at in times)
    facts = DeploymentFacts(
        name=found.name,
        deployment_id=str(found.id),
        schedule=", ".join(map(_when, found.schedules)) or "by hand",
        paused=paused,
        next_at=next_at,
        running=sum(run.state_type == "RUNNING" for run in begun),
        waiting=waiting,
    )
    if not begun:
        return facts
    last = begun[0]
    began_at = _iso(last.start_time) if last.start_time else ""
    return facts.model_copy(update={"last_run": str(last.id), "last_state": last.state_name or "", "last_at": began_at})


def _when(schedule: DeploymentSchedule) -> str:
    """Return a schedule in words, such as `0 2 * * * (Europe/Berlin)` or `every 1:00:00`."""
    what: Any = schedule.schedule
    zone = f" ({what.timezone})" if getattr(what, "timezone", None) else ""
    if interval := getattr(what, "interval", None):
        return f"every {interval}"
    return str(getattr(what, "cron", None) or getattr(what, "rrule", "")) + zone


def _iso(at: datetime.datetime) -> str:
    return at.astimezone(datetime.UTC).isoformat(timespec="seconds")
