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

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.metric_names import TASKS
from onward.trainer.config.sections.metrics import MetricConfig, metrics_of
from onward.trainer.distributed.lists import gather_lists
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.library_measure import LibraryMeasure
from onward.trainer.model.metrics.measures import SUMS, Confusion, Measure, Measured

MOST_CLASSES = 30
"""The most classes for which the confusion matrix is kept."""


class EvaluationMetrics:
    """`loss`, and the metrics of each loss, over all evaluation batches.

    metrics: those that are configured; without any, `accuracy` for cross-entropy and BCE, `mse` and `mae` for
    regression. Of several losses each has its own, as `<output>/loss`, `<output>/accuracy`, ..., and `loss` is their
    weighted sum. What is added up stays on the device until `compute`, so that a batch does not wait for the one
    before it.

    counts: whether the batches of this rank are added; false on all ranks of a tensor-parallel group but one.
    """

    def __init__(
        self, losses: Losses, metrics: Sequence[MetricConfig] = (), *, device: torch.device, counts: bool = True
    ) -> None:
        self._losses, self._device, self._counts, self._configured = losses, device, counts, bool(metrics)
        self._each = [_LossMetrics(loss, metrics, device) for loss in losses.each]
        self.confusion: dict[str, list[list[int]]] = {}
        """After `compute`, of each loss with few classes, if metrics are configured: its title, or "" if it is the only
        one, -> how many targets there are by [class][predicted class]."""

    @torch.no_grad()
    def update(self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> None:
        """Add one batch; labels of each loss. Replicas may add different numbers of batches; collective only over a
        group that shards classes."""
        for each, own in zip(self._each, labels, strict=True):
            each.update(outputs, own, size)

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches of all ranks. Collective: every rank of the default group."""
        alone = not dist.is_initialized()
        if self._configured:
            sizes = torch.tensor([each.size for each in self._each], device=self._device)
            if not alone:
                dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
            for each, size in zip(self._each, sizes.tolist(), strict=True):
                each.learn(size)
        states = [state for each in self._each for state in each.sums()]
        totals = torch.cat([state.flatten().double() for state in states])
        if not alone:
            totals = totals if self._counts else torch.zeros_like(totals)
            dist.all_reduce(totals)
        own = [part if self._counts else part[:0] for each in self._each for part in each.lists()]
        lists = iter(gather_lists(own))
        sums, on_first = _split(totals.tolist(), [state.numel() for state in states]), alone or dist.get_rank() == 0
        values = [each.values(sums, lists, with_library=on_first) for each in self._each]
        return self._named(values if alone else self._agreed(values))

    def _agreed(self, values: list[list[float]]) -> list[list[float]]:
        """Return what rank 0 has computed, where it alone computes some of the values."""
        if not any(each.has_library for each in self._each):
            return values
        table = torch.tensor([value for own in values for value in own], dtype=torch.float64, device=self._device)
        dist.broadcast(table, src=0)
        return list(_split(table.tolist(), [len(own) for own in values]))

    def _named(self, values: list[list[float]]) -> dict[str, float]:
        each = [dict(zip(own.names, found, strict=True)) for own, found in zip(self._each, values, strict=True)]
        titles = self._losses.titles if len(each) > 1 else [""]
        self.confusion = {title: own.table for title, own in zip(titles, self._each, strict=True) if own.table}
        if len(each) == 1:
            return each[0]
        loss = self._losses.weighted([torch.tensor(found["loss"], dtype=torch.float64) for found in each])
        titled = zip(titles, each, strict=True)
        return {"loss": float(loss)} | {f"{title}/{name}": v for title, own in titled for name, v in own.items()}


class _LossMetrics:
    """One loss and its metrics on this rank."""

    def __init__(self, loss: Loss, metrics: Sequence[MetricConfig], device: torch.device) -> None:
        self._loss, task = loss, TASKS.get(loss.name)
        self._measures: list[Measure] = [
            SUMS[metric.name](metric, device)
            if metric.name in SUMS
            else LibraryMeasure(metric, task, device, ignore_index=loss.ignore_index)
            for metric in metrics_of(loss.config, metrics)
            if task  # else there are none
        ]
        self._confusion = Confusion(MetricConfig(name="accuracy"), device) if metrics and task == "classes" else None
        self.names = ["loss", *(measure.key for measure in self._measures)]
        self.has_library = any(isinstance(measure, LibraryMeasure) for measure in self._measures)
        self.size = 0
        """`Measured.size`; 0 as long as it is not known."""
        self.table: list[list[int]] = []
        """The confusion matrix, once `values` was called."""
        # the number of targets (or of their weights), and the loss; fp64 counts exactly, and one NaN makes a sum NaN
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None:
        """Add one batch of `size` samples."""
        count, loss_sum = self._loss.count(labels, size), self._loss(outputs, labels, size)
        for total, value in zip(self._totals, (count, loss_sum), strict=True):
            total.add_(value)
        if labels is None or not self._measures:
            return
        batch = Measured(self._loss, outputs, labels, loss_sum=loss_sum)
        self.learn(batch.size)
        for measure in (*self._measures, *self._own_confusion()):
            measure.update(batch)

    def learn(self, size: int) -> None:
        """Take the number of classes, labels or values from a batch, or from the other ranks."""
        self.size = size
        self._confusion = self._confusion if size <= MOST_CLASSES else None

    def _own_confusion(self) -> list[Confusion]:
        return [self._confusion] if self._confusion else []

    def sums(self) -> list[Tensor]:
        """Return what is added up over the ranks."""
        measures = (*self._measures, *self._own_confusion())
        return [self._totals, *(state for measure in measures for state in measure.sums(self.size))]

    def lists(self) -> list[Tensor]:
        """Return what is concatenated over the ranks; after `sums`."""
        return [part for measure in self._measures for part in measure.lists()]

    def values(self, sums: Iterator[list[float]], lists: Iterator[Tensor], *, with_library: bool) -> list[float]:
        """Return a value for each of `names`, from the next sums and lists; NaN if there is no target.

        with_library: also those of torchmetrics, which need the lists; else NaN.
        """
        count, loss = next(sums)
        found = [loss / count if count else math.nan]
        for measure in self._measures:
            own_sums, own_lists = [next(sums) for _ in measure.sums(self.size)], [next(lists) for _ in measure.lists()]
            computed = count and (with_library or not isinstance(measure, LibraryMeasure))
            found.append(measure.value(own_sums, own_lists, self.size) if computed else math.nan)
        for confusion in self._own_confusion():
            self.table = confusion.table(next(sums), self.size)
        return found


def _split(values: list[float], lengths: Sequence[int]) -> Iterator[list[float]]:
    """Yield successive parts of these lengths."""
    start = 0
    for length in lengths:
        yield values[start : start + length]
        start += length
