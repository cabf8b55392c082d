"""Samples: the evaluation rows on which the exported file is worst, boxes of images, residuals of a regression."""

from __future__ import annotations

from collections.abc import Mapping

from onward.trainer.run.records import Record

LEAST_SCORE = 0.25
"""Boxes with a lower score are kept where there are fewer boxes than objects of the labels."""


class ImageBox(Record):
    """An object of the labels, or a box that a file has found in an image."""

    of_class: int
    corners: tuple[float, float, float, float]
    """x1, y1, x2, y2, in shares of the image."""
    score: float | None = None
    """None of an object of the labels."""


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
    image_size: tuple[int, int] = (0, 0)
    """Width and height of that PNG file."""
    objects: tuple[ImageBox, ...] | None = None
    """Of images with boxes: the objects of the labels; None for all other data."""
    before: tuple[ImageBox, ...] = ()
    """What the file that came in has found, the greatest score first."""
    after: tuple[ImageBox, ...] = ()
    """What the exported file has found, likewise."""


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
    ordinary: tuple[Sample, ...] = ()
    """Of images with boxes: some of the others, drawn at random."""
    mean: float = 0.0
    """Of the losses of the rows."""
    counts: tuple[int, ...] = ()
    """Histogram of the losses of the rows."""
    edges: tuple[float, ...] = ()
    """`len(counts) + 1` losses between which they are counted."""
    values: tuple[tuple[float, float], ...] = ()
    """Of a regression with one value for each row: (target, predicted) of the first rows."""
