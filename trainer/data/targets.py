"""Count the targets of a micro-batch, and describe labels that are no classes."""

from __future__ import annotations

from torch import Tensor

from onward.trainer.config.sections import ModelConfig

NO_LABELS = (0, 0)


def count_targets(labels: Tensor | None, size: int, model: ModelConfig) -> int | Tensor:
    """Return the number of targets that enter the loss of `size` samples.

    A tensor on the device of the labels, where it depends on their values: reading it is left to the caller.
    """
    if model.loss == "output" or labels is None:
        return size
    if model.loss == "cross_entropy":
        return (labels != model.ignore_index).sum()
    return labels.numel()


def label_range(labels: Tensor | None, model: ModelConfig) -> tuple[int, int]:
    """Return the least and the greatest class among the labels of a cross-entropy, both 0 if there are none."""
    if model.loss != "cross_entropy" or labels is None:
        return NO_LABELS
    counted = labels[labels != model.ignore_index]
    return (int(counted.min()), int(counted.max())) if counted.numel() else NO_LABELS
