"""Report what does not fit between one input or label and the columns that feed it, one sentence for each misfit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data import misfits
from onward.trainer.data.input_columns import Feed
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.class_axis import find_class_axis, same_lengths
from onward.trainer.data.schema.columns import BYTES, TEXT, Column
from onward.trainer.data.schema.label_axes import Dims, fits, num_elements, without_axis
from onward.trainer.data.schema.label_axes import remedy as remedy_of_axes
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import shown_shape

NUMERIC = {"bool", "float16", "bfloat16", "float32", "float64", "uint8", "uint16", "uint32", "uint64"} | {
    f"int{bits}" for bits in (8, 16, 32, 64)
}
"""Types that columns of numbers can be converted to."""


def type_problems(feed: Feed, columns: list[Column]) -> Iterator[str]:
    """Yield what is wrong with the types and shapes of the columns of one feed."""
    if feed.dtype not in NUMERIC:
        yield f"{feed.target} takes {feed.dtype}, which cannot be fed from columns of numbers"
        return
    if feed.sequence and feed.stacked:
        yield f"{feed.target} is a sequence with one tensor a sample; it cannot be stacked from columns"
        return
    is_series = len(feed.sample_shape or ()) == 2
    for column in columns:
        if column.dtype == TEXT:
            remedy = _advice(feed, column)
            if feed.is_label and feed.dtype == "int64":
                remedy = "; number the classes from 0 on, in the model's order"
            elif feed.is_label:
                remedy = '; only a cross-entropy takes class names (model.loss = "cross_entropy")'
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds text{remedy}"
        elif column.dtype == BYTES:
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds bytes{_advice(feed, column)}"
        elif not _castable(column.dtype, feed.dtype):
            numbers = feed.target.endswith("label") and feed.dtype == "int64"
            key = "model.loss" if feed.target == "data.label" else feed.target.replace(".label", ".name")
            hint = f": the loss compares with classes 0, 1, 2, ...; {misfits.loss_of_numbers(key)}" if numbers else ""
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds {column.dtype}{hint}"
        elif feed.stacked and is_series and not column.variable:
            if column.shape != columns[0].shape:
                yield f"{feed.target} stacks columns of one length, but column {column.name!r} is {column.kind}"
        elif feed.stacked and (column.shape or column.variable):
            yield f"{feed.target} stacks single numbers, but column {column.name!r} is {column.kind}"
    shape = feed.sample_shape
    if not feed.stacked:
        if columns[0].holds_numbers and (problem := _shape_problem(feed, columns[0])):
            yield problem
        return
    if shape is None:
        return
    stacked = (*columns[0].shape, len(columns))  # series are stacked on the last axis: [length, columns]
    # labels pair with an output also where one of the two has further axes of length 1
    is_right = fits(shape, stacked) if feed.is_label else same_lengths(shape, stacked)
    if not is_right:
        lengths = f" of {shown_sample(stacked[:-1])}" if stacked[:-1] else ""
        by = "it" if feed.is_label else "data.inputs"
        yield (
            f"{feed.target} takes shape {shown_sample(shape)} per sample, but {by} stacks {len(columns)} columns"
            f"{lengths}{_advice(feed, columns[0])}"
        )


def image_problems(feed: Feed, column: Column, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with a column of encoded images or paths; after sharding it may hold pixels."""
    if column.holds_numbers and (column.dtype, column.shape) != (dtype, shape):
        what, setting = ("masks", "data.image.masks") if feed.is_label else ("images", "[data.image]")
        yield (
            f"{feed.target} takes encoded {what} or paths, but column {column.name!r} holds {column.kind}; leave "
            f"{setting} out to feed numbers as they are"
        )


