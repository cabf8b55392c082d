"""Open what a configuration computes of each batch; other than computations.py, this may import torch."""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batch_transforms import BatchTransform
from onward.trainer.data.signature import Signature


def open_batch_transforms(config: RunConfig, signature: Signature) -> list[BatchTransform]:
    """Return what computes batches from stored columns, in order."""
    return []
