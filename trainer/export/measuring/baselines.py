"""What a file must beat to be worth serving: metrics of predictions that need no model.

    labels of the rows ──> the most frequent class, or the mean of the numbers ──> the same metrics, on the same rows
    the past of a window ──> its last value, once more for each future row

They are the best constants for these very rows, so the bar is a little higher than that of constants of the training
rows, and no pass over these is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.reading.series_windows import AHEAD
from onward.trainer.data.schema.columns import Array
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics

log = logging.getLogger(__name__)

LEAST_SHARE = 1e-6
"""A class that no row has gets this share, so that its logarithm is finite."""
FREQUENT = "the most frequent class"
MEAN = "the mean of the labels"
LAST = "the last known value"


class Baselines:
    """Metrics of predictions without a model, over the rows of `data`: first `count` all of them, then `measure` all.

    outputs: the names of the file's outputs. What cannot be predicted without a model, such as boxes or sequences, has
    no baseline; neither has a run with a teacher.
    """

    def __init__(self, config: DataConfig, data: EvaluationData, outputs: Sequence[str]) -> None:
        self._data = data
        self._outputs = outputs
        self._why = ""
        losses = data.new_metrics(outputs).losses
        kinds = [_kind(loss) for loss in losses.each]
        self._constant = ""
        # all losses or none: one without a best constant has no value to add to the total
        if kinds and all(kinds) and not losses.soft:
            self._constant = " and ".join(dict.fromkeys(kinds))
        self._series = _series(config, losses) if data.rows is not None else ""
        names = filter(None, (self._constant, LAST if self._series else ""))
        self._metrics: dict[str, EvaluationMetrics] = {name: data.new_metrics(outputs) for name in names}
        self._losses = losses
        self._sums = [torch.zeros(0, dtype=torch.float64) for _ in losses.each]
        """Of each loss: rows of each class, or the sum of each element of the labels."""
        self._rows = 0

    def count(self, outputs: Sequence[Tensor], batch: Batch, start: int, stop: int) -> None:
        """Add up the labels of the rows [start, stop) of a batch. Raises nothing."""
        self._try(lambda: self._count(batch, start, stop))

    def measure(self, outputs: Sequence[Tensor], batch: Batch, start: int, stop: int) -> None:
        """Add these rows to the metrics; outputs: those of the file, for their shapes. Raises nothing."""
        self._try(lambda: self._measure(outputs, batch, start, stop))

    def compute(self) -> dict[str, dict[str, float]]:
        """Return what was predicted -> its metrics, as `<split>/<name>`; {} where nothing can be."""
        if self._why:
            log.info("no baseline: %s", self._why)
            return {}
        split = self._data.split
        return {
            name: {f"{split}/{metric}": value for metric, value in metrics.compute().items()}
            for name, metrics in self._metrics.items()
        }

    def _try(self, act: Callable[[], None]) -> None:
        if self._why or not self._metrics:
            return
        try:
            act()
        except Exception as error:  # what only informs must not fail an export
            self._why = f"{type(error).__name__}: {error}"

    def _count(self, batch: Batch, start: int, stop: int) -> None:
        self._rows += stop - start
        for place, loss in enumerate(self._losses.each if self._constant else ()):
            labels = batch.labels[place]
            assert labels is not None
            own = labels[start:stop]
            if loss.config.has_classes:
                # negative labels are no classes, whatever is ignored
                classes = own[(own != loss.ignore_index) & (own >= 0)]
                found = torch.bincount(classes.flatten()).double()
            else:
                found = own.reshape(stop - start, -1).double().sum(0)
            # later rows may have classes, or labels, beyond those so far
            length = max(len(self._sums[place]), len(found))
            self._sums[place] = _padded(self._sums[place], length) + _padded(found, length)

    def _measure(self, outputs: Sequence[Tensor], batch: Batch, start: int, stop: int) -> None:
        labels = [None if each is None else each[start:stop] for each in batch.labels]
        if self._constant:
            constants = [each.float() for each in outputs]
            for place, loss in enumerate(self._losses.each):
                of = labels[place]
                assert of is not None
                like = constants[loss.index]
                constants[loss.index] = self._constant_of(place, loss, like, of).expand(like.shape)
            self._metrics[self._constant].update(constants, labels, stop - start)
        if self._series:
            (loss,) = self._losses.each
            last = self._last_values(batch.rows[start:stop])
            repeated = [each.float() for each in outputs]
            like = repeated[loss.index]
            repeated[loss.index] = last.reshape(-1, *[1] * (like.ndim - 1)).expand(like.shape)
            self._metrics[LAST].update(repeated, labels, stop - start)

    def _constant_of(self, place: int, loss: Loss, like: Tensor, labels: Tensor) -> Tensor:
        """Return what is said of every row, in a shape that expands to that of the output."""
        if loss.config.has_classes:
            axis = loss.axis(like, labels)
            counts = _padded(self._sums[place], like.shape[axis])
            # scores whose softmax is the shares of the classes: the best constant of a cross-entropy
            scores = (counts / counts.sum().clamp(min=1)).clamp(min=LEAST_SHARE).log()
            return scores.float().reshape([-1 if each == axis else 1 for each in range(like.ndim)])
        mean = self._sums[place] / self._rows
        if len(mean) != like[:1].numel():  # rows of varying length
            mean = mean.mean().expand(like[:1].numel())
        if loss.config.rule.tasks == ("labels",):
            # the loss applies a sigmoid to what it reads
            mean = torch.logit(mean.clamp(LEAST_SHARE, 1 - LEAST_SHARE))
        return mean.float().reshape(1, *like.shape[1:])

    def _last_values(self, rows: Array) -> Tensor:
        """Return the last value of each row's past, in the units of the source: fp32 [n]."""
        assert self._data.rows is not None
        past = np.asarray(self._data.rows.read(rows)[self._series], np.float64)[:, -1]
        fitted = self._data.rows.fitted.get(self._series)
        if fitted is not None and fitted.center:  # it feeds the model standardised
            past = past * fitted.scale[-1] + fitted.center[-1]
        # backwards through what training fitted: first the scale, then the logarithm
        if fitted is not None and fitted.log1p:
            past = np.expm1(past)
        return torch.from_numpy(past).float()


def _kind(loss: Loss) -> str:
    if loss.config.soft_labels:
        return ""
    if "accuracy" in loss.config.rule.metrics:
        return FREQUENT
    return MEAN if loss.config.rule.tasks == ("values",) else ""


def _series(data: DataConfig, losses: Losses) -> str:
    """Return the column of the past of the only label, which is the future of a window; "" if it is none."""
    columns = [name for loss in losses.each for name in loss.config.columns]
    if data.table.window is None or len(columns) != 1 or losses.each[0].config.rule.tasks != ("values",):
        return ""
    (label,) = columns
    past = label.removesuffix(AHEAD)
    fed: set[str] = set()
    for names in data.inputs.values():
        fed.update([names] if isinstance(names, str) else names)
    return past if past != label and past in fed else ""


def _padded(values: Tensor, length: int) -> Tensor:
    return functional.pad(values, (0, length - len(values)))
