"""Cross-entropy over logits whose classes are sharded over a tensor-parallel group, without gathering them.

Megatron-LM (arXiv:1909.08053) calls it vocabulary-parallel cross-entropy. For classes c on several ranks:

    rank 0  z_0 .. z_k        max over the group -> m           one all-reduce of a number per label
    rank 1  z_k+1 .. z_C      sum over the group of
                              exp(z_c - m), and of z_label - m  one all-reduce of two numbers per label

    loss = log(sum exp(z_c - m)) - (z_label - m)

With probabilities y_c in place of labels (MixUp, CutMix), the second is the sum of y_c (z_c - m).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.trainer.distributed.collectives import all_reduce
from onward.trainer.model.losses.chunked_loss import at_least_fp32, chunks


@dataclass(frozen=True)
class ClassShard:
    """The classes whose logits this rank computes, if a group has sharded them over its ranks."""

    start: int
    stop: int
    total: int
    """Number of classes of all ranks; each class is on one rank."""
    group: str
    """Name of the process group."""

    def gathered(self, logits: Tensor) -> Tensor:
        """Return all logits without gradient: [..., stop - start] -> [..., total]. Collective: the group."""
        everything = logits.new_zeros(*logits.shape[:-1], self.total)
        # an all-reduce of zeros and one shard: an all-gather would need shards of equal size
        everything[..., self.start : self.stop] = logits
        return all_reduce(everything, self.group, "sum")

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the class with the greatest logit over all ranks, the first of several: [..., stop - start] -> [...].

        Collective: every rank of the group.
        """
        value, index = at_least_fp32(logits.detach()).max(-1)
        value = value.nan_to_num(math.inf, math.inf, -math.inf)  # a NaN is the greatest of all, as for torch.argmax
        # ranks without the greatest value give a number above every class, so that the minimum is the first class
        chosen = torch.where(value == all_reduce(value, self.group, "max"), index + self.start, self.total)
        return all_reduce(chosen, self.group, "min")

    def cross_entropy(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """Return the cross-entropy of all logits, summed over labels, on every rank; its gradient is of this shard.

        logits: [..., stop - start]; labels: [...]; returns a scalar. Two all-reduces in the forward pass, of one and
        two numbers per label; none in the backward pass. Collective: every rank of the group.
        """
        return _ShardedCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), ignore_index, self)  # type: ignore[no-any-return, no-untyped-call]

    def soft_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of all logits with probabilities [..., total], summed over their rows.

        As `cross_entropy`, collectives included.
        """
        return _SoftCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(0, -2), self)  # type: ignore[no-any-return, no-untyped-call]


class _ShardedCrossEntropy(torch.autograd.Function):
    """-log(exp(z_label - m) / sum of exp(z - m)) in fp32.

    Keeps the logits z and two numbers per label; the backward pass computes exp(z - m) again. Both passes go through
    the logits in chunks of rows, so that no fp32 copy of all of them is made.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, ignore_index: int, classes: ClassShard) -> Tensor:
        counted = labels != ignore_index
        index = torch.where(counted, labels - classes.start, 0)
        # a label that is not a class of any rank stays in on the first or last rank, so that gather fails as in torch
        is_last = classes.stop == classes.total
        own = counted & ((index >= 0) | (classes.start == 0)) & ((index < logits.shape[-1]) | is_last)
        index = torch.where(own, index, 0)[:, None]
        # subtracted before the exponential, which would overflow; the loss does not depend on it
        greatest = all_reduce(at_least_fp32(logits.amax(-1)), classes.group, "max")
        sums = torch.empty(2, len(labels), device=logits.device, dtype=greatest.dtype)
        for rows in chunks(logits):
            shifted = _shifted(logits[rows], greatest[rows])
            sums[1, rows] = torch.where(own[rows], shifted.gather(1, index[rows])[:, 0], 0.0)
            sums[0, rows] = shifted.exp_().sum(-1)
        total, target = all_reduce(sums, classes.group, "sum")
        context.save_for_backward(logits, greatest, total, index, own, counted)
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, greatest, total, index, own, counted = context.saved_tensors
        # ignored labels are multiplied by 0, not set to 0, so that a NaN stays a NaN as in torch's cross-entropy
        each = torch.where(counted, gradient, 0.0)
        factor = (each / total)[:, None]
        at_label = torch.where(own, each, 0.0)[:, None]
        result = torch.empty_like(logits)
        for rows in chunks(logits):
            part = _shifted(logits[rows], greatest[rows]).exp_().mul_(factor[rows])
            # each row has one index, so this needs no atomic addition, whose order would not be determined
            part.scatter_(1, index[rows], part.gather(1, index[rows]) - at_label[rows])
            result[rows] = part
        return result, None, None, None


class _SoftCrossEntropy(torch.autograd.Function):
    """-(sum over classes of y log(exp(z - m) / sum of exp(z - m))) in fp32, for probabilities y.

    Mixed labels (MixUp, CutMix) are those of a few rows, so the rows are not divided into chunks.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, classes: ClassShard) -> Tensor:
        own = at_least_fp32(labels[:, classes.start : classes.stop])
        mass = labels.sum(-1)
        shifted = _shifted(logits, all_reduce(at_least_fp32(logits.amax(-1)), classes.group, "max"))
        sums = torch.stack([shifted.exp().sum(-1), (shifted * own).sum(-1)])
        total, target = all_reduce(sums, classes.group, "sum")
        context.save_for_backward(shifted, total, own, mass)
        context.dtype = logits.dtype
        loss: Tensor = (mass * total.log() - target).sum()
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shifted, total, own, mass = context.saved_tensors
        return ((shifted.exp() * (mass / total)[:, None] - own) * gradient).to(context.dtype), None, None


def _shifted(logits: Tensor, greatest: Tensor) -> Tensor:
    # half precision becomes fp32 here already, because `greatest` is fp32
    return at_least_fp32(logits - greatest[:, None])
