"""Open what a configuration computes of each batch; other than computations.py, this may import torch.

The keys of the noise that a graph draws itself are a number for each sample and one for the step:

    training      (seed, position in the stream)     the same sample has other noise in each epoch
    evaluation    (row of the split)                 the same noise in every evaluation, whatever the seed

So they are the same on any number of ranks and after a resume (onnx_import/ops/random.py makes noise of them).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.images.image_batches import ImageBatches
from onward.trainer.data.images.image_inputs import box_column, image_inputs, masks, mixed_labels
from onward.trainer.data.schema.batch_transforms import BatchTransform, Samples
from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.text.masking import open_masking
from onward.trainer.data.text.text_columns import TextColumns, text_columns


def open_batch_transforms(
    config: RunConfig, signature: Signature, fitted: Mapping[str, Fitted]
) -> list[BatchTransform]:
    """Return what computes batches from stored columns, in order. fitted: what was found on the data, by column."""
    data = config.data
    seed = config.train.seed
    text = text_columns(config.data, config.losses, config.model, signature)
    transforms: list[BatchTransform] = []
    images = image_inputs(data, signature)
    if images and data.image is not None:
        labels = masks(data, config.losses, signature)
        boxes = [column] if (column := box_column(data, config.losses)) else []
        mixed = mixed_labels(data, config.losses, signature)
        transforms.append(ImageBatches(data.image, images, seed=seed, masks=labels, boxes=boxes, mixed=mixed))
    of_text = (open_masking(text, fitted, seed=seed), open_block_masks(text))
    return [*transforms, *(transform for transform in of_text if transform)]


def noise_keys(samples: Samples, seed: int) -> Array:
    """Return int64 [B, 2]: the key of each sample, and in each row that of the step."""
    is_training = samples.positions is not None
    numbers = samples.rows if samples.positions is None else samples.positions
    begin = zlib.crc32(f"noise of training {seed}".encode() if is_training else b"noise of evaluation") << 31
    return np.stack([numbers + begin, np.full_like(numbers, samples.step + begin)], axis=1).astype(np.int64)


# -- make the masks of windows that several texts share, each of which attends to itself alone
#
# stored, the number of each token's text      1 1 1 2 2 0       0 = padding
# mask                                         1 1 1 . . .
#                                              1 1 1 . . .       causal: without what is right of the diagonal
#                                              1 1 1 . . .
#                                              . . . 1 1 .
#                                              . . . 1 1 .
#                                              . . . . . 1       padding attends to padding, so that no row is empty


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
