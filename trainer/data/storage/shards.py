"""Read shards: the data as files of rows, in a directory with a manifest, readable at random by row number.

    CACHE/<key>/manifest.json             ShardManifest: columns, files, SHA-256 digests
    CACHE/<key>/train-00000.arrow         rows 0 .. rows_per_shard - 1 of the training split
    CACHE/<key>/train-00001.arrow         the next rows; earlier versions could write .pb, too
    CACHE/<key>/evaluation-00000.arrow    the rows that are held out

`sharding.py` writes them, `opened_shards.py` opens them. Of shards on a server the directory has `manifest.json` and
`origin.json` alone, and a file is fetched when its rows are needed (shard_cache.py).
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from pydantic import Field

from onward.trainer.data.formats.arrow_shards import ArrowFiles, ArrowReader
from onward.trainer.data.formats.finished_shards import FILES_TOGETHER, MANIFEST
from onward.trainer.data.formats.page_advice import advise_file
from onward.trainer.data.formats.tensorproto_files import ProtoFiles, ProtoReader
from onward.trainer.data.schema.columns import Array, Column, Schema, Values, joined, rows_at
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.data.storage.soft_labels import SoftLabelFiles
from onward.trainer.errors import DataError
from onward.trainer.run.records import Record

SHARD_VERSION = 2
"""Raised when the same source would give other shards, so that shards of an older version are not reused."""

Split = Literal["train", "evaluation", "test"]


class ShardFile(Record):
    """One file of a split. A manifest may come from a server: a name leads into no other directory."""

    name: Annotated[str, Field(pattern=r"^[a-z]+-\d+\.(arrow|pb)$")]
    rows: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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

    @property
    def all_files(self) -> tuple[ShardFile, ...]:
        """The files of all splits."""
        return (*self.train, *self.evaluation, *self.test)

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


def manifest_problems(directory: Path, manifest: ShardManifest) -> list[str]:
    """Return one sentence if a manifest is not as it was written; else []."""
    if manifest.digest == manifest.with_digest().digest:
        return []
    why = "has changed" if manifest.digest else "has no digest: an earlier version wrote it"
    return [f"{directory / MANIFEST} {why}"]


class ShardServer(Protocol):
    """Fetches the files of shards (shard_cache.py)."""

    def hold(self, file: ShardFile, release_others: Callable[[], None]) -> tuple[Path, int]:
        """Return a local copy and a descriptor that keeps it there; release_others: closes what could be fetched again.

        Raises DataError for a damaged file, ServerUnavailable, and RuntimeUnavailable where there is no room.
        """

    def hold_if_possible(self, file: ShardFile, is_over: Callable[[], bool]) -> int | None:
        """Return a descriptor as `hold` does, None where there is no room or no answer. Raises DataError.

        is_over: whether to end before that.
        """


MOST_OPEN = 4096
"""Files that are mapped at a time, each several times: a process may have 65,530 mappings by default."""
SHARD_READERS: dict[str, type[ArrowReader] | type[ProtoReader]] = {"arrow": ArrowReader, "pb": ProtoReader}
SHARD_FILES: dict[str, Callable[[Any, Array], ArrowFiles | ProtoFiles]] = {"arrow": ArrowFiles, "pb": ProtoFiles}


class Shards:
    """The rows of one split, read by row number; a file is opened when one of its rows is first read.

    most: only so many of the rows, chosen by a hash of their numbers, in the order of the split; 0 = all.
    server: where the files come from; None if they are in the directory.
    """

    def __init__(
        self,
        directory: Path,
        manifest: ShardManifest,
        split: Split,
        *,
        for_file: bool = False,
        most: int = 0,
        server: ShardServer | None = None,
    ) -> None:
        columns = (*manifest.columns, *manifest.file_columns) if for_file else manifest.columns
        self._directory = directory
        self.manifest = manifest
        """Of all splits."""
        self._files = manifest.files(split)
        self.rows_of_file = self._files[0].rows if self._files else 0
        """Of each file but the last one."""
        self._starts = np.cumsum([0, *(file.rows for file in self._files)])
        self._open: dict[int, ArrowReader | ProtoReader] = {}
        # the open files as one; empty after one was opened or closed. A list, which a copy with soft labels shares
        self._joined: list[ArrowFiles | ProtoFiles] = []
        self._opening = threading.Lock()
        # file -> descriptor, which keeps a file of a server that was fetched ahead
        self._ahead: dict[int, int] = {}
        self._server = server
        self.is_streamed = server is not None
        """Whether the files come from a server when their rows are needed."""
        self._most_open = MOST_OPEN
        if self._server:
            # files that are open cannot make room for others; evaluations read one file after the other
            self._most_open = FILES_TOGETHER if split == "train" else 2
        self.num_rows = int(self._starts[-1])
        self._chosen = _few(self.num_rows, most) if 0 < most < self.num_rows else None
        if self._chosen is not None:
            self.num_rows = most
        # only training mixes sources; other splits, and shards of one source, are a single range
        self.sizes = manifest.sizes if split == "train" and manifest.sizes else (self.num_rows,)
        """Rows of each source."""
        self.columns: Schema = {column.name: column for column in columns}
        self.pad_values = manifest.pad_values
        self.fitted = manifest.fitted
        self._soft_labels: SoftLabelFiles | None = None
        self.reads_around = True
        """Whether the kernel may read pages around those of the rows that are asked for; of files that are opened."""
        self.size_bytes = manifest.size_bytes(split)
        """Of all files of the split."""

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
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"there are {self.num_rows} rows, and not all of {rows.min()} to {rows.max()}")
        rows = self.numbers(rows)
        # all files are open, and stay so: none is looked for
        if self._server is None and len(self._open) == len(self._files):
            return self._rows_of(self._starts[:0], rows)
        # `side="right"`: a row that starts a file belongs to it, also behind files without rows
        files = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = np.unique(files)
        # of a server's files each is closed before the next one is opened, for which there may be no room otherwise
        together = 1 if self._server else self._most_open
        if len(numbers) <= together:
            return self._rows_of(numbers, rows)
        groups = [numbers[first : first + together] for first in range(0, len(numbers), together)]
        places = [np.flatnonzero(np.isin(files, group)) for group in groups]
        parts = [self._rows_of(group, rows[here]) for group, here in zip(groups, places, strict=True)]
        # order[i] is where row i is in the concatenation of the parts
        order = np.argsort(np.concatenate(places))
        return {name: rows_at(joined([part[name] for part in parts]), order) for name in self.columns}

    def _rows_of(self, files: Array, rows: Array) -> dict[str, Values]:
        with self._opening:
            for number in files.tolist():
                self._opened(number)
            if not self._joined:
                numbers = sorted(self._open)
                readers = [self._open[number] for number in numbers]
                self._joined.append(SHARD_FILES[self.manifest.format](readers, self._starts[numbers]))
            joined = self._joined[0]
        values = joined.read(rows)
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

    def read_ahead(self, is_over: Callable[[], bool]) -> None:
        """Let the kernel read all files of the split, from their beginnings to their ends, until `is_over`."""
        for file in self._files:
            # an error is raised where the rows are read
            with suppress(OSError):
                advise_file(self._directory / file.name, is_over)

    def read_ahead_of(self, firsts: Array, count: int, is_over: Callable[[], bool]) -> None:
        """Let the kernel read ranges of `count` rows, until `is_over`; firsts: their first rows, int64 [n]."""
        # a head that is read behind all ranges would keep who reads rows waiting, too
        for number in self.files_with(firsts, count):
            self._reader(number)
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

    def hold_ahead(self, number: int, is_over: Callable[[], bool]) -> bool:
        """Fetch a file of a server and keep it; return whether that is possible now. One thread may call it for a file.

        is_over: whether to end before that. Raises DataError for a damaged file.
        """
        assert self._server is not None
        if number not in self._ahead:
            descriptor = self._server.hold_if_possible(self._files[number], is_over)
            if descriptor is None:
                return False
            self._ahead[number] = descriptor
        return True

    def release_ahead(self, numbers: Collection[int]) -> None:
        """Let files be deleted that were fetched ahead, once nobody reads them."""
        for number in numbers:
            # where rows that are needed now have no room, another thread releases all of them
            descriptor = self._ahead.pop(number, None)
            if descriptor is not None:
                os.close(descriptor)

    def _release_all(self) -> None:
        self._open.clear()
        self._joined.clear()
        self.release_ahead(list(self._ahead))

    def close_files(self) -> None:
        """Close all files; one that is read again is opened again."""
        with self._opening:
            self._open.clear()
            self._joined.clear()

    def _reader(self, number: int) -> ArrowReader | ProtoReader:
        with self._opening:
            return self._opened(number)

    def _opened(self, number: int) -> ArrowReader | ProtoReader:
        reader = self._open.pop(number, None)
        if reader is None:
            file = self._files[number]
            reader = self._new_reader(file)
            if reader.num_rows != file.rows:
                raise DataError(f"{self._directory / file.name} holds {reader.num_rows} rows, not {file.rows}")
            self._joined.clear()
            if len(self._open) == self._most_open:
                # of rows that were read from it, numpy keeps the mapping
                del self._open[next(iter(self._open))]
        # the last one that is closed
        self._open[number] = reader
        return reader

    def _new_reader(self, file: ShardFile) -> ArrowReader | ProtoReader:
        kind = partial(
            SHARD_READERS[self.manifest.format], columns=list(self.columns.values()), around=self.reads_around
        )
        if self._server is None:
            return kind(self._directory / file.name)
        path, descriptor = self._server.hold(file, self._release_all)
        try:
            reader = kind(path)
        except BaseException:
            os.close(descriptor)
            raise
        # a thread may read from it after it was closed here; the lock ends with the mapping
        weakref.finalize(reader, os.close, descriptor)
        return reader


def _few(num_rows: int, most: int) -> Array:
    """Return `most` of the row numbers, int64, increasing: those with the least hashes."""
    # a hash and not the first rows, because a split may be sorted; the same rows in each evaluation and attempt
    hashes = keyed_hash(np.arange(num_rows), hash_key("evaluation rows"))
    return np.sort(np.argpartition(hashes, most)[:most])
