"""Write the rows of the sources into the files of the splits: range after range, then one manifest.

source_ranges         ranges of rows that belong together: those of one source
     |
write_range           read in blocks, fit, compute, divide into splits  ->  RangeRows: rows, bad rows
     |
write_shards          all ranges in order into the same files  ->  ShardManifest, or DataError with the bad rows
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from onward.trainer.data.misfits import remedy_of_missing
from onward.trainer.data.reading.read_ahead import read_ahead
from onward.trainer.data.reading.sources import SourceRange, read_range, source_ranges
from onward.trainer.data.schema.column_computers import computed_chunks, stored_of
from onward.trainer.data.schema.columns import (
    MAX_NAMED_ROWS,
    NOT_UTF8,
    Array,
    Block,
    Column,
    LeftOut,
    fit_block,
    in_parts,
    select,
)
from onward.trainer.data.schema.described_columns import merge
from onward.trainer.data.schema.fitted import all_fitted
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.sharding_progress import Report, ShardingProgress
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.storage.split_writer import SplitWriter
from onward.trainer.errors import DataError

MISSING_CELL = " is missing"
"""The end of the reason of a bad row, behind the name of its column."""


@dataclass(frozen=True)
class RangeRows:
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
        return RangeRows(trained, bad, named, self.missing | later.missing, self.left_out + later.left_out)


def _refused_rows(block: Block, reasons: Mapping[int, str]) -> RangeRows:
    # rows that the settings leave out are counted, and are no errors
    bad = sorted(row for row, why in reasons.items() if not isinstance(why, LeftOut))
    named = tuple(f"{block.where(row)}: {reasons[row]}" for row in bad[:MAX_NAMED_ROWS])
    missing = {reasons[row].removesuffix(MISSING_CELL) for row in bad if reasons[row].endswith(MISSING_CELL)}
    return RangeRows(0, len(bad), named, frozenset(missing), len(reasons) - len(bad))


def write_shards(
    recipe: Recipe, key: str, directory: Path, labels: Collection[str], report: Report | None = None
) -> ShardManifest:
    """Write all splits in one pass over each source, a block at a time. labels: as in `shard`.

    Raises DataError for bad rows (policy `fail`), and for a split or a source without rows.
    """
    data = recipe.data
    progress = ShardingProgress(recipe.data, report)
    splits = ("train", "evaluation", "test") if data.test_source else ("train", "evaluation")
    written = list[RangeRows]()
    total = RangeRows()
    with ExitStack() as opened:
        disk = opened.enter_context(ThreadPoolExecutor(1, "disk"))
        writers = {
            split: opened.enter_context(SplitWriter(directory, split, data=data, packer=recipe.packer, disk=disk))
            for split in splits
        }
        for rows in source_ranges(data):
            written.append(write_range(rows, recipe, writers, progress, is_counted=total.bad > 0))
            total = total.with_later(written[-1])
        files = {split: tuple(writer.close()) for split, writer in writers.items()}
    # raised after all ranges, so that the message counts all bad rows
    if total.bad and data.bad_rows == "fail":
        raise DataError(_bad_row_problems(total, recipe, labels))
    _refuse_empty_split(recipe, {split: writer.num_rows for split, writer in writers.items()}, total)
    # the ranges to train on come first, one for each source
    sizes = [rows.trained for rows in written[: len(data.mixture)]]
    if 0 in sizes:
        raise DataError(f"{data.mixture[sizes.index(0)].source} holds no row to train on")
    # what only the whole file reads, such as text, is stored for evaluation only
    file_columns = [column for column in recipe.source_columns if column not in recipe.trained_columns]
    # a packer's windows replace the rows of the source
    stored = [*([] if recipe.packer else recipe.trained_columns), *stored_of(recipe.computers)]
    summaries = [computer.summary for computer in recipe.computers]
    if total.left_out:
        summaries.append(f"{total.left_out:,} rows without a value left out (data.table.missing = 'skip')")
    return ShardManifest(
        key=key,
        format="arrow",
        columns=_observed(stored, writers.values()),
        train=files["train"],
        evaluation=files["evaluation"],
        test=files.get("test", ()),
        sizes=tuple(sizes) if data.sources else (),
        skipped=total.bad,
        skipped_rows=total.named,
        left_out=total.left_out,
        preprocessing="; ".join(summaries),
        file_columns=_observed(file_columns, writers.values()),
        pad_values=recipe.pad_values,
        fitted=all_fitted(recipe.computers),
    )


def write_range(
    rows: SourceRange,
    recipe: Recipe,
    writers: Mapping[str, SplitWriter],
    progress: ShardingProgress,
    *,
    is_counted: bool,
) -> RangeRows:
    """Append the rows of a range to the files of the splits.

    is_counted: an earlier range has bad rows. With data.bad_rows "fail" no file will be kept after a bad row, so the
    rest is only counted.
    """
    before = writers["train"].num_rows
    found = RangeRows()
    # without a name for the blocks, so that their files are closed where an error leaves the loop
    for block, held_out in in_parts(read_ahead(read_range(rows, recipe.request)), recipe.columns):
        keeps = recipe.data.bad_rows == "skip" or not (is_counted or found.bad)
        reasons = _write_block(block, held_out, recipe, writers["train"], writers[rows.held_split], keeps=keeps)
        found = found.with_later(_refused_rows(block, reasons))
        progress.add(len(block.index) + len(block.bad))
    for writer in writers.values():
        writer.end_source()
    return replace(found, trained=writers["train"].num_rows - before)


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


def _observed(columns: Sequence[Column], writers: Collection[SplitWriter]) -> tuple[Column, ...]:
    """Return the columns with the extremes and the longest row of all splits."""
    described = []
    observed = [writer.observed for writer in writers]
    for column in columns:
        # a split without rows has observed nothing
        rows = reduce(merge, [split[column.name] for split in observed if column.name in split])
        described.append(column.model_copy(update={"extremes": rows.extremes, "shape": rows.shape}))
    return tuple(described)


def _bad_row_problems(rows: RangeRows, recipe: Recipe, labels: Collection[str]) -> list[str]:
    """Return the first bad rows, the number of the others, and what can be done."""
    data = recipe.data
    more = [f"... and {rows.bad - MAX_NAMED_ROWS:,} more"] if rows.bad > MAX_NAMED_ROWS else []
    noun, them = ("bad row", "it") if rows.bad == 1 else ("bad rows", "them")
    total = f"{rows.bad:,} {noun}: correct {them}, or set data.bad_rows = 'skip' to leave such rows out"
    if any(why.endswith(NOT_UTF8) for why in rows.named):
        total += "; data.table.encoding = 'latin-1' (or 'cp1252', ...) reads a table in another encoding"
    # a missing text is filled only as a category
    fillable = {column.name for column in recipe.columns}
    if not data.table.categories:
        fillable = {column.name for column in recipe.columns if column.holds_numbers}
    return [*rows.named, *more, total + remedy_of_missing(rows.missing & fillable - {*labels})]


def _refuse_empty_split(recipe: Recipe, rows: Mapping[str, int], total: RangeRows) -> None:
    data = recipe.data
    details = f"bad rows left out: {total.bad}"
    if all(rows.values()):
        return
    if rows["train"] and rows["evaluation"]:
        raise DataError(f"data.test_source: {data.test_source} holds no row ({details})")
    if packer := recipe.packer:
        details += f", each a window of {packer.packed_columns[0].shape[0]} tokens"
    if total.left_out:
        details += f", and {total.left_out} without a value (data.table.missing = 'skip')"
    source = data.evaluation_source or f"data.evaluation_fraction {data.evaluation_fraction:g}"
    raise DataError(
        f"{data.source}: {rows['train']} rows to train on and {rows['evaluation']} to evaluate on (by {source}; "
        f"{details}); both need at least one: give more rows, another data.evaluation_fraction, or an evaluation_source"
    )
