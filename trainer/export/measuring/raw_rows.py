"""Read evaluation rows from the source again, as they were before shards were written.

source       a.jpg  b.jpg  c.jpg (damaged)  d.jpg  e.jpg        held out: b, c, d
shards       evaluation rows 0, 1        pixels of the final size
raw rows     b.jpg, d.jpg                encoded files, texts and numbers of the same rows, in the same order
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from onward.trainer.data.reading import sources
from onward.trainer.data.schema.column_computers import computed_chunks
from onward.trainer.data.schema.columns import Array, Block, Cells, fit_block, in_parts, select
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.shards import ShardManifest


def read_raw_rows(recipe: Recipe, manifest: ShardManifest, most: int) -> dict[str, list[Any]]:
    """Return the first `most` evaluation rows of the shards: column of the source -> cells, nothing computed.

    Raises DataError if the source cannot be read any more.
    """
    stored = recipe.columns
    computers = recipe.computers
    # only what is computed of a row says whether sharding has left it out
    is_checked = manifest.skipped > 0
    if is_checked:
        recipe.fit()
    found: dict[str, list[Any]] = {column.name: [] for column in stored}
    ranges = [rows for rows in sources.source_ranges(recipe.data) if rows.held_split == "evaluation"]
    for rows in ranges:
        for block, held_out in in_parts(sources.read_range(rows, recipe.request), stored):
            if not held_out.any():
                continue
            kept = _rows_of(block, np.flatnonzero(held_out))
            values, good, bad = fit_block(kept, stored)
            if is_checked:
                for _ in computed_chunks(computers, kept, values, good, np.ones(len(good), bool), bad):
                    pass  # it adds the rows that have no result to `bad`
                good &= ~np.isin(kept.index, list(bad))
            for name, cells in select(values, good).items():
                found[name] += list(cells)
            if len(next(iter(found.values()))) >= most:
                return {name: cells[:most] for name, cells in found.items()}
    return found


def _rows_of(block: Block, places: Array) -> Block:
    """Return some of the rows of a block."""

    def chosen(cells: Cells) -> Cells:
        return cells[places] if isinstance(cells, np.ndarray) else [cells[at] for at in places]

    return replace(
        block, index=block.index[places], cells={name: chosen(cells) for name, cells in block.cells.items()}, bad={}
    )
