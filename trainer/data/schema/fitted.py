"""What is found on the data before it is stored: class names, means, vocabularies; and the pass that finds it.

A computer that is fitted sees the rows of the source once before it computes the first of them:

    first pass     labels dog cat dog        fitted: classes cat, dog     only for computers that need one
    second pass    labels dog cat dog        stored: 1 0 1

What was fitted goes into the manifest of the shards, and from there to every rank, to the metrics and to the export.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from pydantic import Field

from onward.trainer.config.losses import LabelUnits
from onward.trainer.data.schema.columns import (
    BYTES,
    Array,
    Block,
    Column,
    ColumnType,
    Schema,
    Values,
    fit_block,
    in_parts,
    select,
)
from onward.trainer.run.records import Record

MAX_NAMED = 10
"""Classes that a message names; the others are counted."""


class Vocabulary(Record):
    """What masking needs to know of a tokenizer."""

    mask_id: int
    special_ids: tuple[int, ...]
    """Ids that are neither masked nor drawn."""
    size: int
    """The greatest id, and one."""
    names: tuple[str, ...] = ()
    """The tokens of `special_ids`."""


class Fitted(Record):
    """What was found on the data, or given for it, for one column."""

    classes: tuple[str, ...] = ()
    """Of a column of class names: the names, in the order of the classes' ids."""
    sorted_by_name: bool = False
    """Whether the order of `classes` is that of the names, because `data.classes` gives none."""
    token_vocabulary: Vocabulary | None = None
    """Of a column of token ids that are masked."""
    pad_left: bool = False
    """Of a column of varying length: whether shorter rows of a batch are padded in front."""
    vocabulary: tuple[str, ...] = ()
    """Of a column of categories: the texts, in the order of their ids; "" stands for unknown ones."""
    integers: bool = False
    """Of a column of categories: whether it holds integers, whose digits are the texts."""
    fill: tuple[float, ...] = ()
    """Of a column of numbers: what replaces missing ones, one value for each element of a row; () = nothing does."""
    log1p: bool = False
    """Whether log(1 + x) is taken next."""
    scaling: str = "none"
    """`data.table.standardise` for the column."""
    center: tuple[float, ...] = ()
    """What is subtracted next, one value for each element of a row; () = nothing."""
    scale: tuple[float, ...] = ()
    """What the difference is divided by."""
    class_counts: tuple[int, ...] = ()
    """Of labels whose classes are weighted by their numbers ("balanced"): how often each class, from 0 on, is among the
    training rows; () = not counted."""
    label_units: dict[str, LabelUnits] = Field(default_factory=dict)
    """Of labels that are standardised: `loss.standardise_label` -> the units that it gives the training rows."""

    @property
    def is_label(self) -> bool:
        """Whether it is known as a label: what feeds an input has none of these."""
        return bool(self.classes or self.class_counts or self.label_units)


def describe_classes(name: str, found: Fitted) -> str:
    """Return the classes of a column in words, and whether they are sorted."""
    numbered = [f"{number} = {each}" for number, each in enumerate(found.classes[:MAX_NAMED])]
    more = [f"... {len(found.classes) - MAX_NAMED:,} more"] if len(found.classes) > MAX_NAMED else []
    order = ", in the order of their names (data.classes sets another order)" if found.sorted_by_name else ""
    return f"classes of {name}: {', '.join([*numbered, *more])}{order}"


