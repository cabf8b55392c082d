"""Measure the losses and their metrics over all evaluation batches of all ranks.

each rank      update(batch), update(batch), ...
all ranks      sizes, all-reduce (max)       where a metric needs the number of classes, which not every rank knows
               sums, all-reduce              one for all losses and metrics
               lists, gathered on rank 0     where a metric needs the scores of all targets
rank 0         values, sent to all ranks     where they come from lists or from torchmetrics
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.sections.metrics import MetricConfig, metrics_of, task_of
from onward.trainer.distributed.lists import gather_lists
from onward.trainer.model.metrics.library_measure import LibraryMeasure
from onward.trainer.model.metrics.mean_precision import MeanPrecision
from onward.trainer.model.metrics.measured import Measured
from onward.trainer.model.metrics.measures import CONFUSIONS, OWN, Confusion, Counts, LabelConfusion, Measure

if TYPE_CHECKING:
    from onward.trainer.config.metric_names import Task
    from onward.trainer.event_records import ClassPrecision
    from onward.trainer.model.losses.loss import Loss, Losses

MOST_CLASSES = 30
"""The most classes or labels for which the confusion matrix is kept."""


class EvaluationMetrics:
    """`loss`, and the metrics of each loss, over all evaluation batches.

    metrics: those that are configured; without any, `accuracy` for cross-entropy and BCE, `mse` and `mae` for
    regression. Of several losses each has its own, as `<output>/loss`, `<output>/accuracy`, ..., and `loss` is their
    weighted sum. With a teacher, `distillation` is the weighted sum of the losses against it; it is the `loss` as well
    where there are no labels. What is added up stays on the device until `compute`, so that a batch does not wait for
    the one before it.

    counts: whether the batches of this rank are added; false on all ranks of a tensor-parallel group but one.
    """

    def __init__(
        self, losses: Losses, metrics: Sequence[MetricConfig] = (), *, device: torch.device, counts: bool = True
    ) -> None:
        self.losses = losses
        self._device = device
        self._counts = counts
        self._configured = bool(metrics)
        self._each = [_LossMetrics(loss, metrics, device) for loss in losses.each]
        self._soft = torch.zeros(len(losses.soft), 2, dtype=torch.float64, device=device)
        """For each loss against the teacher the number of targets, and the sum over them."""
        self.confusion: dict[str, Counts] = {}
        """After `compute`, of each loss with few classes or labels, if metrics are configured: its title, or "" if it
        is the only one, -> how many targets there are by [class][predicted class] or by [label][is][predicted]."""
        self.precisions: dict[str, list[ClassPrecision]] = {}
        """After `compute`, on rank 0: likewise, of each loss of detected objects."""

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> None:
        """Add one batch; labels of each loss. Replicas may add different numbers of batches; collective only over a
        group that shards classes."""
        for each, own in zip(self._each, labels, strict=False):
            each.update(outputs, own, size)
        # the labels of the losses against the teacher are behind those of the others
        for total, soft, counted in zip(self._soft, self.losses.soft, labels[len(self._each) :], strict=False):
            total[0].add_(soft.count(counted, size))
            total[1].add_(soft(outputs, counted, size))

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches of all ranks. Collective: every rank of the default group."""
        alone = not dist.is_initialized()
        if self._configured:
            # a rank without a batch has zeros, and takes the numbers of the others
            own_sizes = [size for metrics in self._each for size in metrics.sizes.values()]
            sizes = torch.tensor(own_sizes, device=self._device)
            if not alone:
                dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
            # the greatest of all ranks, in the order in which each rank has listed its own
            agreed = iter(sizes.tolist())
            for metrics in self._each:
                for task in metrics.sizes:
                    metrics.learn(task, next(agreed))
        totals = self.totals()
        if not alone:
            # the same shape on every rank, since all of them take part in the sum
            totals = totals if self._counts else torch.zeros_like(totals)
            dist.all_reduce(totals)
        parts = [part for metrics in self._each for part in metrics.lists()]
        # the ranks of a tensor-parallel group have the same targets: one of them gives these, the others none
        if not self._counts:
            parts = [part[:0] for part in parts]
        lists = iter(gather_lists(parts))
        sums = self._split(totals.tolist())
        on_first = alone or dist.get_rank() == 0
        values = [metrics.values(sums, lists, on_first_rank=on_first) for metrics in self._each]
        return self._named(values if alone else self._agreed(values)) | self._distillation(next(sums))

    def totals(self) -> Tensor:
        """Return all that this rank adds up: fp64 [n]. The totals of several parts of the data may be added."""
        return torch.cat([state.flatten().double() for state in self._states()])

    def of_totals(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics that such totals [n] have; NaN for those that need more than sums."""
        sums = self._split(totals.tolist())
        # of totals alone there are no lists of other ranks; what needs them is NaN
        lists = iter([part for metrics in self._each for part in metrics.lists()])
        values = [metrics.values(sums, lists, on_first_rank=False) for metrics in self._each]
        return self._named(values) | self._distillation(next(sums))

    def precision(self, name: str) -> MeanPrecision | None:
        """Return what measures a mean average precision, by the name that `compute` returns; None for other metrics."""
        for title, own in zip(self.losses.titles, self._each, strict=False):
            for _, measure in own.measures:
                # the metrics of a single loss have no prefix
                if isinstance(measure, MeanPrecision) and f"/{title}/{measure.key}".endswith(f"/{name}"):
                    return measure
        return None

    def _states(self) -> list[Tensor]:
        return [*(state for metrics in self._each for state in metrics.sums()), self._soft]

    def _split(self, totals: list[float]) -> Iterator[list[float]]:
        return _split(totals, [state.numel() for state in self._states()])

    def _distillation(self, sums: list[float]) -> dict[str, float]:
        """Return the weighted loss against the teacher; {} without one. sums: two for each soft loss."""
        means = [loss / count if count else math.nan for count, loss in zip(sums[::2], sums[1::2], strict=True)]
        total = sum(soft.config.weight * mean for soft, mean in zip(self.losses.soft, means, strict=True))
        if not means:
            return {}
        return {"distillation": total} if self._each else {"loss": total, "distillation": total}

    def _agreed(self, values: list[list[float]]) -> list[list[float]]:
        """Return what rank 0 has computed, where it alone computes some of the values."""
        if not any(metrics.needs_first_rank for metrics in self._each):
            return values
        # rank 0 has the lists, and so the values that need them: its values hold for all ranks
        table = torch.tensor([value for own in values for value in own], dtype=torch.float64, device=self._device)
        dist.broadcast(table, src=0)
        return list(_split(table.tolist(), [len(own) for own in values]))

    def _named(self, values: list[list[float]]) -> dict[str, float]:
        each = [dict(zip(own.names, found, strict=True)) for own, found in zip(self._each, values, strict=True)]
        # the metrics of a single loss have no prefix
        titles = [""] if len(each) == 1 else self.losses.titles
        titled = list(zip(titles, self._each, strict=True))
        self.confusion = {title: own.table for title, own in titled if own.table}
        self.precisions = {title: own.precisions for title, own in titled if own.precisions}
        if len(each) < 2:
            return each[0] if each else {}
        pairs = zip(self.losses.each, each, strict=True)
        loss = sum((own.config.weight * found["loss"] for own, found in pairs), start=0.0)
        named = zip(titles, each, strict=True)
        return {"loss": loss} | {f"{title}/{name}": v for title, own in named for name, v in own.items()}


class _LossMetrics:
    """One loss and its metrics on this rank."""

    def __init__(self, loss: Loss, metrics: Sequence[MetricConfig], device: torch.device) -> None:
        self._loss = loss
        self.measures: list[tuple[Task, Measure]] = []
        # the first metric of detected objects, whose results the others read
        self._precision: MeanPrecision | None = None
        for metric in metrics_of(loss.config, metrics):
            task = task_of(metric, loss.config)
            assert task
            # metrics without an entry in OWN are those of torchmetrics
            library = partial(LibraryMeasure, task=task, ignore_index=loss.ignore_index)
            measure: Measure = OWN.get(metric.name, library)(metric, device=device)
            if isinstance(measure, MeanPrecision):
                self._precision = measure.first = self._precision or measure
            self.measures.append((task, measure))
        self.sizes: dict[Task, int] = dict.fromkeys((task for task, _ in self.measures), 0)
        """What is measured -> `Measured.size`; 0 as long as it is not known."""
        self._confusions: dict[Task, Confusion | LabelConfusion] = {}
        for task in self.sizes:
            if metrics and task in CONFUSIONS:
                # the matrix needs a configuration only to be a measure; its counts do not depend on it
                self._confusions[task] = CONFUSIONS[task](MetricConfig(name="accuracy"), device)
        self.names = ["loss", *(measure.key for _, measure in self.measures)]
        self.needs_first_rank = any(measure.on_first_rank for _, measure in self.measures)
        self.table: Counts = []
        """The confusion matrix, once `values` was called."""
        # of each term the number of targets (or of their weights), and the loss; fp64 counts exactly, and one NaN makes
        # a sum NaN
        self._totals = torch.zeros(2, loss.config.num_terms, dtype=torch.float64, device=device)

    @property
    def precisions(self) -> list[ClassPrecision]:
        """The precision of each class of detected objects, once `values` was called; else []."""
        return self._precision.classes if self._precision else []

    def update(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None:
        """Add one batch of `size` samples."""
        loss_sum = self._loss(outputs, labels, size)
        count = self._loss.divisor(labels, size)
        for total, value in zip(self._totals, (count, loss_sum), strict=True):
            total.add_(value)
        # a padding micro-batch has no labels: it takes part in collectives and adds nothing
        if labels is None and self._loss.config.takes_labels:
            return
        # one for each task, so that metrics share what is computed from the outputs
        batches = {task: Measured(self._loss, outputs, labels, task=task, loss_sum=loss_sum) for task in self.sizes}
        for task, batch in batches.items():
            self.learn(task, batch.size)
        for task, measure in (*self.measures, *self._confusions.items()):
            measure.update(batches[task])

    def learn(self, task: Task, size: int) -> None:
        """Take the number of classes, labels or values from a batch, or from the other ranks."""
        self.sizes[task] = size
        # every rank drops it, at the latest in `compute`, where all agree on the number
        if size > MOST_CLASSES:
            self._confusions.pop(task, None)

    def sums(self) -> list[Tensor]:
        """Return what is added up over the ranks."""
        measures = (*self.measures, *self._confusions.items())
        return [self._totals, *(state for task, measure in measures for state in measure.sums(self.sizes[task]))]

    def lists(self) -> list[Tensor]:
        """Return what is concatenated over the ranks; after `sums`."""
        return [part for _, measure in self.measures for part in measure.lists()]

    def values(self, sums: Iterator[list[float]], lists: Iterator[Tensor], *, on_first_rank: bool) -> list[float]:
        """Return a value for each of `names`, from the next sums and lists; NaN if there is no target.

        on_first_rank: also those that only rank 0 computes, because it has the lists; else NaN.
        """
        counts, losses = _split(next(sums), [self._loss.config.num_terms] * 2)
        # of rows without any object the divisor is 0, and their loss is not
        if self._loss.config.rule.own_divisor and (counts[0] or losses[0]):
            counts = [max(counts[0], 1.0)]
        means = [loss / (count or 1.0) for count, loss in zip(counts, losses, strict=True)]
        results = [sum(means, start=0.0) if any(counts) else math.nan]
        for task, measure in self.measures:
            size = self.sizes[task]
            # in the order of `sums`, which all ranks have added up
            own_sums = [next(sums) for _ in measure.sums(size)]
            own_lists = [next(lists) for _ in measure.lists()]
            computed = any(counts) and (on_first_rank or not measure.on_first_rank)
            results.append(measure.value(own_sums, own_lists, size) if computed else math.nan)
        for task, confusion in self._confusions.items():
            self.table = confusion.table(next(sums), self.sizes[task])
        return results


def _split(values: list[float], lengths: Sequence[int]) -> Iterator[list[float]]:
    """Yield successive parts of these lengths."""
    start = 0
    for length in lengths:
        yield values[start : start + length]
        start += length
