"""Find out how many rows a run will train and evaluate on, without writing shards, as far as that is cheap.

shards in the cache     their key is a digest of the source, which is known, or computed below DIGESTED_BYTES
a small source          its rows are counted (COUNTED_BYTES in first_rows.py)
else                    not known before the data is sharded
"""

from __future__ import annotations

from pathlib import Path

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.formats.finished_shards import shards_at
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows, source_bytes
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.data.storage.sharding import cache_key, is_known
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import OnwardError
from onward.trainer.run.records import Record, read_record

DIGESTED_BYTES = 4 << 30
"""A larger source is not read to find its shards."""


class RowCount(Record):
    """The rows of a run."""

    train: int = 0
    """0 = not known."""
    evaluation: int = 0
    source: str
    """Where the numbers are from, or why they are not known."""
    shard_bytes: int = 0
    """Of the shards that exist; 0 = there are none, or they were not looked for."""


def count_rows(config: RunConfig, cache: Path) -> RowCount:
    """Return the numbers of rows. cache: the directory of shards. Raises DataError for a source that cannot be read."""
    size = source_bytes(config.data)
    if manifest := cached_shards(config, cache):
        directory = shards_at(config.data)
        return _evaluated(
            config.data.evaluation_rows,
            manifest.rows("train"),
            manifest.rows("evaluation"),
            f"the shards {directory}" if directory else f"the shards in the cache, {cache / manifest.key}",
            shard_bytes=sum(file.bytes for file in manifest.all_files),
        )
    # one row is asked for: all are counted on the way where the source is small
    counts = read_first_rows(config, read_training_signature(config.model), 1).counts
    if counts:
        return _evaluated(config.data.evaluation_rows, *counts, "counted in the source")
    why = f"its {size / 2**20:,.0f} MiB are counted while they are sharded, which a run does first"
    return RowCount(source=f"not known: {why}")


def _evaluated(most: int, train: int, evaluation: int, source: str, *, shard_bytes: int = 0) -> RowCount:
    return RowCount(train=train, evaluation=min(most or evaluation, evaluation), source=source, shard_bytes=shard_bytes)


def cached_shards(config: RunConfig, cache: Path) -> ShardManifest | None:
    """Return the manifest of the shards that the run would use, if they exist and finding them takes no long time."""
    if directory := shards_at(config.data):
        return read_record(directory / "manifest.json", ShardManifest)
    if not cache.is_dir():
        return None
    recipe = recipe_of(config, read_training_signature(config.model))
    if source_bytes(config.data) > DIGESTED_BYTES and not is_known(recipe, cache):
        return None
    key = cache_key(recipe, cache)
    try:
        return read_record(cache / key / "manifest.json", ShardManifest)
    except (OnwardError, OSError):
        return None
