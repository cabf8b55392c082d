"""Add up loss and metrics over evaluation batches as exact totals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.model.loss import Loss

METRICS = {
    "cross_entropy": ("accuracy",),
    "bce_with_logits": ("accuracy",),
    "mse": ("mae", "mse"),
    "l1": ("mae", "mse"),
}
"""Loss -> the names of its metrics."""


class EvaluationMetrics:
    """`loss`, and the metrics of the task, over all evaluation batches.

    `accuracy` for cross-entropy and BCE; `mse` and `mae` for regression; the loss alone for `output`.
    Each is a quotient of two sums over targets. The sums stay on the device until `compute`, so that a batch does not
    wait for the one before it.
    """

    def __init__(self, loss: Loss, *, ignore_index: int, device: torch.device) -> None:
        self._loss = loss
        self._ignore_index = ignore_index
        self._names = ("loss", *METRICS.get(loss.name, ()))
        # the number of targets, then a sum for each name; fp64 counts exactly, and one NaN makes a sum NaN
        self._totals = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None:
        """Add one batch. Replicas may add different numbers of batches; collective only over a group that shards
        classes."""
        sums = [self._loss.count(labels, size), self._loss(outputs, labels, size), *self._sums(outputs, labels)]
        for total, value in zip(self._totals, sums, strict=True):
            total.add_(value)

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches of all ranks. Collective: every rank of the default group."""
        totals = self._totals
        if dist.is_initialized():
            totals = totals.clone()
            dist.all_reduce(totals)
        count, *sums = totals.tolist()
        return {name: total / count if count else math.nan for name, total in zip(self._names, sums, strict=True)}

    def _sums(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None) -> list[Tensor]:
        """Return the sums of the metrics besides the loss."""
        if len(self._names) == 1 or labels is None:
            return []
        if self._loss.name == "cross_entropy":
            labels = labels.flatten()
            right = self._loss.predicted(outputs).flatten() == labels
            # the ignored label may be a class
            return [(right & (labels != self._ignore_index)).sum()]
        output = self._loss.output(outputs)
        target = labels.reshape(output.shape)
        if self._loss.name == "bce_with_logits":
            return [((output > 0) == (target > 0.5)).sum()]
        difference = output - target
        return [part.sum(dtype=torch.float64) for part in (difference.abs(), difference.square())]
