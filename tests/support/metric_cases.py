"""For each metric outputs and labels of 60 rows, and what torchmetrics computes of all of them at once.

Losses are named as in `LossConfig`; `file int64` and `file float32` are losses of the user's own with such labels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.metrics.library_measure import import_torchmetrics

CPU = torch.device("cpu")
ROWS, CLASSES, LABELS, IGNORED = 60, 5, 3, 2


def squared(output: Tensor, labels: Tensor) -> Tensor:
    """A loss of the user's own, of labels of any kind."""
    return output.square().sum() + labels.sum()


LEVELS = (0.5, 0.1, 0.9)
SETTINGS: dict[str, dict[str, Any]] = {
    "quantile": {"quantiles": LEVELS},
    "cosine": {"margin": 0.2, "output": ["a", "b"]},
    "triplet": {"output": ["a", "b", "c"]},
    "info_nce": {"output": ["a", "b"]},
    **{
        f"file {kind}": {"file": f"{Path(__file__).resolve()}:squared", "label_type": kind}
        for kind in ("int64", "float32")
    },
}
"""Of losses that have some."""


@functools.cache
def data(loss: str) -> tuple[list[Tensor], Tensor | None]:
    """Outputs and labels that have something to do with each other: [60, ...]."""
    random = torch.Generator().manual_seed(4)
    if loss == "file int64":
        return data("cross_entropy")
    if loss == "file float32":
        return data("bce_with_logits")
    if loss == "quantile":
        labels = torch.randn(ROWS, 2, generator=random)
        return [0.5 * labels[..., None] + torch.tensor([0.0, -0.8, 0.8])], labels
    if loss == "giou":
        corners = torch.rand(ROWS, 3, 2, 2, generator=random)
        labels = torch.cat([corners.amin(2), corners.amax(2)], -1)
        return [labels + 0.05 * torch.randn(labels.shape, generator=random)], labels
    if loss == "ctc":
        labels = torch.randint(1, 6, (ROWS, 6), generator=random)
        labels[torch.rand(labels.shape, generator=random) < 0.2] = -100
        wrong = torch.randint(6, (ROWS, 13), generator=random)
        steps = torch.stack([torch.zeros_like(labels), labels.clamp(min=0)], -1).flatten(1)
        steps = F.pad(steps, (0, 1))
        steps = torch.where(torch.rand(steps.shape, generator=random) < 0.2, wrong, steps)
        return [F.one_hot(steps, 6).float()], labels
    if loss in ("cosine", "triplet", "info_nce"):
        rows = [torch.randn(ROWS, 6, generator=random) for _ in range(3)]
        alike = torch.where(torch.rand(ROWS, generator=random) < 0.5, 1.0, -1.0)
        near = rows[0] * (alike[:, None] if loss == "cosine" else 1) + 1.5 * rows[1]
        return [rows[0], near, rows[2]][: 3 if loss == "triplet" else 2], alike if loss == "cosine" else None
    output, labels = _of_one(loss)
    return [output], labels


