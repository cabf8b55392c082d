"""Recognise finished shards as a data source: a directory with the manifest of shards (layout: storage/shards.py).

They are the rows as they are trained on, so they are not read as a source: `make_training_shards` uses them as they
are. Of shards behind a URL the local directory has the manifest and ORIGIN; the files come when their rows are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.columns import Block, Column, Schema
from onward.trainer.errors import DataError
from onward.trainer.run.record_base import Record

MANIFEST = "manifest.json"
ORIGIN = "origin.json"
"""The record of the URL, beside a manifest without its files."""
FILES_TOGETHER = 16
"""Files whose rows are read together where the order is one of files (batches/sample_stream.py)."""


class ShardOrigin(Record):
    """Where the files of a directory are that has only their manifest."""

    url: str


class FileHead(BaseModel):
    """What a source says of a file of its rows."""

    model_config = ConfigDict(extra="ignore")

    rows: int


class ShardHead(BaseModel):
    """What a source says of its rows: a part of the manifest of shards."""

    model_config = ConfigDict(extra="ignore")

    key: str
    columns: tuple[Column, ...]
    file_columns: tuple[Column, ...] = ()
    sizes: tuple[int, ...] = ()
    train: tuple[FileHead, ...]
    evaluation: tuple[Any, ...]


def shard_head(manifest: Path) -> ShardHead | None:
    """Return the head of the manifest of shards; None for a file that is absent, or something else."""
    try:
        return ShardHead.model_validate_json(read_bounded(manifest, RECORD_BYTES))
    except (OSError, ValidationError):
        return None


def shards_at(data: DataConfig) -> Path | None:
    """Return the directory of finished shards that [data] names as its source; None for any other source.

    Raises DataError where [data] names further rows: the shards have those to evaluate on, too. So it does for shards
    of several sources, whose weights only the run has that made them, and for a manifest that is damaged or lists no
    rows.
    """
    directory = Path(data.source)
    head = shard_head(directory / MANIFEST)
    # as a plain directory of Arrow files it would let the rows to evaluate on be trained on
    if head is None and (directory / MANIFEST).exists() and any(directory.glob("train-*.arrow")):
        raise DataError(f"{directory / MANIFEST} is damaged: copy it there again, with the shards that it belongs to")
    if head is None or data.format not in ("auto", "shards"):
        return None
    others = ("sources", "evaluation_source", "test_source")
    if named := [f"data.{name}" for name in others if getattr(data, name)]:
        raise DataError(
            f"{data.source} holds finished shards, which have the rows to evaluate on: remove {' and '.join(named)}"
        )
    if not head.train or head.train[0].rows < 1:
        raise DataError(f"{directory / MANIFEST} lists no rows to train on")
    if head.sizes:
        raise DataError(f"{data.source} holds shards of {len(head.sizes)} sources: make shards of one source")
    return directory


def shard_columns(data: DataConfig) -> Schema:
    """Return the columns of finished shards by name. Raises DataError for another directory, or a file."""
    head = shard_head(Path(data.source) / MANIFEST)
    if head is None:
        raise DataError(f"{data.source} holds no finished shards: there is no {MANIFEST} of shards in it")
    return {column.name: column for column in (*head.columns, *head.file_columns)}


def refuse_to_read(files: Sequence[tuple[str, Path]], request: object) -> Iterator[tuple[str, Block]]:
    """Raise DataError, where rows are wanted as they were before they were sharded."""
    yield from ()
    raise DataError(f"{files[0][1].parent} holds finished shards: their rows cannot be read as those of a source")
