"""The formulas of the losses by name: each a sum over targets, whose number data/schema/target_counts.py counts.

Every formula is a function of `LossInputs`. Outputs are fp32. `tests/trainer/model/test_loss_formulas.py` compares
values and gradients with torch's own functions, whose means are these sums divided by these counts. Losses by sample
(dice, ctc, cosine, triplet) are summed over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.target_counts import without_lengths
from onward.trainer.model.losses import set_prediction
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss
from onward.trainer.model.losses.dense_heads.families import dense_loss


@dataclass(frozen=True)
class LossInputs:
    """What a formula reads of one micro-batch."""

    loss: LossConfig
    outputs: Sequence[Tensor]
    """Those that the loss names, in this order, in fp32."""
    given: Tensor | None
    """The labels [B, ...] as the batch has them; None if the loss takes none."""
    size: int
    """B; 0 for a padding micro-batch."""
    axis: int = -1
    """Of cross_entropy and dice: the axis of the classes."""
    class_weights: Tensor | None = None
    """fp32 [C]"""
    positive_weights: Tensor | None = None
    """fp32 [C] or [1]"""
    replicas: dist.ProcessGroup | None = None
    """The group over which info_nce compares samples."""

    @property
    def output(self) -> Tensor:
        """The first output, of most losses the only one."""
        return self.outputs[0]

    @property
    def labels(self) -> Tensor:
        """The labels of a loss that takes labels."""
        assert self.given is not None
        return self.given

    @property
    def labels_like_output(self) -> Tensor:
        """The labels in shape and type of the output. `check_axes` comes first: only axes of length 1 may differ."""
        # without the reshape, [B] and [B, 1] would broadcast to [B, B]
        return self.labels.reshape(self.output.shape).to(self.output.dtype)


Formula = Callable[[LossInputs], Tensor]
"""Return the loss summed over the targets that count, a scalar."""
SetFormula = Callable[[Tensor, Tensor, Tensor, LossConfig], Tensor]
"""The same of class scores [B, Q, C], boxes [B, Q, 4] and labels [B, objects x 6]."""


def as_rows(values: Tensor, axis: int) -> Tensor:
    """Return scores with the classes on one axis as [rows, C], the rows in the order of the other axes."""
    # a file for one row may leave the batch out of its output: [C], which `flatten` refuses
    return values.movedim(axis, -1).reshape(-1, values.shape[axis])


def cross_entropy(x: LossInputs) -> Tensor:
    """[..., C, ...] and [...], or of labels that are probabilities both of one shape."""
    if x.labels.is_floating_point():
        # torch's own, which has no effect
        targets = as_rows(x.labels.reshape(x.output.shape), x.axis)
        ignored = -100
    else:
        targets = x.labels.flatten()
        ignored = x.loss.ignored
    return F.cross_entropy(
        as_rows(x.output, x.axis),
        targets,
        weight=x.class_weights,
        ignore_index=ignored,
        label_smoothing=x.loss.label_smoothing,
        reduction="sum",
    )


def mse(x: LossInputs) -> Tensor:
    """(output - label)^2: [...] and the same, but for axes of length 1."""
    return F.mse_loss(x.output, x.labels_like_output, reduction="sum")


def l1(x: LossInputs) -> Tensor:
    """|output - label|: as `mse`."""
    return F.l1_loss(x.output, x.labels_like_output, reduction="sum")


def huber(x: LossInputs) -> Tensor:
    """Half the square up to `delta`, from there on linear: as `mse`."""
    return F.huber_loss(x.output, x.labels_like_output, reduction="sum", delta=x.loss.delta)


def bce_with_logits(x: LossInputs) -> Tensor:
    """Binary cross-entropy of logits [..., C], weighted by label and by whether it is positive."""
    weights = x.class_weights
    positive = x.positive_weights
    return F.binary_cross_entropy_with_logits(
        x.output, x.labels_like_output, weight=weights, pos_weight=positive, reduction="sum"
    )


def dice(x: LossInputs) -> Tensor:
    """1 - (2 |P and G| + s) / (|P| + |G| + s), averaged over the classes of a sample: [B, C, ...] and [B, ...].

    P: probabilities, by softmax; of one class (C = 1) by sigmoid, with labels 0 and 1. G: the labels, one-hot.
    """
    # [B, C, positions], whatever the axis of the classes and the number of the others
    scores = x.output.movedim(x.axis, 1).flatten(2)
    smooth = x.loss.smooth
    labels = x.labels.reshape(scores.shape[0], 1, -1)  # `len` would fix the batch where the graph is recorded
    counted = labels != x.loss.ignored
    if scores.shape[1] == 1:
        predicted = scores.sigmoid()
        actual = labels.to(scores.dtype)
    else:
        classes = torch.arange(scores.shape[1], device=scores.device)[:, None]
        predicted = scores.softmax(1)
        actual = (labels == classes).to(scores.dtype)
    # ignored labels belong neither to the overlap nor to the sizes
    predicted = predicted * counted
    actual = actual * counted
    overlap = (predicted * actual).sum(2)
    sizes = (predicted + actual).sum(2)
    return (1 - (2 * overlap + smooth) / (sizes + smooth)).mean(1).sum()


def focal(x: LossInputs) -> Tensor:
    """(1 - p)^gamma x binary cross-entropy of logits [...], p: probability of the right answer (arXiv:1708.02002)."""
    output = x.output
    labels = x.labels_like_output
    alpha = x.loss.alpha
    entropy = F.binary_cross_entropy_with_logits(output, labels, reduction="none")
    probability = output.sigmoid()
    # p of the answer that the label gives; of labels between 0 and 1 a mean of both
    right = probability * labels + (1 - probability) * (1 - labels)
    values = entropy * (1 - right) ** x.loss.gamma
    # below 0 both kinds of labels weigh the same
    if alpha >= 0:
        values = values * (alpha * labels + (1 - alpha) * (1 - labels))
    return values.sum()


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_overlaps(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection and union of boxes [N, 4] as x1, y1, x2, y2, row by row: both [N]."""
    # the intersection begins at the greater of the two begins, and ends at the lesser of the two ends
    least = torch.max(ours[:, :2], theirs[:, :2])
    greatest = torch.min(ours[:, 2:], theirs[:, 2:])
    # boxes that do not meet would have sides below 0
    sides = (greatest - least).clamp(min=0)
    overlap = sides[:, 0] * sides[:, 1]
    return overlap, _area(ours) + _area(theirs) - overlap