def _of_one(loss: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    if loss == "cross_entropy":  # two targets in a row; class 2 is ignored
        labels = torch.randint(CLASSES, (ROWS, 2), generator=random)
        noise = torch.randn(ROWS, 2, CLASSES, generator=random)
        return noise + 1.5 * F.one_hot(labels, CLASSES), labels
    if loss == "bce_with_logits":
        labels = torch.randint(2, (ROWS, LABELS), generator=random).float()
        return torch.randn(ROWS, LABELS, generator=random) + labels, labels
    images = torch.rand(ROWS, 1, 12, 12, generator=random)
    return images + 0.1 * torch.randn(images.shape, generator=random), images


def metrics(loss: str, *entries: str | dict[str, Any], counts: bool = True, **settings: Any) -> EvaluationMetrics:
    ignored = {"ignore_index": IGNORED if loss in ("cross_entropy", "file int64") else -100}
    base = {"name": loss.split()[0], "label": "label", "output": "a"}
    config = LossConfig.model_validate(base | ignored | SETTINGS.get(loss, {}) | settings)
    found = [MetricConfig.model_validate(entry) for entry in entries]
    return EvaluationMetrics(Losses([config], ["a", "b", "c"]), found, device=CPU, counts=counts)


def measured(loss: str, entry: str | dict[str, Any], sizes: list[int]) -> float:
    totals = metrics(loss, entry)
    add(totals, loss, slice(None), sizes)
    (found,) = (value for name, value in totals.compute().items() if name != "loss")
    return found


def add(totals: EvaluationMetrics, loss: str, rows: slice, sizes: list[int]) -> None:
    """Add these rows in batches of these sizes."""
    outputs, labels = data(loss)
    start = 0
    for size in sizes:
        own = [None if part is None else part[rows][start : start + size] for part in (*outputs, labels)]
        totals.update([part for part in own[:-1] if part is not None], [own[-1]], size)
        start += size


def single(loss: str) -> tuple[Tensor, Tensor]:
    """The one output and the labels of a loss that has them."""
    (output,), labels = data(loss)
    assert labels is not None
    return output, labels


# -- what torchmetrics computes of all data at once


def of_classes(function: str, **parameters: Any) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        output, labels = (each.flatten(0, 1) for each in single("cross_entropy"))
        classification = import_torchmetrics().functional.classification
        call = getattr(classification, f"multiclass_{function}")
        return call(output.softmax(-1), labels, num_classes=CLASSES, ignore_index=IGNORED, **parameters)

    return reference


def of_labels(function: str, **parameters: Any) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        output, labels = single("bce_with_logits")
        classification = import_torchmetrics().functional.classification
        call = getattr(classification, f"multilabel_{function}")
        return call(output.sigmoid(), labels.long(), num_labels=LABELS, **parameters)

    return reference


def of_values(function: str, **parameters: Any) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        output, labels = single("mse")
        library = import_torchmetrics().functional
        if function == "r2_score":
            return library.r2_score(output.flatten(0, 2), labels.flatten(0, 2))
        flat = (output, labels) if "structural" in function else (output.flatten(), labels.flatten())
        found = getattr(library.image if "s" in parameters.pop("of", "") else library, function)(*flat, **parameters)
        return torch.as_tensor(found)

    return reference


def of_torch(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
    output, labels = (each.flatten(0, 1) for each in single("cross_entropy"))
    return lambda: function(output[labels != IGNORED], labels[labels != IGNORED])


def of_coverage(level: float) -> Callable[[], Tensor]:
    output, labels = single("quantile")
    return lambda: (labels <= output[..., LEVELS.index(level)]).float().mean()


def of_pinball(*levels: float) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        from sklearn.metrics import mean_pinball_loss  # which ranks do not need

        output, labels = single("quantile")
        columns = [(output[..., LEVELS.index(level)].flatten(), level) for level in levels]
        found = [mean_pinball_loss(labels.flatten(), predicted, alpha=level) for predicted, level in columns]
        return torch.tensor(sum(found) / len(found))

    return reference


def of_boxes() -> Tensor:
    ours, theirs = (boxes.flatten(0, 1) for boxes in single("giou"))
    matrix = import_torchmetrics().functional.detection.intersection_over_union(ours, theirs, aggregate=False)
    return torch.as_tensor(matrix).diagonal().mean()


def of_symbols(function: str, join: str) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        output, labels = single("ctc")
        steps = [
            [a for a, b in zip(row, [0, *row], strict=False) if a != b and a] for row in output.argmax(-1).tolist()
        ]
        real = [[label for label in row if label != -100] for row in labels.tolist()]
        found, wanted = ([join.join(map(str, row)) for row in rows] for rows in (steps, real))
        return torch.as_tensor(getattr(import_torchmetrics().functional.text, function)(found, wanted))

    return reference


def of_pairs(function: str) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        (one, other), labels = data("cosine")
        assert labels is not None
        similarity = (1 + F.cosine_similarity(one.double(), other.double())) / 2
        classification = import_torchmetrics().functional.classification
        found = getattr(classification, f"binary_{function}")(
            similarity, (labels > 0).long(), **({"threshold": 0.8} if function == "accuracy" else {})
        )
        return torch.as_tensor(found)

    return reference


def of_triplets() -> Tensor:
    anchor, positive, negative = data("triplet")[0]
    return ((anchor - positive).norm(dim=1) < (anchor - negative).norm(dim=1)).float().mean()


def of_retrieval(k: int) -> Callable[[], Tensor]:
    def reference() -> Tensor:
        queries, keys = (F.normalize(part.double(), dim=-1) for part in data("info_nce")[0])
        rate = import_torchmetrics().functional.retrieval.retrieval_hit_rate
        return torch.stack(
            [rate(q @ keys.T, torch.arange(ROWS) == row, top_k=k) for row, q in enumerate(queries)]
        ).mean()

    return reference


CASES: list[tuple[str, str | dict[str, Any], Callable[[], Tensor]]] = [
    ("cross_entropy", "accuracy", of_classes("accuracy", average="micro")),
    ("cross_entropy", "top_2", of_classes("accuracy", average="micro", top_k=2)),
    ("cross_entropy", "perplexity", of_torch(lambda out, labels: F.cross_entropy(out, labels).exp())),
    (
        "cross_entropy",
        {"name": "bits_per_byte", "bytes_per_target": 4.0},
        of_torch(lambda out, labels: F.cross_entropy(out, labels) / math.log(2) / 4),
    ),
    ("cross_entropy", "f1", of_classes("f1_score", average="macro")),
    ("cross_entropy", "f1_micro", of_classes("f1_score", average="micro")),
    ("cross_entropy", "f1_weighted", of_classes("f1_score", average="weighted")),
    ("cross_entropy", {"name": "f_beta", "beta": 2.0}, of_classes("fbeta_score", beta=2.0, average="macro")),
    ("cross_entropy", "precision_macro", of_classes("precision", average="macro")),
    ("cross_entropy", "recall_weighted", of_classes("recall", average="weighted")),
    ("cross_entropy", "balanced_accuracy", of_classes("recall", average="macro")),
    (
        "cross_entropy",
        {"name": "recall", "of_class": 3},
        lambda: of_classes("recall", average="none")()[3],  # type: ignore[list-item]
    ),
    ("cross_entropy", "specificity", of_classes("specificity", average="macro")),
    ("cross_entropy", "dice", of_classes("f1_score", average="macro")),
    ("cross_entropy", "mean_iou", of_classes("jaccard_index", average="macro")),
    ("cross_entropy", "cohen_kappa", of_classes("cohen_kappa")),
    ("cross_entropy", "matthews", of_classes("matthews_corrcoef")),
    ("cross_entropy", "auroc", of_classes("auroc", average="macro")),
    ("cross_entropy", {"name": "auroc", "thresholds": 20}, of_classes("auroc", average="macro", thresholds=20)),
    ("cross_entropy", "average_precision_weighted", of_classes("average_precision", average="weighted")),
    ("cross_entropy", "calibration_error", of_classes("calibration_error", n_bins=15)),
    ("bce_with_logits", "accuracy", of_labels("accuracy", average="micro")),
    ("bce_with_logits", "f1_macro", of_labels("f1_score", average="macro")),
    ("bce_with_logits", "mean_iou", of_labels("jaccard_index", average="macro")),
    ("bce_with_logits", "auroc", of_labels("auroc", average="macro")),
    ("bce_with_logits", "matthews", of_labels("matthews_corrcoef")),
    ("mse", "mae", of_values("mean_absolute_error")),
    ("mse", "mse", of_values("mean_squared_error")),
    ("mse", "rmse", of_values("mean_squared_error", squared=False)),
    ("mse", "r2", of_values("r2_score")),
    ("mse", "mape", of_values("mean_absolute_percentage_error")),
    ("mse", "spearman", of_values("spearman_corrcoef")),
    (
        "mse",
        {"name": "psnr", "data_range": 1.0},
        of_values("peak_signal_noise_ratio", data_range=1.0, of="images"),
    ),
    (
        "mse",
        {"name": "ssim", "data_range": 1.0},
        of_values("structural_similarity_index_measure", data_range=1.0, of="images"),
    ),
    ("quantile", "pinball", of_pinball(*LEVELS)),
    ("quantile", {"name": "pinball", "quantile": 0.9}, of_pinball(0.9)),
    ("quantile", {"name": "coverage", "quantile": 0.1}, of_coverage(0.1)),
    # whoever is below the 10 % quantile is below the 90 % quantile
    ("quantile", "coverage", lambda: of_coverage(0.9)() - of_coverage(0.1)()),
    ("giou", "box_iou", of_boxes),
    ("giou", "mae", lambda: (single("giou")[0] - single("giou")[1]).abs().mean()),
    ("ctc", "word_error_rate", of_symbols("word_error_rate", " ")),
    ("ctc", "char_error_rate", of_symbols("char_error_rate", "")),
    ("cosine", "auroc", of_pairs("auroc")),
    ("cosine", "average_precision", of_pairs("average_precision")),
    ("cosine", "pair_accuracy", of_pairs("accuracy")),
    ("triplet", "triplet_accuracy", of_triplets),
    ("info_nce", "retrieval_accuracy", of_retrieval(1)),
    ("info_nce", "retrieval_accuracy_top_5", of_retrieval(5)),
    ("file int64", "accuracy", of_classes("accuracy", average="micro")),
    ("file int64", "f1", of_classes("f1_score", average="macro")),
    ("file float32", "f1", of_labels("f1_score", average="macro")),
    ("file float32", "mae", lambda: (single("file float32")[0] - single("file float32")[1]).abs().mean()),
]
