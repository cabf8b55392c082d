"""Compute the configured loss as a sum over targets, beside the number of targets.

A loss here is never a mean. The mean over a step is the sum over all replicas and micro-batches divided by the number
of targets over all of them; a mean of means differs from it as soon as a label is ignored or one micro-batch is
smaller. This is why two replicas equal one replica with twice the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.sections import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.vocabulary_loss import ClassShard


def _cross_entropy(output: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # classes are on the last axis of the output: [..., C] and [...]
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")


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
        self._index = output_index(config, output_names)
        self._ignore_index = config.ignore_index
        self._classes = classes
        self.name = config.loss

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """Return the loss summed over the targets that count: a scalar, differentiable."""
        if self._classes:
            assert labels is not None, "only the head of a cross-entropy is sharded"
            return self._classes.cross_entropy(self._own(outputs), labels, self._ignore_index)
        output = self.output(outputs)
        if self.name == "output" or labels is None:
            return output.mean() * size  # a loss that the graph computes is a mean over its batch
        return LOSSES[self.name](output, labels, self._ignore_index)

    def count(self, labels: Tensor | None, size: int) -> int:
        """Return the number of targets that count in a micro-batch of `size` samples, without a forward pass."""
        if self.name == "output" or labels is None:
            return size
        if self.name == "cross_entropy":
            return int((labels != self._ignore_index).sum())
        return labels.numel()

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
        return outputs if isinstance(outputs, Tensor) else outputs[self._index]


def output_index(config: ModelConfig, output_names: Sequence[str]) -> int:
    """Return the index of the output that the loss reads. Raises ConfigError for an unknown `model.output`."""
    if config.output and config.output not in output_names:
        raise ConfigError(f"model.output {config.output!r} is not an output of the graph: {', '.join(output_names)}")
    return list(output_names).index(config.output) if config.output else 0
