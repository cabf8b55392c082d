"""Match the objects of labels with cells and anchors of a grid, by the ratio of their sides (YOLOv5).

    anchor    matches an object if neither side is 4 times as long as that of the other, or more
    cells     the one with the object's centre, and those beside it whose border is nearer than half a cell:

                  +-------+-------+
                  |       | left  |        x 0.7, y 0.3 of the cell: the cell to the right and the cell above
                  +-------+-------+
                  |  own  | right |
                  +-------+-------+

The matches depend on labels, anchors and the size of the input, and on no output. So the host counts them before the
forward pass, as the numbers of targets of every other loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED, NO_CLASS
from onward.trainer.data.schema.detection_grids import Cells, grids_of, size_of
from onward.trainer.errors import ConfigError

LEAST_RATIO = 4.0
"""Of two sides, from which an anchor does not match."""
SHIFTS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))
"""From the cell of the centre to those that may match, x and y."""


class Matches(NamedTuple):
    """The pairs of one level that may match: N = objects x anchors x 5 cells in each image."""

    is_match: Tensor
    """bool [B, N]"""
    rows: Tensor
    """The row of the cell and anchor in the table of all levels (dense_heads/head.py), int64 [B, N]."""
    objects: Tensor
    """The place of the object among those of the image, int64 [N]."""


def objects_of(labels: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the objects of labels [B, M x 6]: classes int64 [B, M], corners in pixels [B, M, 4], and which of them are
    trained on, bool [B, M]; M is at least 1. size: width and height of the model's input [2]."""
    found = labels.reshape(labels.shape[0], -1, BOX_NUMBERS)
    if not found.shape[1]:
        found = torch.full((labels.shape[0], 1, BOX_NUMBERS), NO_CLASS, device=labels.device)
    is_trained = (found[..., 0] >= 0) & (found[..., 5] == COUNTED)
    corners = found[..., 1:5].to(size.dtype) * size.repeat(2)
    return torch.where(is_trained, found[..., 0], 0.0).long(), corners * is_trained[..., None], is_trained


@torch.no_grad()
def anchor_matches(corners: Tensor, is_trained: Tensor, loss: LossConfig, levels: Sequence[Cells]) -> Iterator[Matches]:
    """Yield the matches of each level. corners, is_trained: of `objects_of`; levels: in the order of the strides."""
    first_row = 0
    for (height, width), stride, sides in zip(levels, loss.strides, loss.anchors, strict=True):
        anchors = corners.new_tensor(sides)
        ratios = (corners[..., 2:] - corners[..., :2])[:, :, None] / anchors
        fits = torch.maximum(ratios, 1 / ratios).amax(-1) < LEAST_RATIO
        cells, is_beside = _cells(corners, stride, corners.new_tensor([width - 1, height - 1]))
        # [B, M, anchors, 5]
        is_match = (fits & is_trained[..., None])[..., None] & is_beside[:, :, None]
        rows = (cells[..., 1] * width + cells[..., 0])[:, :, None] * len(sides)
        rows = rows.long() + torch.arange(len(sides), device=rows.device)[:, None] + first_row
        objects = torch.arange(corners.shape[1], device=rows.device).repeat_interleave(len(sides) * len(SHIFTS))
        yield Matches(is_match.flatten(1), rows.flatten(1), objects)
        first_row += height * width * len(sides)


def _cells(corners: Tensor, stride: float, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the five cells of each object, x and y [B, M, 5, 2], and which of them match, bool [B, M, 5].

    last: x and y of the last cell. A cell outside of the grid does not match, and the nearest one stands for it.
    """
    centres = (corners[..., :2] + corners[..., 2:]) / 2 / stride
    # a centre on the border of the image belongs to the last cell
    own = torch.minimum(centres.floor(), last).clamp(min=0)
    shifts = corners.new_tensor(SHIFTS)
    # on the side of the shift: both are below the middle, or both above it; a shift of 0 has no side
    from_middle = (centres - own - 0.5)[..., None, :] * shifts
    cells = own[..., None, :] + shifts
    inside = torch.minimum(cells, last).clamp(min=0)
    is_beside = ((from_middle > 0) | (shifts == 0)) & (inside == cells)
    return inside, is_beside.all(-1)


def count_matches(labels: Tensor | None, size: int, loss: LossConfig, image: Cells | None) -> Tensor:
    """Return the images, then the matches of each level: [1 + levels], by which the terms of the loss are divided.

    labels: [size, objects x 6]. image: height and width of the model's input. Raises ConfigError without these.
    """
    if image is None or labels is None:
        raise ConfigError(f"loss {loss.name!r} reads boxes of images; feed the model's input with data.image")
    levels = grids_of(image, loss.strides)
    height, width = size_of(levels, loss.strides)
    _, corners, is_trained = objects_of(labels, torch.tensor([width, height]))
    counts = [matches.is_match.sum() for matches in anchor_matches(corners, is_trained, loss, levels)]
    return torch.stack([torch.tensor(size), *counts])