class LabelledRows(Protocol):
    """Rows of data, read by number."""

    @property
    def num_rows(self) -> int: ...
    @property
    def columns(self) -> Schema: ...
    @property
    def fitted(self) -> Mapping[str, Fitted]: ...
    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows by number, int64 [n]: column -> array [n, *shape], or a list of n arrays."""
        ...


class FittedComputer(ABC):
    """A ColumnComputer that is fitted to the rows before it computes the first of them."""

    fitted: Mapping[str, Fitted] = {}
    """Column -> what is known of it; {} before `finish` where it has to be found on the data."""
    reads: Mapping[str, ColumnType]
    """The columns of the source that it reads, and what they are read as."""
    makes: frozenset[str]
    """The names of its results, for which no columns are read unless `reads` names them, too."""
    leaves_out: frozenset[str] = frozenset()
    """Columns of `reads`: a row where one of them is missing is left out, and no computer is fitted to it."""
    columns: tuple[Column, ...] = ()
    pad_values: Mapping[str, float] = {}
    file_only: frozenset[str] = frozenset()
    """As of any ColumnComputer."""

    @property
    def is_fitted(self) -> bool:
        """Return whether nothing is left to be found on the data."""
        return bool(self.fitted)

    @abstractmethod
    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Take note of rows; training: bool [n], which of them are trained on. Raises DataError."""

    @abstractmethod
    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the results of `count` rows, and row -> why it has none."""

    @abstractmethod
    def finish(self) -> None:
        """Set `fitted` from the rows that were observed. Raises DataError."""

    def restore(self, found: Mapping[str, Fitted]) -> None:
        """Set `fitted` to what another process has found on the same rows."""
        if not self.is_fitted:
            raise NotImplementedError(f"{type(self).__name__} is fitted in each process")


def unfitted(computers: Sequence[object]) -> list[FittedComputer]:
    """Return the computers that have to see the data before they compute."""
    return [computer for computer in _fitted_computers(computers) if not computer.is_fitted]


def _fitted_computers(computers: Sequence[object]) -> list[FittedComputer]:
    return [computer for computer in computers if isinstance(computer, FittedComputer)]


def columns_to_fit(computers: Sequence[object], stored: Sequence[Column], *, skips_rows: bool) -> list[Column]:
    """Return the columns that are read to fit computers; [] if all are fitted.

    skips_rows: rows that cannot be read are left out, so that the other columns say which rows are stored.
    """
    needed = {name for computer in unfitted(computers) for name in computer.reads}
    reads_others = bool(needed) and skips_rows
    columns = []
    for column in stored:
        # encoded content is large, and decoded much later
        is_other = reads_others and column.dtype != BYTES
        if is_other or column.name in needed:
            columns.append(column)
    return columns


def fit_computers(
    computers: Sequence[object], blocks: Iterable[tuple[Block, Array]], columns: Sequence[Column]
) -> None:
    """Fit the computers that are not fitted yet to blocks, each with bool [n]: which rows are held out.

    Rows that cannot be read are left out. Raises DataError.
    """
    waiting = unfitted(computers)
    names = {column.name for column in columns}
    # rows that these refuse are not stored, and so must not be fitted to
    fitted = [computer for computer in _fitted_computers(computers) if computer.is_fitted]
    ready = [computer for computer in fitted if computer.reads.keys() <= names]
    for block, held_out in in_parts(blocks, columns):
        values, good, _ = fit_block(block, columns)
        # a row that a computer leaves out is not stored, and must not count
        good &= complete_rows(waiting, values, len(good))
        rows = select(values, good)
        training = ~held_out[good]
        for each in ready:
            _, failed = each.compute(rows, len(training))
            fine = np.array([at not in failed for at in range(len(training))], bool)
            rows = select(rows, fine)
            training = training[fine]
        if len(training):
            for each in waiting:
                each.observe(rows, training)
    for each in waiting:
        each.finish()


def complete_rows(computers: Sequence[object], values: Mapping[str, Values], count: int) -> Array:
    """Return which of `count` rows are not left out by a computer's `leaves_out`: bool [n]."""
    complete = np.ones(count, bool)
    for name in (name for computer in _fitted_computers(computers) for name in computer.leaves_out):
        array = np.asarray(values[name])
        missing = array == "" if array.dtype == object else np.isnan(array)
        complete &= ~missing.reshape(count, -1).any(axis=1) if count else complete
    return complete


def all_fitted(computers: Sequence[object]) -> dict[str, Fitted]:
    """Return column -> what is known of it, over all computers."""
    return {name: found for each in _fitted_computers(computers) for name, found in each.fitted.items()}
