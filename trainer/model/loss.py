"""Compute the configured loss as a sum over targets, beside the number of targets.

A loss here is never a mean. The mean over a step is the sum over all replicas and micro-batches divided by the number
of targets over all of them; a mean of means differs from it as soon as a label is ignored or one micro-batch is
smaller. This is why two replicas equal one replica with twice the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.sections import ModelConfig
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


class Loss:
    """The configured loss over the outputs of one micro-batch.

    `output_names`: the graph's outputs in order. `classes`: the classes whose logits this rank computes, if tensor
    parallelism sharded them (tensor/vocabulary.py); then every rank of the group must call each method that takes
    outputs, and all get the same result. Raises ConfigError for an unknown `model.output`.
    """

    def __init__(self, config: ModelConfig, output_names: Sequence[str], *, classes: ClassShard | None = None) -> None:
        self.index = output_index(config, output_names)
        """Position of the output that the loss reads."""
        self._config, self._ignore_index = config, config.ignore_index
        self._classes = classes
        self.name = config.loss

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """Return the loss summed over the targets that count: a scalar, differentiable."""
        own = self._own(outputs)
        if self.name == "cross_entropy" and labels is not None:
            if self._classes:
                return self._classes.cross_entropy(own, labels, self._ignore_index)
            if own.dtype in (torch.float16, torch.bfloat16):
                return cross_entropy(own, labels, self._ignore_index)
        output = self.output(outputs)
        if self.name == "output" or labels is None:
            return output.mean() * size  # a loss that the graph computes is a mean over its batch
        return LOSSES[self.name](output, labels, self._ignore_index)

    def count(self, labels: Tensor | None, size: int) -> int | Tensor:
        """Return the number of targets of a micro-batch of `size` samples, without a forward pass (count_targets)."""
        return count_targets(labels, size, self._config)

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        """Raise DataError if a label of a cross-entropy is neither a class of the outputs nor `model.ignore_index`.

        It compares numbers of the host. On a GPU such a label would stop the device, in a later and unrelated call.
        """
        if self.name != "cross_entropy":
            return
        num_classes = self.num_classes(outputs)
        if batch.label_range[0] >= 0 and batch.label_range[1] < num_classes:
            return
        assert batch.labels is not None
        labels = batch.labels.reshape(batch.size, -1).cpu()
        wrong = (labels != self._ignore_index) & ((labels < 0) | (labels >= num_classes))
        values, rows = sorted(set(labels[wrong].tolist())), batch.rows[wrong.any(1).numpy()].tolist()
        raise DataError(
            f"labels {_first(values)} in rows {_first(rows)} of the split are not classes: the "
            f"output that the loss reads has {num_classes} of them, 0..{num_classes - 1}. Correct the labels "
            f"(data.label), replace the head (model.num_classes), or exclude one label from the loss "
            f"(model.ignore_index, now {self._ignore_index})"
        )

    def output(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the output that the loss reads, in fp32; if its classes are sharded, all of it without gradient."""
        output = self._own(outputs).float()
        return self._classes.gathered(output) if self._classes else output

    def predicted(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the class with the greatest logit for each target: [..., C] -> [...]. Does not gather the logits."""
        output = self._own(outputs)
        return self._classes.argmax(output) if self._classes else output.argmax(-1)

    def num_classes(self, outputs: Tensor | Sequence[Tensor]) -> int:
        """Return the size of the last axis of the output, over all ranks that share it."""
        return self._classes.total if self._classes else self._own(outputs).shape[-1]

    def _own(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs[self.index]


def _first(values: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def output_index(config: ModelConfig, output_names: Sequence[str]) -> int:
    """Return the index of the output that the loss reads. Raises ConfigError for an unknown `model.output`."""
    if config.output and config.output not in output_names:
        raise ConfigError(f"model.output {config.output!r} is not an output of the graph: {', '.join(output_names)}")
    return list(output_names).index(config.output) if config.output else 0
