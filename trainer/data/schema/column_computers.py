"""Compute further columns from the columns that are read, while shards are written or the first rows are rehearsed.

    read       text "a good film"                     image: bytes of a JPEG file
                     |                                       |
    computers  Preprocessor (preprocessing.py)         ... one after the other, each sees the results of those before
                     |                                       |
    stored     ids [1, 7, 4]                           image: uint8 [224, 224, 3]

What a computer computes of a row depends on this row alone, so rows may be computed in any groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from onward.trainer.data.schema.columns import BLOCK_BYTES, Array, Block, Column, Values, rows_at, select

MAX_ROWS = 4096
"""Rows that are computed in one call, at most."""


class ColumnComputer(Protocol):
    """Computes columns from columns, row by row."""

    @property
    def digest(self) -> str:
        """Return a digest of all that decides the results, for the key of the shard cache."""
        ...

    @property
    def summary(self) -> str:
        """Return one sentence for people: what is computed from what."""
        ...

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of the results, as soon as `describe` has found them."""
        ...

    @property
    def pad_values(self) -> Mapping[str, float]:
        """Return result of varying length -> the value that pads it in a batch."""
        ...

    @property
    def file_only(self) -> frozenset[str]:
        """Return the columns that only the whole file reads (FileRows); they are stored for evaluation only."""
        ...

    @property
    def consumed(self) -> frozenset[str]:
        """Return the columns that nothing reads any more; they are not stored. A result may have such a name."""
        ...

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find `columns` from the first rows. Raises DataError for results that cannot be stored."""
        ...

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the results of `count` rows, and row -> why it has none; the results of such a row are arbitrary."""
        ...


class RowPacker(ABC):
    """A computer, the last of several, whose rows are made into rows of another number: windows over several texts."""

    packed_columns: tuple[Column, ...]
    """The columns of the rows that are stored, in the place of all others."""

    @abstractmethod
    def pack(self, rows: Mapping[str, Values], split: str) -> dict[str, Values]:
        """Return the rows, possibly none, that are complete with these rows of a split, in order."""

    @abstractmethod
    def rest(self, split: str) -> dict[str, Values]:
        """Return the rows of a split, possibly none, that are complete because no others come."""


class RowDivider(ABC):
    """A computer, the last of several, that makes several rows of one, such as the windows of a long text.

        rows                      0        1     2
        results           0.0  0.1  0.2   1.0   2.0  2.1
        window_column      0    1    2     0     0    1

    The other columns of a row are repeated for each.
    """

    window_column: str
    """The result that counts the rows made of one row, from 0; "" where each row gives one."""


def divider_of(computers: Sequence[object]) -> RowDivider | None:
    """Return the computer that divides rows, or None."""
    dividers = [computer for computer in computers if isinstance(computer, RowDivider)]
    # without a column of windows each row stays one
    return next((divider for divider in dividers if divider.window_column), None)


def packer_of(computers: Sequence[object]) -> RowPacker | None:
    """Return the computer that packs rows, or None."""
    return next((each for each in computers if isinstance(each, RowPacker)), None)


def stored_of(computers: Sequence[ColumnComputer]) -> tuple[Column, ...]:
    """Return the columns that are stored of the results."""
    packer = packer_of(computers)
    if packer:
        return packer.packed_columns
    return tuple(column for computer in computers for column in computer.columns)


def computed_chunks(
    computers: Sequence[ColumnComputer],
    block: Block,
    values: Mapping[str, Values],
    good: Array,
    held_out: Array,
    bad: dict[int, str],
) -> Iterator[tuple[dict[str, Values], Array]]:
    """Yield the good rows of a block with all results, a few MB at a time, and bool [n]: which of them are held out.

    Rows that have no result are added to `bad`. Raises DataError for results that cannot be stored.
    """
    rows = select(values, good)
    held = held_out[good]
    index = block.index[good]
    if not len(held):
        return
    if not computers:
        yield rows, held
        return
    describe_all(computers, rows)
    row_bytes = sum(column.row_bytes for each in computers for column in each.columns)
    # results may be far larger than what they are computed from
    step = max(1, min(MAX_ROWS, BLOCK_BYTES // max(row_bytes, 1)))
    for first in range(0, len(held), step):
        part = rows_between(rows, first, first + step)
        places = np.arange(first, min(first + step, len(held)))
        for each in computers:
            results, failed = each.compute(part, len(places))
            # the index of the row in its file, by which it is reported
            bad |= {int(index[places[at]]): why for at, why in failed.items()}
            of_row = np.arange(len(places))
            if isinstance(each, RowDivider) and each.window_column:
                # each window with number 0 begins the next row
                of_row = np.cumsum(np.asarray(results[each.window_column]) == 0) - 1
                part = {name: rows_at(values, of_row) for name, values in part.items()}
            # `failed` numbers rows before they were divided
            fine = np.array([at not in failed for at in of_row.tolist()], bool)
            part = select({**part, **results}, fine)
            places = places[of_row][fine]
            # no row is left for the computers that follow
            if not len(places):
                break
        else:
            yield part, held[places]


def describe_all(computers: Sequence[ColumnComputer], rows: Mapping[str, Values]) -> None:
    """Let each computer that has no columns yet find them from the first rows and the results of those before it."""
    if all(each.columns for each in computers):
        return
    part = rows_between(rows, 0, 32)
    for place, each in enumerate(computers, start=1):
        if not each.columns:
            each.describe(part)
        if place == len(computers):
            return
        count = len(next(iter(part.values())))
        results, failed = each.compute(part, count)
        # the next computer is described by rows that those before have accepted
        part = select({**part, **results}, np.array([at not in failed for at in range(count)], bool))
        if not len(next(iter(part.values()))):
            return


def rows_between(values: Mapping[str, Values], start: int, stop: int) -> dict[str, Values]:
    """Return a range of rows of every column."""
    return {name: rows[start:stop] for name, rows in values.items()}
