"""The grids of a detector: how many cells an image has at each level, and which size of images levels belong to.

image of 300 pixels     stride 8      38 cells of 304 pixels     the last cell reaches beyond the image
                        stride 100     3 cells of 300 pixels     which ends with the image: this is its size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onward.trainer.config.losses import LossConfig

LARGEST_ERROR = 1e-4
"""Of a side, by the rounding of strides."""
Cells = tuple[int, int]
"""Height and width of a level, in cells, or of an input, in pixels."""


def grids_of(image: Cells, strides: Sequence[float]) -> list[Cells]:
    """Return the levels of an input of this height and width."""
    # a convolution with a stride makes as many cells, also where it does not divide the image; the quotient is rounded
    # because strides may be the sides divided by the cells
    return [(math.ceil(round(image[0] / stride, 6)), math.ceil(round(image[1] / stride, 6))) for stride in strides]


def size_of(levels: Sequence[Cells], strides: Sequence[float]) -> tuple[float, float]:
    """Return height and width of the input of levels, as far as they say it: the last cells of most may reach beyond
    it, and those of one at least end with it (`size_problems`)."""
    pairs = list(zip(levels, strides, strict=True))
    return min(height * stride for (height, _), stride in pairs), min(width * stride for (_, width), stride in pairs)


def size_problems(loss: LossConfig, image: Cells) -> Iterator[str]:
    """Yield what is wrong with the height and width of images of which no grid of a loss ends with a side."""
    least = min(loss.strides)
    for side, found in zip(image, size_of(grids_of(image, loss.strides), loss.strides), strict=True):
        if found - side > LARGEST_ERROR * side:
            below = side // least * least
            yield (
                f"loss {loss.name}: no grid of loss.strides {list(loss.strides)} ends with the {side} pixels of an "
                f"image, so that boxes would be {found / side - 1:.1%} too large; set data.image.size to multiples of "
                f"{least:g}, such as {below:g} or {below + least:g}"
            )
