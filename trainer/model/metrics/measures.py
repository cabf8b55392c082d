"""What the metrics of a loss keep of evaluation batches: sums, or the scores of all targets.

A measure reads batches one by one (`update`) and never leaves its rank. `EvaluationMetrics` adds up the sums of all
ranks and concatenates their lists; the measure then computes its value from these. So it does not matter how many
batches a rank has seen, or whether it has seen any:

    rank 0    update, update, update    sums [..]   lists [n0, ..]    \\
    rank 1    update                    sums [..]   lists [n1, ..]     >   value(all sums, all lists) on rank 0
    rank 2    (no outputs)              zeros       lists [0, ..]     /
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.metric_names import Task
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.loss_formulas import box_overlaps
from onward.trainer.model.metrics.mean_precision import MeanPrecision
from onward.trainer.model.metrics.measured import Measured

Counts = list[list[int]] | list[list[list[int]]]
"""Of classes targets by [class][predicted class], of labels by [label][is][predicted]."""


class Measure(Protocol):
    """One metric of one loss over all evaluation batches."""

    key: str
    on_first_rank: bool
    """Whether rank 0 alone computes its value, because it needs the lists or is torchmetrics'."""

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

    on_first_rank = False

    def __init__(self, metric: MetricConfig, device: torch.device) -> None:
        self.metric = metric
        self.key = metric.key
        self._device = device
        self._sums: Tensor | None = None

    def update(self, batch: Measured) -> None:
        batch_sums = self.sums_of(batch)
        self._sums = batch_sums if self._sums is None else self._sums + batch_sums

    def sums(self, size: int) -> list[Tensor]:
        # a rank without a batch takes part in the sum over ranks with zeros
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
        """Return the sums over a batch, fp64 [*shape]."""
        raise NotImplementedError

    def value_of(self, sums: list[float], size: int) -> float:
        """Return the metric: here the quotient of a sum and a count."""
        total, count = sums
        return total / count


def _with_count(total: Tensor, count: int | Tensor) -> Tensor:
    """Return both as fp64 [2], without waiting for the device."""
    # a count that is on the device stays there: reading it would wait for all kernels
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
        # of fewer classes than k each target would count as found
        if k > batch.size:
            raise ConfigError(f"metrics: {self.key} needs {k} classes or more, but the output has {batch.size}")
        # the target is among the k classes with the greatest scores
        found = (batch.scores.topk(k).indices == batch.targets[:, None]).any(-1)
        return _with_count((found & batch.counted).sum(), batch.count)


class CrossEntropy(SumMeasure):
    """`perplexity` and `bits_per_byte`."""

    def sums_of(self, batch: Measured) -> Tensor:
        return _with_count(batch.entropy, batch.count)

    def value_of(self, sums: list[float], size: int) -> float:
        mean = super().value_of(sums, size)
        # from nats to bits, and from targets to bytes
        if self.metric.name == "bits_per_byte":
            return mean / math.log(2) / (self.metric.bytes_per_target or 1.0)
        return math.exp(mean) if not mean > 700 else math.inf  # exp(710) is beyond fp64


class Errors(SumMeasure):
    """`mae`, `mse`, `rmse` and `psnr`."""

    def sums_of(self, batch: Measured) -> Tensor:
        # only mae adds up absolute values; the others are functions of the squares
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

    def shape(self, size: int) -> tuple[int, ...]:
        return (4, size)

    def sums_of(self, batch: Measured) -> Tensor:
        targets = batch.targets.double()
        errors = (batch.scores - batch.targets).double()
        # the count of each column, so that all four sums have one shape
        count = torch.full_like(targets[0], len(targets))
        return torch.stack([targets.sum(0), targets.square().sum(0), errors.square().sum(0), count])

    def value_of(self, sums: list[float], size: int) -> float:
        total, squares, errors, count = torch.tensor(sums, dtype=torch.float64).view(4, size)
        # sum (y - mean)^2 from sums alone, which ranks can add up
        spread = squares - total.square() / count
        return float(torch.where(spread > 0, 1 - errors / spread, torch.nan).mean())


