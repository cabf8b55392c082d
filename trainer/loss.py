"""What is minimised and what is reported: losses as sums over targets, metrics as exact totals.

A loss here is a *sum* over its targets beside their *count*, never a mean: the mean over a whole step
is the sum over all replicas and micro-batches divided by the count over all of them, which no mean of
means equals once a label is ignored or a batch is ragged. Two replicas equal one with twice the batch
because of this.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.vision import import_torchvision

if TYPE_CHECKING:
    from torchmetrics import Metric


class Batch(Protocol):
    """What a loss is taken over: the graph's inputs in order, the labels, and the number of samples."""

    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def labels(self) -> Tensor | None: ...
    @property
    def size(self) -> int: ...


class Totals(Protocol):
    """Who adds up an evaluation: `Evaluation` below."""

    def update(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None: ...
    def compute(self) -> dict[str, float]: ...


def _cross_entropy(output: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # classes are on the last axis of the output, [..., C] against [...]
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")


def _elementwise(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    def total(output: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        # [B] against [B, 1] must not broadcast to [B, B]
        return function(output, labels.reshape(output.shape).to(output.dtype), reduction="sum")

    return total


LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "bce_with_logits": _elementwise(F.binary_cross_entropy_with_logits),
}


class Loss:
    """The configured loss over the outputs of one micro-batch.

    `output_names`: the graph's outputs in order. Raises ConfigError for an unknown `model.output`.
    """

    def __init__(self, config: ModelConfig, output_names: Sequence[str]) -> None:
        if config.output and config.output not in output_names:
            raise ConfigError(f"model.output {config.output!r} is no output of the graph: {', '.join(output_names)}")
        self._index = list(output_names).index(config.output) if config.output else 0
        self._ignore_index = config.ignore_index
        self.name = config.loss

    def output(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """The output that the loss reads, in fp32 whatever the compute type."""
        return (outputs if isinstance(outputs, Tensor) else outputs[self._index]).float()

    def count(self, labels: Tensor | None, size: int) -> int:
        """Targets that count in a micro-batch of `size` samples; known before the forward pass."""
        if self.name == "output" or labels is None:
            return size
        if self.name == "cross_entropy":
            return int((labels != self._ignore_index).sum())
        return labels.numel()

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """The loss summed over the targets that count: a scalar, differentiable."""
        output = self.output(outputs)
        if self.name == "output" or labels is None:
            return output.mean() * size  # the graph's own loss is a mean over its batch
        return LOSSES[self.name](output, labels, self._ignore_index)


class Evaluation:
    """Totals over evaluation batches: `loss`, and what the task is judged by (torchmetrics).

    `accuracy` for cross-entropy and BCE, `mse` and `mae` for regression, the loss alone for `output`.
    """

    def __init__(self, loss: Loss, *, ignore_index: int, device: torch.device) -> None:
        # imported here: it takes as long as torch itself, and not every rank program evaluates
        import_torchvision()
        from torchmetrics import SumMetric
        from torchmetrics.classification import BinaryAccuracy
        from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

        self._loss = loss
        self._ignore_index = ignore_index
        self._num_classes = 0
        # sums, so that one NaN makes the total NaN: a mean of torchmetrics would leave the batch out
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
        """Add one batch. Not collective: ranks may have different numbers of batches."""
        output = self._loss.output(outputs)
        for total, value in zip(
            self._totals, (self._loss(outputs, labels, size), self._loss.count(labels, size)), strict=True
        ):
            total.update(value)
        if labels is None or self._loss.name == "output":
            return
        if self._loss.name == "cross_entropy":
            self._classes(output.shape[-1])
            self._metrics["accuracy"].update(output.flatten(0, -2), labels.flatten())
            return
        target = labels.reshape(output.shape)
        for name in self._metrics:
            if name == "accuracy":  # decided here: torchmetrics takes logits within [0, 1] for probabilities
                self._metrics[name].update((output > 0).int(), (target > 0.5).int())
            else:
                self._metrics[name].update(output, target.float())

    def compute(self) -> dict[str, float]:
        """Exact totals over all batches of all ranks. Collective: every rank of the default group."""
        if dist.is_initialized():  # a rank without a batch has not seen the width, but must take part
            width = torch.tensor(self._num_classes, device=self._device)
            dist.all_reduce(width, dist.ReduceOp.MAX)
            self._classes(int(width))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*``compute`` method of metric.*before the ``update``")
            total, count = (float(metric.compute()) for metric in self._totals)
            values = {name: float(metric.compute()) for name, metric in sorted(self._metrics.items())}
        return {"loss": total / count if count else math.nan, **values}

    def _classes(self, num_classes: int) -> None:
        if num_classes and not self._num_classes:
            from torchmetrics.classification import MulticlassAccuracy

            self._num_classes = num_classes
            metric = MulticlassAccuracy(num_classes, average="micro", ignore_index=self._ignore_index)
            self._metrics["accuracy"] = metric.to(self._device)
