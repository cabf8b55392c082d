"""Read and delete records of Onward's own Prefect server, through Prefect's client.

Prefect deletes events after 7 days by itself, and flow runs never: 230 KB for each run.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.configuration import prefect_client
from onward.flows.running.local_run import FLOWS, prefect_server
from onward.infra.servers.databases import named_database
from onward.trainer.run.directory import onward_home

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
PAGE = 200
"""Prefect's limit of records per call."""


def database() -> Path:
    """Return the database of Onward's own Prefect server."""
    return onward_home() / "prefect" / "prefect.db"


@contextlib.contextmanager
def own_prefect(kinds: Collection[str]) -> Iterator[SyncPrefectClient | None]:
    """Yield a client of Onward's own Prefect server, which is started if needed.

    None if there has never been a server, or if neither runs nor records of Prefect are among the kinds to remove.
    Raises RuntimeUnavailable when the server does not start.
    """
    has_records = database().exists() or bool(named_database("prefect"))
    if not has_records or not {"run", "prefect"} & set(kinds):
        yield None
        return
    with prefect_server(own=True), prefect_client() as client:
        yield client


def deployments(client: SyncPrefectClient | None) -> dict[str, str]:
    """Return name -> parameters of the deployments."""
    found: list[DeploymentResponse] = []
    while client and (page := client.read_deployments(limit=PAGE, offset=len(found))):
        found += page
    return {f"deployment {each.name}": json.dumps(each.parameters) for each in found}


def old_flow_runs(client: SyncPrefectClient, days: float, doomed: Collection[str]) -> list[UUID]:
    """Return the ids of Onward's flow runs that ended so many days ago, and whose run or sweep is not there or goes.

    doomed: the directories of the runs that go.
    """
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter

    flows = FlowFilter.model_validate({"name": {"any_": FLOWS}})
    ended = FlowRunFilter.model_validate({"state": {"type": {"any_": ENDED}}})
    runs: list[FlowRun] = []
    # Prefect gives a page at a time, and an empty one behind the last
    while page := client.read_flow_runs(flow_filter=flows, flow_run_filter=ended, limit=PAGE, offset=len(runs)):
        runs += page
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    old = []
    for run in runs:
        if run.updated is None or run.updated >= before:
            continue
        # the directory has the name of the run that it resumed, of its sweep, or its own id
        name = str(run.parameters.get("sweep") or run.parameters.get("resume") or run.id)
        exists = any((onward_home() / folder / name).is_dir() for folder in ("runs", "sweeps"))
        if name in doomed or not exists:
            old.append(run.id)
    return old
