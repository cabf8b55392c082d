"""The boxes of one image as a cell of the data, and as a row of numbers in the shards.

    cell     Box objects of annotations that lie beside images (images/box_annotations.py), or what tables hold:
             [{"bbox": [x, y, width, height], "category": "cat"}, ...]              a list of objects
             {"bbox": [[x, y, width, height], ...], "category": ["cat", ...]}       lists, as Hugging Face has them
    row      width, height, and for each box six numbers: class, x1, y1, x2, y2, flag

Width and height are those of the image as it is shown, and corners are in its pixels, from the left and from the top.
In a batch corners are shares of the model's input, without width and height; rows are padded with -1: no class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

COUNTED, CROWD, DIFFICULT = 0, 1, 2
"""Flags of a box. A crowd is a region of many objects (COCO's iscrowd); a difficult one is not counted by Pascal VOC's
metric. Neither is trained on, and what is found there is no error."""
BOX_NUMBERS = 6
"""Numbers of a box: class, x1, y1, x2, y2, flag."""
HEAD_NUMBERS = 2
"""Numbers in front of the boxes of a row: width and height of the image."""
NO_CLASS = -1.0
"""What pads the boxes of a batch."""
NAMES = ("category", "label", "class", "name")
"""Keys of the class in a cell of a table."""


class Box(NamedTuple):
    """One object."""

    name: str
    """Of its class."""
    x1: float
    y1: float
    x2: float
    y2: float
    """Corners, in pixels or in shares of the image."""
    flag: int = COUNTED
    are_shares: bool = False
    size: tuple[int, int] = (0, 0)
    """Width and height of the image as the annotations say them; (0, 0) if they do not."""

    @property
    def problem(self) -> str:
        """What is wrong with the corners by themselves; "" if nothing is."""
        corners = f"{self.x1:g}, {self.y1:g}, {self.x2:g}, {self.y2:g}"
        if not all(map(math.isfinite, self[1:5])):
            return f"the box {corners} is not finite"
        if self.x2 < self.x1 or self.y2 < self.y1:
            return f"the corners of the box {corners} are swapped"
        if self.x2 == self.x1 or self.y2 == self.y1:
            return f"the box {corners} is empty"
        return ""


def boxes_of(cell: Any) -> list[Box] | str:
    """Return the boxes of a cell, or what is wrong with it."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return f"is {cell[:40]!r}, not a list of boxes"
    if isinstance(cell, Mapping):
        cell = _rows_of(cell)
    if cell is None or not hasattr(cell, "__len__") or isinstance(cell, bytes):
        return "is missing" if cell is None else f"holds {str(cell)[:40]}, not a list of boxes"
    boxes = []
    for number, each in enumerate(cell):
        box = each if isinstance(each, Box) else _box_of(each)
        if box is None:
            return f"holds {str(each)[:60]} as box {number}, not a bbox [x, y, width, height] and a category"
        if box.problem:
            return f"holds box {number}: {box.problem}"
        boxes.append(box)
    return boxes


def _rows_of(cell: Mapping[str, Any]) -> Any:
    """Return a list of objects of lists that belong together; None where they do not."""
    columns = {key: values for key, values in cell.items() if not isinstance(values, str | bytes | int | float)}
    if any(not hasattr(values, "__len__") for values in columns.values()):
        return None
    if {len(values) for values in columns.values()} != {len(columns.get("bbox", ()))}:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _box_of(found: Any) -> Box | None:
    if not isinstance(found, Mapping):
        return None
    name = next((found[key] for key in NAMES if found.get(key) is not None), None)
    try:
        x, y, width, height = (float(value) for value in found["bbox"])
    except (KeyError, TypeError, ValueError):
        return None
    # numpy's integers are none of Python's
    if not isinstance(name, str | int | np.integer) or isinstance(name, bool):
        return None
    flag = CROWD if found.get("iscrowd") else DIFFICULT if found.get("difficult") else COUNTED
    return Box(str(name).strip(), x, y, x + width, y + height, flag)
