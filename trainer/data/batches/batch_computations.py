"""Open what a configuration computes of each batch; other than computations.py, this may import torch."""

from __future__ import annotations

from collections.abc import Mapping

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.images.image_batches import ImageBatches
from onward.trainer.data.images.image_inputs import image_inputs, masks, mixed_labels
from onward.trainer.data.schema.batch_transforms import BatchTransform
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.text.block_masks import open_block_masks
from onward.trainer.data.text.masking import open_masking


def open_batch_transforms(
    config: RunConfig, signature: Signature, fitted: Mapping[str, Fitted]
) -> list[BatchTransform]:
    """Return what computes batches from stored columns, in order. fitted: what was found on the data, by column."""
    opened = (
        open_image_batches(config, signature),
        open_masking(config, signature, fitted),
        open_block_masks(config, signature),
    )
    return [transform for transform in opened if transform]


def open_image_batches(config: RunConfig, signature: Signature) -> ImageBatches | None:
    """Return what makes tensors of images; None without [data.image]."""
    images = image_inputs(config.data, signature)
    if not images or config.data.image is None:
        return None
    return ImageBatches(
        config.data.image,
        images,
        seed=config.train.seed,
        masks=masks(config, signature),
        mixed=mixed_labels(config, signature),
    )
