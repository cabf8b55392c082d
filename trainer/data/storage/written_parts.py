"""Write the shards in parts, which several processes of one or of many machines make: the same bytes as of one process.

                 part 0        part 1        part 2            each by any process, in any order, possibly twice
    parts/       |  rows  |  |    rows    |  |  rows  |        of each split, with their numbers, extremes and bad rows
                 |   train-00000   |   train-00001   |         joined in order, a few files by any process, too

A step that a lost process has left is made again: its folder or file has its name only once it is complete.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.empty_targets import EmptyTargets
from onward.trainer.data.formats.arrow_shards import record_batches
from onward.trainer.data.images.image_computer import ImageComputer
from onward.trainer.data.reading.source_parts import SourcePart, divide, may_be_divided, read_part
from onward.trainer.data.reading.sources import Source, SourceRange, locate, read_range, source_ranges
from onward.trainer.data.schema.column_computers import ColumnComputer, RowDivider, RowPacker, describe_all
from onward.trainer.data.schema.columns import Column, fit_block, in_parts, select
from onward.trainer.data.schema.fitted import Fitted, FittedComputer, all_fitted
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.sequence_lengths import SequenceLengths
from onward.trainer.data.storage.recipe import Recipe, recipe_of
from onward.trainer.data.storage.sharding_progress import ShardingProgress
from onward.trainer.data.storage.shards import ShardFile
from onward.trainer.data.storage.split_writer import ShardFiles, SplitWriter
from onward.trainer.data.storage.written_ranges import RangeRows, WrittenRows, splits_of, write_blocks
from onward.trainer.errors import DataError
from onward.trainer.run.durable_files import fsync
from onward.trainer.run.records import Record, read_record, write_record

PART_BYTES = 32 << 20
"""A part of the sources has about this many bytes, or more."""
LEAST_BYTES = 2 << 30
"""Smaller sources are written by one process, whose threads read ahead: another process takes three seconds of
processor time until it helps, and rows are written twice, in parts and in shards."""
JOINED_BYTES = 64 << 20
"""Files of about this size are joined in one step, or of more."""
ALL_ROWS = 1 << 62
MAKES_COLUMNS = (FittedComputer, ImageComputer)
CHECKS_ROWS = (SequenceLengths, EmptyTargets)
"""Computers whose results for a row need no row before it, but for what they are fitted to."""


class PartJob(Record):
    """What a process needs to make any part."""

    config: RunConfig | None
    """None: nothing is computed of the columns."""
    data: DataConfig
    columns: tuple[Column, ...]
    fitted: Mapping[str, Fitted]
    num_files: tuple[int, ...]
    """Of the source of each range."""


class WrittenPart(Record):
    """The rows of a part, which are in a folder of its number."""

    rows: RangeRows
    seen: int
    """Rows that were read, also those that are left out."""
    counts: Mapping[str, int]
    """Split -> its rows."""
    columns: tuple[tuple[Column, ...], ...]
    """Of each split, with the extremes and the longest row."""
    size_bytes: int


class Join(Record):
    """Files of a split that are made of the rows of parts."""

    split: str
    first_file: int
    parts: tuple[int, ...]
    skip: int
    """Rows of the first part that belong to files before."""
    rows: int
    """Rows of all of the files."""


class PartStep(Record):
    """What a process is asked for: one of the two."""

    part: SourcePart | None = None
    join: Join | None = None


class StepResult(Record):
    """What became of a step."""

    written: WrittenPart | None = None
    files: tuple[ShardFile, ...] = ()
    problems: tuple[str, ...] = ()
    """Of a DataError."""


class StepRunner(Protocol):
    """Makes steps in several processes."""

    @property
    def most_parts(self) -> int:
        """Return how many parts there are at most, about."""
        ...

    def can_divide(self, recipe: Recipe) -> bool:
        """Return whether more processes than this one would be faster."""
        ...

    def opened(self, maker: PartMaker) -> AbstractContextManager[RunSteps]:
        """Return what runs the steps of a job; its processes end with the context."""
        ...


RunSteps = Callable[[Iterable["PartStep"]], Iterator[tuple[int, "StepResult"]]]
"""Yields the number of each step, from 0, with its result, in any order. Steps are begun in their order, and none after
a result with problems."""


class PartMaker:
    """Makes steps in this process. folder: of the parts; recipe: fitted."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe

    @cached_property
    def ranges(self) -> list[SourceRange]:
        """Return what is read, in order."""
        return source_ranges(self.recipe.data)

    @cached_property
    def sources(self) -> list[Source]:
        """Return the files of each range."""
        return [locate(rows.source, self.recipe.data) for rows in self.ranges]

    def write_job(self) -> None:
        """Write what `open_maker` reads in another process."""
        recipe = self.recipe
        job = PartJob(
            config=recipe.config,
            data=recipe.data,
            columns=tuple(recipe.columns),
            fitted=all_fitted(recipe.computers),
            num_files=tuple(len(source.files) for source in self.sources),
        )
        write_record(self.folder / "job.json", job)

    def make(self, step: PartStep) -> StepResult:
        """Return the result of a step; a DataError is one. Raises OSError."""
        try:
            if step.join:
                return StepResult(files=self._joined(step.join))
            assert step.part
            return StepResult(written=self._written(step.part))
        except DataError as error:
            return StepResult(problems=error.problems)

    def _written(self, part: SourcePart) -> WrittenPart:
        recipe = self.recipe
        partial = self.folder / f".{part.number:05d}.{uuid.uuid4().hex}.partial"
        partial.mkdir()
        try:
            seen = ShardingProgress(recipe.data, None)
            held_split = self.ranges[part.range].held_split
            with ExitStack() as opened:
                writers = {}
                for split in ("train", held_split):
                    # one file for a split: its rows are divided into shards when parts are joined
                    files = ShardFiles(partial, split, rows_per_file=ALL_ROWS, disk=None)
                    writers[split] = SplitWriter(split, opened.enter_context(files), packer=None)
                blocks = read_part(part, self.ranges, self.sources, recipe.request)
                rows = write_blocks(blocks, recipe, writers["train"], writers[held_split], seen, is_counted=False)
                for writer in writers.values():
                    writer.close()
            size_bytes = sum(path.stat().st_size for path in partial.iterdir())
            try:
                os.rename(partial, self._folder_of(part.number))  # noqa: PTH104 - fails if it is there and not empty
            except OSError:
                # another process has made it, too, as after a host was taken for lost
                if not self._folder_of(part.number).is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return WrittenPart(
            rows=rows,
            seen=seen.rows,
            counts={split: writer.num_rows for split, writer in writers.items()},
            columns=tuple(tuple(writer.observed.values()) for writer in writers.values()),
            size_bytes=size_bytes,
        )

    def _joined(self, join: Join) -> tuple[ShardFile, ...]:
        # under another name first: a process that was taken for lost may still be writing the same files
        partial = self.folder / f".{join.split}-{join.first_file}.{uuid.uuid4().hex}.partial"
        partial.mkdir()
        try:
            with ThreadPoolExecutor(1, "disk") as disk:
                rows_per_file = self.recipe.data.rows_per_shard
                shards = ShardFiles(partial, join.split, rows_per_file=rows_per_file, disk=disk, first=join.first_file)
                with shards:
                    self._add_rows(join, shards)
                    files = tuple(shards.close())
            for file in files:
                # whoever makes these files writes the same bytes, so it is no matter whose stay
                (partial / file.name).replace(self.folder.parent / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return files

    def _add_rows(self, join: Join, shards: ShardFiles) -> None:
        skip = join.skip
        left = join.rows
        for number in join.parts:
            for rows in record_batches(self._folder_of(number) / f"{join.split}-00000.arrow"):
                wanted = rows.slice(skip, left)
                skip = max(0, skip - rows.num_rows)
                left -= wanted.num_rows
                shards.add(wanted)

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"{number:05d}"


def open_maker(folder: Path) -> PartMaker:
    """Return the maker of a job that another process has begun. Raises DataError if the sources have changed since."""
    job = read_record(folder / "job.json", PartJob)
    if job.config is None:
        recipe = Recipe(job.data, job.columns, ())
    else:
        recipe = recipe_of(job.config, read_training_signature(job.config.model))
        for computer in recipe.computers:
            if isinstance(computer, FittedComputer):
                computer.restore(job.fitted)
    maker = PartMaker(folder, recipe)
    num_files = tuple(len(source.files) for source in maker.sources)
    if tuple(recipe.columns) != job.columns or num_files != job.num_files:
        raise DataError(
            f"{job.data.source}: this process finds other files or columns than the one that divided the sources "
            f"({num_files} and {job.num_files} files); every process must see the same directories"
        )
    describe(maker)
    return maker


def describe(maker: PartMaker) -> None:
    """Let the computers find their columns from the first rows, as they do in a process that reads all rows."""
    recipe = maker.recipe
    waiting = [each for each in recipe.computers if isinstance(each, MAKES_COLUMNS)]
    if not waiting:
        return
    for block, _ in in_parts(read_range(maker.ranges[0], recipe.request), recipe.columns):
        values, good, _ = fit_block(block, recipe.columns)
        if good.any():
            describe_all(recipe.computers, select(values, good))
        if all(each.columns for each in waiting):
            return


def is_divided(recipe: Recipe, runner: StepRunner | None) -> bool:
    """Return whether the sources are large enough, and their rows independent enough, for several processes."""
    if runner is None or not runner.can_divide(recipe):
        return False
    computers: Sequence[ColumnComputer] = recipe.computers
    if computers and recipe.config is None:
        return False
    for computer in computers:
        joins_rows = isinstance(computer, RowPacker | RowDivider)
        if joins_rows or not isinstance(computer, MAKES_COLUMNS + CHECKS_ROWS):
            return False
    sources = [locate(rows.source, recipe.data) for rows in source_ranges(recipe.data)]
    return may_be_divided(recipe.data, sources) and _size(sources) >= LEAST_BYTES


def _size(sources: Iterable[Source]) -> int:
    return sum(path.stat().st_size for source in sources for _, path in source.files)


@contextmanager
def writing_parts(
    recipe: Recipe, directory: Path, progress: ShardingProgress, runner: StepRunner
) -> Iterator[WrittenRows]:
    """Write the rows of all splits in parts; `finish` joins these. Raises DataError, the first in their order."""
    folder = directory / "parts"
    folder.mkdir()
    maker = PartMaker(folder, recipe)
    maker.write_job()
    describe(maker)
    part_bytes = max(PART_BYTES, _size(maker.sources) // runner.most_parts)
    range_of = []

    def steps() -> Iterator[PartStep]:
        for part in divide(recipe.data, maker.ranges, maker.sources, part_bytes):
            range_of.append(part.range)
            yield PartStep(part=part)

    def seen(result: StepResult) -> None:
        progress.add(result.written.seen if result.written else 0)

    with runner.opened(maker) as run:
        yield _written_rows(maker, run, _results(run, steps(), seen), range_of, runner.most_parts)


def _written_rows(
    maker: PartMaker, run: RunSteps, results: Sequence[StepResult], range_of: Sequence[int], most: int
) -> WrittenRows:
    """Return the rows of all parts. range_of: the number of the range of each part."""
    recipe = maker.recipe
    written = [result.written for result in results if result.written]
    totals = [RangeRows() for _ in maker.ranges]
    for at, part in zip(range_of, written, strict=True):
        totals[at] = totals[at].with_later(part.rows)
    counts = {split: [part.counts.get(split, 0) for part in written] for split in splits_of(recipe.data)}
    of_splits = [columns for part in written for columns in part.columns]
    observed = [{column.name: column for column in columns} for columns in of_splits]

    def finish() -> Mapping[str, tuple[ShardFile, ...]]:
        # by what was written, because sources may be compressed or text
        row_bytes = sum(part.size_bytes for part in written) / max(1, sum(map(sum, counts.values())))
        rows_per_step = max(1, round(JOINED_BYTES / row_bytes))
        joins = _joins(counts, recipe.data.rows_per_shard, rows_per_step, most)
        files = defaultdict[str, list[ShardFile]](list)
        joined = _results(run, (PartStep(join=join) for join in joins), lambda _: None)
        for join, result in zip(joins, joined, strict=True):
            files[join.split] += result.files
        # out of the shards first: a process that was taken for lost may still write here, so that something stays
        done = maker.folder.parent.with_name(f".{uuid.uuid4().hex}.partial")
        maker.folder.rename(done)
        shutil.rmtree(done, ignore_errors=True)
        fsync(maker.folder.parent)
        return {split: tuple(files[split]) for split in counts}

    return WrittenRows(totals, {split: sum(each) for split, each in counts.items()}, observed, finish)


def _results(run: RunSteps, steps: Iterable[PartStep], seen: Callable[[StepResult], None]) -> list[StepResult]:
    """Return the results of all steps, in their order. Raises the DataError of the first that has one."""
    results: dict[int, StepResult] = {}
    for number, result in run(steps):
        results[number] = result
        seen(result)
    # the message is that of one process, whichever part was read first
    in_order = [results[number] for number in sorted(results)]
    if wrong := next((result for result in in_order if result.problems), None):
        raise DataError(wrong.problems)
    return in_order


def _joins(counts: Mapping[str, Sequence[int]], rows_per_file: int, rows_per_step: int, most: int) -> list[Join]:
    """Return the steps that join the parts of each split. counts: split -> rows of each part."""
    total = sum(map(sum, counts.values()))
    files_per_step = max(1, rows_per_step // rows_per_file, -(-total // (most * rows_per_file)))
    size = files_per_step * rows_per_file
    joins = []
    for split, each in counts.items():
        # part k has the rows starts[k] .. starts[k + 1] - 1
        starts = [0, *accumulate(each)]
        for first in range(0, starts[-1], size):
            end = min(first + size, starts[-1])
            begins = int(np.searchsorted(starts, first, side="right")) - 1
            ends = int(np.searchsorted(starts, end, side="left"))
            joins.append(
                Join(
                    split=split,
                    first_file=first // rows_per_file,
                    parts=tuple(number for number in range(begins, ends) if each[number]),
                    skip=first - starts[begins],
                    rows=end - first,
                )
            )
    return joins
