"""What the metrics of a loss read of a batch: scores, targets, predictions, ..., each as the loss reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.data.schema.target_counts import without_lengths
from onward.trainer.errors import DataError
from onward.trainer.model.losses import set_prediction
from onward.trainer.model.losses.dense_heads.families import FAMILIES, dense_detections
from onward.trainer.model.losses.loss_formulas import as_rows, quantile_rows

if TYPE_CHECKING:
    from onward.trainer.config.metric_names import Task
    from onward.trainer.model.losses.loss import Loss


class Measured:
    """A batch of one loss. Each value is computed when it is first needed, and then kept.

    task: what outputs and labels are (config/metric_names.py). labels: None of a loss without any (triplet, info_nce).
    """

    def __init__(
        self,
        loss: Loss,
        outputs: Tensor | Sequence[Tensor],
        labels: Tensor | None,
        *,
        task: Task,
        loss_sum: Tensor | None = None,
    ) -> None:
        self._loss = loss
        self._outputs = outputs
        self._given = labels
        self._loss_sum = loss_sum
        self.task = task
        self.config = loss.config

    @cached_property
    def size(self) -> int:
        """The number of classes, of labels in a row, or of values in a row; else 1."""
        if self.task == "classes":
            return max(self._num_classes, 2)
        return self.scores.shape[1] if self.task in ("labels", "values", "quantiles") else 1

    @cached_property
    def _labels(self) -> Tensor:
        assert self._given is not None
        return self._given

    @cached_property
    def _num_classes(self) -> int:
        return self._loss.num_classes(self._outputs, self._labels)

    @cached_property
    def targets(self) -> Tensor:
        """Of classes int64 [targets], those that are ignored included; of quantiles [rows]; else [rows, size], labels
        as 0 and 1."""
        if self.task == "classes":
            is_soft = self._labels.is_floating_point()  # probabilities: the greatest is the class
            axis = self._loss.axis(self._outputs, self._labels)
            soft = self._loss.like_output(self._outputs, self._labels) if is_soft else self._labels
            targets = (soft.argmax(axis) if is_soft else soft).flatten()
            if self.config.is_own:
                self._refuse((targets != self._loss.ignore_index) & ((targets < 0) | (targets >= self.size)), targets)
            return targets
        if self.task == "quantiles":
            return self._labels.reshape(len(self.scores))
        # of pairs there is one label for each row, of all others one for each element of the output
        labels = self._labels if self.task == "pairs" else self._loss.like_output(self._outputs, self._labels)
        targets = labels.reshape(self.scores.shape)
        if self.task == "labels" and self.config.is_own:
            self._refuse((targets != 0) & (targets != 1), targets)
        return (targets > 0.5).long() if self.task in ("labels", "pairs") else targets

    def _refuse(self, wrong: Tensor, targets: Tensor) -> None:
        """Raise DataError for labels of loss.file that metrics cannot read; other losses check theirs."""
        if wrong.any():
            wrong_labels = ", ".join(f"{value:g}" for value in sorted(set(targets[wrong].tolist()))[:5])
            wanted = f"classes of the output, 0..{self.size - 1}" if self.task == "classes" else "0 or 1, no or yes"
            raise DataError(f"the metrics read the labels of loss.file as {wanted}, but there are {wrong_labels}")

    @cached_property
    def counted(self) -> Tensor:
        """Of classes: which targets count, bool [targets]."""
        # the ignored label may be a class
        return self.targets != self._loss.ignore_index

    @cached_property
    def count(self) -> int | Tensor:
        """The number of targets that count."""
        return self.counted.sum() if self.task == "classes" else self.targets.numel()

    @cached_property
    def predicted(self) -> Tensor:
        """Of classes: the one with the greatest score, int64 [targets]."""
        # a mask of one channel: its two classes are those of `scores`
        if self._num_classes == 1:
            return self.scores.argmax(-1)
        return self._loss.predicted(self._outputs, self._labels).flatten()

    @cached_property
    def scores(self) -> Tensor:
        """Of classes the logits, fp32 [targets, size]; of pairs their cosine similarity [rows, 1]; else the output as
        [rows, size].

        A mask of one channel has two classes: the logits 0 and z have the softmax 1 - sigmoid(z), sigmoid(z). An output
        [B, L] has L labels or values in each row. In one with more axes every element is a label alike, and the values
        are those of the last axis.
        """
        if self.task == "pairs":
            one, other = self.embeddings
            return F.cosine_similarity(one, other)[:, None]
        output = self._loss.output(self._outputs)
        if self.task == "quantiles":
            return quantile_rows(output, self.config).flatten(0, -2)
        if self.task == "classes":
            rows = as_rows(output, self._loss.axis(self._outputs, self._labels))
            return torch.cat([torch.zeros_like(rows), rows], -1) if rows.shape[-1] == 1 else rows
        # an output with more axes than two is a table of single labels, unless it holds values
        in_rows = output.ndim == 2 or (output.ndim > 2 and self.task == "values")
        return output.reshape(-1, output.shape[-1] if in_rows else 1)

    @cached_property
    def entropy(self) -> Tensor:
        """Of classes: the sum of -log p(target), without weights and smoothing: a scalar."""
        # the loss is this very sum, and is not computed a second time
        if self._loss_sum is not None and self._loss.config.is_plain and not self._labels.is_floating_point():
            return self._loss_sum
        ignored = self._loss.ignore_index
        return F.cross_entropy(self.scores, self.targets, ignore_index=ignored, reduction="sum")

    @cached_property
    def sequences(self) -> tuple[list[list[int]], list[list[int]]]:
        """Of a CTC: the symbols with the greatest scores, without repetitions and blanks, and those of the labels."""
        best = self._loss.output(self._outputs).argmax(-1).tolist()
        own_labels, lengths = without_lengths(self._labels, self.config)
        if lengths is not None:
            best = [row[:length] for row, length in zip(best, lengths.tolist(), strict=True)]
        # repetitions first: a blank between two equal symbols keeps both
        merged = [[symbol for symbol, _ in itertools.groupby(row)] for row in best]
        symbols = [_without(row, self._loss.config.blank) for row in merged]
        labels = own_labels.reshape(len(best), -1).tolist()
        return symbols, [_without(row, self._loss.ignore_index) for row in labels]

    @cached_property
    def embeddings(self) -> list[Tensor]:
        """Every output that the loss reads, fp32 [rows, D]."""
        assert not isinstance(self._outputs, Tensor)
        return [self._outputs[place].float() for place in self._loss.indices]

    @cached_property
    def objects(self) -> tuple[Sequence[Tensor], Tensor]:
        """What was found in each image, class, score, x1, y1, x2, y2 [n, 6], and the labels [B, objects x 6]."""
        if self.config.name in FAMILIES:
            return dense_detections(self.embeddings, self.config), self._labels
        scores, boxes = self.embeddings
        return set_prediction.detections(scores, boxes, self.config), self._labels

    @cached_property
    def boxes(self) -> tuple[Tensor, Tensor]:
        """Output and labels, [boxes, 4]."""
        output, labels = self.images
        return output.reshape(-1, 4), labels.reshape(-1, 4)

    @cached_property
    def images(self) -> tuple[Tensor, Tensor]:
        """Output and labels in the shape of the output."""
        return self._loss.output(self._outputs), self._loss.like_output(self._outputs, self._labels)

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax or sigmoid of `scores` [..], in fp64: in fp32 great scores would become equal. Of pairs, 0 .. 1."""
        scores = self.scores.double()
        if self.task == "pairs":
            return ((1 + scores) / 2).clamp(0, 1)
        return scores.softmax(-1) if self.task == "classes" else scores.sigmoid()


def _without(symbols: list[int], left_out: int) -> list[int]:
    return [symbol for symbol in symbols if symbol != left_out]
