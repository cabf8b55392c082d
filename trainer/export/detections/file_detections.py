"""Read boxes, scores and classes out of the outputs of a detector's own file, with whatever decodes and selects in it.

    raw outputs of known values --+-- the end of the file ------- its outputs
                                  '-- the decoding of its loss -- boxes [P, 4], scores of each class [P, C]

A column holds what it has the values of: nothing depends on names, nodes or exporters. The forms that are read:

    boxes and a score of each class, all P of them      YOLOv8 [1, 4 + C, P], YOLOX [1, P, 5 + C] with objectness, ...
    the same, and the choice of NonMaxSuppression       [n, 3]: image, class, box
    boxes, one score and one class                      [n, 6], [1, n, 6], [n, 7], or three outputs; where there are
                                                        fewer than P, the file has chosen them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.detections.box_tables import (
    LEAST_BOXES,
    box_columns,
    box_tables,
    distinct_boxes,
    same_boxes,
    tables,
)
from onward.trainer.export.served.detections import (
    ACTIVATIONS,
    BoxColumns,
    Choice,
    Column,
    EachClass,
    FileDetections,
    OneClass,
    Selection,
    Table,
    column_of,
)
from onward.trainer.model.losses.dense_heads.families import (
    FAMILIES,
    LEAST_SCORE,
    MOST_COMPARED,
    MOST_DETECTIONS,
    SAME_OBJECT,
)

SHARPNESS = (1.0, 3.0, 6.0)
"""Deviations of random logits. A file that keeps only great scores keeps some of the sharper ones."""
MOST_ROWS = 100
"""Boxes of the file that are compared."""
SCORE_TOLERANCE = 1e-4
MOST_COLUMNS = 12
"""Columns of a table in which scores and classes of chosen boxes are looked for, and in which those of all begin."""


@dataclass(frozen=True)
class _Known:
    """What the loss decodes from the raw outputs."""

    boxes: Array
    """Corners in pixels [P, 4]."""
    scores: Array
    """[P, C]."""
    size: tuple[int, int]

    @property
    def num_classes(self) -> int:
        return int(self.scores.shape[1])


@dataclass(frozen=True)
class _Boxes:
    """Columns of a table that hold known boxes."""

    table: Table
    columns: BoxColumns
    compared: Array
    """Numbers of some rows."""
    same: Array
    """Which of the known boxes each of these rows is, bool [compared, P]."""


def recognise(
    run: Callable[[Mapping[str, Array]], Sequence[Array]],
    shapes: Sequence[Sequence[int]],
    loss: LossConfig,
    size: tuple[int, int],
) -> FileDetections:
    """Return how a file holds what it has found.

    run: its end, from raw outputs by name to its outputs for one image. shapes: those of the raw outputs
    [1, channels, H, W], in the order of `loss.output`. size: width and height of an image. Raises UnsupportedModel with
    the reason for a file that is not understood.
    """
    # flat scores may all be below the limit of the file, and sharp ones hide an activation: several are tried
    family = FAMILIES[loss.name]
    problem = ""
    for sharpness in SHARPNESS:
        raw = _random_outputs(shapes, loss, sharpness)
        head = family.head([torch.from_numpy(each) for each in raw], loss)
        known = _Known(family.decode(head)[0].numpy(), family.confidence(head)[0].numpy(), size)
        results = run(dict(zip(loss.outputs, raw, strict=True)))
        found, problem = _recognised(results, known)
        if found:
            return _keeping_all(found) if family.keeps_all else found
    raise UnsupportedModel(problem.format(loss=loss.name))


def _recognised(results: Sequence[Array], known: _Known) -> tuple[FileDetections | None, str]:
    """Return how the outputs hold the known boxes and scores; else None and the reason."""
    found = list(_boxes(results, known))
    if not found:
        return None, "no output of the file holds the boxes that {loss} decodes from the same raw outputs"
    # each level as an output of its own would need to be put together first
    with_boxes = tuple(sorted({boxes.table.output for boxes in found}))
    for boxes in found:
        beside = _beside(results, boxes, known)
        # without a class beside them, boxes of one level look as chosen ones do
        has_no_class = isinstance(beside, OneClass) and beside.of_class is None
        if len(with_boxes) > 1 and has_no_class:
            return None, "several outputs of the file hold boxes of {loss}, such as one for each level"
        if beside:
            # fewer boxes than there are predictions: the file has chosen them itself
            chooses = len(boxes.table.rows(results)) < len(known.boxes)
            own = boxes.table, boxes.columns
            selection = Selection(MOST_DETECTIONS, MOST_COMPARED, LEAST_SCORE, SAME_OBJECT)
            detections = FileDetections(own, beside, known.num_classes, selection, with_boxes=with_boxes)
            return (_keeping_all(detections), "") if chooses else _with_choice(detections, results)
    return None, "the file returns boxes of {loss}, but beside them no scores and classes of the same boxes"


def _with_choice(found: FileDetections, results: Sequence[Array]) -> tuple[FileDetections | None, str]:
    """Return how the outputs hold all boxes, with the choice among them if there is one; else None and the reason."""
    scores = found.beside.scores(results, found.num_classes)
    # NonMaxSuppression returns integers, three in a row
    choices = []
    for table in tables(results):
        result = results[table.output]
        if np.issubdtype(result.dtype, np.integer) and result.ndim == 2 and not table.is_transposed:
            choices += [table] if result.shape[1] == 3 else []
    if not choices:
        return found, ""
    # the numbers of classes may begin behind that of the background
    for table, first_class in itertools.product(choices, (0, 1)):
        choice = Choice(table, first_class)
        if len(table.rows(results)) and choice.agrees(results, scores):
            return replace(_keeping_all(found), choice=choice), ""
    return None, "the file chooses among the boxes of {loss}, but not by its best scores"


def _keeping_all(found: FileDetections) -> FileDetections:
    """Return the same where boxes of one class that overlap are kept: the file has left such ones out, or need not."""
    return replace(found, selection=replace(found.selection, same_object=None))


def _boxes(results: Sequence[Array], known: _Known) -> Iterator[_Boxes]:
    """Yield the columns that hold nothing but known boxes, and rows of one number, which only fill the output."""
    for table in box_tables(results):
        rows = table.rows(results)
        for columns in box_columns(rows.shape[1]):
            boxes = columns.corners(rows, known.size)
            # rows of one number, such as 0 or -1, only fill the output to a fixed length
            compared = np.flatnonzero(np.ptp(boxes, axis=1) > 0)
            if len(distinct_boxes(boxes[compared])):
                compared = compared[:: -(-len(compared) // MOST_ROWS)]
                same = same_boxes(boxes[compared], known.boxes, known.size)
                if same.any(1).all():
                    yield _Boxes(table, columns, compared, same)


def _beside(results: Sequence[Array], boxes: _Boxes, known: _Known) -> EachClass | OneClass | None:
    """Return where the scores and classes of boxes are; None if they are nowhere."""
    # scores and classes stand beside the boxes: in tables of as many rows
    number = len(boxes.table.rows(results))
    alike = [each for each in tables(results) if len(each.rows(results)) == number]
    some = list(results)  # with the compared rows alone
    for table in alike:
        rows = table.rows(results)[boxes.compared]
        some[table.output] = rows.T if table.is_transposed else rows
    # a corner of a box is neither a score nor a class
    of_boxes = {(boxes.table, boxes.columns.first + place) for place in range(4)}
    columns = [column for column in _columns(some, alike) if column not in of_boxes]
    # of a part of all boxes, such as those of one level, the others would be missing
    if number == len(known.boxes):
        for each_class in _each_class(some, alike, known.num_classes, columns):
            if _is_each(each_class.scores(some, known.num_classes), known, boxes.same):
                return each_class
    for one_class in _one_class(some, known.num_classes, columns):
        if _is_one(one_class.scores(some, known.num_classes), known, boxes.same):
            return one_class
    return None


def _each_class(
    results: Sequence[Array], alike: Sequence[Table], num_classes: int, columns: Sequence[Column]
) -> Iterator[EachClass]:
    """Yield each place in which the scores of all classes may be. alike: tables with as many rows as boxes."""
    for table, activation in itertools.product(alike, ACTIVATIONS):
        starts = table.rows(results).shape[1] - num_classes + 1
        for first in range(min(starts, MOST_COLUMNS)):
            yield EachClass(table, first, activation)
            # no class is multiplied by itself
            own = {(table, first + place) for place in range(num_classes)}
            for factor in columns:
                if factor not in own:
                    yield EachClass(table, first, activation, factor)
                    yield EachClass(table, first, activation, factor, is_root=True)


def _one_class(results: Sequence[Array], num_classes: int, columns: Sequence[Column]) -> Iterator[OneClass]:
    """Yield each pair of columns in which the scores and classes of boxes may be."""
    # a column with a few values is a class, or the number of the image
    scores = [column for column in columns if len(np.unique(column_of(results, column))) >= LEAST_BOXES]
    if num_classes == 1:
        yield from (OneClass(score, None) for score in scores)
    for score, of_class, first_class in itertools.product(scores, columns, (0, 1)):
        classes = column_of(results, of_class)
        # classes are whole numbers, of whatever type
        if score != of_class and np.array_equal(classes, classes.round()):
            yield OneClass(score, of_class, first_class)


def _columns(results: Sequence[Array], alike: Sequence[Table]) -> list[Column]:
    return [(table, place) for table in alike for place in range(min(table.rows(results).shape[1], MOST_COLUMNS))]


def _is_each(scores: Array, known: _Known, same: Array) -> bool:
    """Return whether each row has the scores of all classes of a box that it is."""
    pairs = zip(scores, same, strict=True)
    return all((np.abs(known.scores[is_box] - row) < SCORE_TOLERANCE).all(1).any() for row, is_box in pairs)


def _is_one(scores: Array, known: _Known, same: Array) -> bool:
    """Return whether each row with a score has that of one class of a box that it is."""
    # a row without a score says nothing
    scored = np.flatnonzero(scores.max(1) > 0)
    for row in scored:
        of_class = scores[row].argmax()
        differences = np.abs(known.scores[same[row], of_class] - scores[row, of_class])
        if differences.min() >= SCORE_TOLERANCE:
            return False
    return len(scored) >= LEAST_BOXES


def _random_outputs(shapes: Sequence[Sequence[int]], loss: LossConfig, sharpness: float) -> list[Array]:
    """Return random raw outputs. Those of boxes are positive, as behind a Relu; logits have the given deviation."""
    random = np.random.default_rng(0)
    found = []
    for place, shape in enumerate(shapes):
        values = random.normal(size=shape).astype(np.float32)
        is_logit = _logit_channels(loss, place, shape[1])[:, None, None]
        found.append(np.where(is_logit, values * sharpness, np.abs(values)).astype(np.float32))
    return found


def _logit_channels(loss: LossConfig, place: int, channels: int) -> Array:
    """Return which channels of a raw output are logits, bool [channels]."""
    # a tensor for each role
    roles = loss.rule.roles
    if len(loss.outputs) == len(loss.strides) * len(roles):
        role = list(roles)[place % len(roles)]
        return np.full(channels, role in ("scores", "objectness"))
    # one tensor with the channels of all roles, anchor by anchor
    number = len(loss.anchors[0]) if loss.anchors else 1
    rest = channels // number - sum(roles.values())
    of_anchor = [np.full(own or rest, role in ("scores", "objectness")) for role, own in roles.items()]
    return np.tile(np.concatenate(of_anchor), number)
