"""Add up loss and metrics over evaluation batches as exact totals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.model.loss import Loss, Losses

METRICS = {
    "cross_entropy": ("accuracy",),
    "bce_with_logits": ("accuracy",),
    "mse": ("mae", "mse"),
    "l1": ("mae", "mse"),
}
"""Loss -> the names of its metrics."""


class EvaluationMetrics:
    """`loss`, and the metrics of the task, over all evaluation batches.

    `accuracy` for cross-entropy and BCE; `mse` and `mae` for regression; the loss alone for `output`. Of several
    losses each has its own, as `<output>/loss`, `<output>/accuracy`, ..., and `loss` is their weighted sum. Each is a
    quotient of two sums over targets. The sums stay on the device until `compute`, so that a batch does not wait for
    the one before it.
    """

    def __init__(self, losses: Losses, *, device: torch.device) -> None:
        self._losses = losses
        self._names = [("loss", *METRICS.get(loss.name, ())) for loss in losses.each]
        # of each loss the number of targets, then a sum for each name; fp64 counts exactly, and one NaN makes a sum NaN
        self._lengths = [1 + len(names) for names in self._names]
        self._totals = torch.zeros(sum(self._lengths), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> None:
        """Add one batch; labels of each loss. Replicas may add different numbers of batches; collective only over a
        group that shards classes."""
        sums = [
            part
            for loss, own in zip(self._losses.each, labels, strict=True)
            for part in (loss.count(own, size), loss(outputs, own, size), *_sums(loss, outputs, own))
        ]
        for total, value in zip(self._totals, sums, strict=True):
            total.add_(value)

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches of all ranks. Collective: every rank of the default group."""
        totals = self._totals
        if dist.is_initialized():
            totals = totals.clone()
            dist.all_reduce(totals)
        each = []
        for names, part in zip(self._names, torch.split(totals, self._lengths), strict=True):
            count, *sums = part.tolist()
            values = [total / count if count else math.nan for total in sums]
            each.append(dict(zip(names, values, strict=True)))
        if len(each) == 1:
            return each[0]
        loss = self._losses.weighted([torch.tensor(values["loss"], dtype=torch.float64) for values in each])
        titled = zip(self._losses.titles, each, strict=True)
        return {"loss": float(loss)} | {f"{title}/{name}": v for title, own in titled for name, v in own.items()}


def _sums(loss: Loss, outputs: Tensor | Sequence[Tensor], labels: Tensor | None) -> list[Tensor]:
    """Return the sums of a loss's metrics besides the loss itself."""
    if loss.name not in METRICS or labels is None:
        return []
    if loss.name == "cross_entropy":
        labels = labels.flatten()
        right = loss.predicted(outputs).flatten() == labels
        # the ignored label may be a class
        return [(right & (labels != loss.ignore_index)).sum()]
    output = loss.output(outputs)
    target = labels.reshape(output.shape)
    if loss.name == "bce_with_logits":
        return [((output > 0) == (target > 0.5)).sum()]
    difference = output - target
    return [part.sum(dtype=torch.float64) for part in (difference.abs(), difference.square())]