def giou(x: LossInputs) -> Tensor:
    """1 - generalised intersection over union of boxes [..., 4] as x1, y1, x2, y2 (arXiv:1902.09630)."""
    ours = x.output.reshape(-1, 4)
    theirs = x.labels_like_output.reshape(-1, 4)
    overlap, union = box_overlaps(ours, theirs)
    # the smallest box around both: it gives boxes that do not touch a gradient towards each other
    around = _area(torch.cat([torch.min(ours[:, :2], theirs[:, :2]), torch.max(ours[:, 2:], theirs[:, 2:])], 1))
    epsilon = 1e-7  # as in torchvision
    return (1 - overlap / (union + epsilon) + (around - union) / (around + epsilon)).sum()


def quantile_rows(output: Tensor, loss: LossConfig) -> Tensor:
    """Return the output with an axis of the quantiles: [..., Q]; one quantile may come without it."""
    return output if output.shape[-1] == len(loss.quantiles) else output[..., None]


def quantile(x: LossInputs) -> Tensor:
    """max(q d, (q - 1) d) for each quantile q, d = label - output: [..., Q] and [...]."""
    output = quantile_rows(x.output, x.loss)
    levels = torch.tensor(x.loss.quantiles, device=x.output.device)
    # the labels have no axis of quantiles: each is compared with all of them
    difference = x.labels.to(output.dtype).reshape(output.shape[:-1])[..., None] - output
    return torch.max(levels * difference, (levels - 1) * difference).sum()


def ctc(x: LossInputs) -> Tensor:
    """-log p(labels) / their number, by sample: scores [B, T, C] and labels [B, L], shorter ones padded (`ignored`).

    With input lengths [B] only the first time steps of a sample are read.
    """
    output = x.output
    labels, steps = without_lengths(x.labels, x.loss)
    labels = labels.reshape(len(output), -1)
    likelihoods = output.log_softmax(-1)
    if is_fake(output):  # while memory is estimated: torch has no CTC of tensors without values
        return likelihoods[..., :1].expand(-1, -1, 2 * labels.shape[1] + 1).exp().sum()  # as many states as it keeps
    # without input lengths every sample has all time steps
    if steps is None:
        steps = torch.full((len(output),), output.shape[1], dtype=torch.int64, device=output.device)
    counted = labels != x.loss.ignored
    lengths = counted.sum(1)
    # torch reads the first `lengths` labels of a row; the others only have to be classes
    targets = torch.where(counted, labels, 0)
    # torch wants the time in front
    values = F.ctc_loss(likelihoods.movedim(1, 0), targets, steps, lengths, x.loss.blank, reduction="none")
    return (values / lengths.clamp(min=1)).sum()


def cosine(x: LossInputs) -> Tensor:
    """1 - cosine of two outputs [B, D] that are alike (label 1), else what the cosine is above `margin`."""
    one, other = x.outputs
    return F.cosine_embedding_loss(one, other, x.labels.flatten(), margin=x.loss.margin or 0.0, reduction="sum")


