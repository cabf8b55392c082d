"""Compute the numbers of a column of boxes while shards are written, and bring them to the size of the model.

cells        [("dog", 30, 20, 90, 80), ("cat", ...)]  +  the image, 640 x 480
shards       640 480 | 1 30 20 90 80 0 | 0 ...             as data/schema/box_cells.py describes
batch        1 .05 .04 .14 .17 0 | 0 ... | -1 -1 ...       in shares of the input, padded to the row with the most boxes
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.geometry import Size, resized_size
from onward.trainer.data.images.image_decoding import ORIENTATION
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, HEAD_NUMBERS, NO_CLASS, Box
from onward.trainer.data.schema.columns import BOXES, BYTES, Array, Column, ColumnType, Values
from onward.trainer.data.schema.fitted import Fitted, FittedComputer, describe_classes
from onward.trainer.errors import DataError, few

BORDER = 1.0
"""Pixels by which a box may reach beyond its image, because annotation tools round to whole ones."""


class BoxColumn(FittedComputer):
    """Computes rows of numbers of a column of boxes, in its place.

    image: the column of the images, whose headers say their sizes. names: of the classes, in their order; None = those
    in the data, sorted.
    """

    def __init__(self, column: str, image: str, names: Sequence[str] | None) -> None:
        self._name = column
        self._image = image
        self.reads = {column: ColumnType(BOXES), image: ColumnType(BYTES)}
        self.makes = self.consumed = frozenset({column})
        self.pad_values = {column: NO_CLASS}
        self.digest = json.dumps(["boxes", column, names and list(names)])
        self._seen: set[str] = set()
        if names is not None:
            self._set(names, sorted_by_name=False)

    @property
    def summary(self) -> str:
        """Return the classes in words."""
        if not self.fitted:
            return f"boxes in {self._name}"
        return f"boxes in {self._name}; {describe_classes(self._name, self.fitted[self._name])}"

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Collect the names of some rows; those of the evaluation rows, too."""
        self._seen |= {box.name for boxes in rows[self._name] for box in boxes}

    def finish(self) -> None:
        """Set the names that were observed. Raises DataError if there is no box."""
        if not self._seen:
            raise DataError(f"column {self._name!r} has no box in any row: there is nothing to learn")
        names = sorted(self._seen)
        if all(name.isdecimal() for name in names):
            # numbers of classes are those of the model's scores, also where one is not in the data
            names = [str(number) for number in range(max(map(int, names)) + 1)]
        self._set(names, sorted_by_name=True)

    def restore(self, found: Mapping[str, Fitted]) -> None:
        """Set the names that were found."""
        self._set(found[self._name].classes, sorted_by_name=found[self._name].sorted_by_name)

    def _set(self, names: Sequence[str], *, sorted_by_name: bool) -> None:
        self.fitted = {self._name: Fitted(classes=tuple(names), sorted_by_name=sorted_by_name)}
        self._ids = {name: number for number, name in enumerate(names)}

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find the length of the rows. Raises DataError if all of the first ones have unknown names."""
        count = len(values[self._name])
        results, failed = self.compute(values, count)
        if len(failed) == count:
            raise DataError(f"{failed[0]} (and for all of the first rows)")
        longest = max(map(len, results[self._name]))
        self.columns = (Column(name=self._name, dtype="float32", shape=(longest,), variable=True),)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the numbers of each row, and row -> what is wrong with its boxes."""
        found: list[Array] = []
        failed = {}
        for at in range(count):
            boxes: Any = rows[self._name][at]
            content: Any = rows[self._image][at]
            row = self._row(boxes, content)
            if isinstance(row, str):
                failed[at] = f"{self._name} {row}"
                row = np.zeros(HEAD_NUMBERS, np.float32)
            found.append(row)
        return {self._name: found}, failed

    def _row(self, boxes: Sequence[Box], content: bytes) -> Array | str:
        size = shown_size_of(content)
        if size is None:
            # the decoder of the image says what is wrong with it
            return np.zeros(HEAD_NUMBERS, np.float32)
        width, height = size
        numbers = np.empty((len(boxes), BOX_NUMBERS), np.float32)
        for number, box in enumerate(boxes):
            if box.name not in self._ids:
                names = self.fitted[self._name].classes
                return f"has a box of class {box.name[:40]!r}, which is none of the {len(names)} classes {few(names)}"
            if any(box.size) and box.size != size:
                turned = ", before it is turned as its EXIF data says" * (box.size == (height, width))
                return f"is of an image of {box.size[0]} x {box.size[1]} pixels{turned}, but it has {width} x {height}"
            factors = (width, height) if box.are_shares else (1.0, 1.0)
            corners = np.array(box[1:5]) * np.tile(factors, 2)
            if (corners < -BORDER).any() or (corners[2:] > np.array(size) + BORDER).any():
                shown = ", ".join(f"{corner:g}" for corner in corners)
                return f"has the box {shown}, which reaches beyond its image of {width} x {height} pixels"
            # as they are stored: in fp64 a box may be wider than nothing that is empty in fp32
            inside = np.clip(corners, 0.0, np.tile(size, 2)).astype(np.float32)
            if (inside[2:] <= inside[:2]).any():
                return f"has a box {', '.join(f'{corner:g}' for corner in corners)} that is outside of its image"
            numbers[number] = (self._ids[box.name], *inside, box.flag)
        return np.concatenate([np.array(size, np.float32), numbers.ravel()])


def shown_size_of(content: bytes) -> tuple[int, int] | None:
    """Return width and height of an encoded image as it is shown, from its header; None for what is no image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            # of a photograph that is turned by 90 degrees when it is shown
            is_turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (height, width) if is_turned else (width, height)


def whole_boxes(row: Array) -> Array:
    """Return boxes float32 [n, 6] in pixels of the whole image. row: as it is stored."""
    return row[HEAD_NUMBERS:].reshape(-1, BOX_NUMBERS)


def fitted_boxes(row: Array, size: Size, config: ImageConfig) -> Array:
    """Return boxes float32 [n, 6] in pixels of an image of `size`. row: as it is stored."""
    width, height = (int(each) for each in row[:HEAD_NUMBERS])
    boxes = whole_boxes(row).copy()
    if len(boxes):
        (rows, columns), (top, left) = resized_size((height, width), size, config)
        boxes[:, (1, 3)] = boxes[:, (1, 3)] * (columns / width) - left
        boxes[:, (2, 4)] = boxes[:, (2, 4)] * (rows / height) - top
    return boxes


def in_shares(boxes: Array, size: Size) -> Array:
    """Return boxes [n, 6] in shares of an image of `size`, of boxes in its pixels."""
    height, width = size
    found = boxes.copy()
    found[:, 1:5] /= np.array([width, height, width, height], np.float32)
    return found
