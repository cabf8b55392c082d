"""A configuration as a Prefect deployment: scheduled, retried from the UI, one run at a time."""

from __future__ import annotations

import datetime
import os
from typing import Any, cast

from onward.infra.service_definitions import CLIENT_SETTINGS, POOL
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import onward_home

HOW_TO = """\
Trains `{model}` on `{data}` with {ranks} ranks, and gives back the same ONNX file with better weights.

- **Run** starts it now; the form is the configuration, with the meaning of every setting.
- **Retry** on a failed run goes on from its newest checkpoint, in the same run directory and MLflow run.
- **Cancel** saves a checkpoint and stops; `onward resume RUN` goes on.
- A scheduled run that could not start within an hour is skipped. One run at a time; others wait.
- Runs are kept under `{home}/runs`; `onward ui` prints the links.
"""


def deploy(config: RunConfig, name: str, *, cron: str = "", interval_s: float = 0.0, timezone: str = "UTC") -> str:
    """Make or replace the deployment `train-onnx/NAME`; returns its id. Needs a reachable Prefect server.

    Raises RuntimeUnavailable when no worker was ever started for it, ConfigError for a wrong `cron`.
    """
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.schedules import Cron, Interval, Schedule
    from prefect.types.entrypoint import EntrypointType

    from onward.flows.train_onnx import train_onnx

    schedules: list[Schedule] = []
    if cron:
        try:
            schedules.append(Cron(cron, timezone=timezone, slug="cron"))
        except ValueError as error:
            raise ConfigError(f"--cron {cron!r} is not a cron expression: {error}") from None
    if interval_s:
        schedules.append(Interval(datetime.timedelta(seconds=interval_s), timezone=timezone, slug="interval"))
    _find_pool()
    parameters: dict[str, Any] = config.model_dump(mode="json")
    deployment = train_onnx.to_deployment(
        name,
        entrypoint_type=EntrypointType.MODULE_PATH,
        work_pool_name=POOL,
        schedules=schedules,
        parameters=parameters,
        tags=["onward", config.model.path.stem],
        description=HOW_TO.format(
            model=config.model.path.name, data=config.data.source, ranks=config.world_size, home=onward_home()
        ),
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        job_variables={"env": {**CLIENT_SETTINGS, "ONWARD_HOME": str(onward_home()), **_tracking()}},
    )
    return str(cast(RunnerDeployment, deployment).apply())


def _find_pool() -> None:
    """The pool is made by its first worker."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound:
            raise RuntimeUnavailable(
                f"the Prefect server {client.api_url} has no work pool {POOL!r}, in which deployed runs wait for a "
                f"worker; start one with `prefect worker start --pool {POOL} --type process`"
            ) from None


def _tracking() -> dict[str, str]:
    """Where the deployer's MLflow is, if it was configured by environment."""
    return {name: os.environ[name] for name in ("MLFLOW_TRACKING_URI",) if name in os.environ}
