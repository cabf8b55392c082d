"""The metrics by name: what each one measures, its parameters, and which losses it fits. Needs no torch.

An entry of `metrics` is a name, or a table with parameters; some parameters may be a part of the name:

    "top_5"          {name = "top_k", k = 5}
    "f1_weighted"    {name = "f1", average = "weighted"}

A metric reads the output and the labels of a loss as the loss does, and which metrics fit depends on what these are:

    classes    class scores and class numbers: accuracy, f1, auroc, ...
    labels     one score for each yes-or-no label: accuracy, f1, auroc, ...
    values     numbers: mae, rmse, r2, ...
    quantiles  several predicted quantiles of a number: pinball, coverage
    boxes      boxes (x1, y1, x2, y2): box_iou
    objects    a set of boxes with class scores, for any number of objects: map, map_50, ...
    sequences  scores of symbols at each time step, and shorter sequences of symbols: word_error_rate
    pairs      two embeddings of each row, alike or not: auroc of their similarity, pair_accuracy
    triplets   three embeddings of each row: triplet_accuracy
    matches    two embeddings of each row, which belong together: retrieval_accuracy
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Task = Literal[
    "classes", "labels", "values", "quantiles", "boxes", "objects", "sequences", "pairs", "triplets", "matches"
]  # fmt: skip

FILE_TASKS: Mapping[str, tuple[Task, ...]] = {"int64": ("classes",), "float32": ("values", "labels")}
"""`loss.label_type` of a loss of your own -> what it compares. Of numbers the name of the metric decides."""

AVERAGES = ("macro", "micro", "weighted")


@dataclass(frozen=True)
class Metric:
    """A metric of the list below."""

    meaning: str
    tasks: tuple[Task, ...]
    better: Literal["least", "greatest", "nominal"]
    """`nominal`: neither, it is best near a value of its own, so that no checkpoint can be chosen by it."""
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Those of the parameters that have no default."""
    library: str = ""
    """The torchmetrics class, after `Multiclass`, `Binary` or `Multilabel` where labels are no values; "" = ours."""


_AVERAGED = ("average", "of_class")
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("share of targets that are predicted right", ("classes", "labels"), "greatest"),
    "top_k": Metric(
        "share of targets among the k classes with the greatest scores", ("classes",), "greatest", ("k",), ("k",)
    ),
    "perplexity": Metric("exp(mean cross-entropy)", ("classes",), "least"),
    "bits_per_byte": Metric(
        "cross-entropy in bits, divided by the bytes of the text that the targets stand for",
        ("classes",),
        "least",
        ("bytes_per_target",),
    ),
    "precision": Metric(
        "share of the predictions of a class that are right",
        ("classes", "labels"),
        "greatest",
        _AVERAGED,
        (),
        "Precision",
    ),
    "recall": Metric(
        "share of the targets of a class that are found", ("classes", "labels"), "greatest", _AVERAGED, (), "Recall"
    ),
    "specificity": Metric(
        "share of the targets of other classes that are predicted as others",
        ("classes", "labels"),
        "greatest",
        _AVERAGED,
        (),
        "Specificity",
    ),
    "f1": Metric("harmonic mean of precision and recall", ("classes", "labels"), "greatest", _AVERAGED, (), "F1Score"),
    "f_beta": Metric(
        "as f1, with recall `beta` times as important as precision",
        ("classes", "labels"),
        "greatest",
        (*_AVERAGED, "beta"),
        ("beta",),
        "FBetaScore",
    ),
    "dice": Metric(
        "Dice coefficient over all targets, the same as f1", ("classes", "labels"), "greatest", _AVERAGED, (), "F1Score"
    ),
    "mean_iou": Metric(
        "intersection over union (Jaccard index)", ("classes", "labels"), "greatest", _AVERAGED, (), "JaccardIndex"
    ),
    "auroc": Metric(
        "area under the ROC curve, of several classes one against the rest; of pairs that of their cosine similarity",
        ("classes", "labels", "pairs"),
        "greatest",
        (*_AVERAGED, "thresholds"),
        (),
        "AUROC",
    ),
    "average_precision": Metric(
        "area under the precision-recall curve",
        ("classes", "labels", "pairs"),
        "greatest",
        (*_AVERAGED, "thresholds"),
        (),
        "AveragePrecision",
    ),
    "cohen_kappa": Metric("agreement beyond chance", ("classes",), "greatest", (), (), "CohenKappa"),
    "matthews": Metric(
        "Matthews correlation coefficient", ("classes", "labels"), "greatest", (), (), "MatthewsCorrCoef"
    ),
    "calibration_error": Metric(
        "expected calibration error over 15 bins of confidence", ("classes",), "least", (), (), "CalibrationError"
    ),
    "mae": Metric("mean absolute error", ("values",), "least"),
    "mse": Metric("mean squared error", ("values",), "least"),
    "rmse": Metric("root of the mean squared error", ("values",), "least"),
    "r2": Metric("coefficient of determination, the mean over the last axis of the output", ("values",), "greatest"),
    "psnr": Metric("peak signal-to-noise ratio in dB", ("values",), "greatest", ("data_range",), ("data_range",)),
    "ssim": Metric(
        "structural similarity of images [B, C, H, W]",
        ("values",),
        "greatest",
        ("data_range",),
        ("data_range",),
        "StructuralSimilarityIndexMeasure",
    ),
    "mape": Metric(
        "mean absolute error relative to the target", ("values",), "least", (), (), "MeanAbsolutePercentageError"
    ),
    "word_error_rate": Metric(
        "edits between the sequence of the greatest scores and the labels, per word; each label is a word, or those "
        "between two labels `separator`",
        ("sequences",),
        "least",
        ("separator",),
        (),
        "WordErrorRate",
    ),
    "char_error_rate": Metric(
        "edits between the sequence of the greatest scores and the labels, per label",
        ("sequences",),
        "least",
        (),
        (),
        "CharErrorRate",
    ),
    "spearman": Metric("rank correlation", ("values",), "greatest", (), (), "SpearmanCorrCoef"),
    "pinball": Metric("mean pinball loss of one quantile, or of all", ("quantiles",), "least", ("quantile",)),
    "coverage": Metric(
        "share of the labels that are at most the predicted quantile, or without one between the least and the "
        "greatest quantile",
        ("quantiles",),
        "nominal",
        ("quantile",),
    ),
    "box_iou": Metric("mean over the boxes of the intersection over the union with the label", ("boxes",), "greatest"),
    "map": Metric(
        "mean average precision of COCO, over intersections over unions of 0.50 to 0.95",
        ("objects",),
        "greatest",
        library="MeanAveragePrecision",
    ),
    "map_50": Metric(
        "the same at an intersection over union of 0.50",
        ("objects",),
        "greatest",
        library="MeanAveragePrecision",
    ),
    "map_small": Metric(
        "as map, of objects of less than 32 x 32 pixels", ("objects",), "greatest", library="MeanAveragePrecision"
    ),
    "map_medium": Metric(
        "as map, of objects of 32 x 32 to 96 x 96 pixels", ("objects",), "greatest", library="MeanAveragePrecision"
    ),
    "map_large": Metric(
        "as map, of objects of more than 96 x 96 pixels", ("objects",), "greatest", library="MeanAveragePrecision"
    ),
    "pair_accuracy": Metric(
        "share of pairs whose cosine similarity is above the middle of loss.margin and 1 where they are alike, and not "
        "above it where they are not",
        ("pairs",),
        "greatest",
    ),
    "triplet_accuracy": Metric(
        "share of rows whose first output is nearer to the second than to the third", ("triplets",), "greatest"
    ),
    "retrieval_accuracy": Metric(
        "share of rows whose second output is among the k most similar ones to the first, of all evaluation data",
        ("matches",),
        "greatest",
        ("k",),
    ),
}
ALIASES: Mapping[str, dict[str, Any]] = {
    "balanced_accuracy": {"name": "recall", "average": "macro"},
    "cer": {"name": "char_error_rate"},
    "iou": {"name": "mean_iou"},
    "wer": {"name": "word_error_rate"},
    "jaccard": {"name": "mean_iou"},
    "mcc": {"name": "matthews"},
}


