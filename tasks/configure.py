"""configure: validate the configuration, rehearse the run, create the run directory and the MLflow run.

The directory is named after the Prefect flow run, so a Retry in Prefect (the same flow run in a new process) finds it;
`onward resume` starts a new flow run that names the old directory. The saved configuration does not change, but for
[stop], with which a run that ended early may go on: other parameters that differ are refused, and the error names each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import get_current_settings

from onward.infra.git import commit_of
from onward.infra.mlflow import mlflow_store, tracking
from onward.infra.mlflow.tracking import page_on_own_server
from onward.tasks.attempts.log_damage import damage_of_log
from onward.tasks.checks.file_check import check_files
from onward.tasks.checks.machine_check import crowded_cores, machine_problems
from onward.tasks.checks.registered_models import store_of
from onward.tasks.checks.rehearsing import Preparation
from onward.tasks.shown.mlflow_tags import first_tags, parameters
from onward.tasks.storing.run_sender import begin_sending
from onward.trainer.checkpoint.manifest import read_manifest
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.config.flat_settings import flat_settings
from onward.trainer.config.loading import build_config
from onward.trainer.config.named_files import named_files
from onward.trainer.config.rules import Sections
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.data.completed_settings import with_inputs
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.scores_read import scores_said, with_scores
from onward.trainer.errors import CheckpointError, ConfigError, RuntimeUnavailable
from onward.trainer.run.allowed_code import SHOWN, AllowedCode
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import accepted_changes, refuse_edited, write_settings
from onward.trainer.run.names import name_of
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import Rehearsal, RunIdentity, read_record, record_if_written, utc_now, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies

log = logging.getLogger(__name__)

CHOSEN = {
    "train.gradient_accumulation_steps",
    *(f"parallel.{name}" for name in ("data", "tensor", "pipeline", "zero")),
    "recompute.mode",
}
"""Settings that `parallel = "auto"` chooses. The saved configuration of such a run holds the chosen values."""

DIGESTED = ("loss.file", "teacher.path", "model.converters")
"""Settings whose files decide, beside the model, what is computed."""
MAX_NAMED = 5
"""Weights that a message names."""
NOT_REHEARSED = (
    "An error there would end the run later, in training or at its export, which compares the file again; `onward "
    "doctor CONFIG` compares it now, without a limit of time"
)


@task(name="configure", task_run_name="configure", cache_policy=NO_CACHE)
def configure(run: RunDir, settings: Mapping[str, Any], allowed: Mapping[str, str] | None = None) -> RunIdentity:
    """Validate `settings` (the fields of RunConfig) and rehearse a new run; write the records; start the MLflow run.

    The records are `code.json`, `rehearsal.json`, `config.json` and `identity.json`. allowed: path -> SHA-256 of the
    Python files that may be executed (deployment_limits.py); None = those that `settings` name. Raises ConfigError with
    all problems at once, and the errors of `rehearse` and `identify`.
    """
    known = record_if_written(run.remote, LocalCopies) if run.config.exists() else None
    checked = []

    def check(sections: Sections) -> list[str]:
        checked.append(check_files(sections, known, resumed=run.config.exists(), allowed=allowed))
        return checked[0].problems

    # Prefect validates each section by itself; the rules across sections and the files are checked here.
    config = build_config(dict(settings), check=check)
    # the check has fetched the remote files, and read the code that may be executed
    copies = checked[0].copies
    code = checked[0].code
    config = with_inputs(config, with_copies(config, copies))
    local = with_copies(config, copies)  # with columns in place of patterns
    reads_scores = with_scores(config, local)
    if run.config.exists():
        saved = read_config(run, "given")
        refuse_edited(run)
        if _tensors_read(saved) == _tensors_read(reads_scores):  # else it is of a version that chose none
            config = reads_scores
        refuse_changes(saved, config)
        # the saved values count, because "auto" has been replaced in them; only [stop] may be new
        config = saved.model_copy(update={"stop": config.stop})
        if config != saved:
            write_settings(run, config)
            for name, before in saved.stop:
                if (value := getattr(config.stop, name)) != before:
                    log.info("stop.%s was %s, and is now %s", name, before, value)
        _write_copies(run, copies)
        for remark in filter(None, (str(damage_of_log(run)), *map(str, accepted_changes(run)))):
            log.warning("%s", remark)
    else:
        if missing := machine_problems(dict(config)):
            raise RuntimeUnavailable(missing)
        if config.quantize.aware:
            Preparation(config, copies, code=code).quantize(run)
        said = list(scores_said(config, reads_scores, local))
        config, found = Preparation(reads_scores, copies, run.quantized, code).rehearse()
        _write_copies(run, copies)
        write_record(run.code, AllowedCode(files=code))  # as it was before the rehearsal executed it
        write_record(run.rehearsal, found)  # before config.json, with which a run has begun and is not rehearsed again
        write_settings(run, config)
        for sentence in said:
            log.info("%s", sentence)
        _log(found, crowded_cores(config.launch, config.world_size))
    # After config.json, so that a run whose MLflow is unavailable can be started again unchanged.
    write_record(run.identity, identity := identify(run, config))
    if not run.code.exists():  # a run of an earlier version, whose files have been compared with its identity
        write_record(run.code, AllowedCode(files=code))
    begin_sending(run, config.checkpoint.store, log)
    run.open_log()
    _show_links(identity)
    return identity


def _tensors_read(config: RunConfig) -> tuple[object, ...]:
    """Return what `with_scores` names."""
    return config.model.outputs, [each.output for each in config.losses], config.teacher.output


def _write_copies(run: RunDir, copies: LocalCopies) -> None:
    if copies.copies:
        write_record(run.remote, copies)


def refuse_changes(saved: RunConfig, given: RunConfig) -> None:
    """Raise ConfigError with every setting that differs: a run keeps the configuration that it began with.

    Only limits of [stop] may differ: they decide how far a run goes, and not what a step does.
    """
    before = flat_settings(saved)
    now = flat_settings(given)
    # With "auto" the saved values were chosen when the run began, and the given ones are still the defaults.
    if given.parallel.sizes == saved.parallel.sizes == "auto":
        chosen = CHOSEN if given.parallel.memory_gib else {*CHOSEN, "parallel.memory_gib"}
        before = {key: value for key, value in before.items() if key not in chosen}
        now = {key: value for key, value in now.items() if key not in chosen}
    for key in ("model.fixed_batch", "precision.compute", "graph.compile"):
        if now[key] == "auto":
            before[key] = "auto"
    # the best value that is saved keeps its meaning: `stop` has limits alone
    for name in type(saved.stop).model_fields:
        before[f"stop.{name}"] = now[f"stop.{name}"]
    if changed := [key for key in before | now if before.get(key) != now.get(key)]:
        raise ConfigError(
            [f"{key} was {before.get(key)!r} when the run began, now {now.get(key)!r}" for key in changed]
            + ["a run keeps the configuration that it began with: resume it without changes, or start a new run"]
        )


def _log(found: Rehearsal, crowded: str) -> None:
    """Log what the rehearsal found: Prefect's page and the terminal of `onward run` show it."""
    log.info("%s", found.summary)
    if crowded:
        log.warning("%s", crowded)
    if found.compile:
        log.info("graph.compile 'auto' is %s: %s", str(found.compile.compiles).lower(), found.compile.text)
    for warning in found.warnings:
        log.warning("%s: %s\n    -> %s", warning.key, warning.what, warning.remedy)
    if found.batches:
        for left_out in found.not_rehearsed:
            log.warning("not rehearsed: %s. %s", left_out, NOT_REHEARSED)
    if found.without_gradient:
        few = ", ".join(found.without_gradient[:MAX_NAMED])
        number = len(found.without_gradient)
        first = "" if number <= MAX_NAMED else f"the first {MAX_NAMED} of them are "
        log.warning(
            "%d weights have no gradient on the first rows, and would not change by such rows: %s%s", number, first, few
        )


