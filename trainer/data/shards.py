"""Shards: the data as the ranks read it. Made once for each content, kept in a cache, readable at random.

    CACHE/<key>/manifest.json           ShardManifest; `key` digests the source's bytes and the settings that matter
    CACHE/<key>/train-00000.arrow       rows_per_shard rows; `.pb` in the predecessor's format
    CACHE/<key>/evaluation-00000.arrow

A directory is built under another name, fsynced and renamed: it is whole or absent, and of two that build
the same one the first wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from onward.trainer.config.sections import DataConfig
from onward.trainer.data import sources
from onward.trainer.data.arrow_files import ArrowReader, ArrowWriter
from onward.trainer.data.columns import (
    TEXT,
    Array,
    Column,
    ColumnType,
    Schema,
    Values,
    extremes,
    fit_block,
    infer,
    merge,
    select,
    stored,
)
from onward.trainer.data.tensorproto_files import ProtoReader, ProtoWriter
from onward.trainer.errors import DataError, OnwardError
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.records import Record, read_record, write_record

FORMAT = 1
"""Changes when the same source would give other shards, so that old ones are not taken for new."""
NAMED = 20
"""Bad rows that are named; the others are counted."""
PEEK_BYTES = 8 << 20
STALE_S = 86400.0
"""A directory being built that is older than this belongs to nobody any more."""

Split = Literal["train", "evaluation"]


class ShardFile(Record):
    """One file of a split."""

    name: str
    rows: int
    bytes: int
    sha256: str


class ShardManifest(Record):
    """What the shards of a directory hold, and the proof that they are whole."""

    key: str
    """Digest of the source's content and of the settings that matter."""
    format: Literal["arrow", "pb"]
    columns: tuple[Column, ...]
    train: tuple[ShardFile, ...]
    evaluation: tuple[ShardFile, ...]
    skipped: int = 0
    """Bad rows left out (data.bad_rows = 'skip')."""
    skipped_rows: tuple[str, ...] = ()
    """The first of them: file, line and reason."""
    version: int = FORMAT

    def files(self, split: Split) -> tuple[ShardFile, ...]:
        """The files of a split, in order."""
        return self.train if split == "train" else self.evaluation

    def rows(self, split: Split) -> int:
        """Rows of a split."""
        return sum(file.rows for file in self.files(split))

    @property
    def table(self) -> Schema:
        """The columns by name, with the extremes of all rows."""
        return {column.name: column for column in self.columns}


# -- looking


def peek(data: DataConfig, max_rows: int = 10_000) -> Schema:
    """What the source's first rows hold, by column; reads some megabytes at most. Raises DataError."""
    if sources.locate(data.source, data).format == "digits":
        return sources.digits_schema(data)
    found: dict[str, Column] = {}
    rows, size, bad = 0, 0, list[str]()
    for block in sources.first_blocks(data):
        bad += [f"{block.where(row)}: {why}" for row, why in block.bad.items()]
        for name, cells in block.cells.items() if len(block.index) else ():
            column = infer(name, cells[: max_rows - rows])
            found[name] = merge(found[name], column) if name in found else column
        rows += len(block.index)
        size += len(block.index) * sum(_row_bytes(column) for column in found.values())
        if rows >= max_rows or size >= PEEK_BYTES:
            break
    if not rows:
        raise DataError([f"{data.source} holds no row that can be read", *bad[:NAMED]])
    return found


def _row_bytes(column: Column) -> int:
    return 0 if column.dtype == TEXT else int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize


# -- making


def make_shards(
    data: DataConfig, wants: Mapping[str, ColumnType] | None, cache: Path
) -> tuple[Path, ShardManifest, bool]:
    """Shard the data into `cache`, unless the same content is there: (directory, manifest, was it there).

    wants: the columns to keep and how they will be read; None keeps every column of numbers as it is.
    Raises DataError: bad rows (policy `fail`) with file and line, no rows for a split, unreadable files.
    """
    columns = _plan(data, wants)
    key = _key(data, columns)
    final = cache / key
    if whole := _whole(final):
        return final, whole, True
    cache.mkdir(parents=True, exist_ok=True)
    for stale in cache.glob(".*.partial"):
        if time.time() - stale.stat().st_mtime > STALE_S:
            shutil.rmtree(stale, ignore_errors=True)
    partial = cache / f".{key}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        manifest = _write(data, columns, key, partial)
        write_record(partial / "manifest.json", manifest)
        return final, _settle(partial, final) or manifest, False
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(data: DataConfig, wants: Mapping[str, ColumnType] | None) -> list[Column]:
    """The columns to keep, as they are kept. Raises DataError for those that are missing or hold no numbers."""
    schema = peek(data)
    if wants is None:
        wanted: Mapping[str, ColumnType | None] = {c.name: None for c in schema.values() if c.dtype != TEXT}
    else:
        wanted = wants
    problems = [f"there is no column {name!r}, only {', '.join(schema)}" for name in wanted if name not in schema]
    problems += [f"column {n!r} holds text, not numbers" for n in wanted if n in schema and schema[n].dtype == TEXT]
    if problems or not wanted:
        raise DataError(f"{data.source}: {problem}" for problem in problems or ["there is no column of numbers"])
    ragged = sources.locate(data.source, data).format in sources.RAGGED
    exact = data.shard_format == "pb"
    return [stored(schema[name], want, exact=exact, ragged=ragged) for name, want in wanted.items()]


