"""Look for tables and for boxes in the outputs of a detector's file: numpy arrays of one image."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from onward.trainer.data.schema.columns import Array
from onward.trainer.export.served.detections import BoxColumns, Table

TOLERANCE = 1e-3
"""Of the corners of boxes, relative to the side of the input."""
LEAST_BOXES = 3
"""Different boxes that the file must compute, for a comparison that shows something."""
MOST_BEFORE = 4
"""Columns that may stand before those of a box, such as the number of its image."""


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
    firsts = range(min(num_columns - 3, MOST_BEFORE))
    for first, in_shares, is_centred in itertools.product(firsts, (False, True), (False, True)):
        yield BoxColumns(first, is_centred=is_centred, in_shares=in_shares)


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
