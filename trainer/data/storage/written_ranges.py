"""Write the rows of the sources into the files of the splits, range after range, in one process.

source_ranges         ranges of rows that belong together: those of one source
     |
write_blocks          read in blocks, fit, compute, divide into splits  ->  RangeRows: rows, bad rows
     |
write_ranges          all ranges in order into the same files  ->  WrittenRows

written_parts.py does the same in several processes, written_shards.py makes the manifest of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onward.trainer.data.reading.read_ahead import read_ahead
from onward.trainer.data.reading.sources import read_range, source_ranges
from onward.trainer.data.schema.column_computers import computed_chunks, stored_of
from onward.trainer.data.schema.columns import (
    MAX_NAMED_ROWS,
    Array,
    Block,
    Column,
    LeftOut,
    fit_block,
    in_parts,
    select,
)
from onward.trainer.data.storage.split_writer import ShardFiles, SplitWriter
from onward.trainer.run.records import Record

if TYPE_CHECKING:
    from onward.trainer.config.sections.data import DataConfig
    from onward.trainer.data.storage.recipe import Recipe
    from onward.trainer.data.storage.sharding_progress import ShardingProgress
    from onward.trainer.data.storage.shards import ShardFile

MISSING_CELL = " is missing"
"""The end of the reason of a bad row, behind the name of its column."""


class RangeRows(Record):
    """What became of the rows of a block, of a range, or of all ranges."""

    trained: int = 0
    """Rows in the training files: samples, where rows are packed."""
    bad: int = 0
    named: tuple[str, ...] = ()
    """The first bad rows: file, line and reason."""
    missing: frozenset[str] = frozenset()
    """Columns of which a bad row has no cell."""
    left_out: int = 0
    """Rows that are not bad: the settings leave them out."""

    def with_later(self, later: RangeRows) -> RangeRows:
        """Return both as one."""
        named = (self.named + later.named)[:MAX_NAMED_ROWS]
        trained = self.trained + later.trained
        bad = self.bad + later.bad
        missing = self.missing | later.missing
        left_out = self.left_out + later.left_out
        return RangeRows(trained=trained, bad=bad, named=named, missing=missing, left_out=left_out)


def _refused_rows(block: Block, reasons: Mapping[int, str]) -> RangeRows:
    # rows that the settings leave out are counted, and are no errors
    bad = sorted(row for row, why in reasons.items() if not isinstance(why, LeftOut))
    named = tuple(f"{block.where(row)}: {reasons[row]}" for row in bad[:MAX_NAMED_ROWS])
    missing = {reasons[row].removesuffix(MISSING_CELL) for row in bad if reasons[row].endswith(MISSING_CELL)}
    left_out = len(reasons) - len(bad)
    return RangeRows(bad=len(bad), named=named, missing=frozenset(missing), left_out=left_out)


@dataclass(frozen=True)
class WrittenRows:
    """The rows of all ranges."""

    ranges: list[RangeRows]
    counts: Mapping[str, int]
    """Split -> its rows."""
    observed: Sequence[Mapping[str, Column]]
    """Columns with their extremes and the longest row, by name, of all rows together."""
    finish: Callable[[], Mapping[str, tuple[ShardFile, ...]]]
    """Completes the files of the splits."""


def splits_of(data: DataConfig) -> tuple[str, ...]:
    """Return the splits that are written."""
    return ("train", "evaluation", "test") if data.test_source else ("train", "evaluation")


def write_ranges(recipe: Recipe, directory: Path, progress: ShardingProgress) -> WrittenRows:
    """Write all splits in one pass over each source, a block at a time."""
    data = recipe.data
    written = list[RangeRows]()
    total = RangeRows()
    with ExitStack() as opened:
        disk = opened.enter_context(ThreadPoolExecutor(1, "disk"))
        writers = {}
        for split in splits_of(data):
            files = opened.enter_context(ShardFiles(directory, split, rows_per_file=data.rows_per_shard, disk=disk))
            writers[split] = SplitWriter(split, files, packer=recipe.packer)
        for rows in source_ranges(data):
            held = writers[rows.held_split]
            blocks = read_range(rows, recipe.request)
            written.append(write_blocks(blocks, recipe, writers["train"], held, progress, is_counted=total.bad > 0))
            total = total.with_later(written[-1])
        files_of = {split: tuple(writer.close()) for split, writer in writers.items()}
    counts = {split: writer.num_rows for split, writer in writers.items()}
    return WrittenRows(written, counts, [writer.observed for writer in writers.values()], lambda: files_of)


def write_blocks(
    blocks: Iterable[tuple[Block, Array]],
    recipe: Recipe,
    train: SplitWriter,
    held: SplitWriter,
    progress: ShardingProgress,
    *,
    is_counted: bool,
) -> RangeRows:
    """Append the rows of the blocks of a range, or of a part of one, to the files of two splits.

    is_counted: an earlier range has bad rows. With data.bad_rows "fail" no file will be kept after a bad row, so the
    rest is only counted.
    """
    before = train.num_rows
    found = RangeRows()
    # without a name for the blocks, so that their files are closed where an error leaves the loop
    for block, held_out in in_parts(read_ahead(iter(blocks)), recipe.columns):
        keeps = recipe.data.bad_rows == "skip" or not (is_counted or found.bad)
        reasons = _write_block(block, held_out, recipe, train, held, keeps=keeps)
        found = found.with_later(_refused_rows(block, reasons))
        progress.add(len(block.index) + len(block.bad))
    train.end_source()
    if held is not train:
        held.end_source()
    return found.model_copy(update={"trained": train.num_rows - before})


def _write_block(
    block: Block, held_out: Array, recipe: Recipe, train: SplitWriter, held: SplitWriter, *, keeps: bool
) -> dict[int, str]:
    """Write the good rows of a block, and return why the others are not: row -> reason."""
    values, good, reasons = fit_block(block, recipe.columns)
    for chunk, is_held in computed_chunks(recipe.computers, block, values, good, held_out, reasons):
        has_bad_rows = any(not isinstance(why, LeftOut) for why in reasons.values())
        # no file is kept after a bad row: only further bad rows are of interest
        if not keeps or (has_bad_rows and recipe.data.bad_rows == "fail"):
            continue
        computed = stored_of(recipe.computers)
        train.add(select(chunk, ~is_held), (*recipe.trained_columns, *computed))
        held.add(select(chunk, is_held), (*recipe.source_columns, *computed))
    return reasons
