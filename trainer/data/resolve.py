"""Complete the settings that name what the data decides: "balanced" class weights, units of labels, bytes per target.

    config.json, adjusted.json ---.
                                   +--- resolve ---> RUN_DIR/resolved.json ---> ranks, export, variants
    shards -----------------------'      (shard data, once)

The file holds the digest of what it was made from. Where it is absent or made from other settings, as in a run
directory of an earlier version, each process resolves the settings itself: the same shards give the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.data.losses_from_data import losses_from_data, take_from_data
from onward.trainer.data.schema.fitted import LabelledRows
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.opened_shards import open_evaluated, open_shards
from onward.trainer.data.storage.shards import ShardManifest, Split
from onward.trainer.data.text.byte_counts import counts_bytes, metrics_from_data
from onward.trainer.data.text.text_columns import text_columns
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import Record, read_record, record_if_written, write_record


class ResolvedSettings(Record):
    """The settings of a run that its data has completed."""

    made_from: str
    """SHA-256 of the configuration and of the key of the shards."""
    loss: tuple[LossConfig, ...]
    metrics: Mapping[Split, tuple[MetricConfig, ...]]
    """Split that is evaluated -> the metrics on its rows."""


def resolve(
    config: RunConfig, rows: LabelledRows, signature: Signature, *, evaluated: LabelledRows | None = None
) -> RunConfig:
    """Return the configuration with numbers in place of the settings that the data decides; itself if there are none.

    rows: the training data. evaluated: the rows that an evaluation reads; None = `rows` are a sample, on which
    everything is tried. Reads the labels of all rows if their numbers are not known: of a sample, and of shards of an
    earlier version. Raises ConfigError for data that does not decide a setting, DataError for labels without logarithm.
    """
    completed = config
    if take_from_data(config.losses):
        completed = completed.model_copy(update={"loss": losses_from_data(config.data, config.losses, rows, signature)})
    if counts_bytes(config.data, config.metrics):
        text = text_columns(config.data, config.losses, config.model, signature)
        metrics = metrics_from_data(config.metrics, text, rows if evaluated is None else evaluated)
        completed = completed.model_copy(update={"metrics": metrics})
        # a sample may have no such rows, the evaluated rows must
        if evaluated is not None and counts_bytes(completed.data, completed.metrics):
            raise ConfigError("metrics: bits_per_byte: the tokens of the evaluation data stand for no byte of text")
    return completed


def depends_on_data(data: DataConfig, losses: Sequence[LossConfig], metrics: Sequence[MetricConfig]) -> bool:
    """Return whether `resolve` would change a configuration of these sections."""
    return take_from_data(losses) or counts_bytes(data, metrics)


def write_resolved(run: RunDir) -> None:
    """Write resolved.json for the shards of a run, if their data decides a setting. Raises the errors of `resolve`."""
    config = read_config(run)
    if depends_on_data(config.data, config.losses, config.metrics):
        manifest = read_record(run.shards / "manifest.json", ShardManifest)
        splits: tuple[Split, ...] = ("evaluation", "test") if manifest.test else ("evaluation",)
        write_record(run.resolved, _resolved(run, config, manifest, splits))


def read_resolved(run: RunDir, split: Split = "evaluation") -> RunConfig:
    """Return the configuration of a run, completed from its shards. split: the rows on which metrics are evaluated.

    Not collective. Raises the errors of `read_config` and of `resolved_for`.
    """
    return resolved_for(run, read_config(run), [split])[split]


def resolved_for(run: RunDir, config: RunConfig, splits: Sequence[Split]) -> dict[Split, RunConfig]:
    """Return split -> the configuration that `read_config` has read, completed from the shards of the run.

    splits: the rows on which metrics are evaluated. Not collective. Raises RecordError for a damaged resolved.json,
    and, where that file is absent or stale, the errors of `resolve`.
    """
    if not depends_on_data(config.data, config.losses, config.metrics):
        return dict.fromkeys(splits, config)
    manifest = read_record(run.shards / "manifest.json", ShardManifest)
    settings = record_if_written(run.resolved, ResolvedSettings)
    # absent or stale: the same numbers are computed here, for the asked splits
    if settings is None or settings.made_from != _digest(config.model_dump_json(), manifest):
        settings = _resolved(run, config, manifest, splits)
    return {
        split: config.model_copy(update={"loss": settings.loss, "metrics": settings.metrics[split]}) for split in splits
    }


def _resolved(run: RunDir, config: RunConfig, manifest: ShardManifest, splits: Iterable[Split]) -> ResolvedSettings:
    rows = open_shards(run.shards, "train")
    signature = read_training_signature(config.model)
    metrics = {}
    completed = config
    for split in splits:
        # the losses are those of the training rows in each pass; the metrics count the rows of the split
        completed = resolve(config, rows, signature, evaluated=open_evaluated(run.shards, config.data, split))
        metrics[split] = completed.metrics
    kept = config.model_copy(update={"loss": completed.loss, "metrics": completed.metrics})
    assert completed == kept, "ResolvedSettings lacks a setting that `resolve` completes"
    return ResolvedSettings(made_from=_digest(config.model_dump_json(), manifest), loss=completed.loss, metrics=metrics)


def _digest(settings: str, manifest: ShardManifest) -> str:
    return hashlib.sha256(f"{manifest.key} {settings}".encode()).hexdigest()
