"""List the ways in which columns of the data can be the labels of an output, from shapes, types and ranges of values.

output [B, C]       texts, or integers 0..C-1         cross_entropy     another number of classes: a new head
                    C numbers, or C columns           mse               bce_with_logits where all are 0 or 1
                    3 or more columns of 0 and 1      bce_with_logits   multi-label; another number: a new head
output [B, 1], [B]  numbers                           mse               bce_with_logits where all are 0 or 1
output [B, ..., C]  integers of the other axes        cross_entropy     the axis of the classes
any                 numbers of the output's shape     mse               bce_with_logits where all are 0 or 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onward.trainer.config.loss_rules import LossName
from onward.trainer.data.label_units import are_far
from onward.trainer.data.schema.class_axis import find_class_axis, same_lengths
from onward.trainer.data.schema.columns import TEXT, Array, Column
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.source_summary import Facts

IGNORED = -100
LEAST_FLAGS = 3
"""Columns of 0 and 1 that are taken for the labels of a multi-label classifier together."""
MARKS = ("|", ";")
"""What separates several names in one cell."""
MOST_SHOWN = 6
MOST_CLASSES = 1000
"""Different values of a column that are still taken for classes where nothing else says so."""


@dataclass(frozen=True)
class Reading:
    """Columns as the labels of an output."""

    label: str | tuple[str, ...]
    loss: LossName
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the loss."""
    classes: int = 0
    """The classes that a new head must have; 0 = the head fits."""
    sorted_ids: bool = False
    """Whether the integers are names of classes, such as 1..C, which are sorted."""
    axes: tuple[int, ...] = ()
    """Several axes of the output that may have the classes."""


def readings(facts: Facts, output: TensorInfo, columns: Sequence[str]) -> list[Reading]:
    """Return how each of `columns` (or some of them together) can be the labels of an output; [] if none can."""
    sample = output.sample_shape
    if sample is None:
        return []
    flags = _flags(facts, sample, columns)
    # a flag alone would be one class of several: flags are labels together only
    single: list[Reading] = []
    for name in columns:
        if name not in flags:
            single += _of_column(facts, sample, facts.column(name))
    together = _of_flags(facts, sample, flags) if flags else _of_several(facts, sample, columns)
    return [*single, *together]


def with_fitting_head(candidates: Sequence[Reading]) -> list[Reading]:
    """Return the readings that the output fits as it is, without a new head."""
    return [reading for reading in candidates if not reading.classes]


def _flags(facts: Facts, sample: Dims, columns: Sequence[str]) -> list[str]:
    """Return the columns of 0 and 1, if they are labels of several kinds at once; [] if they are too few for it."""
    if len(sample) != 1 or sample[0] == 1:
        return []
    numbers = set(facts.numbers).intersection(columns)
    flags = {name for name in numbers if set(facts.distinct(name)) == {0, 1}}
    if len(flags) < LEAST_FLAGS:
        return []
    return [name for name in columns if name in flags]


def _of_flags(facts: Facts, sample: Dims, flags: Sequence[str]) -> Iterator[Reading]:
    """Yield the reading of columns of 0 and 1 as the labels of a multi-label classifier."""
    named = ", ".join(flags[:MOST_SHOWN])
    if len(flags) > MOST_SHOWN:
        named += ", ..."
    why = f"{named} hold 0 and 1 in {facts.rows}"
    # values are stored without missing ones: only complete columns have their rows side by side
    if not any(facts.missing[name] for name in flags):
        rows = np.stack([np.asarray(facts.values[name]) for name in flags], axis=1)
        most = int(rows.sum(axis=1).max())
        why += f": multi-label, a row has up to {most} of {len(flags)}"
        if (rows.sum(axis=1) == 1).all():
            why += ", always one: classes that exclude each other are better one column of names, for cross_entropy"
    (length,) = sample
    classes = 0
    if length not in (None, len(flags)):
        why += f"; the output has {length} scores"
        classes = len(flags)
    yield Reading(tuple(flags), "bce_with_logits", why, classes=classes)


def names_in_cells(facts: Facts, columns: Sequence[str]) -> str:
    """Return which column has several names in a cell, and how it becomes labels; "" if there is none.

    Such as "red|blue", or lists of texts: neither is one class, and no loss reads them as they are.
    """
    for name in columns:
        cells = facts.cells.get(name, ())
        if lists := [cell for cell in cells if _is_list_of_names(cell)]:
            names = {part for cell in lists for part in cell}
            content = f"lists of names, such as {json.dumps(lists[0][:3])}"
            return _as_columns(name, content, len(names), '.str.join("|").str.get_dummies("|"))')
        if facts.column(name).dtype == TEXT and (mark := _mark_of_lists(facts, name)):
            names = {part for text in facts.distinct(name) for part in text.split(mark)}
            shown = next(text for text in facts.distinct(name) if mark in text)
            content = f"several names in a cell, such as {shown[:40]!r}"
            return _as_columns(name, content, len(names), f'.str.get_dummies("{mark}"))')
    return ""