def triplet(x: LossInputs) -> Tensor:
    """max(0, |anchor - positive| - |anchor - negative| + margin) of three outputs [B, D]."""
    anchor, positive, negative = x.outputs
    margin = 1.0 if x.loss.margin is None else x.loss.margin
    return F.triplet_margin_loss(anchor, positive, negative, margin=margin, reduction="sum")


def info_nce(x: LossInputs) -> Tensor:
    """Cross-entropy of finding the key of each query, and the query of each key, among those of all replicas; halved.

    Two outputs [B, D], queries and keys. Collective: every rank of the replicas' group.
    """
    queries, keys = (value[: x.size] for value in x.outputs)
    all_queries, all_keys, at = gathered_rows(queries, keys, x.replicas)
    # the match of a row is the row of the same number, counted over all replicas
    own = torch.arange(at, at + queries.shape[0], device=queries.device)

    def found(rows: Tensor, among: Tensor) -> Tensor:
        scores = F.normalize(rows, dim=-1) @ F.normalize(among, dim=-1).T / x.loss.temperature
        return F.cross_entropy(scores, own, reduction="sum")

    return (found(queries, all_keys) + found(keys, all_queries)) / 2


def output(x: LossInputs) -> Tensor:
    """A loss that the graph computes, a scalar or [B], is a mean over its batch."""
    return x.output.mean() * x.size


def of_set(formula: SetFormula) -> Formula:
    """Return a loss of set predictions as a formula; of a padding micro-batch it is 0."""

    def of_inputs(x: LossInputs) -> Tensor:
        scores, boxes = x.outputs
        if not x.size or x.given is None:
            return 0.0 * (scores.sum() + boxes.sum())
        # a query may have no object: both outputs are always a part of the loss
        return formula(scores, boxes, x.labels, x.loss) + 0.0 * (scores.sum() + boxes.sum())

    return of_inputs


def dense(x: LossInputs) -> DividedLoss:
    """The loss of a detector that predicts boxes at every cell of a grid; of a padding micro-batch it is 0."""
    # a head without an object is no part of the loss, and its gradient must exist
    nothing = 0.0 * sum((output.sum() for output in x.outputs), start=x.output.new_zeros(()))
    if not x.size or x.given is None:
        nothing = nothing.expand(x.loss.num_terms) if x.loss.num_terms > 1 else nothing
        return DividedLoss(nothing, nothing.detach())
    total, divisor = dense_loss(x.outputs, x.given, x.loss)
    return DividedLoss(total + nothing, divisor)


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "l1": l1,
    "bce_with_logits": bce_with_logits,
    "output": output,
    "huber": huber,
    "quantile": quantile,
    "focal": focal,
    "dice": dice,
    "giou": giou,
    "ctc": ctc,
    "cosine": cosine,
    "triplet": triplet,
    "info_nce": info_nce,
    "set_classes": of_set(set_prediction.set_classes),
    "set_l1": of_set(set_prediction.set_l1),
    "set_giou": of_set(set_prediction.set_giou),
}
"""Loss -> its formula; that of `file` is the user's (loss_file.py), those of dense detectors are in dense_heads/."""


# -- gather rows of all replicas with exact gradients, for losses that compare every sample of a step with every other
#
#     replica 0   rows [2, D] --.                     .-- all [5, D], its own from row 0
#                                >--- all-reduce ----<
#     replica 1   rows [3, D] --'                     `-- all [5, D], its own from row 2
#
# Each replica differentiates its own part of the loss, which reads the rows of all; the gradient of a row is the sum of
# what all replicas compute for it: the backward pass is an all-reduce of the same size.


def gathered_rows(one: Tensor, other: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Return two tensors [B, D] of all replicas [sum of B, D], and where the own rows begin.

    Replicas may have different numbers of rows, also none. Without a group, or without gradients (in evaluation, where
    a replica may have a batch alone), the own rows are all. Collective: every rank of the group.
    """
    if group is None or group.size() == 1 or not torch.is_grad_enabled():
        return one, other, 0
    counts = torch.zeros(group.size(), dtype=torch.int64, device=one.device)
    counts[group.rank()] = len(one)
    dist.all_reduce(counts, group=group)
    sizes = counts.tolist()
    at = sum(sizes[: group.rank()])
    both = _Gathered.apply(torch.stack([one, other], 1), sum(sizes), at, group)  # type: ignore[no-untyped-call]
    return both[:, 0], both[:, 1], at


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, total: int, at: int, group: dist.ProcessGroup) -> Tensor:
        context.at = at
        context.number = len(rows)
        context.group = group
        everything = rows.new_zeros(total, *rows.shape[1:])
        everything[at : at + len(rows)] = rows
        dist.all_reduce(everything, group=group)  # zeros and one part: the numbers of rows differ
        return everything

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # all_reduce writes in place, and the gradient is not this function's own
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient[context.at : context.at + context.number], None, None, None
