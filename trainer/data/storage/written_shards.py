"""Write the shards of the sources, in this process or in several, and make the manifest: or say why that is impossible.

write_ranges or writing_parts  rows of all ranges, in files or parts of files
     |
checks                         bad rows, splits and sources without rows        -> DataError
     |
manifest                       the files, and what their columns hold           -> ShardManifest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path

from onward.trainer.data.misfits import remedy_of_missing
from onward.trainer.data.schema.column_computers import stored_of
from onward.trainer.data.schema.columns import MAX_NAMED_ROWS, NOT_UTF8, Column
from onward.trainer.data.schema.described_columns import merge
from onward.trainer.data.schema.fitted import all_fitted
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.sharding_progress import Report, ShardingProgress
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.storage.written_parts import StepRunner, writing_parts
from onward.trainer.data.storage.written_ranges import RangeRows, WrittenRows, write_ranges
from onward.trainer.errors import DataError


def write_shards(
    recipe: Recipe,
    key: str,
    directory: Path,
    labels: Collection[str],
    report: Report | None = None,
    runner: StepRunner | None = None,
) -> ShardManifest:
    """Write all splits in one pass over each source. labels: as in `shard`; runner: None = in this process.

    Raises DataError for bad rows (policy `fail`), and for a split or a source without rows.
    """
    progress = ShardingProgress(recipe.data, report)
    if runner is None:
        return _manifest(recipe, key, labels, write_ranges(recipe, directory, progress))
    with writing_parts(recipe, directory, progress, runner) as written:
        return _manifest(recipe, key, labels, written)


def _manifest(recipe: Recipe, key: str, labels: Collection[str], written: WrittenRows) -> ShardManifest:
    """Check what was written, and complete its files."""
    data = recipe.data
    total = reduce(RangeRows.with_later, written.ranges, RangeRows())
    # raised after all ranges, so that the message counts all bad rows
    if total.bad and data.bad_rows == "fail":
        raise DataError(_bad_row_problems(total, recipe, labels))
    _refuse_empty_split(recipe, written.counts, total)
    # the ranges to train on come first, one for each source
    sizes = [rows.trained for rows in written.ranges[: len(data.mixture)]]
    if 0 in sizes:
        raise DataError(f"{data.mixture[sizes.index(0)].source} holds no row to train on")
    # behind all checks, because joining parts writes every row once more
    files = written.finish()
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
        columns=_observed(stored, written.observed),
        train=files["train"],
        evaluation=files["evaluation"],
        test=files.get("test", ()),
        sizes=tuple(sizes) if data.sources else (),
        skipped=total.bad,
        skipped_rows=total.named,
        left_out=total.left_out,
        preprocessing="; ".join(summaries),
        file_columns=_observed(file_columns, written.observed),
        pad_values=recipe.pad_values,
        fitted=all_fitted(recipe.computers),
    )


def _observed(columns: Sequence[Column], observed: Sequence[Mapping[str, Column]]) -> tuple[Column, ...]:
    """Return the columns with the extremes and the longest row of all splits."""
    described = []
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