def _key(data: DataConfig, columns: Sequence[Column]) -> str:
    """Digest of all that decides what the shards hold: file names and contents, settings, columns."""
    located = [sources.locate(source, data) for source in (data.source, data.evaluation_source) if source]
    formats = {source.format for source in located}
    settings = data.model_dump(
        include={"evaluation_fraction", "bad_rows", "shard_format", "rows_per_shard"}
        | ({"image_size", "image_channels"} if "digits" in formats else set())
        | ({"sequence_length"} if "text" in formats else set())
    )
    files = [[source.format, *((name, sha256(path)) for name, path in source.files)] for source in located]
    content = [FORMAT, settings, files, [column.model_dump() for column in columns]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _whole(directory: Path) -> ShardManifest | None:
    """The manifest, if every file is there in its size."""
    try:
        manifest = read_record(directory / "manifest.json", ShardManifest)
        files = (*manifest.train, *manifest.evaluation)
        return manifest if all((directory / file.name).stat().st_size == file.bytes for file in files) else None
    except (OnwardError, OSError):
        return None


def _settle(partial: Path, final: Path) -> ShardManifest | None:
    """Rename to the final name; returns another builder's manifest if that one was first."""
    fsync(partial)
    if final.exists() and _whole(final) is None:
        damaged = final.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
        final.rename(damaged)  # ranks that still read it keep their open files
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.rename(partial, final)  # noqa: PTH104 - fails if there is a directory that is not empty
    except OSError:
        if winner := _whole(final):
            return winner
        raise
    fsync(final.parent)
    return None


def _write(data: DataConfig, columns: Sequence[Column], key: str, directory: Path) -> ShardManifest:
    """One pass over the source, a block at a time."""
    splits = {split: _SplitWriter(directory, split, columns, data=data) for split in ("train", "evaluation")}
    skipped, skipped_rows = 0, list[str]()
    for block, held_out in sources.read(data, [column.name for column in columns]):
        values, good, bad = fit_block(block, columns)
        skipped_rows += [f"{block.where(row)}: {bad[row]}" for row in islice(sorted(bad), NAMED - len(skipped_rows))]
        skipped += len(bad)
        if skipped and data.bad_rows == "fail":
            continue  # nothing will be kept: only count
        splits["train"].add(select(values, good & ~held_out))
        splits["evaluation"].add(select(values, good & held_out))
    files = {split: tuple(writer.close()) for split, writer in splits.items()}
    rows = {split: sum(file.rows for file in files[split]) for split in files}
    if skipped and data.bad_rows == "fail":
        more = [f"... and {skipped - NAMED:,} more"] if skipped > NAMED else []
        raise DataError(
            [*skipped_rows, *more, f"{skipped:,} bad rows; mend them, or set data.bad_rows = 'skip' to leave them out"]
        )
    _refuse_empty(data, rows, skipped)
    seen = [
        column.model_copy(update=_seen([writer.seen[column.name] for writer in splits.values()])) for column in columns
    ]
    return ShardManifest(
        key=key,
        format=data.shard_format,
        columns=tuple(seen),
        train=files["train"],
        evaluation=files["evaluation"],
        skipped=skipped,
        skipped_rows=tuple(skipped_rows),
    )


def _seen(columns: Sequence[Column | None]) -> dict[str, object]:
    """What two splits together showed of a column."""
    one, *others = [column for column in columns if column is not None]
    for other in others:
        one = merge(one, other)
    return {"extremes": one.extremes, "shape": one.shape}


def _refuse_empty(data: DataConfig, rows: Mapping[str, int], skipped: int) -> None:
    if all(rows.values()):
        return
    source = data.evaluation_source or f"data.evaluation_fraction {data.evaluation_fraction:g}"
    raise DataError(
        f"{data.source}: {rows['train']} rows to train on and {rows['evaluation']} to evaluate on "
        f"(by {source}; {skipped} bad rows left out); both need at least one: give more rows, another "
        "data.evaluation_fraction, or an evaluation_source"
    )


class _Writer(Protocol):
    def write(self, values: Mapping[str, Values]) -> None: ...
    def close(self) -> None: ...


WRITERS: dict[str, Callable[[Path, Sequence[Column]], _Writer]] = {"arrow": ArrowWriter, "pb": ProtoWriter}


class _SplitWriter:
    """Cuts a stream of rows into files of rows_per_shard rows."""

    def __init__(self, directory: Path, split: str, columns: Sequence[Column], *, data: DataConfig) -> None:
        self._directory = directory
        self._split = split
        self._columns = columns
        self._data = data
        self._file: _Writer | None = None
        self._rows = 0
        self._done: list[ShardFile] = []
        self.seen: dict[str, Column | None] = {column.name: None for column in columns}

    def add(self, values: dict[str, Values]) -> None:
        """Append rows."""
        count = len(next(iter(values.values())))
        for column in self._columns if count else ():
            self._note(column, values[column.name])
        at = 0
        while at < count:
            if self._file is None:
                self._file = WRITERS[self._data.shard_format](self._path, self._columns)
            rows = min(count - at, self._data.rows_per_shard - self._rows)
            self._file.write({name: cells[at : at + rows] for name, cells in values.items()})
            self._rows += rows
            at += rows
            if self._rows == self._data.rows_per_shard:
                self._end_file()

    def close(self) -> list[ShardFile]:
        """End the last file; returns all of them."""
        self._end_file()
        return self._done

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self._done):05d}.{self._data.shard_format}"

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        path = self._path
        fsync(path)
        size = path.stat().st_size
        self._done.append(ShardFile(name=path.name, rows=self._rows, bytes=size, sha256=sha256(path)))
        self._file, self._rows = None, 0

    def _note(self, column: Column, values: Values) -> None:
        """Remember the extremes and the longest row."""
        shape = (max(map(len, values)),) if column.variable else column.shape
        seen = column.model_copy(update={"extremes": extremes(values), "shape": shape})
        before = self.seen[column.name]
        self.seen[column.name] = merge(before, seen) if before else seen


