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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.sections import ModelConfig
from onward.trainer.distributed.collectives import all_reduce
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.torchvision_import import import_torchvision

if TYPE_CHECKING:
    from torchmetrics import Metric


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


# -- classes divided over the ranks of a group


@dataclass(frozen=True)
class Slice:
    """The classes of which this rank computes the logits, when a group has divided them among its ranks."""

    start: int
    stop: int
    total: int
    """Of all ranks: together they have each class once."""
    group: str
    """Name of the process group."""

    def gathered(self, logits: Tensor) -> Tensor:
        """[..., stop - start] -> [..., total], without a gradient. Collective: every rank of the group."""
        whole = logits.new_zeros(*logits.shape[:-1], self.total)
        whole[..., self.start : self.stop] = logits
        return all_reduce(whole, self.group, "sum")

    def likeliest(self, logits: Tensor) -> Tensor:
        """[..., stop - start] -> [...]: of all classes the one of the greatest logit, the first if there are several.

        Collective: every rank of the group.
        """
        value, place = logits.detach().float().max(-1)
        value = value.nan_to_num(math.inf, math.inf, -math.inf)  # a NaN is the greatest of all, as for argmax
        chosen = torch.where(value == all_reduce(value, self.group, "max"), place + self.start, self.total)
        return all_reduce(chosen, self.group, "min")

    def cross_entropy(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """The same sum as `_cross_entropy` of the gathered logits, on every rank; its gradient is of this slice.

        Two collectives of one and two numbers for each label, none backward. Collective: every rank of the group.
        """
        return _DividedCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), ignore_index, self)  # type: ignore[no-any-return, no-untyped-call]


class _DividedCrossEntropy(torch.autograd.Function):
    """-log(exp(z_label - m) / sum of exp(z - m)), m the greatest logit, in fp32, as one pass over the logits.

    Keeps exp(z - m), from which the gradient is made; the logits themselves may go.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, ignore_index: int, classes: Slice) -> Tensor:
        counted = labels != ignore_index
        place = torch.where(counted, labels - classes.start, 0)
        # a label that is no class of any rank is left in, for the first or the last rank to fall over, as torch does
        own = counted & ((place >= 0) | (classes.start == 0)) & ((place < logits.shape[-1]) | _is_last(classes))
        place = torch.where(own, place, 0)[:, None]
        greatest = all_reduce(logits.amax(-1).float(), classes.group, "max")
        shifted = (logits - greatest[:, None]).float()  # half precision is fp32 already, because `greatest` is
        target = torch.where(own, shifted.gather(1, place)[:, 0], 0.0)
        exponentials = shifted.exp_()
        total, target = all_reduce(torch.stack((exponentials.sum(-1), target)), classes.group, "sum")
        context.save_for_backward(exponentials, total, place, own, counted)
        context.dtype = logits.dtype
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, place, own, counted = context.saved_tensors
        # x 0 for labels that do not count, not 0: what is not a number stays so, as in torch's
        each = torch.where(counted, gradient, 0.0)
        result = exponentials * (each / total)[:, None]
        result.scatter_add_(1, place, -torch.where(own, each, 0.0)[:, None])
        return result.to(context.dtype), None, None, None


def _is_last(classes: Slice) -> bool:
    return classes.stop == classes.total


# -- what the loop uses


class Loss:
    """The configured loss over the outputs of one micro-batch.

    `output_names`: the graph's outputs in order. `classes`: those that this rank's graph gives the logits of, when a
    group has divided them (tensor/vocabulary.py); then every rank of it must call what takes outputs, and gets the
    same. Raises ConfigError for an unknown `model.output`.
    """

    def __init__(self, config: ModelConfig, output_names: Sequence[str], *, classes: Slice | None = None) -> None:
        self._index = output_index(config, output_names)
        self._ignore_index = config.ignore_index
        self._classes = classes
        self.name = config.loss

    def output(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """The output that the loss reads, whole, in fp32 whatever the compute type; no gradient if it was divided."""
        output = self._own(outputs).float()
        return self._classes.gathered(output) if self._classes else output

    def predicted(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """The likeliest class of each target: [...] of logits [..., C]. Needs no whole logits."""
        output = self._own(outputs)
        return self._classes.likeliest(output) if self._classes else output.argmax(-1)

    def num_classes(self, outputs: Tensor | Sequence[Tensor]) -> int:
        """The length of the last axis of the whole output."""
        return self._classes.total if self._classes else self._own(outputs).shape[-1]

    def _own(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs[self._index]

    def count(self, labels: Tensor | None, size: int) -> int:
        """Targets that count in a micro-batch of `size` samples; known before the forward pass."""
        if self.name == "output" or labels is None:
            return size
        if self.name == "cross_entropy":
            return int((labels != self._ignore_index).sum())
        return labels.numel()

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """The loss summed over the targets that count: a scalar, differentiable."""
        if self._classes:
            assert labels is not None, "only the head of a cross-entropy is divided"
            return self._classes.cross_entropy(self._own(outputs), labels, self._ignore_index)
        output = self.output(outputs)
        if self.name == "output" or labels is None:
            return output.mean() * size  # the graph's own loss is a mean over its batch
        return LOSSES[self.name](output, labels, self._ignore_index)


def output_index(config: ModelConfig, output_names: Sequence[str]) -> int:
    """Which of the graph's outputs the loss reads. Raises ConfigError for an unknown `model.output`."""
    if config.output and config.output not in output_names:
        raise ConfigError(f"model.output {config.output!r} is no output of the graph: {', '.join(output_names)}")
    return list(output_names).index(config.output) if config.output else 0


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
        """Add one batch. Replicas may have different numbers of them; collective over a group that divides classes."""
        for total, value in zip(
            self._totals, (self._loss(outputs, labels, size), self._loss.count(labels, size)), strict=True
        ):
            total.update(value)
        if labels is None or self._loss.name == "output":
            return
        if self._loss.name == "cross_entropy":
            self._classes(self._loss.num_classes(outputs))
            self._metrics["accuracy"].update(self._loss.predicted(outputs).flatten(), labels.flatten())
            return
        output = self._loss.output(outputs)
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
