"""Find what losses need to know of all labels of the training rows, once, and keep it in the manifest of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.label_units import standardised_columns, units_of_column
from onward.trainer.data.losses_from_data import count_classes, counted_columns
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.shards import ShardManifest, Shards
from onward.trainer.errors import ConfigError
from onward.trainer.run.records import write_record


def with_label_statistics(
    directory: Path, manifest: ShardManifest, data: DataConfig, losses: Sequence[LossConfig], signature: Signature
) -> ShardManifest:
    """Return the manifest with what losses need to know of all labels, also in the directory.

    Numbers of the classes for "balanced" weights, and units for labels that are standardised. Shards without them were
    made for another loss, or by an earlier version. Raises the errors of `units_of_column`.
    """
    uncounted, unscaled = _unknown(manifest, losses)
    stored = {column.name: column for column in manifest.columns}
    known = {name: manifest.fitted.get(name, Fitted()) for name in stored}
    kinds = standardised_columns(losses)
    if not uncounted and not unscaled:
        return manifest

    def rows(names: Sequence[str]) -> Shards:
        # of no other column a value is read
        columns = tuple(stored[name] for name in names)
        return Shards(directory, manifest.model_copy(update={"columns": columns}), "train")

    fitted = dict(manifest.fitted)
    if uncounted:
        for name, counts in count_classes(rows(uncounted), uncounted, data, losses, signature).items():
            fitted[name] = known[name].model_copy(update={"class_counts": counts})
    for name in unscaled:
        units = {**known[name].label_units, kinds[name]: units_of_column(rows([name]), name, kinds[name])}
        fitted[name] = fitted.get(name, known[name]).model_copy(update={"label_units": units})
    manifest = manifest.model_copy(update={"fitted": fitted}).with_digest()
    write_record(directory / "manifest.json", manifest)
    return manifest


def check_label_statistics(manifest: ShardManifest, losses: Sequence[LossConfig]) -> None:
    """Raise ConfigError if finished shards lack what losses need to know of all labels: they stay as they are."""
    uncounted, unscaled = _unknown(manifest, losses)
    if lacking := [*uncounted, *unscaled]:
        raise ConfigError(
            f"the finished shards {manifest.key} do not have the numbers of the classes, or the units, of label "
            f"{', '.join(lacking)}, which [loss] needs: make them by a run with the same [loss]"
        )


def _unknown(manifest: ShardManifest, losses: Sequence[LossConfig]) -> tuple[list[str], list[str]]:
    """Return the labels whose classes are to be counted, and those whose units are to be found."""
    stored = {column.name for column in manifest.columns}  # labels that are made with each batch are not
    known = {name: manifest.fitted.get(name, Fitted()) for name in stored}
    counted = stored.intersection(counted_columns(losses))
    uncounted = sorted(name for name in counted if not known[name].class_counts)
    kinds = {name: kind for name, kind in standardised_columns(losses).items() if name in stored}
    return uncounted, [name for name, kind in kinds.items() if kind not in known[name].label_units]