def identify(run: RunDir, config: RunConfig) -> RunIdentity:
    """Return the run's ids in Prefect and MLflow; create or find its MLflow run.

    Raises ConfigError when the ONNX file, a loss file or a converter has changed since the run began,
    RuntimeUnavailable when MLflow refuses, or when it cannot be reached and the run is new. A resumed run continues
    without MLflow; its events are sent later.
    """
    # The checkpoints of the run fit only the file that it began with.
    local = read_config(run)
    digest = model_digest(local.model.path)
    # of each loss file (of an ONNX loss with its external data), converter, and the teacher
    files = [file.location for setting, file in named_files(local) if setting in DIGESTED]
    code = {path: model_digest(Path(path)) for path in files}
    known = record_if_written(run.identity, RunIdentity)
    if known is None and run.current_attempt:
        log.warning("%s is gone, and is written again", run.identity)
    if (began_with := known.model_sha256 if known else _model_of_checkpoint(run)) and began_with != digest:
        raise ConfigError(
            f"{config.model.path} changed since the run began (SHA-256 {began_with[:12]}, now "
            f"{digest[:12]}); put the file back, or start a new run"
        )
    # both records: that of an earlier version has the digests in the identity alone
    permitted = read_record(run.code, AllowedCode).files if run.code.exists() else {}
    before = {**(known.code_sha256 if known else {}), **permitted}
    if changed := [path for path, sha256 in before.items() if code.get(path) != sha256]:
        raise ConfigError(
            f"{path} changed since the run began (SHA-256 {before[path][:SHOWN]}, now {code.get(path, '')[:SHOWN]}), "
            "which would continue with another computation; put the file back, or start a new run"
            for path in changed
        )
    # the sweep has named its trials, such as trial 2 of `mlp-15`: `mlp-15-2`
    trial = membership(run)
    name = name_of(run, config.name, wanted=config.name if trial else "")
    identity = known or _new_identity(run, config.name, config.monitor, is_trial=trial is not None)
    current = {"run_id": run.root.name, "name": name, "prefect_url": prefect_url()}
    identity = identity.model_copy(update=current | {"model_sha256": digest, "code_sha256": code})
    try:
        tracker = tracking.Tracker(identity.tracking_uri)
        mlflow_run_id, mlflow_url = tracker.start_run(
            config.monitor.experiment,
            key=identity.run_id,
            name=name,
            # of a run that had ended early; the monitor sets it again if it still has
            tags=first_tags(run, config.model, config.data, config.parallel, identity)
            | ({"onward.ended_early": ""} if known else {}),
            params=parameters(config),
        )
        tracker.log_file(run.config)
    except mlflow_store.TrackingUnavailable as error:
        if known is None:
            raise RuntimeUnavailable(
                f"{error}; start it, or set MLFLOW_TRACKING_URI or monitor.tracking_uri (empty = Onward's own store)"
            ) from None
        log.warning("MLflow cannot be reached; the run continues and sends its metrics later: %s", error)
        mlflow_run_id = known.mlflow_run_id
        mlflow_url = known.mlflow_url
    except mlflow_store.TrackingError as error:
        raise RuntimeUnavailable(str(error)) from None
    return identity.model_copy(update={"mlflow_run_id": mlflow_run_id, "mlflow_url": mlflow_url})