def text_problems(data: DataConfig, feed: Feed, columns: list[Column]) -> Iterator[str]:
    """Yield what is wrong with the columns of a feed of strings."""
    for column in columns:
        # the cells of a CSV file are text, also those that look like numbers
        if column.dtype != TEXT and sources.locate(data.source, data).data_format.has_types:
            yield f"{feed.target} takes strings, but column {column.name!r} holds {column.kind}, not text"
    shape = feed.sample_shape
    if feed.sequence and feed.stacked:
        yield f"{feed.target} is a sequence with one tensor a sample; it cannot be stacked from columns"
    elif feed.stacked and shape not in (None, (None,), (len(columns),)):
        takes = f"{feed.target} takes shape {shown_sample(shape)} per sample"
        yield f"{takes}, but data.inputs stacks {len(columns)} columns"
    elif not feed.stacked and shape not in (None, (), (1,), (None,)):
        takes = f"{feed.target} takes {shown_sample(shape)} strings a sample"
        yield (
            f"{takes}, but column {columns[0].name!r} holds one; stack several columns: "
            f"data.inputs.{feed.target.removeprefix('input ')} = [...]"
        )


def _advice(feed: Feed, column: Column) -> str:
    """Return, behind a semicolon, the setting that makes a column fit; "" if there is none."""
    found = misfits.remedy(feed, column)
    return f"; {found}" if found else ""


def _castable(source: str, target: str) -> bool:
    """Return whether a column may be converted: integers and booleans to floats, but not the reverse."""
    # floats as labels or ids would be cut off
    return np.dtype(source).kind in "biu" or "float" in target


def _class_axis_problem(feed: Feed, column: Column) -> str:
    """Return what is wrong with labels beside scores of three or more axes: no axis of classes fits, or several do."""
    assert feed.scores is not None
    labels = (None, *column.shape)
    try:
        find_class_axis(feed.scores, labels, declared=feed.scores, given=feed.class_axis)
    except ConfigError as error:
        # lengths that are not known yet fit any axis: the rehearsal sees the real ones
        known = None not in (*feed.scores[1:], *labels[1:])
        return "" if not known else (_last_axis_problem(feed, column) or "; ".join(error.problems))
    return ""


def _last_axis_problem(feed: Feed, column: Column) -> str:
    """Return a sentence that is easier to read, where labels fit no axis in number."""
    assert feed.scores is not None
    sample = feed.scores[1:]
    sizes = set()
    for axis in range(len(sample)):
        sizes.add(num_elements(without_axis(sample, axis)))
    if math.prod(column.shape) in sizes or feed.class_axis is not None:
        return ""
    takes = f"{feed.target} must be {shown_sample(sample[:-1])} a sample to fit the output"
    return f"{takes}, but column {column.name!r} is {column.kind}"


def _shape_problem(feed: Feed, column: Column) -> str:
    shape = feed.sample_shape
    if feed.scores is not None and len(feed.scores) > 2 and not column.variable:
        return _class_axis_problem(feed, column)
    if shape is None:
        return ""
    if feed.is_label:
        wrong = not _labels_fit(shape, column)
        takes = f"{feed.target} must be {shown_sample(shape)} a sample to fit the output"
    elif column.variable:
        wrong = len(shape) != 1 or (shape[0] or 0) > column.shape[0]
        takes = f"{feed.target} takes {shown_sample(shape)} a sample"
    else:
        # a column of single numbers feeds an input [batch, 1] as it is
        found = (1,) if feed.is_one_column and not column.shape else column.shape
        wrong = not same_lengths(shape, found)
        takes = f"{feed.target} takes {shown_sample(shape)} a sample"
    is_vector = shape == (None,) and not column.shape
    hint = f"; ['{column.name}'] makes a vector of one" if is_vector else _advice(feed, column)
    # a transpose that makes labels fit says more than a setting
    if feed.is_label and (advice := remedy_of_axes(shape, column.shape, column.name)):
        hint = f": {advice}"
    return f"{takes}, but column {column.name!r} is {column.kind}{hint}" if wrong else ""


def _labels_fit(shape: Dims, column: Column) -> bool:
    """Return whether the rows of a column pair with an output whose labels have this shape."""
    if not column.variable:
        return fits(shape, column.shape)
    # rows of varying length are padded to the longest of a batch, on their one axis
    size = num_elements(shape)
    return fits(shape, (None,)) and (None in shape or column.shape[0] >= size)


def shown_sample(dims: Dims) -> str:
    return shown_shape(dims) if dims else "one number"
