"""Add up loss and metrics over evaluation batches as exact totals (torchmetrics)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.model.loss import Loss
from onward.trainer.onnx_import.torchvision_import import import_torchvision

if TYPE_CHECKING:
    from torchmetrics import Metric


class EvaluationMetrics:
    """`loss`, and the metrics of the task, over all evaluation batches.

    `accuracy` for cross-entropy and BCE; `mse` and `mae` for regression; the loss alone for `output`.
    """

    def __init__(self, loss: Loss, *, ignore_index: int, device: torch.device) -> None:
        # imported here, because torchmetrics takes as long to import as torch and few processes evaluate
        import_torchvision()
        from torchmetrics import SumMetric
        from torchmetrics.classification import BinaryAccuracy
        from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

        self._loss = loss
        self._ignore_index = ignore_index
        self._num_classes = 0
        # two sums instead of torchmetrics' mean, which would leave out a batch with a NaN: one NaN makes the loss NaN
        self._totals = [SumMetric(nan_strategy="disable").set_dtype(torch.float64).to(device) for _ in range(2)]
        self._metrics: dict[str, Metric] = {}
        if loss.name == "bce_with_logits":
            self._metrics["accuracy"] = BinaryAccuracy()
        elif loss.name in ("mse", "l1"):
            self._metrics = {"mse": MeanSquaredError(), "mae": MeanAbsoluteError()}
        self._device = device
        for metric in self._metrics.values():
            metric.to(device)

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None:
        """Add one batch. Replicas may add different numbers of batches; collective only over a group that shards
        classes."""
        for total, value in zip(
            self._totals, (self._loss(outputs, labels, size), self._loss.count(labels, size)), strict=True
        ):
            total.update(value)
        if labels is None or self._loss.name == "output":
            return
        if self._loss.name == "cross_entropy":
            # only now: the number of classes is known from the first outputs
            self._make_accuracy(self._loss.num_classes(outputs))
            self._metrics["accuracy"].update(self._loss.predicted(outputs).flatten(), labels.flatten())
            return
        output = self._loss.output(outputs)
        target = labels.reshape(output.shape)
        for name in self._metrics:
            if name == "accuracy":  # thresholds are applied here: torchmetrics takes logits in [0, 1] as probabilities
                self._metrics[name].update((output > 0).int(), (target > 0.5).int())
            else:
                self._metrics[name].update(output, target.float())

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches of all ranks. Collective: every rank of the default group."""
        if dist.is_initialized():
            # a rank without a batch does not know the number of classes, but must take part in the reduction
            num_classes = torch.tensor(self._num_classes, device=self._device)
            dist.all_reduce(num_classes, dist.ReduceOp.MAX)
            self._make_accuracy(int(num_classes))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*``compute`` method of metric.*before the ``update``")
            total, count = (float(metric.compute()) for metric in self._totals)
            values = {name: float(metric.compute()) for name, metric in sorted(self._metrics.items())}
        return {"loss": total / count if count else math.nan, **values}

    def _make_accuracy(self, num_classes: int) -> None:
        if num_classes and not self._num_classes:
            from torchmetrics.classification import MulticlassAccuracy

            self._num_classes = num_classes
            metric = MulticlassAccuracy(num_classes, average="micro", ignore_index=self._ignore_index)
            self._metrics["accuracy"] = metric.to(self._device)
