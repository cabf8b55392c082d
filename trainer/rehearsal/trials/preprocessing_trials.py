"""Try the plausible preprocessings of a model on labelled data, and rank them by the model's own accuracy.

An ONNX file does not say what its inputs were scaled to. But a trained model knows: under the preprocessing that it was
trained with its accuracy is high, under others it is lower, often near to guessing.

    candidates   a b c d e f g h        all on 32 rows
                 b d e                  the better third on 96
                 d b                    ... and so on, the last ones on all rows

Only settings change from trial to trial ([data.image], [data.text], [data.table]), and rows are read as training reads
them. So the settings of the best trial are lines of a configuration.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from onward.trainer.config.loading import load_config
from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.permutation import permutation
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.first_rows import FirstRows, read_first_rows
from onward.trainer.errors import ConfigError, Refused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, proto_of, trained_part
from onward.trainer.model.choose_fixed_batch import use_of_part
from onward.trainer.model.losses.dense_heads.assigned import overlaps
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.metrics.measured import Measured
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch
from onward.trainer.rehearsal.trials.preprocessing_candidates import Settings, candidates
from onward.trainer.run.recorded.trial_records import PreprocessingTrial, PreprocessingTrials

FIRST_ROWS = 32
LEAST_ROWS = 4
KEPT = 1 / 3
"""Rows of the first round; each round keeps this share of the candidates and takes the inverse more rows."""
ROWS_AT_ONCE = 32
MEASURED = tuple(name for name, rule in LOSS_RULES.items() if rule.metrics)
"""The losses whose outputs are compared with labels one by one."""
MANY_CLASSES = 1000
"""With more classes in the data their order is not examined."""
LEAST_OVERLAP = 0.5
"""Of a box with the object that it finds."""
LEAST_PRECISION = 0.25
"""The share of images in which the best box of a file is an object, if the file was trained on such objects."""
SURE = 3.0
"""Standard errors by which an accuracy must be above another one to count as better."""


def try_preprocessings(config: RunConfig, rows: int, *, limit_s: float = math.inf) -> PreprocessingTrials:
    """Run the file of `config` on `rows` rows of its data under each plausible preprocessing.

    limit_s: about how long all of them may take; with a slow model each gets fewer rows.
    Raises ConfigError when the loss takes no labels or the data does not fit the model, DataError for unreadable data.
    """
    signature = read_training_signature(config.model)
    if len(config.losses) != 1 or config.losses[0].name not in MEASURED:
        names = ", ".join(str(each.name) for each in config.losses)
        raise ConfigError(
            f"preprocessings are tried with one loss of {', '.join(MEASURED)}, not {names}; set model.loss"
        )
    if config.model.num_classes:
        raise ConfigError("model.num_classes makes a new head, which no preprocessing can fit; leave it out")
    with tempfile.TemporaryDirectory(prefix="onward-trials-") as folder:
        file = ModelFile.read(config.model.path)
        part = trained_part(file.proto, file.path, Path(folder), config.model)
        proto = proto_of(part)
        if declared_batch(proto.graph) and (use := use_of_part(proto, config.model, config.lora)).kind == "joint":
            raise ConfigError(
                f"the file declares a batch of {use.declared} and its rows depend on each other ({use.reason}): "
                "preprocessings cannot be tried on single rows"
            )
        runner = OnnxRunner(part, _no_data(config.model, config.losses))
        experiment = _Experiment(config, signature, runner, rows, limit_s)
        ranked = experiment.ranked([_Trial(settings) for settings in candidates(config, signature)])
    return experiment.record(ranked)


def _no_data(model: ModelConfig, losses: Sequence[LossConfig]) -> EvaluationData:
    def new_metrics(names: Sequence[str]) -> EvaluationMetrics:
        return EvaluationMetrics(Losses(losses, names), device=torch.device("cpu"))

    return EvaluationData(batches=list, new_metrics=new_metrics, model=model)


@dataclass
class _Trial:
    """One preprocessing, and the results of the rows so far."""

    settings: Settings
    scores: list[Array] = field(default_factory=list)
    """For each batch, by target: whether it is right, for classes; the squared error, for numbers."""
    pairs: list[Array] = field(default_factory=list)
    """For each batch, [n, 2]: the label and the prediction."""
    losses: list[float] = field(default_factory=list)
    """For each batch the sum of the loss over its targets."""
    num_rows: int = 0
    refused: str = ""

    @property
    def labels_and_predictions(self) -> Array:
        return np.concatenate(self.pairs)


class _Experiment:
    """The rows of the data under each preprocessing, read once for all that only differ in what is done in a batch."""

    def __init__(self, config: RunConfig, signature: Signature, runner: OnnxRunner, rows: int, limit_s: float) -> None:
        self._config = config
        self._signature = signature
        self._runner = runner
        self._loss = Losses(config.losses, runner.outputs).each[0]
        """Completed from the first rows that are read."""
        self._most = rows
        self._limit_s = limit_s
        # to infer it takes a walk over the folder, and no trial changes it
        self._schema = infer_schema(config.data)
        self._read: dict[str, FirstRows] = {}
        self._num_rows = rows
        self._model_classes = 0

    def ranked(self, trials: list[_Trial]) -> list[_Trial]:
        """Return all trials, the best first; those that were given up behind those with more rows."""
        given_up: list[_Trial] = []
        # two are compared on all rows at once
        first_rows = self._affordable_rows(trials)
        rows = first_rows if len(trials) > 2 else self._most
        while True:
            for trial in trials:
                self._extend(trial, min(rows, self._most))
            trials.sort(key=self._rank, reverse=True)
            if rows >= self._most:
                return [*trials, *given_up]
            # two at least: the record shows by how much the best one is better
            kept = max(2, math.ceil(len(trials) * KEPT))
            given_up = [*trials[kept:], *given_up]
            trials = trials[:kept]
            rows = round(rows / KEPT) if len(trials) > 2 else self._most

    def _affordable_rows(self, trials: Sequence[_Trial]) -> int:
        """Return the rows of the first round, and limit those of the last one alike, by the time of a few rows."""
        if math.isinf(self._limit_s):
            return FIRST_ROWS
        # what is read and opened once is not counted
        for rows in (LEAST_ROWS, 2 * LEAST_ROWS):
            began = time.monotonic()
            self._extend(trials[0], min(rows, self._most))
        row_s = (time.monotonic() - began) / LEAST_ROWS
        # each of about three rounds takes as long as the first one
        affordable = self._limit_s / max(3 * len(trials) * row_s, 1e-9)
        rows = round(min(FIRST_ROWS, max(2 * LEAST_ROWS, affordable)))
        self._most = min(self._most, math.ceil(self._most * rows / FIRST_ROWS))
        return rows

    def _extend(self, trial: _Trial, rows: int) -> None:
        """Run more rows, up to `rows` in all."""
        if trial.refused:
            return
        try:
            config = load_config(self._config, list(trial.settings.items()))
            first = self._rows(config)
            self._num_rows = min(self._num_rows, first.num_rows)
            for start in range(trial.num_rows, min(rows, first.num_rows), ROWS_AT_ONCE):
                places = np.arange(start, min(start + ROWS_AT_ONCE, rows, first.num_rows))
                # shuffled: the first rows of a folder of classes are of one class
                numbers = permutation(places, first.num_rows, seed=0, epoch="trials")
                self._run(trial, config, first, numbers)
        except Refused as error:
            trial.refused = "; ".join(error.problems)

    def _rows(self, config: RunConfig) -> FirstRows:
        key = _stored_as(config.data)
        if key not in self._read:
            rows = read_first_rows(config, self._signature, self._most, spread=True, schema=self._schema)
            if not self._read:  # no trial changes labels, so the first rows say what they say of the loss
                losses = resolve(self._config, rows, self._signature).losses
                self._loss = Losses(losses, self._runner.outputs).each[0]
            self._read[key] = rows
        return self._read[key]

    def _run(self, trial: _Trial, config: RunConfig, rows: FirstRows, numbers: Array) -> None:
        batch = one_batch(rows, config, self._signature, numbers)
        outputs = [torch.from_numpy(np.array(each)) for each in self._runner.run(batch.inputs)]
        labels = batch.labels[0]
        assert labels is not None
        if self._are_classes and labels.is_floating_point():
            raise ConfigError("labels that are probabilities have no accuracy; name a column of classes in data.label")
        self._loss.check_labels(batch, outputs)
        if self._are_classes:
            self._model_classes = self._loss.num_classes(outputs, labels)
        # boxes are compared whatever their class, which the file may not have
        if self._measure != "precision":
            trial.losses.append(float(self._loss(outputs, labels, batch.size)))
        pairs = _labels_and_predictions(self._loss, outputs, labels)
        trial.pairs.append(pairs)
        trial.num_rows += len(numbers)

    # -- what the results say

    def _rank(self, trial: _Trial) -> tuple[float, float, float]:
        """Return what trials are sorted by: accuracy, also of another order where it is surely better; then loss."""
        if trial.refused or not trial.pairs:
            return -math.inf, -math.inf, -math.inf
        accuracy = self._score(trial)
        _, surely = self._other_order(trial)
        return max(accuracy, surely), accuracy, -sum(trial.losses)

    def _score(self, trial: _Trial) -> float:
        """Return the accuracy, or of numbers the share of the variance that is explained (R squared)."""
        labels, predicted = trial.labels_and_predictions.T
        if not len(labels):
            return 0.0
        if self._measure != "r2":
            return float((labels == predicted).mean())
        # of equal labels no share of the variance can be explained
        variance = float(np.square(labels - labels.mean()).sum())
        return 1 - float(np.square(labels - predicted).sum()) / variance if variance else math.nan

    @property
    def _measure(self) -> Literal["accuracy", "precision", "r2"]:
        if self._loss.config.rule.labels == "objects":
            return "precision"
        return "accuracy" if "accuracy" in self._loss.config.rule.metrics else "r2"

    @property
    def _are_classes(self) -> bool:
        return self._loss.config.rule.labels == "classes"

    def _other_order(self, trial: _Trial) -> tuple[dict[int, int], float]:
        """Return (label -> class of the model under the best order of classes, the accuracy that it surely has).

        The order is found on one half of the targets; the accuracy is that of the other half, less its greatest error.
        """
        pairs = trial.labels_and_predictions.astype(np.int64) if self._are_classes else np.empty(0)
        if len(pairs) < 2 or len(np.unique(pairs[:, 0])) > MANY_CLASSES:
            return {}, -math.inf
        # found and judged on different halves: an order fits the targets that it was found on too well
        order = best_order(pairs[::2])
        others = pairs[1::2]
        return order, agreement(others, order) - SURE * _standard_error(0.5, len(others))

    def _classes(self) -> Fitted:
        """Return what is known of the names of the classes."""
        for rows in self._read.values():
            for name in self._config.losses[0].columns:
                if name in rows.fitted:
                    return rows.fitted[name]
        return Fitted()

    def record(self, trials: Sequence[_Trial]) -> PreprocessingTrials:
        """Return the results as a record."""
        done = [trial for trial in trials if not trial.refused]
        if not done:
            raise ConfigError(list(dict.fromkeys(trial.refused for trial in trials)))
        best = done[0]
        if not len(best.labels_and_predictions):
            raise ConfigError("none of the images that were tried has an object")
        chance = 0.0
        if self._measure == "accuracy":
            chance = _chance(best.labels_and_predictions[:, 0])
        elif self._measure == "precision":
            # boxes overlap some objects by chance: at least as often as under preprocessings that are wrong
            chance = max(statistics.median(map(self._score, done)), LEAST_PRECISION)
        accuracy = self._score(best)
        targets = len(best.labels_and_predictions)
        # the most frequent label is what a model could guess without looking
        least = chance + SURE * _standard_error(chance, targets)
        order, surely = self._other_order(best)
        order_accuracy = agreement(best.labels_and_predictions, order) if order else 0.0
        results = []
        for trial in trials:
            accuracy_of_trial = loss = math.nan
            if not trial.refused:
                accuracy_of_trial = self._score(trial)
                loss = sum(trial.losses) / max(len(trial.labels_and_predictions), 1)
            results.append(
                PreprocessingTrial(
                    settings=dict(trial.settings),
                    rows=trial.num_rows,
                    accuracy=accuracy_of_trial,
                    loss=loss,
                    refused=trial.refused,
                )
            )
        return PreprocessingTrials(
            measure=self._measure,
            chance=chance,
            better_than_chance=accuracy > least,
            other_order=order if surely > max(accuracy, least) else {},
            other_order_accuracy=order_accuracy,
            classes=self._classes().classes,
            sorted_by_name=self._classes().sorted_by_name,
            model_classes=self._model_classes,
            trials=tuple(results),
        )


def _stored_as(data: DataConfig) -> str:
    """Return a key of the settings that change stored rows."""
    image = data.image
    if image is not None:
        # grey images are stored with one channel, the other colors are exchanged in a batch
        same = {"scale": 1.0, "mean": (), "std": (), "color": "auto" if image.color != "grey" else "grey"}
        data = data.model_copy(update={"image": image.model_copy(update=same)})
    return data.model_dump_json()


def _labels_and_predictions(loss: Loss, outputs: Sequence[torch.Tensor], labels: torch.Tensor) -> Array:
    """Return [n, 2]: the label and the prediction of each target."""
    if loss.config.rule.labels == "objects":
        return _best_boxes(Measured(loss, outputs, labels, task="objects"))
    if loss.config.rule.labels == "classes":
        flat = labels.flatten()
        predicted = loss.predicted(outputs, labels).flatten()
        # ignored targets have no class that could be right
        counted = flat != loss.ignore_index
        return torch.stack([flat[counted], predicted[counted]], dim=1).numpy()
    output = loss.output(outputs)
    target = loss.like_output(outputs, labels)
    if "accuracy" in loss.config.rule.metrics:
        output = (output > 0).float()
        target = (target > 0.5).float()
    return torch.stack([target.flatten().double(), output.flatten().double()], dim=1).numpy()


def _best_boxes(batch: Measured) -> Array:
    """Return [images with objects, 2]: 1, and whether the best box of the image overlaps an object, of whatever class.

    The classes of the data may be others than those that the file was trained on.
    """
    found, labels = batch.objects
    pairs = []
    for boxes, objects in zip(found, labels.reshape(len(labels), -1, BOX_NUMBERS), strict=True):
        counted = objects[(objects[:, 0] >= 0) & (objects[:, 5] == COUNTED), 1:5]
        if len(counted):
            overlap = overlaps(counted[:, None], boxes[:1, 2:])
            pairs.append([1.0, float(overlap.gt(LEAST_OVERLAP).any())])
    return np.array(pairs).reshape(-1, 2)


def _chance(labels: Array) -> float:
    """Return the share of the most frequent label."""
    _, counts = np.unique(labels, return_counts=True)
    return float(counts.max() / counts.sum())


def _standard_error(share: float, count: int) -> float:
    """Return the standard error of a share of `count` targets, at least that of one target."""
    return math.sqrt(max(share * (1 - share), 1 / count) / count)


def agreement(pairs: Array, order: Mapping[int, int]) -> float:
    """Return the share of pairs [n, 2] of a label and a prediction that agree under an order of classes."""
    return float(np.mean([order.get(int(label), -1) == predicted for label, predicted in pairs.tolist()]))


def best_order(pairs: Array) -> dict[int, int]:
    """Return label -> class, one to one, with the most agreement among pairs [n, 2] of a label and a prediction."""
    from scipy.optimize import linear_sum_assignment

    classes = np.unique(pairs)
    places = np.searchsorted(classes, pairs)
    counts = np.zeros((len(classes), len(classes)), np.int64)
    # counts[label, prediction], for the assignment problem
    np.add.at(counts, (places[:, 0], places[:, 1]), 1)
    # of equally good orders the one that leaves most classes where they are
    preferred = counts * (len(classes) + 1) + np.eye(len(classes), dtype=np.int64)
    rows, columns = linear_sum_assignment(preferred, maximize=True)
    return {int(classes[row]): int(classes[column]) for row, column in zip(rows, columns, strict=True)}
