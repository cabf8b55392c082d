"""shard data: make the shards, or find them in the cache; check the whole data against the model."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.tracking import Tracker, TrackingError
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.input_columns import columns_to_read, data_problems
from onward.trainer.data.shards import ShardManifest, make_shards
from onward.trainer.data.signature import read_training_signature
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.records import RunIdentity, read_record

log = logging.getLogger(__name__)


@task(name="shard-data", task_run_name="shard-data", cache_policy=NO_CACHE)
def shard_data(run: RunDir) -> ShardManifest:
    """Leave RUN_DIR/shards, a link into the shard cache; unchanged data is not sharded twice.

    Raises DataError for data that cannot be read (file and line), ConfigError where all of the data, unlike
    its first rows, does not fit the model, or where the data is no longer what the run began to learn from.
    """
    config = read_config(run)
    started_at = time.monotonic()
    columns = columns_to_read(config, read_training_signature(config.model))
    directory, manifest, cached = make_shards(config.data, columns, onward_home() / "shards")
    if problems := data_problems(config, manifest.table):
        raise ConfigError(problems)
    _refuse_changes(run, manifest.key)
    _link(run.shards, directory)
    files = len(manifest.train) + len(manifest.evaluation)
    log.info(
        "%d rows to train on, %d to evaluate on, %d %s files %s in %.1f s: %s",
        manifest.rows("train"),
        manifest.rows("evaluation"),
        files,
        manifest.format,
        "found" if cached else "written",
        time.monotonic() - started_at,
        directory,
    )
    if manifest.skipped:
        rows = "; ".join(manifest.skipped_rows[:5])
        log.warning("%d bad rows were left out (data.bad_rows = 'skip'): %s", manifest.skipped, rows)
    _record(run, config, manifest)
    return manifest


def _refuse_changes(run: RunDir, key: str) -> None:
    """Raises ConfigError when training began on other data: its checkpoints' sample order would mean nothing here."""
    if not (run.current_attempt and run.shards.is_symlink()):
        return
    before = run.shards.readlink().name  # the cache names shards by their key; they themselves may be gone
    if before != key:
        raise ConfigError(
            f"the data changed since the run began ({before[:12]}, now {key[:12]}); put it back, or start a new run"
        )


def _record(run: RunDir, config: RunConfig, manifest: ShardManifest) -> None:
    """Name the data in MLflow by its digest, so that runs on equal data are found; an outage costs only that."""
    identity = read_record(run.identity, RunIdentity)
    if not identity.mlflow_run_id:
        return
    rows = {"train": manifest.rows("train"), "evaluation": manifest.rows("evaluation")}
    try:
        Tracker(identity.tracking_uri, identity.mlflow_run_id).log_dataset(
            Path(config.data.source).name, digest=manifest.key, source=run.shards.resolve(), rows=rows
        )
    except TrackingError as error:
        log.warning("the data is not named in MLflow: %s", error)


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target`, without a moment in which it is absent."""
    link.parent.mkdir(parents=True, exist_ok=True)
    partial = link.with_name(f".{link.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target, target_is_directory=True)
    partial.replace(link)