def _is_list_of_names(cell: object) -> bool:
    if not cell or not isinstance(cell, list | tuple):
        return False
    return all(isinstance(part, str) for part in cell)


def _as_columns(name: str, content: str, count: int, dummies: str) -> str:
    return (
        f"column {name!r} holds {content} ({count} names): for a multi-label model write a column of 0 and 1 for each "
        f'name (table.join(table.pop("{name}"){dummies} in pandas), which bce_with_logits reads'
    )


def _mark_of_lists(facts: Facts, name: str) -> str:
    """Return what separates names in the cells of a column of texts; "" if each cell is one name."""
    texts = facts.distinct(name)
    for mark in MARKS:
        divided = [text.split(mark) for text in texts]
        names = {name for parts in divided for name in parts}
        # names that recur in other cells: a mark inside of class names would give more parts than texts
        if len(names) < len(texts) and any(len(parts) > 1 for parts in divided):
            return mark
    return ""


def _of_column(facts: Facts, sample: Dims, column: Column) -> Iterator[Reading]:
    if column.dtype == TEXT:
        yield from _of_names(facts, sample, column.name)
    elif column.holds_numbers and column.name in facts.values and facts.joined(column.name).size:
        if not column.shape:
            yield from _of_numbers(facts, sample, column.name)
        else:
            yield from _of_tensors(facts, sample, column)


