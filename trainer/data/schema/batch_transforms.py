"""What is computed of the stored columns each time a batch is made: decoding, augmentation, standardisation, masking.

Shards hold what does not change from epoch to epoch; a transform computes what does, or what would be too large to
store. Everything random in it is a function of the seed and the sample's position in the stream (permutation.py), never
of the rank, the micro-batch or the thread that computes it. So a run on any number of ranks, killed and resumed at any
step, reads the same bits:

    position in the stream     0     1     2     3          epoch 0
    row of the split           7     2     5     0          permutation.py
    stored columns           bytes bytes bytes bytes        shards.py
    transform                f(7,0) f(2,1) f(5,2) f(0,3)    this; in evaluation f(row, no position)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from onward.trainer.data.schema.columns import Array, Values

ReadPositions = Callable[[Array], dict[str, Values]]


@dataclass(frozen=True)
class Samples:
    """Which samples a micro-batch of B samples holds."""

    rows: Array
    """int64 [B]: the numbers of the rows in the split."""
    positions: Array | None = None
    """int64 [B]: positions in the stream of training samples; None where nothing random may happen: in evaluation, and
    where the trained file is compared with the module."""
    read: ReadPositions | None = None
    """Returns the stored columns of other positions of the stream, such as the partners of mixed samples; None where
    `positions` is."""
    step: int = 0
    """The first position of the step."""
    plain_from: int | None = None
    """The position from which on samples are not put together, by mosaics, MixUp or CutMix; None = all may be."""


class BatchTransform(Protocol):
    """Computes columns of a micro-batch from its stored columns."""

    def __call__(self, values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        """Return all columns, those that are computed in place of the stored ones."""
        ...
