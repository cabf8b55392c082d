"""Shards of data without a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.column_computers import ColumnComputer
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.data.storage.recipe import Recipe, stored_columns
from onward.trainer.data.storage.sharding import shard
from onward.trainer.data.storage.shards import ShardManifest


def make_shards(
    data: DataConfig,
    columns: Mapping[str, ColumnType] | None,
    cache: Path,
    *,
    computers: Sequence[ColumnComputer] = (),
    labels: Collection[str] = (),
) -> tuple[Path, ShardManifest, bool]:
    """Shard these columns, None = all columns of numbers; return (directory, manifest, was it there)."""
    return shard(Recipe(data, stored_columns(data, columns), computers), cache, labels)