def _of_names(facts: Facts, sample: Dims, name: str) -> Iterator[Reading]:
    """Yield the reading of a column of texts as class names."""
    names = facts.distinct(name)
    if _mark_of_lists(facts, name):
        return
    # texts of which nearly each occurs once are no classes
    if len(sample) != 1 or len(names) < 2 or len(names) > max(facts.num_rows // 2, 2):
        return
    (length,) = sample
    if length in (None, len(names)):
        yield Reading(name, "cross_entropy", f"{name} holds {len(names)} class names, as many as the output has scores")
    else:
        why = f"{name} holds {len(names)} class names in {facts.rows}, and the output has {length} scores"
        yield Reading(name, "cross_entropy", why, classes=len(names))


def _of_numbers(facts: Facts, sample: Dims, name: str) -> Iterator[Reading]:
    """Yield the reading of a column of single numbers."""
    values = facts.joined(name)
    is_float = np.dtype(facts.column(name).dtype).kind == "f"
    different = facts.distinct(name)
    if sample in ((), (1,)):
        if set(different) == {0, 1}:
            yield Reading(name, "bce_with_logits", f"{name} is 0 or 1 in {facts.rows}, and the output one number")
        else:
            why, settings = _of_regression(
                f"{name} holds numbers ({_range(values)}), and the output is one number", values
            )
            yield Reading(name, "mse", why, settings)
        return
    if len(sample) != 1 or is_float:
        return
    (length,) = sample
    classes = [value for value in different if value != IGNORED]
    if not classes or classes[0] < 0:
        return
    # `classes` is sorted: the first and the last one are the least and the greatest
    count = len(classes)
    most = int(classes[-1])
    if length is not None and classes[0] == 1 and most == count == length:
        why = f"{name} is 1..{most}, which are the names of the {length} classes 0..{length - 1}"
        yield Reading(name, "cross_entropy", why, sorted_ids=True)
    elif length is None or most < length:
        # classes 0..4 of a model with 1000 are hardly its own; in a few rows the others may be absent by chance
        has_enough_rows = facts.num_rows >= 10 * count > 10
        is_small = length is not None and most == count - 1 and 2 * count <= length
        held = f"{int(classes[0])}..{most}"
        why = f"{name} holds classes {held} in {facts.rows}, and the output has {length or 'any'} scores"
        yield Reading(name, "cross_entropy", why, classes=count if is_small and has_enough_rows else 0)
    elif count <= min(MOST_CLASSES, facts.num_rows // 2):
        # with at most as many gaps as values the integers are class numbers, otherwise names of classes
        if most < 2 * count:
            why = f"{name} holds classes up to {most} in {facts.rows}, and the output has {length} scores"
            yield Reading(name, "cross_entropy", why, classes=most + 1)
        else:
            why = f"{name} holds {count} different integers up to {most}, and the output has {length} scores"
            yield Reading(name, "cross_entropy", why, classes=count if count != length else 0, sorted_ids=True)


def _of_tensors(facts: Facts, sample: Dims, column: Column) -> Iterator[Reading]:
    """Yield the reading of a column of vectors or larger arrays."""
    name = column.name
    values = facts.joined(column.name)
    is_float = np.dtype(column.dtype).kind == "f"
    shape: Dims = (None,) * len(column.shape) if column.variable else column.shape
    if same_lengths(shape, sample):
        loss, why = _of_same_shape(facts, column, values)
        settings: Mapping[str, Any] = {"label_type": "float32"} if loss == "cross_entropy" else {}
        if loss == "mse":
            why, settings = _of_regression(why, values)
        yield Reading(name, loss, f"{name} has the shape of the output; {why}", settings)
        return
    # labels have one axis less than the scores; numbers down to -100 may be those of labels that are not counted
    if is_float or len(sample) < 2 or values.min() < min(IGNORED, 0):
        return
    output = (None, *sample)
    labels = (None, *shape)
    most = int(values.max())
    # an axis of open length has a score for any class
    num_scores = {axis: output[axis] or most + 1 for axis in _class_axes(output, labels)}
    axes = [axis for axis, length in num_scores.items() if most < length]
    if not axes:
        return
    # the axis that training finds needs no setting, even among several
    try:
        default_axis = find_class_axis(output, labels, declared=output)
    except ConfigError:
        default_axis = 0
    shown_axes = [default_axis] if default_axis in axes else axes
    lengths = " or ".join(str(output[axis] or "any number of") for axis in shown_axes)
    why = f"{name} holds classes up to {most}, one for each place of the output, which has {lengths} scores"
    settings = {"class_axis": axes[0]} if len(axes) == 1 and default_axis != axes[0] else {}
    is_open = len(axes) > 1 and default_axis not in axes
    yield Reading(name, "cross_entropy", why, settings, axes=tuple(axes) if is_open else ())


def _class_axes(output: Dims, labels: Dims) -> list[int]:
    """Return the axes without which an output has the shape of the labels."""
    rests = {axis: (*output[:axis], *output[axis + 1 :]) for axis in range(1, len(output))}
    return [axis for axis, rest in rests.items() if same_lengths(rest, labels)]


def _of_same_shape(facts: Facts, column: Column, values: Array) -> tuple[LossName, str]:
    """Return the loss for labels of the output's shape, and why. values: all numbers of the column, [n]."""
    rows = facts.values[column.name]
    is_matrix = not isinstance(rows, list) and rows.ndim == 2
    if set(np.unique(values).tolist()) <= {0, 1}:
        is_one_hot = is_matrix and bool((np.sum(rows, axis=1) == 1).all())
        if is_one_hot and np.dtype(column.dtype).kind == "f" and column.shape[0] > 1:
            return "cross_entropy", "each row has a single 1: classes, one-hot"
        return "bce_with_logits", f"all are 0 or 1 in {facts.rows}"
    if is_matrix and values.min() >= 0 and np.allclose(np.sum(rows, axis=1), 1, atol=1e-3):
        return "cross_entropy", "the numbers of a row are probabilities: their sum is 1"
    return "mse", f"numbers, {_range(values)}"


def _of_several(facts: Facts, sample: Dims, columns: Sequence[str]) -> Iterator[Reading]:
    """Yield the reading of all columns of single numbers together, if the output has as many numbers."""
    if len(sample) != 1 or sample[0] is None or sample[0] < 2:
        return
    numbers = set(facts.numbers)
    single = [name for name in columns if name in numbers]
    floats = [name for name in single if np.dtype(facts.column(name).dtype).kind == "f"]
    # integers beside the labels may be keys: without them the floats may be as many as the output has
    for names in (single, floats):
        if len(names) == sample[0]:
            values = np.concatenate([facts.joined(name) for name in names])
            loss: LossName = "bce_with_logits" if set(np.unique(values).tolist()) == {0, 1} else "mse"
            settings: dict[str, Any] = {}
            why = f"{len(names)} columns of numbers, as many as the output has"
            if loss == "mse":
                why, settings = _of_regression(why, *(facts.joined(name) for name in names))
            yield Reading(tuple(names), loss, why, settings)
            return


def _of_regression(why: str, *columns: Array) -> tuple[str, dict[str, Any]]:
    """Return why, and the settings of a loss of numbers: far from 0 and 1 they are compared in other units."""
    values = next(filter(are_far, columns), None)
    if values is None:
        return why, {}
    spread = f"mean {float(values.mean()):.4g}, standard deviation {float(values.std()):.4g}"
    return f"{why}; {spread}: the loss compares them standardised", {"standardise_label": "standard"}


def _range(values: Array) -> str:
    return f"{float(values.min()):.4g} to {float(values.max()):.4g}"
