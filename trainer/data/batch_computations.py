"""Open what a configuration computes of each batch; other than computations.py, this may import torch."""

from __future__ import annotations

from collections.abc import Mapping

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batch_transforms import BatchTransform
from onward.trainer.data.fitted import Fitted
from onward.trainer.data.signature import Signature
from onward.trainer.data.text.masking import open_masking


def open_batch_transforms(
    config: RunConfig, signature: Signature, fitted: Mapping[str, Fitted]
) -> list[BatchTransform]:
    """Return what computes batches from stored columns, in order. fitted: what was found on the data, by column."""
    masking = open_masking(config, signature, fitted)
    return [masking] if masking else []