class Pinball(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        levels = torch.tensor(batch.config.quantiles, device=batch.scores.device)
        difference = batch.targets[:, None] - batch.scores
        errors = torch.max(levels * difference, (levels - 1) * difference).double()
        # of one quantile only its column, else of all of them
        if self.metric.quantile:
            errors = errors[:, batch.config.quantiles.index(self.metric.quantile)]
        return _with_count(errors.sum(), errors.numel())


class Coverage(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        levels = batch.config.quantiles
        labels = batch.targets
        covered = labels <= batch.scores[:, levels.index(self.metric.quantile or max(levels))]
        # without a named quantile: between the least and the greatest one
        if not self.metric.quantile and len(levels) > 1:
            covered &= labels >= batch.scores[:, levels.index(min(levels))]
        return _with_count(covered.sum(), len(labels))


class BoxIou(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        overlap, union = box_overlaps(*batch.boxes)
        return _with_count(torch.where(union > 0, overlap / union, 0.0).sum(dtype=torch.float64), len(union))


class PairAccuracy(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        # the middle between the cosine of a pair that is alike, 1, and the margin of one that is not
        found_alike = batch.scores > (1 + (batch.config.margin or 0.0)) / 2
        return _with_count((found_alike == batch.targets.bool()).sum(), len(found_alike))


class TripletAccuracy(SumMeasure):
    def sums_of(self, batch: Measured) -> Tensor:
        anchor, positive, negative = batch.embeddings
        # whether the anchor is nearer to the positive sample than to the negative one
        is_nearer = F.pairwise_distance(anchor, positive) < F.pairwise_distance(anchor, negative)
        return _with_count(is_nearer.sum(), len(anchor))


class Retrieval:
    """For each row: is its second output among the k most similar ones to the first, of all rows of all ranks?

    It keeps both outputs of all rows, so that it depends neither on the batches nor on the ranks.
    """

    on_first_rank = True

    def __init__(self, metric: MetricConfig, device: torch.device) -> None:
        self.key = metric.key
        self._k = metric.k or 1
        self._device = device
        self._rows: list[list[Tensor]] = []

    def update(self, batch: Measured) -> None:
        self._rows.append(batch.embeddings)

    def sums(self, size: int) -> list[Tensor]:
        return []

    def lists(self) -> list[Tensor]:
        empty = torch.empty(0, device=self._device)
        return [torch.cat(part) for part in zip(*self._rows, strict=True)] if self._rows else [empty, empty]

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        # of unit length, so that a product is the cosine
        queries, keys = (F.normalize(rows.double(), dim=-1) for rows in lists)
        if queries.isnan().any() or keys.isnan().any():
            return math.nan
        hits = 0
        step = max(1, MOST_SIMILARITIES // len(keys))
        for start in range(0, len(queries), step):
            # in parts, since the similarities of all rows with all rows may not fit into memory
            similar = queries[start : start + step] @ keys.T
            # the key of query i is row i
            own = similar.diagonal(start)[:, None]
            # others that are as similar, but for rounding, come first: equal outputs of all rows find nothing
            others = (similar >= own - 1e-9).sum(1) - 1
            hits += int((others < self._k).sum())
        return hits / len(queries)


MOST_SIMILARITIES = 2**24
"""The most similarities that are computed at once."""


class Confusion(SumMeasure):
    """How often each class is predicted for the targets of each class: counts [target, predicted]."""

    def shape(self, size: int) -> tuple[int, ...]:
        return (size * size + 1,)

    def sums_of(self, batch: Measured) -> Tensor:
        # one more cell for the targets that do not count: to leave them out, the host would wait for their number
        cells = torch.where(batch.counted, batch.targets * batch.size + batch.predicted, batch.size**2)
        counts = torch.zeros(self.shape(batch.size), dtype=torch.float64, device=cells.device)
        return counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def table(self, sums: list[float], size: int) -> Counts:
        """Return the counts by [target][predicted]."""
        return [[int(count) for count in sums[row * size : (row + 1) * size]] for row in range(size)]


class LabelConfusion(SumMeasure):
    """The same of each yes-or-no label: counts [label, target, predicted], where 1 = yes."""

    def shape(self, size: int) -> tuple[int, ...]:
        return (size * 4,)

    def sums_of(self, batch: Measured) -> Tensor:
        yes = batch.targets.bool()
        found = batch.scores > 0
        # in the order of [target][predicted]
        cells = [~yes & ~found, ~yes & found, yes & ~found, yes & found]
        return torch.stack([cell.sum(0) for cell in cells], 1).flatten().double()

    def table(self, sums: list[float], size: int) -> Counts:
        """Return the counts by [label][target][predicted]."""
        cells = [int(count) for count in sums[: size * 4]]
        return [[cells[at : at + 2], cells[at + 2 : at + 4]] for at in range(0, len(cells), 4)]


CONFUSIONS: dict[Task, type[Confusion | LabelConfusion]] = {"classes": Confusion, "labels": LabelConfusion}
"""What is measured -> what counts right and wrong predictions, where there are few classes or labels."""


OWN: dict[str, type[SumMeasure | Retrieval | MeanPrecision]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "perplexity": CrossEntropy,
    "bits_per_byte": CrossEntropy,
    "mae": Errors,
    "mse": Errors,
    "rmse": Errors,
    "psnr": Errors,
    "r2": R2,
    "pinball": Pinball,
    "coverage": Coverage,
    "box_iou": BoxIou,
    "pair_accuracy": PairAccuracy,
    "triplet_accuracy": TripletAccuracy,
    "retrieval_accuracy": Retrieval,
    **dict.fromkeys(("map", "map_50", "map_small", "map_medium", "map_large"), MeanPrecision),
}
"""Metric -> what computes it; all others are of torchmetrics (library_measure.py)."""
