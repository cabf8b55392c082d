"""Create a Prefect deployment of a configuration: scheduled, retried from the UI, one run at a time."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from onward.flows.configuration import prefect_client
from onward.flows.deploying.deployment_limits import Limits, limits_of, record
from onward.flows.deploying.deployments import FLOW
from onward.flows.deploying.signed_limits import KEY, refuse_unpublishable
from onward.flows.deploying.work_pool import START, pool_of, problem_of_pool, template_file
from onward.flows.form import short_form
from onward.infra.servers.databases import without_password
from onward.infra.servers.service_definitions import CLIENT_SETTINGS, POOL
from onward.tasks.checks.registered_models import store_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import onward_home

log = logging.getLogger(__name__)

DESCRIPTION = """\
Trains `{model}` on `{data}` with {ranks} ranks and writes the same ONNX file with trained weights.

- **Run** starts it now; the form shows the configuration and the settings that most runs change.
- **Retry** of a failed run continues from its newest checkpoint, in the same run directory and MLflow run.
- **Suspend** saves a checkpoint and frees the ranks within seconds; **Resume** continues from it, to the same weights.
- **Cancel** saves a checkpoint and stops; **Retry** or `onward resume RUN` continues.
- A scheduled run that cannot start within an hour is skipped.
- One run at a time. Of scheduled runs that wait for it, the newest starts.
- Runs are stored under `{home}/runs`; `onward ui` prints the links.
"""


@dataclass(frozen=True)
class Place:
    """Where the runs of a deployment execute."""

    pool: str = POOL
    """A work pool of Prefect: processes, docker or kubernetes."""
    queue: str = ""
    """A queue of it, which is made if it does not exist; empty = its default."""
    image: str = ""
    """The image of their containers; empty = that of the pool."""


ON_THIS_MACHINE = Place()


def deploy(
    config: RunConfig,
    name: str,
    *,
    cron: str = "",
    interval_s: float = 0.0,
    timezone: str = "UTC",
    allowed: Sequence[str] = (),
    all_waiting: bool = False,
    place: Place = ON_THIS_MACHINE,
) -> tuple[str, Limits]:
    """Create or replace the deployment `train-onnx/NAME`; return its id and what its runs may use.

    `allowed`: directories whose files they may use besides those that the configuration names. `all_waiting`: whether
    every scheduled run that waits for a running one starts after it, and not the newest alone. `place`: where runs
    execute. Needs a reachable Prefect server. Raises RuntimeUnavailable when the server has no work pool for it,
    ConfigError for an invalid `cron`, for directories that cannot be allowed and for limits that cannot be stored.
    """
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.schedules import Cron, Interval
    from prefect.types.entrypoint import EntrypointType

    from onward.flows.train_onnx import train_onnx

    schedules = []
    if cron:
        try:
            schedules.append(Cron(cron, timezone=timezone, slug="cron"))
        except ValueError as error:
            problem = f"--cron {cron!r} is not a cron expression: {error}"
            raise ConfigError(f"{problem}; an example is '0 2 * * *', every night at two") from None
    if interval_s:
        schedules.append(Interval(datetime.timedelta(seconds=interval_s), timezone=timezone, slug="interval"))
    config = config.model_copy(update={"monitor": with_tracking_uri(config.monitor)})
    job_variables = _job_variables(place)
    limits = limits_of(name, dict(config), allowed, all_waiting=all_waiting)
    # before anything changes in Prefect: a deployment without its limits would be scheduled, and its runs refused
    refuse_unpublishable(limits.model_dump_json(), _id_of(name))
    # As JSON, which Prefect stores. What has its default is left out, so that the parameters of a run fit a screen.
    parameters = config.model_dump(mode="json", exclude_defaults=True)
    deployment = train_onnx.to_deployment(
        name,
        # The worker imports the installed package; a file path would need this checkout on its machine.
        entrypoint_type=EntrypointType.MODULE_PATH,
        work_pool_name=place.pool,
        work_queue_name=place.queue or None,
        schedules=schedules,
        parameters=parameters,
        tags=["onward", config.model.path.stem],
        description=DESCRIPTION.format(
            model=config.model.path.name, data=config.data.source, ranks=config.world_size, home=onward_home()
        ),
        # Two runs at once would compete for the same devices.
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        job_variables=job_variables,
    )
    deployment_id = str(cast(RunnerDeployment, deployment).apply())
    form = short_form(train_onnx.parameters.model_dump(exclude_unset=True), parameters)
    with prefect_client() as client:
        client.update_deployment(UUID(deployment_id), DeploymentUpdate(parameter_openapi_schema=form))
    record(deployment_id, limits)
    return deployment_id, limits


def _id_of(name: str) -> str:
    """Return the id of the deployment of that name; "" if there is none yet."""
    from prefect.exceptions import ObjectNotFound

    with prefect_client() as client:
        try:
            return str(client.read_deployment_by_name(f"{FLOW}/{name}").id)
        except ObjectNotFound:
            return ""


def _job_variables(place: Place) -> dict[str, Any]:
    """Return the variables that the work pool needs: none for processes, whose worker decides everything.

    Raises RuntimeUnavailable unless the pool exists, which its first worker makes, and is closed.
    """
    with prefect_client() as client:
        pool = pool_of(client, place.pool)
        if pool is None:
            make = f"prefect work-pool create {place.pool} --type process --base-job-template {template_file()}"
            start = f"start a worker with `{START}`" if place.pool == POOL else f"`{make}` makes one for processes"
            raise RuntimeUnavailable(
                f"the Prefect server {client.api_url} has no work pool {place.pool!r} for deployed runs; {start}"
            )
        if problem := problem_of_pool(client, place.pool):
            raise RuntimeUnavailable(problem)
    if pool.type == "process":
        if place.image:
            raise ConfigError(f"--image {place.image}: runs of the work pool {place.pool!r} are processes")
        return {}
    # A container uses the same home, because the runs are stored there; with signed limits it may have its own.
    home = {} if os.environ.get(KEY) else {"ONWARD_HOME": str(onward_home())}
    return {"env": {**CLIENT_SETTINGS, **home}, **({"image": place.image} if place.image else {})}


def with_tracking_uri(monitor: MonitorConfig) -> MonitorConfig:
    """Return [monitor] with the MLflow of MLFLOW_TRACKING_URI, if it is set here and names none itself.

    Without a password: Prefect would store and show it. The worker's own environment has the whole URI.
    """
    name = "MLFLOW_TRACKING_URI"
    if monitor.tracking_uri or name not in os.environ:
        return monitor
    if without_password(os.environ[name]) != os.environ[name]:
        log.warning("%s holds a password, which is not stored: set %s in the environment of the worker", name, name)
        return monitor
    return monitor.model_copy(update={"tracking_uri": store_of(monitor)})
