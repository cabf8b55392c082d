"""Estimate how large shards will be before they are written, so that a disk that cannot hold them is found at once.

    bytes of a row    the columns of numbers of fixed length; text, rows of varying length and what is computed are left
                      out
    number of rows    Parquet and npz: as the file says; csv and jsonl: size / mean length of the first lines

Images and sound are stored as they are. What is left out makes the estimate too small, never too large, but for lines
that grow shorter: therefore a disk is refused only below half of the estimate, and warned of below all of it.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from onward.trainer.data.reading import sources
from onward.trainer.data.schema.columns import BYTES
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.errors import StorageUnavailable
from onward.trainer.quantities import mb

log = logging.getLogger(__name__)


def check_space(directory: Path, recipe: Recipe) -> bool:
    """Return whether the shards fit into `directory` twice. Raises StorageUnavailable if they surely do not once."""
    estimate = shard_bytes(recipe)
    free = shutil.disk_usage(directory).free
    if free >= estimate:
        return free >= 2 * estimate
    what = (
        f"the shards of {recipe.data.source} take about {mb(estimate)}, but {mb(free)} of disk are free "
        f"in {directory}; make room, or set ONWARD_HOME to a directory on a larger disk"
    )
    if free < estimate / 2:
        raise StorageUnavailable(what)
    log.warning("%s", what)
    return False


def shard_bytes(recipe: Recipe) -> int:
    """Return about the least size of the shards."""
    kept = recipe.source_columns
    row_bytes = sum(column.row_bytes for column in kept if not column.variable)
    holds_content = any(column.dtype == BYTES for column in kept)
    total = 0
    for source in sources.all_sources(recipe.data):
        for _, path in source.files:
            if source.data_format.holds_content:
                total += path.stat().st_size * holds_content
            else:
                total += row_bytes * source.data_format.count_rows(path)
    return total
