"""Find what losses need to know of all labels of the training rows, once, and keep it in the manifest of the shards;
refuse images with more objects than a detector of sets predicts boxes: some of them could never be found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.images.box_columns import whole_boxes
from onward.trainer.data.label_units import standardised_columns, units_of_column
from onward.trainer.data.losses_from_data import count_classes, counted_columns
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED, HEAD_NUMBERS
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.row_origins import row_origins
from onward.trainer.data.storage.shards import ShardManifest, Shards
from onward.trainer.errors import ConfigError
from onward.trainer.run.records import write_record

COUNTED_ROWS = 4096
"""Read at a time."""
NAMING_S = 20.0
"""Longest time in which the source is read again for the name of the image."""
SPLITS: tuple[Literal["train", "evaluation"], ...] = ("train", "evaluation")


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


def refuse_more_objects(
    directory: Path, manifest: ShardManifest, losses: Sequence[LossConfig], recipe: Recipe | None
) -> None:
    """Raise ConfigError with the image that has the most objects, if they are more than a loss has queries.

    recipe: what the shards were made of, for the name of the image; None of finished shards.
    """
    problems = []
    for loss in losses:
        column = manifest.table.get(loss.columns[0]) if loss.num_queries else None
        # the longest row of all, in which also those count that are not trained on
        if column is None or (column.shape[0] - HEAD_NUMBERS) // BOX_NUMBERS <= loss.num_queries:
            continue
        for split in SPLITS:
            # of no other column a value is read
            rows = Shards(directory, manifest.model_copy(update={"columns": (column,)}), split)
            parts = np.array_split(np.arange(rows.num_rows), rows.num_rows // COUNTED_ROWS + 1)
            counts = np.array([_objects(row) for part in parts for row in rows.read(part)[column.name]])
            if not (more := int((counts > loss.num_queries).sum())):
                continue
            at = int(counts.argmax())
            where = f"row {at} of the {split} rows"
            # where rows are left out, or the source takes long to read, it stays a number
            if recipe:
                where = row_origins(recipe, rows, split, [at], limit_s=NAMING_S).get(at, where)
            problems.append(
                f"{where} has {counts[at]} objects, but output {loss.outputs[0]!r} has {loss.num_queries} queries for "
                f"each image, each of which finds one object ({more} of {len(counts)} {split} images have more than "
                "that): take a model with more queries, or leave objects out"
            )
    if problems:
        raise ConfigError(problems)


def _objects(row: Array) -> int:
    """Return the objects of an image that are trained on. row: as data/schema/box_cells.py describes."""
    return int((whole_boxes(row)[:, -1] == COUNTED).sum())