def _new_identity(run: RunDir, name: str, monitor: MonitorConfig, *, is_trial: bool) -> RunIdentity:
    """Return what a run keeps from its beginning: the configuration's name, the time, the store and the commit."""
    return RunIdentity(
        run_id=run.root.name,
        name=name,
        # the name of a trial is the sweep's, with its number behind it
        config_name=name.rpartition("-")[0] if is_trial else name,
        created_at=utc_now(),
        model_sha256="",
        tracking_uri=store_of(monitor),
        git_commit=commit_of(Path.cwd()),
    )


def _model_of_checkpoint(run: RunDir) -> str:
    """Return the digest of the model that the newest checkpoint was made of; "" if none says so."""
    for path in reversed(list_checkpoints(run)):
        with contextlib.suppress(CheckpointError):
            if digest := read_manifest(path).model_sha256:
                return digest
    return ""


def prefect_url() -> str:
    """Return the address of the flow run's page; empty outside of a flow."""
    flow_run_id = runtime.flow_run.get_id()
    ui = get_current_settings().ui_url
    return f"{ui}/v2/runs/flow-run/{flow_run_id}" if flow_run_id and ui else ""


def _show_links(identity: RunIdentity) -> None:
    """Show a link to the MLflow run on the flow run's page."""
    if not identity.prefect_url or not identity.mlflow_run_id:
        return
    with contextlib.suppress(Exception):  # a missing link must not fail the run
        if page := identity.mlflow_url or page_on_own_server(identity.tracking_uri, identity.mlflow_run_id):
            create_link_artifact(
                key="mlflow", link=page, link_text=f"{identity.name} in MLflow", description="Metrics and checkpoints"
            )
        else:
            text = f"`onward ui` starts MLflow and prints the address of this run, `{identity.mlflow_run_id}`."
            create_markdown_artifact(text, key="mlflow", description="Metrics and checkpoints")