def parse(text: str) -> dict[str, Any]:
    """Return the settings that a metric's short name stands for: "f1_macro" -> {"name": "f1", "average": "macro"}.

    A name that is not known is returned as it is.
    """
    if text in ALIASES:
        return dict(ALIASES[text])
    # k is a part of the name, so that top_1 and top_5 are two metrics
    if found := re.fullmatch(r"(|retrieval_accuracy_)top_(\d+)", text):
        return {"name": found[1].rstrip("_") or "top_k", "k": int(found[2])}
    stem, _, average = text.rpartition("_")
    if average in AVERAGES and "average" in METRICS.get(stem, METRICS["accuracy"]).parameters:
        return {"name": stem, "average": average}
    return {"name": text}


def unknown(name: str) -> str:
    """Return the sentence that refuses an unknown metric, with near names or all of them."""
    near = difflib.get_close_matches(name, [*METRICS, *ALIASES, "top_5", *_averaged_names()], n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    known = ", ".join([*METRICS, *ALIASES])
    return f"there is no metric {name!r}; {hint}Known: {known}; with an average as in f1_macro, with k as in top_5"


def _averaged_names() -> list[str]:
    names = [name for name, metric in METRICS.items() if "average" in metric.parameters]
    return [f"{name}_{average}" for name in names for average in AVERAGES]


def is_greatest(name: str) -> bool | None:
    """Return whether a greater value is better, of a metric as evaluations name it; None for one that is not known, or
    of which neither is better.

    Examples: `evaluation/loss`, `evaluation/f1_macro`, `evaluation/boxes/rmse`.
    """
    if name.rpartition("/")[2] == "loss":
        return False
    metric = _measured_as(name)
    return None if metric is None or metric.better == "nominal" else metric.better == "greatest"


def has_no_direction(name: str) -> bool:
    """Return whether a metric, as evaluations name it, is best near a value of its own."""
    metric = _measured_as(name)
    return metric is not None and metric.better == "nominal"


def _measured_as(name: str) -> Metric | None:
    # the name that an evaluation gives is stem, number, average or class: what follows the stem is taken off
    last = re.sub(r"^(f_beta|pinball|coverage)_[\d.e-]+", r"\1", name.rpartition("/")[2])
    return METRICS.get(parse(re.sub(r"_class_\d+$", "", last))["name"])
