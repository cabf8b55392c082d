"""Compute the configured losses as sums over targets, beside the numbers of targets.

A loss here is never a mean. The mean over a step is the sum over all replicas and micro-batches divided by the number
of targets over all of them; a mean of means differs from it as soon as a label is ignored or one micro-batch is
smaller. This is why two replicas equal one replica with twice the batch.

    loss of a step  =  sum over [[loss]] i of  weight_i x (sum over targets of loss i) / (targets of loss i)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig, titles
from onward.trainer.data.batches import Batch
from onward.trainer.data.targets import count_targets
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.chunked_loss import cross_entropy
from onward.trainer.model.vocabulary_loss import ClassShard


def _cross_entropy(output: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # classes are on the last axis of the output: [..., C] and [...]
    # a file for one row may leave the batch out of its output: [C], which `flatten` refuses
    rows = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(rows, labels.flatten(), ignore_index=ignore_index, reduction="sum")


def _elementwise(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    def total(output: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        # without the reshape, [B] and [B, 1] would broadcast to [B, B]
        return function(output, labels.reshape(output.shape).to(output.dtype), reduction="sum")

    return total


LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "bce_with_logits": _elementwise(F.binary_cross_entropy_with_logits),
}


class Losses:
    """All losses of a run over the outputs of one micro-batch, in the order of `RunConfig.losses`.

    classes: as of `Loss`, for a run with one loss.
    """

    def __init__(
        self, losses: Sequence[LossConfig], output_names: Sequence[str], *, classes: ClassShard | None = None
    ) -> None:
        assert classes is None or len(losses) == 1
        self.each = tuple(Loss(each, output_names, classes=classes) for each in losses)
        self.titles = titles(losses, output_names)
        """What the metrics of each loss are named after."""
        self._weights = [each.weight for each in losses]

    def __len__(self) -> int:
        return len(self.each)

    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        """Return each loss summed over its targets: scalars, differentiable."""
        return tuple(loss(outputs, own, size) for loss, own in zip(self.each, labels, strict=True))

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        """Raise DataError for labels that are no classes, see `Loss.check_labels`."""
        for place, loss in enumerate(self.each):
            loss.check_labels(batch, outputs, place)

    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor:
        """Return the sum of values x weight x scale, a scalar. values, scale: one for each loss."""
        scales: Sequence[float | Tensor] = [scale] * len(values) if isinstance(scale, float) else scale
        total = values[0] * (scales[0] * self._weights[0])
        for value, own, weight in zip(values[1:], scales[1:], self._weights[1:], strict=True):
            total = total + value * (own * weight)
        return total


class Loss:
    """One loss over the outputs of one micro-batch.

    `output_names`: the graph's outputs in order. `classes`: the classes whose logits this rank computes, if tensor
    parallelism sharded them (tensor/vocabulary.py); then every rank of the group must call each method that takes
    outputs, and all get the same result. Raises ConfigError for an unknown `model.output`.
    """

    def __init__(self, config: LossConfig, output_names: Sequence[str], *, classes: ClassShard | None = None) -> None:
        self.index = output_index(config.output, output_names)
        """Position of the output that the loss reads."""
        self.config, self.ignore_index = config, config.ignored
        self.classes = classes
        self.name = config.name

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """Return the loss summed over the targets that count: a scalar, differentiable."""
        own = self._own(outputs)
        if self.name == "cross_entropy" and labels is not None:
            if self.classes:
                return self.classes.cross_entropy(own, labels, self.ignore_index)
            if own.dtype in (torch.float16, torch.bfloat16):
                return cross_entropy(own, labels, self.ignore_index)
        output = self.output(outputs)
        if self.name == "output" or labels is None:
            return output.mean() * size  # a loss that the graph computes is a mean over its batch
        return LOSSES[self.name](output, labels, self.ignore_index)

    def count(self, labels: Tensor | None, size: int) -> int | Tensor:
        """Return the number of targets of a micro-batch of `size` samples, without a forward pass (count_targets)."""
        return count_targets(labels, size, self.config)

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor], place: int = 0) -> None:
        """Raise DataError if a label of a cross-entropy is neither a class of the outputs nor the ignored label.

        place: which of the batch's labels are this loss's.

        It compares numbers of the host. On a GPU such a label would stop the device, in a later and unrelated call.
        """
        if self.name != "cross_entropy":
            return
        num_classes = self.num_classes(outputs)
        least, greatest = batch.label_ranges[place]
        if least >= 0 and greatest < num_classes:
            return
        own = batch.labels[place]
        assert own is not None
        labels = own.reshape(batch.size, -1).cpu()
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= num_classes))
        values, rows = sorted(set(labels[wrong].tolist())), batch.rows[wrong.any(1).numpy()].tolist()
        raise DataError(
            f"labels {_first(values)} in rows {_first(rows)} of the split are not classes: the "
            f"output that the loss reads has {num_classes} of them, 0..{num_classes - 1}. Correct the labels "
            f"(data.label), replace the head (model.num_classes), or exclude one label from the loss "
            f"(model.ignore_index, now {self.ignore_index})"
        )

    def output(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the output that the loss reads, in fp32; if its classes are sharded, all of it without gradient."""
        output = self._own(outputs).float()
        return self.classes.gathered(output) if self.classes else output

    def predicted(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the class with the greatest logit for each target: [..., C] -> [...]. Does not gather the logits."""
        output = self._own(outputs)
        return self.classes.argmax(output) if self.classes else output.argmax(-1)

    def num_classes(self, outputs: Tensor | Sequence[Tensor]) -> int:
        """Return the size of the last axis of the output, over all ranks that share it."""
        return self.classes.total if self.classes else self._own(outputs).shape[-1]

    def _own(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs[self.index]


def _first(values: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def output_index(output: str, output_names: Sequence[str]) -> int:
    """Return the index of the output that a loss reads. Raises ConfigError for an unknown name."""
    if output and output not in output_names:
        raise ConfigError(f"model.output {output!r} is not an output of the graph: {', '.join(output_names)}")
    return list(output_names).index(output) if output else 0
