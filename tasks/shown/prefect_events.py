"""Emit events of a run in Prefect, on which automations act: a message, a web hook, another deployment.

    onward.checkpoint    step, path              onward.promotion    status, reason, version
    onward.evaluation    step, metrics           onward.failed       error, message

The resource of each is the run, `onward.run.ID`, with its name; Prefect adds the flow run and the deployment. Outside
of a flow run, and while the server does not answer, nothing is emitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from prefect import runtime
from prefect.events import emit_event

from onward.tasks.shown.prefect_server import prefect_answers
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record

Kind = Literal["checkpoint", "evaluation", "promotion", "failed"]


def emit(kind: Kind, run: RunDir, payload: Mapping[str, Any], *, about: str = "") -> None:
    """Emit `onward.KIND`. about: a text that an automation can filter by, the label `onward.about` of the resource."""
    if not runtime.flow_run.get_id():
        return
    with contextlib.suppress(Exception):  # what an automation does is no part of the run
        if not prefect_answers():
            return
        name = read_record(run.identity, RunIdentity).name if run.identity.exists() else run.root.name
        resource = {"prefect.resource.id": f"onward.run.{run.root.name}", "prefect.resource.name": name}
        emit_event(f"onward.{kind}", resource | ({"onward.about": about} if about else {}), payload=dict(payload))
