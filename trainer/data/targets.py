"""Count the targets of a micro-batch, and describe labels that are no classes."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import ConfigError

NO_LABELS = (0, 0)


def count_targets(labels: Tensor | None, size: int, loss: LossConfig) -> float | Tensor:
    """Return the number of targets that enter the loss of `size` samples; with class weights, the sum of theirs.

    A tensor on the device of the labels, where it depends on their values: reading it is left to the caller.
    """
    if labels is None or not loss.takes_labels or loss.name in ("dice", "ctc", "cosine", "file"):  # means over samples
        return size
    if loss.name == "giou":
        return labels.numel() // 4
    if loss.name == "quantile":
        return labels.numel() * len(loss.quantiles)
    if loss.name != "cross_entropy":
        return labels.numel()
    if labels.is_floating_point():  # probabilities: as many targets as there are rows of them
        return labels.numel() // labels.shape[soft_axis(loss, labels.ndim)]
    counted = labels != loss.ignored
    if not loss.class_weights:
        return counted.sum()
    assert loss.class_weights != "balanced", "balanced_weights comes first"
    weights = torch.tensor(loss.class_weights, device=labels.device)
    known = counted & (labels >= 0) & (labels < len(weights))  # `check_labels` refuses the others
    return torch.where(known, weights[torch.where(known, labels, 0)], 0.0).sum(dtype=torch.float64)


def soft_axis(loss: LossConfig, rank: int) -> int:
    """Return the axis of the classes of labels that are probabilities. Raises ConfigError if it is not known."""
    if loss.class_axis is None and rank > 2:
        raise ConfigError(
            f"labels of {rank} axes that are probabilities have the shape of the output, which does not say where the "
            "classes are; set loss.class_axis"
        )
    return (-1 if loss.class_axis is None else loss.class_axis) % rank


def label_range(labels: Tensor | None, loss: LossConfig) -> tuple[int, int]:
    """Return the least and the greatest class among the labels of a loss that has classes, both 0 if there are none."""
    if not loss.has_classes or labels is None or labels.is_floating_point():
        return NO_LABELS
    counted = labels[labels != loss.ignored]
    return (int(counted.min()), int(counted.max())) if counted.numel() else NO_LABELS
