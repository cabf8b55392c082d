"""The formulas of the losses: each a sum over targets, whose number data/targets.py counts.

Outputs are fp32. `tests/trainer/model/test_loss_formulas.py` compares values and gradients with torch's own functions,
whose means are these sums divided by these counts. Losses by sample (dice, ctc, cosine) are summed over samples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.targets import soft_axis


def as_rows(values: Tensor, axis: int) -> Tensor:
    """Return scores with the classes on one axis as [rows, C], the rows in the order of the other axes."""
    # a file for one row may leave the batch out of its output: [C], which `flatten` refuses
    return values.movedim(axis, -1).reshape(-1, values.shape[axis])


def cross_entropy(output: Tensor, labels: Tensor, axis: int, loss: LossConfig, weights: Tensor | None) -> Tensor:
    """[..., C, ...] and [...], or of labels that are probabilities both of one shape; axis: that of the classes."""
    smoothing = loss.label_smoothing
    if labels.is_floating_point():
        axis = soft_axis(loss, output.ndim)
        targets = as_rows(labels.reshape(output.shape), axis)
        return F.cross_entropy(
            as_rows(output, axis), targets, weight=weights, label_smoothing=smoothing, reduction="sum"
        )
    return F.cross_entropy(
        as_rows(output, axis),
        labels.flatten(),
        weight=weights,
        ignore_index=loss.ignored,
        label_smoothing=smoothing,
        reduction="sum",
    )


def dice(output: Tensor, labels: Tensor, axis: int, loss: LossConfig) -> Tensor:
    """1 - (2 |P and G| + s) / (|P| + |G| + s), averaged over the classes of a sample: [B, C, ...] and [B, ...].

    P: probabilities, by softmax; of one class (C = 1) by sigmoid, with labels 0 and 1. G: the labels, one-hot.
    """
    scores = output.movedim(axis, 1).flatten(2)
    labels = labels.reshape(len(scores), 1, -1)
    counted = labels != loss.ignored
    if scores.shape[1] == 1:
        predicted, actual = scores.sigmoid(), labels.to(scores.dtype)
    else:
        classes = torch.arange(scores.shape[1], device=scores.device)[:, None]
        predicted, actual = scores.softmax(1), (labels == classes).to(scores.dtype)
    predicted, actual = predicted * counted, actual * counted
    overlap, sizes = (predicted * actual).sum(2), (predicted + actual).sum(2)
    return (1 - (2 * overlap + loss.smooth) / (sizes + loss.smooth)).mean(1).sum()


def focal(output: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """(1 - p)^gamma x binary cross-entropy, p being the probability of the right answer (arXiv:1708.02002)."""
    entropy = F.binary_cross_entropy_with_logits(output, labels, reduction="none")
    probability = output.sigmoid()
    right = probability * labels + (1 - probability) * (1 - labels)
    values = entropy * (1 - right) ** loss.gamma
    if loss.alpha >= 0:
        values = values * (loss.alpha * labels + (1 - loss.alpha) * (1 - labels))
    return values.sum()


def giou(output: Tensor, labels: Tensor) -> Tensor:
    """1 - generalised intersection over union of boxes [..., 4] as x1, y1, x2, y2 (arXiv:1902.09630)."""
    ours, theirs = output.reshape(-1, 4), labels.reshape(-1, 4)

    def area(boxes: Tensor) -> Tensor:
        return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])

    least, greatest = torch.max(ours[:, :2], theirs[:, :2]), torch.min(ours[:, 2:], theirs[:, 2:])
    sides = (greatest - least).clamp(min=0)
    overlap = sides[:, 0] * sides[:, 1]
    union = area(ours) + area(theirs) - overlap
    around = torch.cat([torch.min(ours[:, :2], theirs[:, :2]), torch.max(ours[:, 2:], theirs[:, 2:])], 1)
    epsilon = 1e-7  # as in torchvision
    return (1 - overlap / (union + epsilon) + (area(around) - union) / (area(around) + epsilon)).sum()


def quantile(output: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """max(q d, (q - 1) d) for each quantile q, d = label - output: [..., Q] and [...]."""
    levels = torch.tensor(loss.quantiles, device=output.device)
    if output.shape[-1] != len(levels):  # one quantile, without an axis for it
        output = output[..., None]
    difference = labels.reshape(output.shape[:-1])[..., None] - output
    return torch.max(levels * difference, (levels - 1) * difference).sum()


def ctc(output: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """-log p(labels) / their number, by sample: scores [B, T, C] and labels [B, L], shorter ones padded (`ignored`)."""
    steps = torch.full((len(output),), output.shape[1], dtype=torch.int64, device=output.device)
    counted = labels != loss.ignored
    lengths = counted.sum(1)
    # torch reads the first `lengths` labels of a row; the others only have to be classes
    targets = torch.where(counted, labels, 0)
    values = F.ctc_loss(output.log_softmax(-1).movedim(1, 0), targets, steps, lengths, loss.blank, reduction="none")
    return (values / lengths.clamp(min=1)).sum()


def info_nce(
    queries: Tensor, keys: Tensor, temperature: float, all_queries: Tensor, all_keys: Tensor, at: int
) -> Tensor:
    """Cross-entropy of finding the key of each query, and the query of each key, among those of all replicas; halved.

    queries, keys: of this replica [B, D]; all_queries, all_keys: of all of them, where its own begin at row `at`.
    """
    own = torch.arange(at, at + len(queries), device=queries.device)

    def found(rows: Tensor, among: Tensor) -> Tensor:
        scores = F.normalize(rows, dim=-1) @ F.normalize(among, dim=-1).T / temperature
        return F.cross_entropy(scores, own, reduction="sum")

    return (found(queries, all_keys) + found(keys, all_queries)) / 2


def elementwise(name: str, loss: LossConfig, weights: Tensor | None, positive: Tensor | None) -> Callable[..., Tensor]:
    """Return torch's function of (output, labels) of one shape."""
    if name == "huber":
        return lambda output, labels: F.huber_loss(output, labels, reduction="sum", delta=loss.delta)
    if name == "bce_with_logits":
        return lambda output, labels: F.binary_cross_entropy_with_logits(
            output, labels, weight=weights, pos_weight=positive, reduction="sum"
        )
    function = {"mse": F.mse_loss, "l1": F.l1_loss}[name]
    return lambda output, labels: function(output, labels, reduction="sum")
