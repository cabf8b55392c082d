"""Make the masks of windows that several texts share, each of which attends to itself alone.

stored, the number of each token's text      1 1 1 2 2 0       0 = padding
mask                                         1 1 1 . . .
                                             1 1 1 . . .       causal: without what is right of the diagonal
                                             1 1 1 . . .
                                             . . . 1 1 .
                                             . . . 1 1 .
                                             . . . . . 1       padding attends to padding, so that no row is empty
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.data.text.text_columns import TextColumns


@dataclass(frozen=True)
class BlockMasks:
    """Replaces the numbers of texts [B, L] by masks [B, L, L] or [B, 1, L, L]: a BatchTransform."""

    name: str
    has_heads: bool
    """Whether the input has an axis of heads."""
    is_causal: bool

    def __call__(self, values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        """Return all columns, the mask as bool."""
        texts: Array = np.asarray(values[self.name])
        mask = texts[:, :, None] == texts[:, None, :]
        if self.is_causal:
            mask = np.tril(mask)
        return {**values, self.name: mask[:, None] if self.has_heads else mask}


def open_block_masks(columns: TextColumns | None) -> BlockMasks | None:
    """Return what makes masks; None where texts do not share windows, or are not kept apart."""
    if columns is None or columns.block_mask is None:
        return None
    info = columns.block_mask
    return BlockMasks(info.name, len(info.shape or ()) == 4, columns.config.task == "causal")