# -- reading


class _Reader(Protocol):
    num_rows: int

    def read(self, rows: Array) -> dict[str, Values]: ...


READERS: dict[str, Callable[[Path, Sequence[Column]], _Reader]] = {"arrow": ArrowReader, "pb": ProtoReader}


class Shards:
    """The rows of one split, read at random by their number; files are opened when first needed."""

    def __init__(self, directory: Path, manifest: ShardManifest, split: Split) -> None:
        self._directory = directory
        self._manifest = manifest
        self._files = manifest.files(split)
        self._starts = np.cumsum([0, *(file.rows for file in self._files)])
        self._open: dict[int, _Reader] = {}
        self.num_rows = int(self._starts[-1])
        self.columns = manifest.table

    def read(self, rows: Array) -> dict[str, Values]:
        """The rows [n], in this order: column -> array [n, *shape], or a list of n arrays (variable length)."""
        files = np.searchsorted(self._starts, rows, side="right") - 1
        parts = {
            int(file): self._reader(int(file)).read(rows[files == file] - self._starts[file])
            for file in np.unique(files)
        }
        if len(parts) == 1:
            return next(iter(parts.values()))
        order = np.argsort(np.argsort(files, kind="stable"))  # where each row is in the parts put end to end
        return {name: _joined([part[name] for part in parts.values()], order) for name in self.columns}

    def _reader(self, number: int) -> _Reader:
        if number not in self._open:
            file = self._files[number]
            reader = READERS[self._manifest.format](self._directory / file.name, self._manifest.columns)
            if reader.num_rows != file.rows:
                raise DataError(f"{self._directory / file.name} holds {reader.num_rows} rows, not {file.rows}")
            self._open[number] = reader
        return self._open[number]


def _joined(parts: list[Values], order: Array) -> Values:
    if isinstance(parts[0], np.ndarray):
        joined: Array = np.concatenate(parts)[order]
        return joined
    rows = [row for part in parts for row in part]
    return [rows[at] for at in order]


def open_shards(directory: Path, split: Split) -> Shards:
    """The rows of a split. Raises OnwardError when the directory has no manifest, DataError for damaged files."""
    return Shards(directory, read_record(directory / "manifest.json", ShardManifest), split)


def check_shards(directory: Path) -> list[str]:
    """One sentence for each file that is missing or not what was written; reads everything."""
    manifest = read_record(directory / "manifest.json", ShardManifest)
    return list(_problems(directory, (*manifest.train, *manifest.evaluation)))


def _problems(directory: Path, files: Sequence[ShardFile]) -> Iterator[str]:
    for file in files:
        path = directory / file.name
        if not path.is_file():
            yield f"{path} is missing"
        elif (size := path.stat().st_size) != file.bytes:
            yield f"{path} has {size} bytes, not {file.bytes}"
        elif (digest := sha256(path)) != file.sha256:
            yield f"{path} has SHA-256 {digest[:12]}, not {file.sha256[:12]}: its content changed"
