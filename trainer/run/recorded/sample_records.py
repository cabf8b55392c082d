"""Samples: the evaluation rows on which the exported file is worst, and the residuals of a regression."""

from __future__ import annotations

from collections.abc import Mapping

from onward.trainer.run.records import Record


class Sample(Record):
    """One row of the evaluation data, and how the exported file does on it."""

    row: int
    """Its number in the split."""
    where: str = ""
    """Its place in the source, such as a file or a line; "" if it is not known."""
    loss: float
    """The mean over its targets; of several losses their weighted sum."""
    target: float | None = None
    """The class or the value that it has, if it has one target only."""
    predicted: float | None = None
    """The class or the value that the file gives."""
    num_targets: int = 0
    num_right: int | None = None
    """Of classes: targets that the file finds."""
    inputs: Mapping[str, str] = {}
    """Input or column of the data -> its value as text, shortened."""
    image: str = ""
    """Its image in the size in which the model reads it: a PNG file in base64; "" without an image."""


class Samples(Record):
    """What is known of the evaluation rows one by one."""

    judged_by: str
    """The runtime that computed the outputs."""
    num_rows: int
    """Rows whose loss is known, the first of the split."""
    of_rows: int
    """Rows of the split."""
    why_not_all: str = ""
    """Why the losses of the others are not known; "" if all are."""
    worst: tuple[Sample, ...] = ()
    """Those with the greatest loss, the greatest first."""
    mean: float = 0.0
    """Of the losses of the rows."""
    counts: tuple[int, ...] = ()
    """Histogram of the losses of the rows."""
    edges: tuple[float, ...] = ()
    """`len(counts) + 1` losses between which they are counted."""
    values: tuple[tuple[float, float], ...] = ()
    """Of a regression with one value for each row: (target, predicted) of the first rows."""
