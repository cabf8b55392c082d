"""Find where rows of a split come from: the file and the line, or the row, of the source.

The shards do not record it. The source is read again in the order in which it was sharded, up to the rows asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

import numpy as np

from onward.trainer.data.reading import sources
from onward.trainer.data.schema.columns import fit_block
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.shards import Shards, Split


def row_origins(
    recipe: Recipe, rows: Shards, split: Split, wanted: Collection[int], *, limit_s: float
) -> dict[int, str]:
    """Return row of the split -> its place in the source, as messages about bad rows name it.

    Without those that are not found within `limit_s`; {} where the rows of the shards are not those of the source, as
    windows of packed texts are not. Raises DataError for a source that has changed since.
    """
    drops_rows = bool(rows.manifest.skipped or rows.manifest.left_out)
    # which rows a computer has refused is known only after computing all of them again
    if recipe.packer or (drops_rows and recipe.computers):
        return {}
    # a large source takes long to read: what is found by then is enough for a message
    deadline = time.monotonic() + limit_s
    of_split = dict(zip(rows.numbers(np.array(sorted(wanted))).tolist(), sorted(wanted), strict=True))
    found: dict[int, str] = {}
    counts = Counter[str]()
    for source in sources.source_ranges(recipe.data):
        for block, held_out in sources.read_range(source, recipe.request):
            good = fit_block(block, recipe.columns)[1] if drops_rows else np.ones(len(block.index), bool)
            for part, chosen in (("train", good & ~held_out), (source.held_split, good & held_out)):
                index = block.index[chosen]
                if part == split:
                    # the rows of the block are these numbers of the split
                    for number in of_split.keys() & set(range(counts[part], counts[part] + len(index))):
                        found[of_split[number]] = block.where(int(index[number - counts[part]]))
                counts[part] += len(index)
            if len(found) == len(of_split) or time.monotonic() > deadline:
                return found
    return found
