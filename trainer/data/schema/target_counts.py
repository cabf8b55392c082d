"""Count the targets of a micro-batch, divide its labels among the losses, and describe labels that are no classes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.anchor_matches import count_matches
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED
from onward.trainer.data.schema.detection_grids import Cells
from onward.trainer.errors import ConfigError
from onward.trainer.run.allowed_code import load_function

NO_LABELS = (0, 0)
NO_OBJECT_WEIGHT = 0.1
"""Of the class "no object" in set_classes with softmax, as in DETR."""
TargetCounter = Callable[[Tensor | None, int], float | Tensor]
"""(labels [B, ...], B) -> the number of targets that enter the loss of B samples; of several terms a vector."""


def labels_of(losses: Sequence[LossConfig], fed: Iterator[Tensor]) -> list[Tensor | None]:
    """Return the labels of each loss, None where it takes none, from the tensors of their feeds, in order.

    With `loss.input_lengths` they are [B, 1 + L]: the time steps of each row, and its labels.
    """
    found: list[Tensor | None] = []
    for loss in losses:
        labels = next(fed) if loss.takes_labels else None
        if labels is not None and loss.input_lengths:
            labels = torch.cat([next(fed).reshape(-1, 1), labels.reshape(len(labels), -1)], 1)
        found.append(labels)
    return found


def without_lengths(labels: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor | None]:
    """Return labels without the input lengths in front of them, and these lengths [B], None if there are none."""
    return (labels[:, 1:], labels[:, 0]) if loss.input_lengths else (labels, None)


def counted_targets(
    soft: SoftLoss, losses: Sequence[LossConfig], labels: Sequence[Tensor | None], mask: Tensor | None
) -> Tensor | None:
    """Return which targets of a loss against the teacher count, bool [B, ...]; None = all of each sample.

    losses: those against labels, whose `labels` are given. mask: the input that `teacher.mask` names.
    """
    if mask is not None:
        return mask != 0
    own = None if soft.labels_of is None else labels[soft.labels_of]
    if own is None or own.is_floating_point():  # mixed labels (MixUp, CutMix), which leave nothing out
        return None
    assert soft.labels_of is not None
    return torch.ones_like(own, dtype=torch.bool) if soft.unlabelled else own != losses[soft.labels_of].ignored


def target_counter(loss: LossConfig, image: Cells | None = None) -> TargetCounter:
    """Return what counts the targets of a loss: `count_targets`, or the user's function that `loss.count` names.

    image: height and width of the model's input, on which the counts of a loss of several terms depend. Raises
    ConfigError if the file has no such function; so does the counter for what is no number of targets.
    """
    if loss.rule.by_level:
        return functools.partial(count_matches, loss=loss, image=image)
    if not loss.count:
        return functools.partial(count_targets, loss=loss)
    path = Path(loss.named.location)
    name = f"{path}:{loss.count}"
    function = load_function(path, loss.count, "loss.count")

    def count(labels: Tensor | None, size: int) -> float:
        shape = [] if labels is None else list(labels.shape)
        try:
            value = function(labels, size)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(f"loss.count {name} failed on labels {shape}: {type(error).__name__}: {error}") from error
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigError(f"loss.count {name} returned a tensor with a gradient; count the labels, or detach it")
        if isinstance(value, Tensor | np.generic) and value.ndim == 0:
            value = value.item()
        # a bool is an int in Python, but no number of targets
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
            raise ConfigError(f"loss.count {name} returned {what} for labels {shape}, not a number")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"loss.count {name} returned {value} for labels {shape}; it must be 0 or more")
        return float(value)

    return count


def batch_counter(
    losses: Sequence[LossConfig], image: Cells | None
) -> Callable[[Sequence[Tensor | None], int], list[float]]:
    """Return what counts the targets of each term of all losses: (labels of each loss, B) -> numbers. image: see
    `target_counter`, whose errors it raises."""
    counters = [target_counter(loss, image) for loss in losses]

    def count(labels: Sequence[Tensor | None], size: int) -> list[float]:
        numbers: list[float] = []
        for counter, own in zip(counters, labels, strict=True):
            numbers += numbers_of(counter(own, size))
        return numbers

    return count


def numbers_of(count: float | Tensor) -> list[float]:
    """Return the numbers of targets of each term of a loss, from what `target_counter` has counted."""
    return count.double().flatten().tolist() if isinstance(count, Tensor) else [float(count)]


def count_targets(labels: Tensor | None, size: int, loss: LossConfig) -> float | Tensor:
    """Return the number of targets that enter the loss of `size` samples; with class weights, the sum of theirs.

    labels: [size, ...]. The number is a tensor on their device where it depends on their values: reading it is left to
    the caller.
    """
    rule = loss.rule
    if labels is None or not loss.takes_labels:
        return size
    # of a loss that counts its own divisor this only says that there is something to train on
    if rule.by_sample or rule.own_divisor:
        return size
    if rule.labels == "boxes":
        return labels.numel() // 4
    if rule.labels == "objects":
        return _counted_objects(labels, size, loss)
    if rule.labels == "quantiles":
        return labels.numel() * len(loss.quantiles)
    if rule.labels != "classes":
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


def _counted_objects(labels: Tensor, size: int, loss: LossConfig) -> Tensor:
    """Return the objects that are trained on; of set_classes with softmax the weights of all queries."""
    boxes = labels.reshape(len(labels), -1, BOX_NUMBERS)
    counted = ((boxes[..., 0] >= 0) & (boxes[..., 5] == COUNTED)).sum(1, dtype=torch.float64)
    if loss.name != "set_classes" or loss.scores != "softmax":
        return counted.sum()
    assert loss.num_queries, "the file says it, or the configuration"
    # of more objects than queries some have none
    assigned = counted.clamp(max=loss.num_queries).sum()
    return assigned + NO_OBJECT_WEIGHT * (size * loss.num_queries - assigned)


def soft_axis(loss: LossConfig, rank: int) -> int:
    """Return the axis of the classes of labels that are probabilities. Raises ConfigError if it is not known."""
    if loss.class_axis is None and rank > 2:
        raise ConfigError(
            f"labels of {rank} axes that are probabilities have the shape of the output, which does not say where the "
            "classes are; set loss.class_axis"
        )
    return (-1 if loss.class_axis is None else loss.class_axis) % rank


def label_range(labels: Tensor | None, loss: LossConfig) -> tuple[int, int]:
    """Return the least and the greatest class among the labels [B, ...] of a loss; both 0 if none counts."""
    if not loss.has_classes or labels is None or labels.is_floating_point():
        return NO_LABELS
    labels, _ = without_lengths(labels, loss)
    counted = labels[labels != loss.ignored]
    return (int(counted.min()), int(counted.max())) if counted.numel() else NO_LABELS
