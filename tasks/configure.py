"""configure: refuse what can be refused before anything starts; make the run directory, or find it again.

The directory is named after the Prefect flow run, so that a Retry from the UI (same flow run, new process)
finds it; `onward resume` is a new flow run that names the old directory. The saved configuration never
changes: parameters that differ from it are refused, each by name.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import runtime, task
from prefect.artifacts import create_link_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import get_current_settings

from onward.infra import tracking
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.signature import model_digest
from onward.trainer.diagnostics.config_check import check_sections
from onward.trainer.errors import ConfigError, RuntimeUnavailable, UnsupportedModel
from onward.trainer.parallel.plan_record import Plan
from onward.trainer.run.directory import RunDir, onward_home, read_config, refusal_in
from onward.trainer.run.records import Refusal, RunIdentity, own_error, read_record, write_record

log = logging.getLogger(__name__)

CHOSEN = {
    "train.gradient_accumulation_steps",
    *(f"parallel.{name}" for name in ("data", "tensor", "pipeline", "zero")),
    "recompute.mode",
}
"""What `parallel = "auto"` chooses: of a run that began with it, the saved configuration holds what was chosen."""


@task(name="configure", task_run_name="configure", cache_policy=NO_CACHE)
def configure(run: RunDir, settings: Mapping[str, Any]) -> RunIdentity:
    """Validate everything, then fill the run directory and make the MLflow run, or find both as they were.

    Leaves `config.json` and `identity.json`. Raises ConfigError with every problem at once, and what
    `identify` raises.
    """
    config = build_config(dict(settings), check=check_sections)
    if run.config.exists():
        saved = read_config(run)
        refuse_changes(saved, config)
        config = saved
    else:
        config = divided(config)
        write_record(run.config, config)
    identity = identify(run, config)
    write_record(run.identity, identity)
    run.open_log()
    _show_links(identity)
    return identity


def refuse_changes(saved: RunConfig, given: RunConfig) -> None:
    """Raises ConfigError, naming every setting that differs: a run keeps the configuration it began with."""
    before, now = _settings(saved), _settings(given)
    if given.parallel.sizes == saved.parallel.sizes == "auto":
        chosen = CHOSEN if given.parallel.memory_gib else {*CHOSEN, "parallel.memory_gib"}
        before, now = ({key: value for key, value in each.items() if key not in chosen} for each in (before, now))
    if changed := [key for key in before if before[key] != now[key]]:
        raise ConfigError(
            [f"{key} was {before[key]!r} when the run began, now {now[key]!r}" for key in changed]
            + ["a run keeps the configuration it began with; start a new run, or resume without changes"]
        )


def divided(config: RunConfig) -> RunConfig:
    """The configuration, its sizes chosen if `parallel = "auto"`.

    Raises what `plan` raises where the graph cannot be cut, marked or held as configured: before anything is launched.
    """
    given, parallel = config.parallel.sizes == "given", config.parallel
    cut = parallel.pipeline > 1 or parallel.zero or parallel.units or config.recompute.mode != "none"
    if given and not cut and parallel.tensor == 1:
        return config
    try:
        found = plan(config)
    except UnsupportedModel:
        if given and not cut:  # shapes that depend on data cannot be told beforehand, but trained
            return config
        raise
    if given:
        return config
    train = config.train.model_copy(update={"gradient_accumulation_steps": found.gradient_accumulation_steps})
    chosen = {"parallel": found.parallel, "recompute": found.recompute, "train": train}
    return build_config({**dict(config), **chosen})


def plan(config: RunConfig) -> Plan:
    """How a run would be divided, found by the trainer in a process of its own: it imports the model, and torch.

    Raises the process's own error (ConfigError, UnsupportedModel: the graph cannot be divided like that),
    RuntimeUnavailable when it dies.
    """
    with tempfile.TemporaryDirectory(prefix="onward-plan-") as name:
        folder = Path(name)
        write_record(folder / "config.json", config)
        ended = subprocess.run(
            [sys.executable, "-m", "onward.trainer", "plan", str(folder)],
            cwd=folder,  # a directory of Onward's own: `-m` looks for modules in the working directory first
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if refusal_in(folder).exists():
            raise own_error(read_record(refusal_in(folder), Refusal))
        if ended.returncode or not (folder / "plan.json").exists():
            lines = "\n  | ".join((ended.stdout + ended.stderr).splitlines()[-20:])
            raise RuntimeUnavailable(f"the planning process ended with status {ended.returncode}\n  | {lines}")
        return read_record(folder / "plan.json", Plan)


def identify(run: RunDir, config: RunConfig) -> RunIdentity:
    """Who the run is, in every system that shows it; makes or finds its MLflow run.

    Raises ConfigError when the ONNX file is no longer the one the run began with, RuntimeUnavailable when a
    new run finds no MLflow, or MLflow refuses. A run that was known before goes on without an MLflow that is away:
    its events are shipped later.
    """
    digest = model_digest(config.model.path)
    known = read_record(run.identity, RunIdentity) if run.identity.exists() else None
    if known and known.model_sha256 != digest:
        raise ConfigError(
            f"{config.model.path} changed since the run began (SHA-256 {known.model_sha256[:12]}, now "
            f"{digest[:12]}); put the file back, or start a new run"
        )
    identity = RunIdentity(
        run_id=run.root.name,
        name=config.name,
        created_at=known.created_at if known else datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model_sha256=digest,
        prefect_url=_prefect_url(),
        tracking_uri=known.tracking_uri if known else _tracking_uri(config),
    )
    try:
        tracker = tracking.Tracker(identity.tracking_uri)
        mlflow_run_id, mlflow_url = tracker.start_run(
            config.monitor.experiment,
            key=identity.run_id,
            name=config.name,
            tags=_tags(run, config, identity),
            params=_settings(config),
        )
        tracker.log_file(run.config)
    except tracking.TrackingUnavailable as error:
        if known is None:
            raise RuntimeUnavailable(
                f"{error}; start it, or set MLFLOW_TRACKING_URI or monitor.tracking_uri (empty = Onward's own store)"
            ) from None
        log.warning("going on without MLflow, which gets everything later: %s", error)
        mlflow_run_id, mlflow_url = known.mlflow_run_id, known.mlflow_url
    except tracking.TrackingError as error:
        raise RuntimeUnavailable(str(error)) from None
    return identity.model_copy(update={"mlflow_run_id": mlflow_run_id, "mlflow_url": mlflow_url})


def _tracking_uri(config: RunConfig) -> str:
    """Where MLflow is, whatever directory `onward resume` is called in."""
    chosen = config.monitor.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or tracking.local_store(onward_home())
    database = chosen.removeprefix("sqlite:///")
    return chosen if database == chosen else f"sqlite:///{Path(database).absolute()}"


def _tags(run: RunDir, config: RunConfig, identity: RunIdentity) -> dict[str, str]:
    note = f"`{config.model.path.name}` on `{config.data.source}`; run directory `{run.root}`"
    return {
        "onward.run_dir": str(run.root),
        "onward.model": config.model.path.name,
        "onward.data": config.data.source,
        "prefect.flow_run_id": runtime.flow_run.get_id() or "",
        "mlflow.note.content": note + (f" · [in Prefect]({identity.prefect_url})" if identity.prefect_url else ""),
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    """`section.key` -> value."""
    sections = config.model_dump(mode="json")
    flat = {"name": sections.pop("name")}
    return flat | {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _prefect_url() -> str:
    """The flow run's page; empty outside of a flow."""
    flow_run_id, ui = runtime.flow_run.get_id(), get_current_settings().ui_url
    return f"{ui}/v2/runs/flow-run/{flow_run_id}" if flow_run_id and ui else ""


def _show_links(identity: RunIdentity) -> None:
    """Put the MLflow run's address on the flow run's page."""
    if identity.prefect_url and identity.mlflow_url:
        with contextlib.suppress(Exception):  # a link is not worth a run
            create_link_artifact(key="mlflow", link=identity.mlflow_url, link_text=f"{identity.name} in MLflow")
