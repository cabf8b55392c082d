"""Read shards: the data as files of rows, in a directory with a manifest, readable at random by row number.

    CACHE/<key>/manifest.json             ShardManifest: columns, files, SHA-256 digests
    CACHE/<key>/train-00000.arrow         rows 0 .. rows_per_shard - 1 of the training split
    CACHE/<key>/train-00001.arrow         the next rows; earlier versions could write .pb, too
    CACHE/<key>/evaluation-00000.arrow    the rows that are held out

`sharding.py` writes them. Of shards on a server the directory has `manifest.json` and `origin.json` alone, and a file
is fetched when its rows are needed (shard_cache.py).
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.arrow_files import ArrowReader
from onward.trainer.data.formats.finished_shards import MANIFEST
from onward.trainer.data.formats.page_advice import advise_file
from onward.trainer.data.formats.tensorproto_files import ProtoReader
from onward.trainer.data.schema.columns import Array, Column, Schema, Values
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.data.storage.shard_cache import server_of
from onward.trainer.data.storage.soft_labels import SoftLabelFiles
from onward.trainer.errors import DataError
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import Record, read_record

SHARD_VERSION = 2
"""Raised when the same source would give other shards, so that shards of an older version are not reused."""

Split = Literal["train", "evaluation", "test"]


class ShardFile(Record):
    """One file of a split."""

    name: str
    rows: int
    bytes: int
    sha256: str


class ShardManifest(Record):
    """The content of a directory of shards, with a digest of each file."""

    key: str
    """Digest of the source's content and of the settings that decide the shards."""
    format: Literal["arrow", "pb"]
    columns: tuple[Column, ...]
    train: tuple[ShardFile, ...]
    evaluation: tuple[ShardFile, ...]
    test: tuple[ShardFile, ...] = ()
    """Of data.test_source."""
    sizes: tuple[int, ...] = ()
    """Training rows of each of data.sources, which follow each other; () = all rows are of one source."""
    skipped: int = 0
    """Number of bad rows left out (data.bad_rows = 'skip')."""
    skipped_rows: tuple[str, ...] = ()
    """The first of them: file, line and reason."""
    left_out: int = 0
    """Number of rows left out because they lack a value (data.table.missing = 'skip')."""
    preprocessing: str = ""
    """Where the trained part begins, and what was computed in front of it; empty without pre-processing."""
    file_columns: tuple[Column, ...] = ()
    """With pre-processing: columns that only the whole file reads, such as text; in the evaluation files only."""
    pad_values: Mapping[str, float] = {}
    """Computed column of varying length -> what the pre-processing pads it with."""
    fitted: Mapping[str, Fitted] = {}
    """Column -> what was found on the data for it: class names, means, vocabularies."""
    version: int = SHARD_VERSION
    digest: str = ""
    """SHA-256 of the other fields as JSON."""

    def with_digest(self) -> Self:
        """Return the manifest with its own digest, as it is written."""
        content = self.model_copy(update={"digest": ""}).model_dump_json().encode()
        return self.model_copy(update={"digest": hashlib.sha256(content).hexdigest()})

    def files(self, split: Split) -> tuple[ShardFile, ...]:
        """Return the files of a split, in order."""
        return {"train": self.train, "evaluation": self.evaluation, "test": self.test}[split]

    def rows(self, split: Split) -> int:
        """Return the number of rows of a split."""
        return sum(file.rows for file in self.files(split))

    def size_bytes(self, split: Split) -> int:
        """Return the bytes of the files of a split."""
        return sum(file.bytes for file in self.files(split))

    @property
    def table(self) -> Schema:
        """Return the columns by name, with the extremes of all rows."""
        return {column.name: column for column in (*self.columns, *self.file_columns)}


def damaged_files(directory: Path, manifest: ShardManifest) -> list[str]:
    """Return one sentence for each file that is missing or does not have the content that was written.

    Reads every byte, two files at a time: the digest of one is computed while another is read from the disk.
    """
    server = server_of(directory)

    def problem(file: ShardFile) -> str:
        path = directory / file.name
        if server:
            return server.problem(file)
        if not path.is_file():
            return f"{path} is missing"
        # the size is the cheapest difference
        if (size := path.stat().st_size) != file.bytes:
            return f"{path} has {size} bytes, not {file.bytes}"
        if (digest := sha256(path)) != file.sha256:
            return f"{path} has SHA-256 {digest[:12]}, not {file.sha256[:12]}: its content changed"
        return ""

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(problem, (*manifest.train, *manifest.evaluation, *manifest.test)))
    return [*manifest_problems(directory, manifest), *filter(None, found)]


