"""Make the keys of the noise that a graph draws itself: a number for each sample and one for the step.

    training      (seed, position in the stream)     the same sample has other noise in each epoch
    evaluation    (row of the split)                 the same noise in every evaluation, whatever the seed

So they are the same on any number of ranks and after a resume (onnx_import/keyed_noise.py makes noise of them).
"""

from __future__ import annotations

import zlib

import numpy as np

from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.columns import Array


def noise_keys(samples: Samples, seed: int) -> Array:
    """Return int64 [B, 2]: the key of each sample, and in each row that of the step."""
    is_training = samples.positions is not None
    numbers = samples.rows if samples.positions is None else samples.positions
    begin = zlib.crc32(f"noise of training {seed}".encode() if is_training else b"noise of evaluation") << 31
    return np.stack([numbers + begin, np.full_like(numbers, samples.step + begin)], axis=1).astype(np.int64)
