"""Count the targets of a micro-batch, and describe labels that are no classes."""

from __future__ import annotations

from torch import Tensor

from onward.trainer.config.losses import LossConfig

NO_LABELS = (0, 0)


def count_targets(labels: Tensor | None, size: int, loss: LossConfig) -> int | Tensor:
    """Return the number of targets that enter the loss of `size` samples.

    A tensor on the device of the labels, where it depends on their values: reading it is left to the caller.
    """
    if not loss.takes_labels or labels is None:
        return size
    if loss.has_classes:
        return (labels != loss.ignored).sum()
    return labels.numel()


def label_range(labels: Tensor | None, loss: LossConfig) -> tuple[int, int]:
    """Return the least and the greatest class among the labels of a cross-entropy, both 0 if there are none."""
    if not loss.has_classes or labels is None:
        return NO_LABELS
    counted = labels[labels != loss.ignored]
    return (int(counted.min()), int(counted.max())) if counted.numel() else NO_LABELS