def manifest_problems(directory: Path, manifest: ShardManifest) -> list[str]:
    """Return one sentence if a manifest is not as it was written; else []."""
    if manifest.digest == manifest.with_digest().digest:
        return []
    why = "has changed" if manifest.digest else "has no digest: an earlier version wrote it"
    return [f"{directory / MANIFEST} {why}"]


class _Reader(Protocol):
    num_rows: int

    def read(self, rows: Array) -> dict[str, Values]: ...

    def lengths(self, name: str) -> Array: ...
    def read_nothing_around(self) -> None: ...
    def read_ahead_of(self, first: int, end: int) -> None: ...


FILES_TOGETHER = 16
"""Files whose rows are read together where the order is one of files (block_order.py)."""
MOST_OPEN = 4096
"""Files that are mapped at a time, each several times: a process may have 65,530 mappings by default."""
SHARD_READERS: dict[str, Callable[[Path, Sequence[Column]], _Reader]] = {"arrow": ArrowReader, "pb": ProtoReader}


class Shards:
    """The rows of one split, read by row number; a file is opened when one of its rows is first read.

    most: only so many of the rows, chosen by a hash of their numbers, in the order of the split; 0 = all.
    """

    def __init__(
        self, directory: Path, manifest: ShardManifest, split: Split, *, for_file: bool = False, most: int = 0
    ) -> None:
        columns = (*manifest.columns, *manifest.file_columns) if for_file else manifest.columns
        self._directory = directory
        self._manifest = manifest
        self._files = manifest.files(split)
        self._starts = np.cumsum([0, *(file.rows for file in self._files)])
        self._open: dict[int, _Reader] = {}
        self._opening = threading.Lock()
        self._server = server_of(directory)
        self._most_open = MOST_OPEN
        if self._server:
            # files that are open cannot make room for others; evaluations read one file after the other
            self._most_open = FILES_TOGETHER if split == "train" else 2
        self.num_rows = int(self._starts[-1])
        self._chosen = _few(self.num_rows, most) if 0 < most < self.num_rows else None
        self.num_rows = self.num_rows if self._chosen is None else most
        # only training mixes sources; other splits, and shards of one source, are a single range
        self.sizes = manifest.sizes if split == "train" and manifest.sizes else (self.num_rows,)
        """Rows of each source."""
        self.columns: Schema = {column.name: column for column in columns}
        self.pad_values = manifest.pad_values
        self.fitted = manifest.fitted
        self._soft_labels: SoftLabelFiles | None = None
        self._reads_around = True
        self.size_bytes = manifest.size_bytes(split)
        """Of all files of the split."""

    @property
    def is_streamed(self) -> bool:
        """Whether the files come from a server when their rows are needed."""
        return self._server is not None

    @property
    def rows_of_file(self) -> int:
        """Return the rows of each file but the last one."""
        return self._files[0].rows if self._files else 0

    @property
    def manifest(self) -> ShardManifest:
        """The manifest of all splits."""
        return self._manifest

    def numbers(self, rows: Array) -> Array:
        """Return the numbers in the whole split of these rows, which may be some of them (`most`): int64 [n]."""
        return rows if self._chosen is None else self._chosen[rows]

    @property
    def soft_labels(self) -> tuple[str, ...]:
        """The outputs of a teacher that are read with each row."""
        return self._soft_labels.names if self._soft_labels else ()

    def with_soft_labels(self, files: SoftLabelFiles) -> Shards:
        """Return the split with a teacher's outputs as further columns."""
        # a shallow copy: both share the files that are open
        found = copy.copy(self)
        found._soft_labels = files
        return found

    def read(self, rows: Array) -> dict[str, Values]:
        """Read rows [n], in this order: column -> array [n, *shape], or a list of n arrays (variable length)."""
        soft = self._soft_labels.read(rows) if self._soft_labels else {}
        return self._read(rows) | soft

    def _read(self, rows: Array) -> dict[str, Values]:
        rows = rows if self._chosen is None else self._chosen[rows]
        # `side="right"`: a row that starts a file belongs to it, also behind files without rows
        files = np.searchsorted(self._starts, rows, side="right") - 1
        parts = {
            int(file): self._part(int(file), rows[files == file] - self._starts[file]) for file in np.unique(files)
        }
        # all rows are in one file, and in the order asked for
        if len(parts) == 1:
            return next(iter(parts.values()))
        # the parts are in the order of files; order[i] is where row i is in their concatenation
        order = np.argsort(np.argsort(files, kind="stable"))
        return {name: _concatenated([part[name] for part in parts.values()], order) for name in self.columns}

    def _part(self, number: int, rows: Array) -> dict[str, Values]:
        values = self._reader(number).read(rows)
        if self._server:
            # rows of varying length are views of the file, which may be deleted once its reader is closed
            for name, column in values.items():
                if isinstance(column, list):
                    values[name] = [np.array(row) for row in column]
        return values

    def lengths(self, names: Sequence[str]) -> Array:
        """Return the length of every row, summed over columns of varying length: int64 [rows]."""
        total = np.zeros(int(self._starts[-1]), np.int64)
        for number, (first, end) in enumerate(pairwise(self._starts.tolist())):
            total[first:end] = sum(self._reader(number).lengths(name) for name in names)
        return total if self._chosen is None else total[self._chosen]

    def read_nothing_around(self) -> None:
        """From now on read only the pages of the rows that are asked for, and none around them."""
        self._reads_around = False

    def read_ahead(self, is_over: Callable[[], bool]) -> None:
        """Let the kernel read all files of the split, from their beginnings to their ends, until `is_over`."""
        for file in self._files:
            # an error is raised where the rows are read
            with suppress(OSError):
                advise_file(self._directory / file.name, is_over)

    def read_ahead_of(self, firsts: Array, count: int, is_over: Callable[[], bool]) -> None:
        """Let the kernel read ranges of `count` rows, until `is_over`; firsts: their first rows, int64 [n]."""
        for first in np.sort(firsts).tolist():
            if is_over():
                return
            end = min(first + count, int(self._starts[-1]))
            numbers = np.searchsorted(self._starts, [first, end - 1], side="right") - 1
            for number in range(numbers[0], numbers[1] + 1):
                start = int(self._starts[number])
                self._reader(number).read_ahead_of(max(0, first - start), end - start)

    def files_with(self, firsts: Array, count: int) -> list[int]:
        """Return the numbers of the files that have ranges of `count` rows; firsts: their first rows, int64 [n]."""
        lasts = np.minimum(firsts + count, int(self._starts[-1])) - 1
        found: list[int] = np.unique(np.searchsorted(self._starts, [*firsts, *lasts], side="right") - 1).tolist()
        return found

    def hold_ahead(self, number: int, is_over: Callable[[], bool]) -> int | None:
        """Fetch a file of a server; return a descriptor that keeps it, None where that is not possible now.

        is_over: whether to end before that. Raises DataError for a damaged file.
        """
        assert self._server is not None
        return self._server.hold_if_possible(self._files[number], is_over)

    def close_files(self) -> None:
        """Close all files; one that is read again is opened again."""
        with self._opening:
            self._open.clear()

    def _reader(self, number: int) -> _Reader:
        with self._opening:
            return self._opened(number)

    def _opened(self, number: int) -> _Reader:
        if number in self._open:
            # the last one that is closed
            self._open[number] = self._open.pop(number)
        else:
            file = self._files[number]
            path = self._directory / file.name
            descriptor = None
            if self._server:
                path, descriptor = self._server.hold(file, self._open.clear)
            reader = SHARD_READERS[self._manifest.format](path, list(self.columns.values()))
            if descriptor is not None:
                # a thread may read from it after it was closed here; the lock ends with the mapping
                weakref.finalize(reader, os.close, descriptor)
            if reader.num_rows != file.rows:
                raise DataError(f"{path} holds {reader.num_rows} rows, not {file.rows}")
            if not self._reads_around:
                reader.read_nothing_around()
            self._open[number] = reader
            if len(self._open) > self._most_open:
                # of rows that were read from it, numpy keeps the mapping
                del self._open[next(iter(self._open))]
        return self._open[number]


