"""What the metrics of a loss keep of evaluation batches: sums, or the scores of all targets.

A measure reads batches one by one (`update`) and never leaves its rank. `EvaluationMetrics` adds up the sums of all
ranks and concatenates their lists; the measure then computes its value from these. So it does not matter how many
batches a rank has seen, or whether it has seen any:

    rank 0    update, update, update    sums [..]   lists [n0, ..]    \\
    rank 1    update                    sums [..]   lists [n1, ..]     >   value(all sums, all lists) on rank 0
    rank 2    (no outputs)              zeros       lists [0, ..]     /
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.metric_names import TASKS
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.loss import Loss
from onward.trainer.model.losses.loss_formulas import as_rows


class Measured:
    """What metrics read of a batch for one loss; each is computed when it is first needed, and then kept."""

    def __init__(
        self, loss: Loss, outputs: Tensor | Sequence[Tensor], labels: Tensor, *, loss_sum: Tensor | None = None
    ) -> None:
        self._loss, self._outputs, self._labels, self._loss_sum = loss, outputs, labels, loss_sum
        self.task = TASKS[loss.name]

    @cached_property
    def size(self) -> int:
        """The number of classes, of labels in a row, or of values in a row."""
        if self.task == "classes":
            return max(self._num_classes, 2)
        return self._num_classes if self.task == "sequences" else self.scores.shape[1]

    @cached_property
    def _num_classes(self) -> int:
        return self._loss.num_classes(self._outputs, self._labels)

    @cached_property
    def targets(self) -> Tensor:
        """Of classes int64 [targets], those that are ignored included; else [rows, size], labels as 0 and 1."""
        if self.task == "classes":
            is_soft = self._labels.is_floating_point()  # probabilities: the greatest is the class
            axis = self._loss.axis(self._outputs, self._labels)
            return (self._labels.argmax(axis) if is_soft else self._labels).flatten()
        targets = self._labels.reshape(self.scores.shape)
        return (targets > 0.5).long() if self.task == "labels" else targets

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
        if self._num_classes == 1:
            return self.scores.argmax(-1)
        return self._loss.predicted(self._outputs, self._labels).flatten()

    @cached_property
    def scores(self) -> Tensor:
        """Of classes the logits, fp32 [targets, size]; else the output as [rows, size].

        A mask of one channel has two classes: the logits 0 and z have the softmax 1 - sigmoid(z), sigmoid(z). An output
        [B, L] has L labels or values in each row. In one with more axes every element is a label alike, and the values
        are those of the last axis.
        """
        output = self._loss.output(self._outputs)
        if self.task == "classes":
            rows = as_rows(output, self._loss.axis(self._outputs, self._labels))
            return torch.cat([torch.zeros_like(rows), rows], -1) if rows.shape[-1] == 1 else rows
        in_rows = output.ndim == 2 or (output.ndim > 2 and self.task == "values")
        return output.reshape(-1, output.shape[-1] if in_rows else 1)

    @cached_property
    def entropy(self) -> Tensor:
        """Of classes: the sum of -log p(target), without weights and smoothing."""
        if self._loss_sum is not None and self._loss.config.is_plain and not self._labels.is_floating_point():
            return self._loss_sum
        ignored = self._loss.ignore_index
        return F.cross_entropy(self.scores, self.targets, ignore_index=ignored, reduction="sum")

    @cached_property
    def sequences(self) -> tuple[list[list[int]], list[list[int]]]:
        """Of a CTC: the symbols with the greatest scores, without repetitions and blanks, and those of the labels."""
        found = self._loss.output(self._outputs).argmax(-1).tolist()
        blank = self._loss.config.blank
        symbols = [[symbol for symbol, _ in itertools.groupby(row) if symbol != blank] for row in found]
        labels = self._labels.reshape(len(found), -1).tolist()
        return symbols, [[symbol for symbol in row if symbol != self._loss.ignore_index] for row in labels]

    @cached_property
    def images(self) -> tuple[Tensor, Tensor]:
        """Output and labels in the shape of the output."""
        output = self._loss.output(self._outputs)
        return output, self._labels.reshape(output.shape)

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax or sigmoid of the scores, in fp64: in fp32 great scores would become equal."""
        scores = self.scores.double()
        return scores.softmax(-1) if self.task == "classes" else scores.sigmoid()


class Measure(Protocol):
    """One metric of one loss over all evaluation batches."""

    key: str
    sized: bool
    """Whether the shapes of its sums depend on `Measured.size`, which ranks without a batch do not know."""

    def update(self, batch: Measured) -> None:
        """Add a batch."""

    def sums(self, size: int) -> list[Tensor]:
        """Return what is added up over ranks: the same shapes on each, zeros where there was no batch.

        size: `Measured.size` on all ranks; 0 if no rank had a batch.
        """

    def lists(self) -> list[Tensor]:
        """Return what is concatenated over ranks, each [n] or [n, width]; nothing where there was no batch."""

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        """Return the metric from the sums of all ranks, flattened, and from their lists."""


