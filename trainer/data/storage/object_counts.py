"""Refuse images with more objects than a detector of sets predicts boxes: some of them could never be found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED, HEAD_NUMBERS
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.row_origins import row_origins
from onward.trainer.data.storage.shards import ShardManifest, Shards
from onward.trainer.errors import OnwardError

ROWS = 4096
"""Read at a time."""
NAMING_S = 20.0
"""Longest time in which the source is read again for the name of the image."""
SPLITS: tuple[Literal["train", "evaluation"], ...] = ("train", "evaluation")


def query_problems(
    directory: Path, manifest: ShardManifest, losses: Sequence[LossConfig], recipe: Callable[[], Recipe]
) -> Iterator[str]:
    """Yield a sentence about the image of a split with the most objects, if they are more than a loss has queries."""
    for loss in losses:
        column = manifest.table.get(loss.columns[0]) if loss.num_queries else None
        # the longest row of all, in which also those count that are not trained on
        if column is None or (column.shape[0] - HEAD_NUMBERS) // BOX_NUMBERS <= loss.num_queries:
            continue
        for split in SPLITS:
            rows = Shards(directory, manifest.model_copy(update={"columns": (column,)}), split)
            parts = np.array_split(np.arange(rows.num_rows), rows.num_rows // ROWS + 1)
            counts = np.array([_objects(row) for part in parts for row in rows.read(part)[column.name]])
            most, more = int(counts.max(initial=0)), int((counts > loss.num_queries).sum())
            if not more:
                continue
            at = int(counts.argmax())
            where = f"row {at} of the {split} rows"
            with contextlib.suppress(OnwardError):  # the source cannot be read again
                whole = Shards(directory, manifest, split)
                where = row_origins(recipe(), whole, split, [at], limit_s=NAMING_S).get(at, where)
            yield (
                f"{where} has {most} objects, but output {loss.outputs[0]!r} has {loss.num_queries} queries for each "
                f"image, each of which finds one object ({more} of {len(counts)} {split} images have more than that): "
                "take a model with more queries, or leave objects out"
            )


def _objects(row: Array) -> int:
    return int((row[HEAD_NUMBERS:].reshape(-1, BOX_NUMBERS)[:, -1] == COUNTED).sum())
