"""Decide which axes of the labels a loss pairs with which axes of its output, and say what to do where they do not fit.

Row i of the labels belongs to row i of the output, and each further axis to the one in the same place. Only axes of
length 1 may be absent on either side, because they change the order of no numbers:

    output [8, 1]         labels [8]              pair
    output [8, 8, 8, 3]   labels [8, 3, 8, 8]     as many numbers in another order: refused, and a transpose is named
    output [32, 3, 8, 8]  labels [8, 3, 16, 16]   the rows of the output are not those of the batch: refused

The check of the data asks before a run, with the lengths that the file declares; losses and metrics ask again for each
batch. On which axis the classes are is decided in class_axis.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import shown_shape

Dims = tuple[int | None, ...]

MOST_AXES = 6
MOST_ORDERS = 3
"""Transposes are searched up to so many axes of a sample; a message names so many of them."""


def label_shape(loss: LossConfig, output: Dims) -> Dims | None:
    """Return the shape of the labels for an output of this shape, the rows included in both.

    None is a length that is not known, or any length. Returns None where only the labels say it: of a loss of your
    own, and of classes that may be on several axes.
    """
    labels = loss.rule.labels
    if labels in ("own", "objects"):
        return None
    if labels == "rows":
        return output[:1]
    if labels == "sequences":
        return (*output[:1], None)
    if labels == "quantiles":
        has_axis = len(output) > 1 and output[-1] == len(loss.quantiles)
        return output[:-1] if has_axis else output
    if not loss.has_class_axis or len(output) < 2:
        return output
    if loss.class_axis is not None and -len(output) < loss.class_axis < len(output):
        axis = loss.class_axis % len(output)
        return without_axis(output, axis) if axis else None
    # classes are last in [rows, C] and [rows, L, C]; images may have them on axis 1
    return output[:-1] if len(output) < 4 else None


def fits(output: Dims, labels: Dims) -> bool:
    """Return whether two shapes are the same but for axes of length 1. None, a length that is not known, fits any."""
    if output == labels:
        return True
    # an axis of length 1 may be absent on the other side; one of unknown length may be 1
    if output and output[0] in (1, None) and fits(output[1:], labels):
        return True
    if labels and labels[0] in (1, None) and fits(output, labels[1:]):
        return True
    if not output or not labels:
        return False
    if output[0] != labels[0] and None not in (output[0], labels[0]):
        return False
    return fits(output[1:], labels[1:])


def without_axis(dims: Dims, axis: int) -> Dims:
    """Return a shape without one of its axes, which is counted from 0."""
    return (*dims[:axis], *dims[axis + 1 :])


def num_elements(dims: Dims) -> int:
    """Return the product of the lengths of a shape; 0 if one of them is not known."""
    return math.prod(dim or 0 for dim in dims)


def remedy(wanted: Dims, labels: Dims, column: str = "labels") -> str:
    """Return what to do with labels that do not fit, as a clause; "" where their number is wrong, too.

    wanted, labels: shapes of one sample. column: what the labels are called in a line of numpy.
    """
    if orders := _orders(wanted, labels):
        first, *others = (str((0, *(axis + 1 for axis in order))) for order in orders)
        line = f"numpy.transpose({column}, {first})"
        line += f" or {' or '.join(others)}, whichever puts each axis where the output has it" if others else ""
        return f"their axes are in another order: store them as {line}"
    is_known = None not in wanted and None not in labels
    if is_known and num_elements(wanted) == num_elements(labels):
        shape = ", ".join(map(str, (-1, *wanted)))
        return (
            "they are as many numbers, but nothing says in which order: store them as "
            f"numpy.reshape({column}, ({shape})) if it is that of the output"
        )
    return ""


def _orders(wanted: Dims, labels: Dims) -> list[tuple[int, ...]]:
    """Return the orders of the labels' axes that fit, first those that move the fewest; [] if none does."""
    if not 1 < len(labels) <= MOST_AXES:
        return []
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    # the simplest transpose is probably the one that is meant
    for order in sorted(itertools.permutations(range(len(labels))), key=_exchanges):
        if fits(wanted, tuple(labels[axis] for axis in order)):
            # where axes of length 1 go makes no difference
            found.setdefault(tuple(axis for axis in order if labels[axis] != 1), order)
    return list(found.values())[:MOST_ORDERS]


def _exchanges(order: Sequence[int]) -> int:
    # the inversions of a permutation: how many neighbours are to be exchanged
    return sum(one > other for one, other in itertools.combinations(order, 2))


def check_axes(
    loss: LossConfig, outputs: Sequence[Dims], labels: Dims | None, *, names: Sequence[str], size: int = 0
) -> None:
    """Raise ConfigError, with both shapes, unless the loss can pair its outputs with its labels.

    outputs: the shapes of those that it reads, whose names are `names`. size: the rows of the batch, for a loss without
    labels; 0 if they are not known. Classes are left to `find_class_axis`, and a loss of your own pairs them itself.
    """
    if loss.is_own or loss.rule.by_graph:
        return
    output = outputs[0]
    if loss.rule.has_grid:
        return  # the family of the detector reads its outputs level by level (model/losses/dense_heads/head.py)
    if loss.rule.labels == "objects":
        _check_sets(loss, outputs, names)
        return
    if any(other != output for other in outputs[1:]):
        shown = ", ".join(f"{name!r} {shown_shape(each)}" for name, each in zip(names, outputs, strict=True))
        raise ConfigError(
            f"the loss {loss.name!r} cannot be computed: it pairs each row of an output with the same row of the "
            f"others, but their shapes differ: {shown}; name outputs of one shape in loss.output"
        )
    if labels is None:
        if size and output[:1] != (size,):
            raise ConfigError(_refusal(loss, output, None, names[0], rows_problem(output, (size,))))
        return
    if problem := _problem(loss, output, labels):
        raise ConfigError(_refusal(loss, output, labels, names[0], problem))


