"""Read boxes, scores and classes out of the outputs of a detector's file for one image, and suppress what overlaps.

output [1, 84, 8400]    transposed: a table of 8400 rows, boxes in the columns 0..3, scores in the columns 4..83
output [1, 300, 6]      as it is: 300 rows, boxes in the columns 0..3
output [300]            transposed: 300 rows of one column

Where they are, and what counts, is an entry `detections` of preprocessing.json (Detections), found when a file is
exported (trainer/export/detections/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .media import Array, How, geometry


@dataclass(frozen=True)
class Table:
    """An output as a table."""

    output: int
    is_transposed: bool

    def rows(self, results: Sequence[Array]) -> Array:
        """Return the table [rows, columns] among the outputs of one image."""
        result = results[self.output]
        # with sizes in place of -1, which an output without any element leaves open
        rows = result.reshape(math.prod(result.shape[:-1]), result.shape[-1])
        return rows.T if self.is_transposed else rows


@dataclass(frozen=True)
class BoxColumns:
    """The four columns of a table that hold boxes, and how."""

    first: int
    is_centred: bool
    """Whether they are centre and size; else two corners."""
    in_shares: bool
    """Whether they are shares of the image; else pixels."""

    def __str__(self) -> str:
        form = "centre and size" if self.is_centred else "corners"
        unit = "shares of the image" if self.in_shares else "pixels"
        return f"{form} in {unit}, from column {self.first} on"

    def corners(self, rows: Array, size: tuple[int, int], scale: tuple[float, float] = (1.0, 1.0)) -> Array:
        """Return corners in pixels [rows, 4].

        size: width and height of the image. scale: its pixels for each pixel of the table, in x and y.
        """
        unit = size if self.in_shares else scale
        own = rows[:, self.first : self.first + 4] * np.array([*unit, *unit], np.float32)
        if not self.is_centred:
            return own
        # centre and size
        middles, halves = own[:, :2], own[:, 2:] / 2
        return np.concatenate([middles - halves, middles + halves], 1)


Column = tuple[Table, int]
"""A table and the number of a column of it."""


def _sigmoid(rows: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-rows.clip(-60, 60)))
    return found


def _softmax(rows: Array) -> Array:
    powers = np.exp(rows - rows.max(-1, keepdims=True, initial=-np.inf))
    found: Array = powers / powers.sum(-1, keepdims=True)
    return found


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "probabilities": lambda rows: rows,
    "logits of a sigmoid": _sigmoid,
    "logits of a softmax": _softmax,
}


@dataclass(frozen=True)
class EachClass:
    """The scores of each class beside each box."""

    table: Table
    first: int
    activation: str
    factor: Column | None = None
    """The column of a score that all classes of a box are multiplied by, such as its objectness."""
    is_root: bool = False
    """Whether the score is the root of this product, as in FCOS."""

    def scores(self, results: Sequence[Array], num_classes: int) -> Array:
        """Return the scores [n, C]."""
        activate = ACTIVATIONS[self.activation]
        # in fp32 as onnxruntime computes them, whatever type the file returns
        found = activate(self.table.rows(results).astype(np.float32))
        found = found[:, self.first : self.first + num_classes]
        if self.factor:
            table, column = self.factor
            found = found * activate(table.rows(results).astype(np.float32))[:, column, None]
        return np.sqrt(found.clip(0)) if self.is_root else found


@dataclass(frozen=True)
class OneClass:
    """One score and one class beside each box."""

    score: Column
    of_class: Column | None
    """None of a file with one class."""
    first_class: int = 0
    """The number of the first class: 1 where 0 is the background."""

    def scores(self, results: Sequence[Array], num_classes: int) -> Array:
        """Return the scores [n, C], which are 0 for all other classes, and in rows that only fill the output."""
        # a file of one class may leave its number out
        values = column_of(results, self.score)
        classes = np.zeros(len(values), np.int64)
        if self.of_class:
            classes = column_of(results, self.of_class).astype(np.int64) - self.first_class
        found = np.zeros((len(values), num_classes), np.float32)
        # rows that only fill the output have a class below the first one, often -1
        rows = np.flatnonzero((classes >= 0) & (classes < num_classes))
        found[rows, classes[rows]] = values[rows]
        return found


@dataclass(frozen=True)
class Choice:
    """An output [n, 3] of NonMaxSuppression: image, class and box of each score that is kept."""

    table: Table
    first_class: int
    """The number of the first class: 1 where 0 is the background."""

    def kept(self, results: Sequence[Array], scores: Array) -> Array:
        """Return the scores [P, C], 0 for those that are not kept."""
        # the image is always the first one: files are run image by image
        _, classes, boxes = self.table.rows(results).T.astype(np.int64)
        classes = classes - self.first_class
        found = np.zeros_like(scores)
        # the background may be chosen as well, and is no object
        is_class = classes >= 0
        kept = boxes[is_class], classes[is_class]
        found[kept] = scores[kept]
        return found

    def agrees(self, results: Sequence[Array], scores: Array) -> bool:
        """Return whether the best score of each class that has any is kept, as by every suppression."""
        _, classes, boxes = self.table.rows(results).T
        if classes.max() - self.first_class >= scores.shape[1] or boxes.max() >= len(scores):
            return False
        # a suppression leaves lesser boxes out, and never the best one of a class
        kept = self.kept(results, scores)
        is_there = kept.any(0)
        return bool(is_there.any() and np.array_equal(kept.max(0)[is_there], scores.max(0)[is_there]))


@dataclass(frozen=True)
class Selection:
    """Which boxes count of those that have a score."""

    most: int
    """Boxes of an image that are kept, the best ones."""
    compared: int
    """Pairs of box and class of an image, the best ones, among which boxes that overlap are looked for."""
    least_score: float
    """Scores up to this one are left out."""
    same_object: float | None = None
    """Intersection over union from which the lesser of two boxes of one class is left out; None = none is."""
    of_best_class: bool = False
    """Whether each box counts for its best class only."""

    def chosen(self, corners: Array, scores: Array) -> Array:
        """Return class, score, x1, y1, x2, y2 by score, fp32 [n, 6]. corners: [P, 4]; scores: of each class [P, C]."""
        if self.of_best_class:
            scores = np.where(np.arange(scores.shape[1]) == scores.argmax(1)[:, None], scores, 0)
        flat = scores.reshape(-1)
        counted = np.flatnonzero(flat > self.least_score)
        # stable, so that equal scores stay in the order of the file
        best = counted[np.argsort(-flat[counted], kind="stable")[: self.compared]]
        rows, classes = np.divmod(best, scores.shape[1])
        found = np.column_stack([classes, scores[rows, classes], corners[rows]]).astype(np.float32)
        if self.same_object is not None:
            found = found[_not_suppressed(found, self.same_object, self.most)]
        return found[: self.most]


def _not_suppressed(found: Array, same_object: float, most: int) -> list[int]:
    """Return the places of boxes [n, 6], the best first, that no better box of their class overlaps; at most `most`."""
    boxes = found[:, 2:]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    kept: list[int] = []
    left = np.arange(len(found))
    while len(left) and len(kept) < most:
        place, left = int(left[0]), left[1:]
        kept.append(place)
        # a box that is left out suppresses none itself
        first = np.maximum(boxes[place, :2], boxes[left, :2])
        common = (np.minimum(boxes[place, 2:], boxes[left, 2:]) - first).clip(0).prod(1)
        overlap = common / (areas[place] + areas[left] - common).clip(1e-16)
        left = left[(overlap <= same_object) | (found[left, 0] != found[place, 0])]
    return kept


@dataclass(frozen=True)
class FileDetections:
    """How the outputs of a file hold what it has found in an image."""

    boxes: tuple[Table, BoxColumns]
    beside: EachClass | OneClass
    num_classes: int
    selection: Selection
    choice: Choice | None = None
    with_boxes: tuple[int, ...] = ()
    """All outputs that hold boxes."""

    def read(self, results: Sequence[Array], size: tuple[int, int]) -> Array:
        """Return class, score, x1, y1, x2, y2 by score, fp32 [n, 6], from the outputs for one image.

        Corners are in shares of the image. size: its width and height.
        """
        # in shares, as the labels are
        table, columns = self.boxes
        corners = columns.corners(table.rows(results), size) / np.array([*size, *size], np.float32)
        scores = self.beside.scores(results, self.num_classes)
        if self.choice:
            scores = self.choice.kept(results, scores)
        return self.selection.chosen(corners, scores)


def detections_in(described: Mapping[str, Any]) -> FileDetections:
    """Return what `dataclasses.asdict` has made of a FileDetections."""

    def column(each: Any) -> Column | None:
        return (Table(**each[0]), each[1]) if each else None

    table, columns = described["boxes"]
    beside, choice = dict(described["beside"]), described["choice"]
    if "table" in beside:
        scores: EachClass | OneClass = EachClass(
            **{**beside, "table": Table(**beside["table"]), "factor": column(beside["factor"])}
        )
    else:
        scores = OneClass(**{**beside, "score": column(beside["score"]), "of_class": column(beside["of_class"])})
    return FileDetections(
        (Table(**table), BoxColumns(**columns)),
        scores,
        described["num_classes"],
        Selection(**described["selection"]),
        Choice(Table(**choice["table"]), choice["first_class"]) if choice else None,
    )


def in_original(found: Array, old: tuple[int, int], how: How) -> Array:
    """Return boxes [n, 6] with corners in pixels of an image of `old` pixels (height, width), inside of it.

    how: the input that the image became, in which corners are shares.
    """
    (rows, columns), (top, left) = geometry(*old, how)
    begin = np.array([left, top, left, top])
    factors = np.array([old[1] / columns, old[0] / rows] * 2)
    sides = np.array([how["width"], how["height"]] * 2)
    corners = (found[:, 2:] * sides + begin) * factors
    return np.concatenate([found[:, :2], corners.clip(0, [old[1], old[0]] * 2)], 1)


def object_columns(found: Sequence[Array], classes: Sequence[str], top: int = 0) -> dict[str, Array]:
    """Return column -> values of all boxes [n, 6] of some images: row, class, probability, x, y, width, height.

    row: the number of the image. x, y: the left upper corner. top: the best so many boxes of each image, 0 = all.
    """
    kept = [each[:top] if top else each for each in found]
    table = np.concatenate([np.empty((0, 6)), *kept])
    numbers = table[:, 0].astype(np.int64)
    # a model may have more classes than its data, which have no names
    names = [*classes, *map(str, range(len(classes), int(numbers.max(initial=0)) + 1))]
    x1, y1, x2, y2 = table[:, 2:].round(2).T
    return {
        "row": np.repeat(np.arange(len(kept)), [len(each) for each in kept]),
        "class": np.array(names, object)[numbers] if classes else numbers,
        "probability": table[:, 1],
        "x": x1,
        "y": y1,
        "width": (x2 - x1).round(2),
        "height": (y2 - y1).round(2),
    }


def column_of(results: Sequence[Array], column: Column) -> Array:
    """Return the values of one column."""
    table, place = column
    return table.rows(results)[:, place]
