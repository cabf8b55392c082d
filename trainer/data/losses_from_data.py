"""Compute the settings of a loss that the data decides: "balanced" class weights, units of labels, axis of the classes,
size of the images.

labels 0 0 0 1   ->   weights 4 / (2 x 3) = 0.67 and 4 / (2 x 1) = 2: every class has the same sum of weights, 2

Sharding counts the classes once and keeps the numbers in the manifest of the shards, so that every rank, every resumed
attempt and the export read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.images.geometry import fitted_mask
from onward.trainer.data.images.image_decoding import decode_mask
from onward.trainer.data.images.image_inputs import Mask, image_inputs, masks
from onward.trainer.data.label_units import standardised_columns, with_label_units
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.columns import BYTES, Array, Schema
from onward.trainer.data.schema.fitted import LabelledRows
from onward.trainer.data.schema.signature import Signature
from onward.trainer.errors import ConfigError

ROWS_AT_ONCE = 65536
FILES_AT_ONCE = 256


def losses_from_data(
    data: DataConfig, losses: Sequence[LossConfig], rows: LabelledRows, signature: Signature
) -> tuple[LossConfig, ...]:
    """Return the losses with numbers in place of "balanced" weights and of "standard" units of labels, and
    with the size of the images of which boxes are labels.

    rows: the training data, or a sample of it. Raises ConfigError where it has no labels, and the errors of
    `with_label_units`.
    """
    completed = []
    for loss in losses:
        if loss.class_weights == "balanced":
            weights = _weights(loss, rows, data, losses, signature)
            loss = loss.model_copy(update={"class_weights": weights})
        if _awaits_image_size(loss) and (images := image_inputs(data, signature)):
            height, width = images[0].size
            loss = loss.model_copy(update={"image_size": (width, height)})
        completed.append(loss)
    return with_label_units(completed, rows)


def take_from_data(losses: Sequence[LossConfig]) -> bool:
    """Return whether the data decides a setting of the losses."""
    is_open = any(loss.class_weights == "balanced" or _awaits_image_size(loss) for loss in losses)
    return is_open or bool(standardised_columns(losses))


def _awaits_image_size(loss: LossConfig) -> bool:
    return "image_size" in loss.rule.takes and loss.image_size is None


def with_class_axes(losses: Sequence[LossConfig], columns: Schema, signature: Signature) -> tuple[LossConfig, ...]:
    """Return the losses with `loss.class_axis` as the shapes of output and labels say, for the exported loss.

    columns: those of the shards. Raises ConfigError where several axes fit, or none.
    """
    found = []
    for loss in losses:
        output = signature.output(loss.outputs[0])
        is_open = loss.has_class_axis and loss.class_axis is None
        column = columns.get(loss.columns[0]) if is_open else None
        if column is not None and output is not None and output.shape:
            stacked = () if isinstance(loss.label, str) else (len(loss.columns),)
            # the number of rows is not known, nor the length of rows that vary
            labels = (None, *(((None,) if column.variable else column.shape) + stacked))
            axis = find_class_axis(output.shape, labels, declared=output.shape, name=output.name)
            loss = loss.model_copy(update={"class_axis": axis})
        found.append(loss)
    return tuple(found)


def counted_columns(losses: Sequence[LossConfig]) -> tuple[str, ...]:
    """Return the columns whose classes are counted while the data is sharded."""
    balanced = [loss for loss in losses if loss.class_weights == "balanced"]
    return tuple(dict.fromkeys(name for loss in balanced for name in loss.columns))


def count_classes(
    rows: LabelledRows, names: Sequence[str], data: DataConfig, losses: Sequence[LossConfig], signature: Signature
) -> dict[str, tuple[int, ...]]:
    """Return column -> how often each class, from 0 on, is among the rows; negative labels are not counted.

    Masks that are stored as files are counted as evaluation reads them, before any augmentation.
    """
    stored = {name for name in names if rows.columns[name].dtype == BYTES}
    files = {mask.column: mask for mask in masks(data, losses, signature) if mask.column in stored}
    found = {name: np.zeros(0, np.int64) for name in names}
    most = FILES_AT_ONCE if files else ROWS_AT_ONCE
    for first in range(0, rows.num_rows, most):
        values = rows.read(np.arange(first, min(first + most, rows.num_rows)))
        for name in names:
            column = values[name]
            if name in files:
                column = [_decoded(content, files[name], data).ravel() for content in column]
            flat = column.ravel() if isinstance(column, np.ndarray) else np.concatenate([*column, np.zeros(0, int)])
            found[name] = _sum([found[name], np.bincount(flat[flat >= 0].astype(np.int64))])
    return {name: tuple(counts.tolist()) for name, counts in found.items()}


def _decoded(content: Any, mask: Mask, data: DataConfig) -> Array:
    image = data.image
    assert image is not None
    return fitted_mask(decode_mask(content, image.mask_values, mask.ignore_index), mask.size, image, mask.ignore_index)


def _sum(counts: Sequence[Array]) -> Array:
    """Return the sum of arrays of different lengths."""
    total = np.zeros(max(map(len, counts), default=0), np.int64)
    for each in counts:
        total[: len(each)] += each
    return total


def _weights(
    loss: LossConfig, rows: LabelledRows, data: DataConfig, losses: Sequence[LossConfig], signature: Signature
) -> tuple[float, ...]:
    known = {name: rows.fitted[name].class_counts for name in loss.columns if name in rows.fitted}
    missing = [name for name in loss.columns if not known.get(name)]
    known |= count_classes(rows, missing, data, losses, signature) if missing else {}
    counts = _sum([np.array(known[name], np.int64) for name in loss.columns])
    if 0 <= loss.ignored < len(counts):
        counts[loss.ignored] = 0
    # classes behind the last one that occurs are padded to the width of the output below
    counts = np.trim_zeros(counts, "b")
    if not counts.sum():
        raise ConfigError("loss.class_weights 'balanced': the training data has no label that counts")
    output = signature.output(loss.outputs[0])
    shape = output.shape if output and output.shape else ()
    # classes that never occur need a weight, too: labels of later data may have them
    fixed = [dim for dim in shape[1:] if dim is not None]
    declared = [dim for dim in fixed if dim >= len(counts)]
    axis = loss.class_axis
    # without an axis the narrowest dimension that can hold the classes is taken for theirs
    length = shape[axis] if axis is not None and -len(shape) <= axis < len(shape) else min(declared, default=None)
    counts = np.pad(counts, (0, max((length or 0) - len(counts), 0)))
    present = counts > 0
    # N / (number of present classes x count): scikit-learn's "balanced"; the sum of the weights over the rows stays N
    weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
    return tuple(weights.tolist())
