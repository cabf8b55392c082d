"""Measure a file that predicts on labelled rows: the loss and every metric that fits it. Needs torch.

raw rows --Predictor--> outputs  --.
label columns --class names------> labels --> EvaluationMetrics, as training's evaluations
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.metric_names import METRICS
from onward.trainer.config.sections.metrics import MetricConfig, is_library, task_of
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.measuring.predictions import Predictions
from onward.trainer.export.measuring.raw_batches import RawBatch
from onward.trainer.export.served.predictor import BadRows
from onward.trainer.export.served.result_columns import Meaning
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics

LEFT_OUT = ("bits_per_byte", "dice", "ssim")
"""Metrics that are measured only where they are configured: of text, the same as f1, of pictures."""
CURVES = ("auroc", "average_precision")
MOST_CURVES = 100
"""Metrics that keep all scores of all rows in memory: likewise, with more classes than so many."""


def losses_of(meanings: Sequence[Meaning], configured: Sequence[LossConfig] = ()) -> list[LossConfig]:
    """Return the losses that outputs are measured with. configured: those of the run; () = by the names of the losses,
    with their default settings.

    Raises ConfigError for losses that labelled rows alone do not give.
    """
    found = []
    problems = []
    for place, meaning in enumerate(meanings):
        known = {"name": meaning["loss"], "label": tuple(meaning["label"]), "ignore_index": -100}
        loss = configured[place] if configured else LossConfig.model_validate(known)
        if not loss.takes_labels or loss.rule.num_outputs > 1:
            problems.append(f"{loss.name} compares no output with labels: `onward status` has what the run measured")
        elif loss.rule.labels == "sequences" or (loss.is_own and not configured):
            problems.append(f"{loss.name} cannot be measured here: `onward status` has what the run measured")
        # weights that balance the training data are no part of a measure of other rows
        balanced = {"class_weights": ()} if loss.class_weights == "balanced" else {}
        found.append(loss.model_copy(update={"output": meaning["name"], **balanced}))
    if problems:
        raise ConfigError(problems)
    return found


def metrics_that_fit(
    losses: Sequence[LossConfig], configured: Sequence[MetricConfig], *, num_classes: int = 0
) -> list[MetricConfig]:
    """Return the configured metrics, and all others that fit a loss and can be computed here. num_classes: the most
    that an output has, as far as that is known."""
    has_library = importlib.util.find_spec("torchmetrics") is not None
    left_out = LEFT_OUT if num_classes <= MOST_CURVES else (*LEFT_OUT, *CURVES)
    without_settings = [name for name, metric in METRICS.items() if not metric.required]
    others = [MetricConfig(name=name) for name in without_settings if name not in left_out]
    # the configured ones come last, so that their settings count where both have a key
    chosen = {metric.key: metric for metric in (*others, *configured)}
    fitting = []
    for metric in chosen.values():
        fits = any(task_of(metric, loss) for loss in losses)
        if fits and (has_library or not is_library(metric)):
            fitting.append(metric)
    return fitting


def evaluate(
    found: Predictions, losses: Sequence[LossConfig], meanings: Sequence[Meaning], metrics: Sequence[MetricConfig]
) -> dict[str, float]:
    """Return the loss and the metrics over all rows. Raises DataError with the rows whose labels cannot be used."""
    names = [meaning["name"] for meaning in meanings]
    measured = EvaluationMetrics(Losses(losses, names), metrics, device=torch.device("cpu"))
    batches = replace(found, batches=_with_labels(found.batches, losses, meanings))
    for batch, outputs in batches.outputs():
        labels = [
            _labels(batch.cells[_key(place)], outputs[str(loss.output)], loss) for place, loss in enumerate(losses)
        ]
        arrays = [torch.from_numpy(np.ascontiguousarray(outputs[name], np.float32)) for name in names]
        measured.update(arrays, labels, len(batch.names))
    found.num_rows = batches.num_rows
    return measured.compute()


def _with_labels(
    batches: Iterable[RawBatch], losses: Sequence[LossConfig], meanings: Sequence[Meaning]
) -> Iterable[RawBatch]:
    """Yield the batches without rows whose labels cannot be used, with a column of the labels of each loss."""
    for batch in batches:
        try:
            _add_labels(batch, losses, meanings)
        except BadRows as error:
            # without the bad rows the second call raises nothing
            batch.leave_out(error.rows)
            _add_labels(batch, losses, meanings)
        yield batch


def _key(place: int) -> str:
    return f"\0labels {place}"  # no column of a table has this name


def _add_labels(batch: RawBatch, losses: Sequence[LossConfig], meanings: Sequence[Meaning]) -> None:
    bad: dict[int, str] = {}
    for place, (loss, meaning) in enumerate(zip(losses, meanings, strict=True)):
        columns = [batch.cells[name] for name in loss.columns]
        read = _class_of if loss.has_classes else _number_of
        places = {str(name): number for number, name in enumerate(meaning["classes"])}
        labels: list[Any] = []
        for at, row in enumerate(zip(*columns, strict=True)):
            try:
                values = [read(cell, places, loss) for cell in row]
                labels.append(values[0] if isinstance(loss.label, str) or len(values) == 1 else values)
            except ValueError as error:
                bad[at] = f"{', '.join(loss.columns)} {error}"
                # a place holder: the row is left out, and its label is never read
                labels.append(None)
        batch.cells[_key(place)] = labels
    if bad:
        raise BadRows(bad)


def _class_of(cell: Any, places: Mapping[str, int], loss: LossConfig) -> int:
    """Return the number of a class. Raises ValueError with what the cell holds instead."""
    if cell is None or cell != cell:  # NaN is not equal to itself
        raise ValueError("is missing")
    if isinstance(cell, bool | np.bool_):
        cell = str(cell).lower()  # as JSON writes it
    # tables make floats of integers where a cell is missing
    text = str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()
    # names come first: a class may be called "3" and not be the third
    if text in places:
        return places[text]
    is_number = text.lstrip("-").isdigit()
    if is_number and (not places or int(text) == loss.ignored):
        return int(text)
    known = ", ".join(list(places)[:10]) or "numbers from 0 on"
    raise ValueError(f"is {text[:40]!r}, which is no class of the model; it has {known}")


def _number_of(cell: Any, places: Mapping[str, int], loss: LossConfig) -> Any:
    """Return a number, or a list of numbers as it is. Raises ValueError with what the cell holds instead."""
    try:
        found = np.asarray(cell, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"is {str(cell)[:40]!r}, not a number") from None
    if not np.isfinite(found).all():
        raise ValueError("is missing")
    return found.tolist()


def _labels(cells: list[Any], output: Array, loss: LossConfig) -> Tensor:
    """Return the labels of one loss as a tensor. Raises DataError where they do not fit the output [n, ...]."""
    if loss.has_classes:
        classes = torch.tensor(cells, dtype=torch.int64)
        if output.ndim > 2:
            raise DataError(
                f"output {loss.output!r} is {list(output.shape)}, with classes for each position of a row (masks, "
                "tokens), which are not measured here; the evaluations of a run measure them"
            )
        if int(classes.max()) >= output.shape[1]:
            raise DataError(f"the labels go up to class {int(classes.max())}, but the model has {output.shape[1]}")
        return classes
    numbers = torch.tensor(cells, dtype=torch.float32)
    if loss.rule.labels in ("quantiles", "own"):
        return numbers
    if numbers.numel() != output.size:
        raise DataError(
            f"output {loss.output!r} has {output.size // len(output)} numbers a row, but the labels "
            f"{', '.join(loss.columns)} have {numbers.numel() // len(numbers)}"
        )
    return numbers.reshape(output.shape)


def label_kinds(losses: Sequence[LossConfig], meanings: Sequence[Meaning]) -> dict[str, str]:
    """Return label column -> what it holds, as `read_raw_batches` takes it."""
    kinds: dict[str, str] = {}
    for loss, meaning in zip(losses, meanings, strict=True):
        kinds |= dict.fromkeys(loss.columns, "text" if meaning["classes"] else "number")
    return kinds