def _check_sets(loss: LossConfig, outputs: Sequence[Dims], names: Sequence[str]) -> None:
    """Raise ConfigError unless outputs are the scores [B, Q, C] and the boxes [B, Q, 4] of queries."""
    scores, boxes = outputs
    # the class scores may have any length
    if not fits(scores[:2], boxes[:2]) or [len(scores), *boxes[2:]] not in ([3, 4], [3, None]):
        shown = " and ".join(f"{name!r} {shown_shape(each)}" for name, each in zip(names, outputs, strict=True))
        raise ConfigError(
            f"the loss {loss.name!r} reads class scores [batch, queries, classes] and boxes [batch, queries, 4], in "
            f"this order, but loss.output names {shown}"
        )


def check_elements(loss: LossConfig, output: Dims, labels: Dims, *, name: str) -> None:
    """Raise ConfigError unless labels have the shape of an output, which the metrics of a loss of your own compare."""
    if problem := _unpaired(output, output, labels):
        what = "metrics" if loss.is_own else ""
        raise ConfigError(_refusal(loss, output, labels, name, problem, what=what))


def rows_problem(output: Dims, labels: Dims) -> str:
    """Return why the first axis of an output is not that of the rows of a batch, as a clause."""
    rows, batch = (dims[0] if dims else 1 for dims in (output, labels))
    may_be_exchanged = min(len(output), len(labels)) > 1 and output[1] == batch
    if may_be_exchanged and fits((batch, rows, *output[2:]), labels):
        return (
            f"the {batch} rows of the batch are on axis 1 of the output; let the model end with a Transpose that puts "
            "them first, or name another tensor in model.output"
        )
    each = ""
    if rows and batch:
        quotient, remainder = divmod(rows, batch)
        if quotient > 1 and not remainder:
            each = f", {quotient} for each sample"
    return (
        f"the output has {rows} rows for a batch of {batch}{each}, and row i of the output must be that of sample i. A "
        "length that the file fixes, such as in a Reshape to [-1, ...], may not be that of the data: feed samples of "
        "the size that the model was exported for, export it with dynamic lengths, or name another tensor in "
        "model.output"
    )


def _problem(loss: LossConfig, output: Dims, labels: Dims) -> str:
    """Return why one output and the labels do not pair, as a clause; "" if they do."""
    kind = loss.rule.labels
    if kind == "sequences" and len(output) != 3:
        return "the output must be [rows, time steps, classes]"
    # each sample has a sum of its own, so that nothing may stand in front of the rows
    if loss.has_classes and loss.rule.by_sample and output[0] != labels[0]:
        return rows_problem(output, labels)
    if loss.has_class_axis:
        return ""  # find_class_axis
    if labels[:1] == (1,) != output[:1]:
        output = (1, *output)  # a file for one row may leave the batch out of its output
    if kind == "quantiles" and len(loss.quantiles) > 1 and output[1:][-1:] != (len(loss.quantiles),):
        return f"the last axis of the output must have the {len(loss.quantiles)} quantiles of loss.quantiles"
    if kind == "boxes" and not _has_boxes(output[1:]):
        return (
            "the last axis of the output must have the 4 numbers of a box, x1, y1, x2, y2 (or those of several boxes "
            "one after the other, in an output [rows, 4 x boxes])"
        )
    wanted = label_shape(loss, output)
    assert wanted is not None
    return _unpaired(output, wanted, labels)


def _has_boxes(sample: Dims) -> bool:
    """Return whether a sample of this shape is boxes of 4 numbers, the last axis first."""
    lengths = [dim for dim in sample if dim != 1]
    if None in lengths[-1:]:
        return True
    # a list of boxes may be flat: 4 numbers after each other for each
    if len(lengths) == 1:
        return (lengths[0] or 0) % 4 == 0
    return lengths[-1:] == [4]


def _unpaired(output: Dims, wanted: Dims, labels: Dims) -> str:
    if fits(wanted, labels):
        return ""
    if output[:1] != labels[:1]:
        return rows_problem(output, labels)
    what = f"the labels must be {shown_shape(wanted)}, row by row and axis by axis"
    advice = remedy(wanted[1:], labels[1:])
    return f"{what}; {advice}" if advice else f"{what}; name another column (data.label) or output (model.output)"


def _refusal(loss: LossConfig, output: Dims, labels: Dims | None, name: str, why: str, *, what: str = "") -> str:
    against = "" if labels is None else f" and the labels are {shown_shape(labels)}"
    what = f"the {what} of the loss {loss.name!r}" if what else f"the loss {loss.name!r}"
    return f"{what} cannot be computed: output {name!r} is {shown_shape(output)}{against}: {why}"
