"""shard data: write the shards or find them in the cache, and check all of the data against the model."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import get_args

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.mlflow.mlflow_store import TrackingError
from onward.infra.mlflow.model_package import Port
from onward.infra.mlflow.tracking import DataSplit, Tracker
from onward.tasks.launching.own_homes import bring_run
from onward.tasks.mapped_parts import MappedParts
from onward.tasks.shown.mlflow_tags import digests_of
from onward.tasks.shown.task_logger import IN_RESULT
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches.cache_needs import cache_problems
from onward.trainer.data.batches.sample_stream import sample_stream
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.images.image_sources import annotations_beside
from onward.trainer.data.reading import sources
from onward.trainer.data.resolve import write_resolved
from onward.trainer.data.storage.first_rows import source_bytes
from onward.trainer.data.storage.part_processes import THIS_MACHINE
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.sharding_progress import speed
from onward.trainer.data.storage.shards import ShardManifest, Split
from onward.trainer.data.text.masking import describe_masks
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import mb
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.machine.this_machine import fits_in_memory
from onward.trainer.run.records import RunIdentity, read_record
from onward.trainer.run.timing.phases import note_in_phase

log = logging.getLogger(__name__)


@task(name="shard-data", task_run_name="shard-data", cache_policy=NO_CACHE)
def shard_data(run: RunDir) -> ShardManifest:
    """Create RUN_DIR/shards, a link into the shard cache, and resolved.json; unchanged data is not sharded twice.

    Raises DataError with file and line for data that cannot be read, ConfigError when the data does not fit the model
    (`onward run` has checked only the first rows before), or has changed since training began.
    """
    config = read_config(run)
    started_at = time.monotonic()
    with MappedParts(config.data.shard_on) as mapped:
        directory, manifest, cached = make_training_shards(
            config,
            onward_home() / "shards",
            report=lambda sharded: note_in_phase(run, str(sharded)),
            runner=mapped if config.data.shard_on else THIS_MACHINE,
        )
    # again, now with the extremes of all rows: `configure` has seen the first ones only
    problems = data_problems(config, manifest.table, fitted=manifest.fitted)
    if problems := [*problems, *cache_problems(directory, manifest, config.train, config.world_size)]:
        raise ConfigError(problems)
    sizes = manifest.sizes or (manifest.rows("train"),)
    stream = sample_stream(sizes, manifest.size_bytes("train"), manifest.train[0].rows, config.data, config.train)
    _refuse_changes(run, manifest)
    _link(run.shards, directory)
    write_resolved(run)
    bring_run(run)  # now, while nothing else sends to the store
    _say_rows(config.data, manifest, directory, time.monotonic() - started_at, was_found=cached)
    if config.data.sources:
        shares = zip(config.data.sources, stream.shares, manifest.sizes, strict=True)
        each = (f"{share} of {source.source} ({size} rows)" for source, share, size in shares)
        log.info("an epoch has %d samples: %s", stream.num_rows, ", ".join(each))
    if 0 < config.data.evaluation_rows < manifest.rows("evaluation"):
        log.info("%d of the %d rows are evaluated", config.data.evaluation_rows, manifest.rows("evaluation"))
    if stream.num_rows < config.train.global_batch_size:
        log.warning(
            "train.global_batch_size is %d, and an epoch has %d samples: a step is more than an epoch, and the run "
            "makes %d; lower train.global_batch_size, or train for more epochs",
            *(config.train.global_batch_size, stream.num_rows, config.train.steps_of_run(stream.num_rows)),
        )
    size_bytes = manifest.size_bytes("train")
    if config.train.shuffle is True and not fits_in_memory(size_bytes):
        log.warning(
            "the shards to train on take %s, more than half of the free memory of this host: each row reads a page of "
            "4 KB from the disk; train.shuffle = 'blocks' reads the shards about once per epoch",
            mb(size_bytes),
        )
    if manifest.test:
        log.info("%d rows are kept for the test of the exported file", manifest.rows("test"))
    if manifest.preprocessing:
        log.info("%s", manifest.preprocessing, extra=IN_RESULT)
    if masks := describe_masks(config.data, manifest.fitted):
        log.info("%s", masks, extra=IN_RESULT)
    if manifest.skipped:
        rows = "; ".join(manifest.skipped_rows[:5])
        log.warning("bad rows left out (data.bad_rows = 'skip'): %d: %s", manifest.skipped, rows)
    _record(run, config.data, manifest)
    return manifest


def _say_rows(data: DataConfig, manifest: ShardManifest, directory: Path, took_s: float, *, was_found: bool) -> None:
    size_bytes = source_bytes(data)
    # too little data has no speed that says something
    pace = "" if was_found or size_bytes < 1e6 else f" ({speed(size_bytes, took_s)})"
    log.info(
        "%d rows to train on, %d to evaluate on, %d %s files %s in %.1f s%s: %s",
        *(manifest.rows("train"), manifest.rows("evaluation"), len(manifest.train) + len(manifest.evaluation)),
        *(manifest.format, "found" if was_found else "written", took_s, pace, directory),
    )
    if not was_found:
        _say_boxes(data)


def _say_boxes(data: DataConfig) -> None:
    """Say how many boxes there are in how many images of each source, and warn where most have no labels."""
    place = data.image.box_place if data.image else ""
    trained = [each.source for each in data.sources] or [data.source]
    for source in filter(None, [*trained, data.evaluation_source, data.test_source] if place else []):
        found = annotations_beside(sources.locate(source, data).files, place)
        if found.is_sparse:
            log.warning("%s: %s: is data.image.boxes the right place, with files of the images' names?", source, found)
        else:
            log.info("%s: %s", source, found)


def _refuse_changes(run: RunDir, manifest: ShardManifest) -> None:
    """Raise ConfigError when training began on other data, to which the sample order in its checkpoints belongs."""
    key = manifest.key
    # Before the first attempt nothing depends on the data yet.
    if not (run.current_attempt and run.shards.is_symlink()):
        return
    before = run.shards.readlink().name  # the cache names a directory by its key; the directory may be deleted
    if before != key:
        raise ConfigError(
            f"the data changed since the run began (key {before[:12]}, now {key[:12]}); put it back, or start a new run"
        )
    # the run came from another machine, which may have other versions of what decodes pictures, sound or text
    if run.began_with.exists():
        there = read_record(run.began_with, ShardManifest)
        for one, other in zip(there.all_files, manifest.all_files, strict=True):
            if one.sha256 != other.sha256:
                raise ConfigError(
                    f"the same data has become other shards on this machine: {one.name} has SHA-256 "
                    f"{other.sha256[:12]}, and {one.sha256[:12]} where the run began; install the packages of "
                    f"{run.packages}, or start a new run"
                )


def _record(run: RunDir, data: DataConfig, manifest: ShardManifest) -> None:
    """Record the data in MLflow by its digest. When MLflow cannot be reached, only this record is missing."""
    identity = read_record(run.identity, RunIdentity)
    if not identity.mlflow_run_id:
        return
    name = Path(data.source).name
    digests = digests_of(manifest)
    columns = tuple(
        Port(column.name, column.dtype, (-1,) if column.variable else column.shape)
        for column in manifest.table.values()
    )
    splits = []
    for split in get_args(Split):
        if split in digests:
            profile = {"num_rows": manifest.rows(split), "num_bytes": manifest.size_bytes(split)}
            splits.append(
                DataSplit(
                    f"{name}/{split}", "training" if split == "train" else split, digests[split], profile, columns
                )
            )
    try:
        tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
        tracker.log_datasets(splits, source=run.shards.resolve())
        if manifest.preprocessing:
            tracker.set_tags({"onward.data_columns": manifest.preprocessing})
    except TrackingError as error:
        log.warning("the data is not recorded in MLflow, and the run continues without: %s", error)


def _link(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, in one rename, so that readers never find it missing."""
    link.parent.mkdir(parents=True, exist_ok=True)
    # A symbolic link cannot be replaced in place; renaming another one over it can.
    partial = link.with_name(f".{link.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target, target_is_directory=True)
    partial.replace(link)
