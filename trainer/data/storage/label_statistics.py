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
from onward.trainer.run.records import write_record


def with_label_statistics(
    directory: Path, manifest: ShardManifest, data: DataConfig, losses: Sequence[LossConfig], signature: Signature
) -> ShardManifest:
    """Return the manifest with what losses need to know of all labels, also in the directory.

    Numbers of the classes for "balanced" weights, and units for labels that are standardised. Shards without them were
    made for another loss, or by an earlier version. Raises the errors of `units_of_column`.
    """
    stored = {column.name: column for column in manifest.columns}  # labels that are made with each batch are not
    known = {name: manifest.fitted.get(name, Fitted()) for name in stored}
    counted = [name for name in counted_columns(losses) if name in stored]
    uncounted = [name for name in counted if not known[name].class_counts]
    kinds = {name: kind for name, kind in standardised_columns(losses).items() if name in stored}
    unscaled = [name for name, kind in kinds.items() if kind not in known[name].label_units]
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