class SumMeasure:
    """A metric that is computed from sums over targets, which are exact in fp64."""

    sized = False

    def __init__(self, metric: MetricConfig, device: torch.device) -> None:
        self.metric, self.key, self._device = metric, metric.key, device
        self._sums: Tensor | None = None

    def update(self, batch: Measured) -> None:
        found = self.sums_of(batch)
        self._sums = found if self._sums is None else self._sums + found

    def sums(self, size: int) -> list[Tensor]:
        empty = torch.zeros(self.shape(size), dtype=torch.float64, device=self._device)
        return [empty if self._sums is None else self._sums]

    def lists(self) -> list[Tensor]:
        return []

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        return self.value_of(sums[0], size)

    # -- what differs between these metrics

    def shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of the sums."""
        return (2,)

    def sums_of(self, batch: Measured) -> Tensor:
        """Return the sums over a batch, fp64."""
        raise NotImplementedError

    def value_of(self, sums: list[float], size: int) -> float:
        """Return the metric: here the quotient of a sum and a count."""
        total, count = sums
        return total / count


def _with_count(total: Tensor, count: int | Tensor) -> Tensor:
    """Return both as fp64 [2], without waiting for the device."""
    filled = count.double() if isinstance(count, Tensor) else torch.full_like(total, count, dtype=torch.float64)
    return torch.stack([total.double(), filled])


class Accuracy(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        if batch.task == "classes":
            return _with_count(((batch.predicted == batch.targets) & batch.counted).sum(), batch.count)
        return _with_count(((batch.scores > 0) == (batch.targets > 0)).sum(), batch.count)


class TopK(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        k = self.metric.k or 1
        if k > batch.size:
            raise ConfigError(f"metrics: {self.key} needs {k} classes or more, but the output has {batch.size}")
        found = (batch.scores.topk(k).indices == batch.targets[:, None]).any(-1)
        return _with_count((found & batch.counted).sum(), batch.count)


class CrossEntropy(SumMeasure):
    """`perplexity` and `bits_per_byte`."""

    def sums_of(self, batch: Measured) -> Tensor:
        return _with_count(batch.entropy, batch.count)

    def value_of(self, sums: list[float], size: int) -> float:
        mean = super().value_of(sums, size)
        if self.metric.name == "bits_per_byte":
            return mean / math.log(2) / (self.metric.bytes_per_target or 1.0)
        return math.exp(mean) if not mean > 700 else math.inf  # exp(710) is beyond fp64


class Errors(SumMeasure):
    """`mae`, `mse`, `rmse` and `psnr`."""

    def sums_of(self, batch: Measured) -> Tensor:
        difference = batch.scores - batch.targets
        errors = difference.abs() if self.metric.name == "mae" else difference.square()
        return _with_count(errors.sum(dtype=torch.float64), errors.numel())

    def value_of(self, sums: list[float], size: int) -> float:
        mean = super().value_of(sums, size)
        if self.metric.name == "psnr":
            return 10 * math.log10((self.metric.data_range or 1.0) ** 2 / mean) if mean else math.inf
        return math.sqrt(mean) if self.metric.name == "rmse" else mean


class R2(SumMeasure):
    """1 - sum (y - f)^2 / sum (y - mean y)^2, the mean over the columns; NaN where a column has one value only."""

    sized = True

    def shape(self, size: int) -> tuple[int, ...]:
        return (4, size)

    def sums_of(self, batch: Measured) -> Tensor:
        targets, errors = batch.targets.double(), (batch.scores - batch.targets).double()
        count = torch.full_like(targets[0], len(targets))
        return torch.stack([targets.sum(0), targets.square().sum(0), errors.square().sum(0), count])

    def value_of(self, sums: list[float], size: int) -> float:
        total, squares, errors, count = torch.tensor(sums, dtype=torch.float64).view(4, size)
        spread = squares - total.square() / count
        return float(torch.where(spread > 0, 1 - errors / spread, torch.nan).mean())


class Confusion(SumMeasure):
    """How often each class is predicted for the targets of each class: counts [target, predicted]."""

    sized = True

    def shape(self, size: int) -> tuple[int, ...]:
        return (size * size + 1,)

    def sums_of(self, batch: Measured) -> Tensor:
        # one more cell for the targets that do not count: to leave them out, the host would wait for their number
        cells = torch.where(batch.counted, batch.targets * batch.size + batch.predicted, batch.size**2)
        counts = torch.zeros(self.shape(batch.size), dtype=torch.float64, device=cells.device)
        return counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def table(self, sums: list[float], size: int) -> list[list[int]]:
        """Return the counts by [target][predicted]."""
        return [[int(count) for count in sums[row * size : (row + 1) * size]] for row in range(size)]


SUMS: dict[str, type[SumMeasure]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "perplexity": CrossEntropy,
    "bits_per_byte": CrossEntropy,
    "mae": Errors,
    "mse": Errors,
    "rmse": Errors,
    "psnr": Errors,
    "r2": R2,
}
"""Metric -> what computes it from sums; all others are of torchmetrics (library_measure.py)."""
