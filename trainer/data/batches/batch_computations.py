"""Open what a configuration computes of each batch; other than computations.py, this may import torch.

The keys of the noise that a graph draws itself are a number for each sample and one for the step:

    training      (seed, position in the stream)     the same sample has other noise in each epoch
    evaluation    (row of the split)                 the same noise in every evaluation, whatever the seed

So they are the same on any number of ranks and after a resume (onnx_import/keyed_noise.py makes noise of them).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.images.image_batches import ImageBatches
from onward.trainer.data.images.image_inputs import box_column, image_inputs, masks, mixed_labels
from onward.trainer.data.schema.batch_transforms import BatchTransform, Samples
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.text.block_masks import open_block_masks
from onward.trainer.data.text.masking import open_masking
from onward.trainer.data.text.text_columns import text_columns


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
