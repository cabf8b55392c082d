"""Read the first training rows of a data source without writing shards, and count the rows of a small one.

They go through the same reader and the same conversion as sharding, so a batch of them is what training will read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.finished_shards import shards_at
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.column_computers import (
    ColumnComputer,
    computed_chunks,
    divider_of,
    packer_of,
    stored_of,
)
from onward.trainer.data.schema.columns import (
    BYTES,
    Array,
    Block,
    Cells,
    Column,
    Schema,
    Values,
    fit_block,
    in_parts,
    joined,
    rows_at,
)
from onward.trainer.data.schema.fitted import Fitted, all_fitted, complete_rows
from onward.trainer.data.schema.permutation import permutation
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.errors import DataError

COUNTED_BYTES = 16 << 20
"""The rows of a larger source are not counted: that would take about as long as sharding it."""
FITTED_BLOCKS = 4
"""Blocks of such a source from which class names and means are taken."""
KEPT_BYTES = 64 << 20
"""About the most that the rows take which are kept."""
SPREAD_FILES = 4
"""Files of finished shards from which rows are taken that shall stand for all."""
MAX_NAMED = 5
"""Bad rows that a message names."""


@dataclass(frozen=True)
class FirstRows:
    """The first rows of the training split, which repeat when more are read than were kept."""

    columns: Schema
    pad_values: Mapping[str, float]
    values: Mapping[str, Values]
    num_rows: int
    counts: tuple[int, int] | None
    """The numbers of rows for training and for evaluation; None if they were not counted."""
    fitted: Mapping[str, Fitted]
    """What was found on the data, by column: on all rows if they were counted, else on the first of them."""
    soft_labels: tuple[str, ...] = ()
    """A teacher's outputs are computed when training begins."""

    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows by number, int64 [n], from 0."""
        # few rows serve as examples of any batch: after the last one the first follows again
        positions = rows % self.num_rows
        return {name: rows_at(values, positions) for name, values in self.values.items()}


def read_first_rows(
    config: RunConfig, signature: Signature, most: int, *, spread: bool = False, schema: Schema | None = None
) -> FirstRows:
    """Read the first `most` training rows, fewer if they are large. Bad rows are left out: sharding reports them.

    spread: read rows from all over the source, which is counted for it, in place of the first ones: a source may be
    sorted by class. schema: the columns of the source, if they are known.

    Raises DataError when the source cannot be read or holds no row to train on, and the errors of `read_and_computed`.
    """
    data = config.data
    if directory := shards_at(data):
        return _first_of_shards(directory, most, spread=spread)
    recipe = recipe_of(config, signature, schema)
    stored = recipe.columns
    computers = recipe.computers
    packer = recipe.packer
    row_bytes = sum(column.row_bytes for column in stored)
    most = max(1, min(most, KEPT_BYTES // max(row_bytes, 1)))
    # a small table may name many large files
    is_table = not any(source.data_format.holds_content for source in sources.all_sources(data))
    names_files = is_table and any(column.dtype == BYTES for column in stored)
    is_small = not spread and source_bytes(data) <= COUNTED_BYTES
    # a packer or a divider makes other rows than those of the source, which are known only after all are made
    keeps_rows = packer is None and divider_of(computers) is None
    is_counted = is_small and keeps_rows and not names_files
    recipe.fit(most_blocks=None if is_counted or spread else FITTED_BLOCKS)
    blocks = sources.read(data, recipe.request.names, recipe.request.text)
    if spread:
        blocks = _spread(blocks, _count_rows(data, stored), most)
    gathered = _gather(blocks, stored, computers, most, to_end=is_counted)
    if not gathered.parts:
        few = f", or they are fewer tokens than a window of {packer.packed_columns[0].shape[0]}" if packer else ""
        nothing = f"{data.source} holds no row to train on: all are bad, or held out for evaluation{few}"
        raise DataError([*gathered.reasons, nothing])
    result = {column.name: column for column in (*recipe.source_columns, *stored_of(computers))}
    values = {name: joined([part[name] for part in gathered.parts]) for name in result}
    counts = gathered.counts if is_counted else None
    return FirstRows(result, recipe.pad_values, values, gathered.num_kept, counts, all_fitted(computers))


def _first_of_shards(directory: Path, most: int, *, spread: bool) -> FirstRows:
    """Return rows of finished shards, of which the manifest has the numbers; spread: of several files."""
    shards = open_shards(directory, "train")
    row_bytes = shards.size_bytes // max(1, shards.num_rows)
    most = max(1, min(most, shards.num_rows, KEPT_BYTES // max(row_bytes, 1)))
    # of a server each file is fetched whole: a few of them stand for all
    few = min(SPREAD_FILES, -(-shards.num_rows // shards.rows_of_file)) if spread else 1
    starts = np.linspace(0, shards.num_rows - -(-most // few), few).astype(np.int64)
    rows = np.unique(np.concatenate([start + np.arange(-(-most // few)) for start in starts]))[:most]
    manifest = shards.manifest
    counts = manifest.rows("train"), manifest.rows("evaluation")
    values = shards.read(rows)
    return FirstRows(shards.columns, shards.pad_values, values, len(rows), counts, shards.fitted)


class _Gathered(NamedTuple):
    """Rows of the training split, and what was seen on the way to them."""

    parts: list[dict[str, Values]]
    num_kept: int
    counts: tuple[int, int]
    """Good rows for training and for evaluation."""
    reasons: list[str]
    """Why the first rows are bad, if no row was good before them."""


def _gather(
    blocks: Iterable[tuple[Block, Array]],
    stored: Sequence[Column],
    computers: Sequence[ColumnComputer],
    most: int,
    *,
    to_end: bool,
) -> _Gathered:
    """Compute the columns of the first `most` good rows of the training split; to_end: count the rows behind them."""
    parts: list[dict[str, Values]] = []
    packer = packer_of(computers)
    num_kept = 0
    counts = [0, 0]
    reasons = list[str]()
    for block, held_out in in_parts(blocks, stored):
        values, good, bad = fit_block(block, stored)
        good &= complete_rows(computers, values, len(good))
        training = good & ~held_out
        # a row that is packed takes any number of those that are read
        wanted = training & ((np.cumsum(training) <= most - num_kept) | (packer is not None))
        # of the rows that are kept only: computing all of them may take long
        for rows, held in computed_chunks(computers, block, values, wanted, held_out, bad):
            packed = packer.pack(rows, "train") if packer else rows
            if len(held) and (count := len(next(iter(packed.values())))):
                parts.append(packed)
                num_kept += count
            if packer and num_kept >= most:
                break
        if not num_kept:
            reasons = (reasons + [f"{block.where(row)}: {bad[row]}" for row in sorted(bad)])[:MAX_NAMED]
        counts[0] += int(training.sum())
        counts[1] += int((good & held_out).sum())
        if num_kept >= most and not to_end:
            break
    return _Gathered(parts, num_kept, (counts[0], counts[1]), reasons)


def _count_rows(data: DataConfig, stored: Sequence[Column]) -> int:
    """Return the number of training rows, bad ones included."""
    # content is large, and a source that only lists its files does not read them for their labels
    name = next((column.name for column in stored if column.dtype != BYTES), stored[0].name)
    return sum(int((~held_out).sum()) for _, held_out in sources.read(data, [name], [name]))


def _spread(blocks: Iterable[tuple[Block, Array]], num_rows: int, most: int) -> Iterator[tuple[Block, Array]]:
    """Yield `most` of the training rows, which are drawn from all of them, in blocks in the order of the source."""
    drawn = permutation(np.arange(min(most, num_rows)), max(num_rows, 1), seed=0, epoch="spread")
    seen = 0
    for block, held_out in blocks:
        places = np.flatnonzero(~held_out)
        # `drawn` numbers the training rows of the whole source
        chosen = places[np.isin(np.arange(seen, seen + len(places)), drawn)]
        seen += len(places)
        cells: dict[str, Cells] = {}
        for name, column in block.cells.items():
            cells[name] = column[chosen] if isinstance(column, np.ndarray) else [column[at] for at in chosen]
        if len(chosen):
            yield replace(block, index=block.index[chosen], cells=cells, bad={}), held_out[chosen]


def source_bytes(data: DataConfig) -> int:
    """Return the size of all files of the source."""
    if directory := shards_at(data):
        return sum(file.bytes for file in open_shards(directory, "train").manifest.all_files)
    return sum(path.stat().st_size for source in sources.all_sources(data) for _, path in source.files)
