"""Read tables out of the outputs of a detector's file, and boxes out of their columns: numpy arrays of one image.

output [1, 84, 8400]    transposed: a table of 8400 rows, boxes in the columns 0..3, scores in the columns 4..83
output [1, 300, 6]      as it is: 300 rows, boxes in the columns 0..3
output [300]            transposed: 300 rows of one column
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onward.trainer.data.schema.columns import Array

TOLERANCE = 1e-3
"""Of the corners of boxes, relative to the side of the input."""
LEAST_BOXES = 3
"""Different boxes that the file must compute, for a comparison that shows something."""
MOST_BEFORE = 4
"""Columns that may stand before those of a box, such as the number of its image."""


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


def tables(results: Sequence[Array]) -> Iterator[Table]:
    """Yield each output of numbers as a table, as it is and transposed."""
    for place, result in enumerate(results):
        # sequences and optional results are no tables
        if isinstance(result, np.ndarray) and result.ndim and np.issubdtype(result.dtype, np.number):
            yield Table(place, is_transposed=False)
            yield Table(place, is_transposed=True)


def box_tables(results: Sequence[Array]) -> Iterator[Table]:
    """Yield each table that may hold boxes: those of floating numbers, of outputs with more than one axis."""
    for table in tables(results):
        result = results[table.output]
        if np.issubdtype(result.dtype, np.floating) and result.ndim > 1:
            yield table


def box_columns(num_columns: int) -> Iterator[BoxColumns]:
    """Yield each way in which a table of so many columns may hold boxes."""
    # boxes stand at the beginning of a row, behind the number of the image at most
    for first in range(min(num_columns - 3, MOST_BEFORE)):
        for in_shares in (False, True):
            yield BoxColumns(first, is_centred=False, in_shares=in_shares)
            yield BoxColumns(first, is_centred=True, in_shares=in_shares)


def distinct_boxes(boxes: Array) -> Array:
    """Return the different ones of boxes [n, 4]; none if they show nothing, being too few or not finite."""
    # equal boxes, such as empty ones, show nothing
    distinct = np.unique(boxes.round(3), axis=0)
    if len(distinct) < LEAST_BOXES or not np.isfinite(distinct).all():
        return distinct[:0]
    return distinct


def same_boxes(boxes: Array, decoded: Array, size: tuple[int, int]) -> Array:
    """Return which of the decoded boxes [m, 4] each box [n, 4] is, or is within the image: bool [n, m]."""
    sides = np.array([*size, *size], np.float32)
    found = np.zeros((len(boxes), len(decoded)), bool)
    # many files cut boxes off at the border of the image
    for known in (decoded, decoded.clip(0, sides)):
        is_same = np.ones_like(found)
        # numpy's maximum over an axis of four takes ten times as long
        for own, other in zip(boxes.T, known.T, strict=True):
            is_same &= np.abs(own[:, None] - other) < TOLERANCE * max(size)
        found |= is_same
    return found
