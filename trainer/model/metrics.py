"""Add up loss and metrics over evaluation batches as exact totals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.metric_names import DEFAULTS
from onward.trainer.model.loss import Loss, Losses


class EvaluationMetrics:
    """`loss`, and the metrics of the task, over all evaluation batches.

    `accuracy` for cross-entropy and BCE; `mse` and `mae` for regression; the loss alone for `output`. Of several
    losses each has its own, as `<output>/loss`, `<output>/accuracy`, ..., and `loss` is their weighted sum. Each is a
    quotient of two sums over targets. The sums stay on the device until `compute`, so that a batch does not wait for
    the one before it.
    """

    def __init__(self, losses: Losses, *, device: torch.device) -> None:
        self._losses = losses
        self._names = [("loss", *DEFAULTS.get(loss.name, ())) for loss in losses.each]
        # of each loss the number of targets (a sum of weights in the loss), then a sum for each name; fp64 counts
        # exactly, and one NaN makes a sum NaN
        self._lengths = [2 + len(names) for names in self._names]
        self._totals = torch.zeros(sum(self._lengths), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> None:
        """Add one batch; labels of each loss. Replicas may add different numbers of batches; collective only over a
        group that shards classes."""
        sums = [
            part
            for loss, own in zip(self._losses.each, labels, strict=True)
            for part in (loss.count(own, size), *_sums(loss, outputs, own, loss(outputs, own, size)))
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
            weight, count, *sums = part.tolist()
            counts = [weight, *[count] * (len(sums) - 1)]
            values = [total / number if number else math.nan for total, number in zip(sums, counts, strict=True)]
            each.append(dict(zip(names, values, strict=True)))
        if len(each) == 1:
            return each[0]
        loss = self._losses.weighted([torch.tensor(values["loss"], dtype=torch.float64) for values in each])
        titled = zip(self._losses.titles, each, strict=True)
        return {"loss": float(loss)} | {f"{title}/{name}": v for title, own in titled for name, v in own.items()}


def _sums(loss: Loss, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, value: Tensor) -> list[Tensor | float]:
    """Return the number of targets of a loss's metrics, the sum of the loss itself, and those of its metrics."""
    if loss.name not in DEFAULTS or labels is None:
        return [0.0, value]
    if loss.name == "cross_entropy":
        found = loss.predicted(outputs, labels).flatten()
        if labels.is_floating_point():
            labels = labels.argmax(loss.axis(outputs, labels))
        labels = labels.flatten()
        counted = labels != loss.ignore_index
        # the ignored label may be a class
        return [counted.sum(), value, ((found == labels) & counted).sum()]
    output = loss.output(outputs)
    target = labels.reshape(output.shape)
    if DEFAULTS[loss.name] == ("accuracy",):
        return [target.numel(), value, ((output > 0) == (target > 0.5)).sum()]
    difference = output - target
    return [target.numel(), value, *(p.sum(dtype=torch.float64) for p in (difference.abs(), difference.square()))]
