"""The work pool of deployed runs, and what somebody who may start runs can change of the process that runs them.

    `job_variables` of a run --> placeholders of the pool's base job template --> a process that the worker starts

Prefect's default template has a placeholder for the command, the environment and the directory of the process: who may
start a run may then run any program. The pool that Onward makes has none, so what runs is decided by the worker alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.infra.servers.service_definitions import POOL
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import onward_home

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import WorkPool

log = logging.getLogger(__name__)

Template = Mapping[str, Any]
START = "python -m onward.flows.deploying.worker"
"""The command that starts a worker by hand, for a Prefect server of the user's."""
PAGE = 100
"""Deployments that are read at once."""


def closed_template(command: str = "") -> dict[str, Any]:
    """Return a base job template without variables. command: what runs in place of Prefect's own program."""
    return {
        # `env` is not among them: where it is a dictionary, Prefect merges that of a run into it without a placeholder
        "job_configuration": {"stream_output": True, **({"command": command} if command else {})},
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    }


def variables_of(template: Template) -> list[str]:
    """Return what a run or a deployment can change of the process, by a base job template; [] of a closed one."""
    if not template:
        return ["everything"]  # Prefect's worker puts its default in the place of an empty one
    configuration = template.get("job_configuration", {})
    named = set(template.get("variables", {}).get("properties", {}))
    # placeholders of the server itself, prefect. and ctx., cannot be set by a run
    named |= set(re.findall(r"{{\s*(?!prefect\.|ctx\.|\$)([\w.\-\[\]$]+)\s*}}", json.dumps(configuration)))
    return sorted(named | ({"env"} if isinstance(configuration.get("env"), dict) else set()))


def problem_of_pool(client: SyncPrefectClient, name: str = POOL) -> str:
    """Return what is wrong with the work pool and what to do; "" without a pool and for one that may be used.

    A pool of another type, such as docker, has variables by its nature: what they may change is on the security page.
    """
    pool = pool_of(client, name)
    found = variables_of(pool.base_job_template) if pool and pool.type == "process" else []
    if not found:
        return ""
    return (
        f"who may start a run can run any program: the work pool {name!r} of {client.api_url} has the variables "
        f"{', '.join(found)}; close it with `prefect work-pool update {name} --base-job-template {template_file()}`"
    )


def template_file() -> Path:
    """Write the template of a closed pool for a command of Prefect; return its file."""
    path = onward_home() / "work-pool.json"
    path.write_text(json.dumps(closed_template(), indent=2))
    return path


def prepare_pool(client: SyncPrefectClient, command: str) -> None:
    """Make the work pool if there is none, and close one that has Prefect's default template, which nobody has chosen.

    command: what the processes of runs execute in place of Prefect's own program. Raises RuntimeUnavailable for a pool
    with variables that somebody has chosen, and for one of another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate

    pool = pool_of(client)
    template = closed_template(command)
    if pool is None:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        return
    if pool.type != "process":
        problem = f"the work pool {POOL!r} of {client.api_url} is of the type {pool.type!r} and not 'process'"
        raise RuntimeUnavailable(f"{problem}; start its worker with `prefect worker start --pool {POOL}`")
    if _is_default(pool.base_job_template):
        log.warning("the work pool %r obeyed the job_variables of runs; it obeys none from now on", POOL)
        _clear_job_variables(client)
    # a template that somebody has chosen is not replaced
    elif problem := problem_of_pool(client):
        raise RuntimeUnavailable(problem)
    elif not command:
        return
    client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


def pool_of(client: SyncPrefectClient, name: str = POOL) -> WorkPool | None:
    """Return a work pool, that of deployed runs by default; None if the server has none."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


def _is_default(template: Template) -> bool:
    """Return whether a template is that of Prefect's worker, in which nobody has given a variable another default."""
    configuration = template.get("job_configuration", {})
    defaults = [each.get("default") for each in template.get("variables", {}).get("properties", {}).values()]
    # each entry is the placeholder of its own name
    is_plain = all(value == f"{{{{ {name} }}}}" for name, value in configuration.items())
    return is_plain and all(default in (None, True, {}) for default in defaults)


def _clear_job_variables(client: SyncPrefectClient) -> None:
    """Remove the job variables of deployments, with which earlier versions made them: a closed pool refuses them."""
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.client.schemas.filters import WorkPoolFilter

    in_pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    offset = 0
    while found := client.read_deployments(work_pool_filter=in_pool, limit=PAGE, offset=offset):
        for deployment in found:
            if deployment.job_variables:
                client.update_deployment(deployment.id, DeploymentUpdate(job_variables={}))
        offset += PAGE
