"""Find which axis of an output has the classes: the one without which the output has the shape of the labels.

    output [B, 8, 32]      labels [B, 8]         axis 2: scores of a language model
    output [B, 5, 64, 48]  labels [B, 64, 48]    axis 1: scores of the pixels of an image
    output [2, 5, 5, 5]    labels [2, 5, 5]      axis 1, 2 or 3: refused, unless the file or the user says which

Where several axes fit, the file decides if it declares a fixed length for one of them only: the number of classes is
fixed by weights, lengths and sizes often are not. Axis 0 has the rows. The other axes are the positions of the batch,
in order: neighbours may be one axis, in the labels ([B x 8]) as in scores [B x 8, 32].
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from onward.trainer.data.schema.label_axes import Dims, num_elements, remedy, rows_problem, without_axis
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import shown_shape


def find_class_axis(
    output: Dims, labels: Dims, *, declared: Dims | None = None, given: int | None = None, name: str = ""
) -> int:
    """Return the axis of the classes, counted from 0.

    output, labels: shapes, the rows included; None is a length that is not known yet, and fits any. declared: the shape
    of the output in the file. given: `loss.class_axis`. name: of the output, for messages. Raises ConfigError if no
    axis fits, or several do.
    """
    axes = _fitting(output, labels)
    what = f"output {name!r} is {shown_shape(output)} and the labels are {shown_shape(labels)}"
    if not _positions_agree(output, labels):
        raise ConfigError(f"the loss cannot be computed: {what}: {rows_problem(output, labels)}")
    if given is not None:
        if not -len(output) <= given < len(output):
            raise ConfigError(
                f"loss.class_axis {given} is not an axis of output {name!r}, which is {shown_shape(output)}"
            )
        axis = given % len(output)
        # an axis that is set may fit less closely than others: the user has decided
        if axis in axes or _fits(output, labels, axis):
            return axis
        raise ConfigError(f"the loss cannot be computed: {what}, which do not go with loss.class_axis {given}")
    if len(axes) > 1 and declared is not None and len(declared) == len(output):
        # the number of classes is fixed by weights, lengths and sizes often are not
        fixed = [axis for axis in axes if declared[axis] is not None]
        axes = fixed if len(fixed) == 1 else axes
    if len(axes) > 1:
        raise ConfigError(
            f"{what}: the classes may be on axis {', '.join(map(str, axes[:-1]))} or {axes[-1]}; say which: "
            + " or ".join(f"loss.class_axis = {axis}" for axis in axes)
        )
    if not axes:
        if output[:1] != labels[:1] and None not in (*output[:1], *labels[:1]):
            raise ConfigError(f"the loss cannot be computed: {what}: {rows_problem(output, labels)}")
        raise ConfigError(
            f"the loss cannot be computed: {what}, whose shape is not that of the output without one axis; "
            f"{_advice(output, labels)}"
        )
    return axes[0]


def _advice(output: Dims, labels: Dims) -> str:
    """Return what to do with labels that fit no axis: transpose them, where that makes them fit."""
    # from the last axis on, where classes usually are
    for axis in range(len(output) - 1, 0, -1):
        if advice := remedy(without_axis(output, axis)[1:], labels[1:]):
            return advice
    return "name another column (data.label) or another output (model.output)"


def _positions_agree(output: Dims, labels: Dims) -> bool:
    """Return whether there is a label for each row of scores [rows, C], or of one row [C]."""
    rows = output[:-1]
    if len(output) > 2 or None in rows or None in labels:
        return True
    return num_elements(rows) == num_elements(labels)


def _fitting(output: Dims, labels: Dims) -> list[int]:
    """Return the axes that may have the classes. Of [B, C] and [C] it is the last one, whatever the labels are."""
    if len(output) < 3:
        return [len(output) - 1]
    axes = range(1, len(output))
    if exact := [axis for axis in axes if same_lengths(without_axis(output, axis), labels)]:
        return exact
    # labels with an axis of one in place of the classes, such as masks [B, 1, H, W]
    if kept := [axis for axis in axes if same_lengths((*output[:axis], 1, *output[axis + 1 :]), labels)]:
        return kept
    return [axis for axis in axes if _fits(output, labels, axis)]


def _fits(output: Dims, labels: Dims, axis: int) -> bool:
    """Return whether labels are the rest of the output's shape, but for axes of one, or with neighbours as one axis."""
    rest = without_axis(output, axis)
    if same_lengths(rest, labels):
        return True
    # lengths that are not known may be products of each other
    if None in rest or None in labels:
        return len(labels) < len(rest)
    squeezed = _squeezed(rest)
    squeezed_labels = _squeezed(labels)
    if math.prod(squeezed) != math.prod(squeezed_labels):
        return False
    if squeezed == squeezed_labels:
        return True
    # [7, 6] may be [42], and [7, 6, 3] may be [42, 3], but not [21, 6], whose axes would not be neighbours:
    # the running products of merged axes are among those of the axes that they are merged from
    products = set(itertools.accumulate(squeezed, operator.mul))
    label_products = set(itertools.accumulate(squeezed_labels, operator.mul))
    return len(squeezed_labels) < len(squeezed) and label_products <= products


def _squeezed(dims: Dims) -> list[int]:
    """Return the lengths of a shape that are not 1."""
    lengths = [dim or 0 for dim in dims]
    return [length for length in lengths if length != 1]


def same_lengths(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Return whether two shapes may be the same, None being any length."""
    if len(one) != len(other):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))