def _concatenated(parts: list[Values], order: Array) -> Values:
    if isinstance(parts[0], np.ndarray):
        joined: Array = np.concatenate(parts)[order]
        return joined
    rows = [row for part in parts for row in part]
    return [rows[at] for at in order]


def _few(num_rows: int, most: int) -> Array:
    """Return `most` of the row numbers, int64, increasing: those with the least hashes."""
    # a hash and not the first rows, because a split may be sorted; the same rows in each evaluation and attempt
    hashes = keyed_hash(np.arange(num_rows), hash_key("evaluation rows"))
    return np.sort(np.argpartition(hashes, most)[:most])


def open_shards(directory: Path, split: Split, *, for_file: bool = False, most: int = 0) -> Shards:
    """Open the rows of a split. `for_file`: with the columns that only the whole file reads (not of the train split).

    `most`: only so many of the rows (Shards).

    Raises OnwardError when the directory has no manifest, DataError for damaged files.
    """
    return Shards(directory, read_record(directory / MANIFEST, ShardManifest), split, for_file=for_file, most=most)


def open_evaluated(directory: Path, data: DataConfig, split: Split = "evaluation", *, for_file: bool = False) -> Shards:
    """Open the rows of a split that an evaluation reads: of "evaluation" at most `data.evaluation_rows`.

    Raises the errors of `open_shards`.
    """
    most = data.evaluation_rows if split == "evaluation" else 0
    return open_shards(directory, split, for_file=for_file, most=most)
