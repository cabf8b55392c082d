"""Metrics equal torchmetrics in one process, however the data is divided over batches and ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.metric_names import METRICS
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.metrics.library_measure import import_torchmetrics
from tests.support.metric_cases import CASES, CLASSES, CPU, IGNORED, LABELS, ROWS, add, measured, metrics, single
from tests.support.ranks import run_ranks

KEYS = [f"{loss}-{MetricConfig.model_validate(entry).key}" for loss, entry, _ in CASES]


@pytest.mark.parametrize(("loss", "entry", "reference"), CASES, ids=KEYS)
def test_a_metric_is_that_of_torchmetrics_for_all_data_at_once(
    loss: str, entry: str | dict[str, Any], reference: Callable[[], Tensor]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = float(reference())
    assert 0 < expected < 100, "a case that could not fail"
    for sizes in ([ROWS], [1, 20, 39]):
        assert measured(loss, entry, sizes) == pytest.approx(expected, rel=1e-5)


def test_every_metric_of_the_list_is_compared() -> None:
    # those of objects are compared in tests/equivalence/test_detectors.py
    of_others = {name for name, metric in METRICS.items() if metric.tasks != ("objects",)}
    assert {MetricConfig.model_validate(entry).name for _, entry, _ in CASES} == of_others


# -- over ranks

SHARES = [[25, 14], [21], []]
"""Batches of three ranks: the last has none."""


def over_ranks(mpi: MPIContext) -> list[list[float]]:
    """The metrics of `CASES` where each rank has its own share."""
    ends = [sum(map(sum, SHARES[: rank + 1])) for rank in range(3)]
    return [
        list(values.values()) for values in _values(slice(([0, *ends])[mpi.rank], ends[mpi.rank]), SHARES[mpi.rank])
    ]


def over_a_tensor_parallel_group(mpi: MPIContext) -> list[list[float]]:
    """The same where every rank has all data, and one of them counts."""
    return [list(values.values()) for values in _values(slice(None), [31, 29], counts=mpi.rank == 0)]


def _values(rows: slice, sizes: list[int], **options: Any) -> Iterator[dict[str, float]]:
    for loss in dict.fromkeys(loss for loss, _, _ in CASES):
        totals = metrics(loss, *(entry for own, entry, _ in CASES if own == loss), **options)
        add(totals, loss, rows, sizes)
        values = totals.compute()
        if loss == "info_nce":
            del values["loss"]  # which compares the rows of a batch
        yield values | {
            f"cell {place}": float(count)
            for table in totals.confusion.values()
            for place, count in enumerate(torch.tensor(table).flatten().tolist())
        }


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "how"), [(3, "over_ranks"), pytest.param(2, "over_a_tensor_parallel_group", marks=pytest.mark.slow)]
)
def test_all_ranks_have_the_metrics_of_one_process_also_those_without_any_batch(ranks: int, how: str) -> None:
    alone = [list(values.values()) for values in _values(slice(None), [ROWS])]
    found = run_ranks(ranks, f"tests.trainer.model.test_metrics:{how}", timeout_s=120)
    assert all(each == found[0] for each in found), "bit by bit"
    for mine, expected in zip(found[0], alone, strict=True):
        assert mine == pytest.approx(expected, rel=1e-6), "the loss of a batch is a sum in fp32"


def test_the_confusion_matrix_counts_targets_by_class_and_prediction_where_classes_are_few() -> None:
    output, labels = single("cross_entropy")
    totals = metrics("cross_entropy", "accuracy")
    totals.update(output, [labels], ROWS)
    totals.compute()
    expected = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for label, predicted in zip(labels.flatten().tolist(), output.argmax(-1).flatten().tolist(), strict=True):
        expected[label, predicted] += label != IGNORED
    assert totals.confusion == {"": expected.tolist()}
    plain = metrics("cross_entropy")
    plain.update(output, [labels], ROWS)
    assert set(plain.compute()) == {"loss", "accuracy"}
    assert plain.confusion == {}
    many = metrics("cross_entropy", "accuracy")
    many.update(torch.zeros(2, 31), [torch.ones(2, dtype=torch.int64)], 2)
    many.compute()
    assert many.confusion == {}


def test_the_confusion_matrix_of_each_yes_or_no_label_is_that_of_torchmetrics() -> None:
    output, labels = single("bce_with_logits")
    totals = metrics("bce_with_logits", "accuracy")
    for rows in (slice(0, 17), slice(17, None)):
        totals.update(output[rows], [labels[rows]], len(labels[rows]))
    totals.compute()
    multilabel = import_torchmetrics().functional.classification.multilabel_confusion_matrix
    assert totals.confusion == {"": multilabel(output.sigmoid(), labels.long(), num_labels=LABELS).tolist()}
    many = metrics("bce_with_logits", "accuracy")
    many.update(torch.zeros(2, 31), [torch.ones(2, 31)], 2)
    many.compute()
    assert many.confusion == {}


def test_a_metric_refuses_labels_of_a_loss_of_a_file_that_it_cannot_read() -> None:
    for entry, labels, message in (
        ("f1", torch.tensor([0.0, 0.5, 1.0])[:, None], "as 0 or 1, no or yes, but there are 0.5"),
        ("accuracy", torch.tensor([0, 3, -1]), r"as classes of the output, 0..1, but there are -1, 3"),
    ):
        kind = "file float32" if entry == "f1" else "file int64"
        totals = metrics(kind, entry)
        with pytest.raises(DataError, match=f"the metrics read the labels of loss.file {message}"):
            totals.update([torch.zeros(3, 1 if entry == "f1" else 2)], [labels], 3)


def test_outputs_that_are_all_alike_retrieve_nothing() -> None:
    totals = metrics("info_nce", "retrieval_accuracy", "retrieval_accuracy_top_5")
    totals.update([torch.ones(6, 3), torch.ones(6, 3)], [None], 6)
    values = totals.compute()
    assert (values["retrieval_accuracy"], values["retrieval_accuracy_top_5"]) == (0.0, 0.0)


def test_a_mask_of_one_channel_is_one_binary_label() -> None:
    output, labels = (
        torch.tensor([2.0, -1.0, 3.0, -2.0]).view(1, 1, 2, 2),
        torch.tensor([1.0, 1, 0, 0]).view(1, 1, 2, 2),
    )
    totals = metrics("bce_with_logits", "dice", "mean_iou", "precision", "auroc")
    totals.update(output, [labels], 1)
    values = totals.compute()
    assert (values["dice"], values["precision"]) == (0.5, 0.5)
    assert values["mean_iou"] == pytest.approx(1 / 3)
    assert values["auroc"] == 0.5


@pytest.mark.parametrize(("separator", "expected"), [(None, 3 / 7), (9, 2 / 3)])
def test_the_word_error_rate_of_a_ctc_counts_edits_of_the_greatest_scores(
    separator: int | None, expected: float
) -> None:
    """Found 1 2 9 3 for 1 2 9 3 4, and 5 for 6 6: of 7 labels 1 is missing, 1 is wrong and 1 is missing."""
    steps = torch.tensor([[1, 1, 0, 2, 9, 0, 3, 3], [5, 5, 0, 0, 0, 0, 0, 0]])
    labels = torch.tensor([[1, 2, 9, 3, 4], [6, 6, -100, -100, -100]])
    totals = metrics("ctc", {"name": "word_error_rate"} | ({} if separator is None else {"separator": separator}))
    totals.update(F.one_hot(steps, 10).float(), [labels], 2)
    assert totals.compute()["word_error_rate"] == pytest.approx(expected)


def test_the_word_error_rate_reads_no_time_step_beyond_the_input_length() -> None:
    steps = torch.tensor([[1, 1, 0, 2, 9, 9], [5, 0, 5, 7, 7, 7]])
    labels = torch.tensor([[4, 1, 2, -100], [3, 5, 5, 6]])  # the lengths in front: found 1 2 and 5 5
    totals = metrics("ctc", {"name": "word_error_rate"}, input_lengths="steps")
    totals.update(F.one_hot(steps, 10).float(), [labels], 2)
    assert totals.compute()["word_error_rate"] == pytest.approx(1 / 5)


def test_metrics_follow_the_axis_of_the_classes_and_the_labels_of_the_loss() -> None:
    output, labels = single("cross_entropy")
    wanted = metrics("cross_entropy", "f1", "auroc", "top_2", "perplexity")
    wanted.update(output, [labels], ROWS)
    found = metrics(
        "cross_entropy", "f1", "auroc", "top_2", "perplexity", label_smoothing=0.1, class_weights=(1, 2, 3, 4, 5)
    )
    found.update(output.movedim(-1, 1), [labels], ROWS)
    expected, values = wanted.compute(), found.compute()
    assert values.pop("loss") != pytest.approx(expected.pop("loss"))
    assert values == pytest.approx(expected, rel=1e-5)
    soft = metrics("cross_entropy", "f1", "accuracy", label_type="float32", ignore_index=-100)
    probabilities = 0.8 * F.one_hot(labels.flatten(), CLASSES) + 0.04
    soft.update(output.flatten(0, 1), [probabilities], 2 * ROWS)
    hard = metrics("cross_entropy", "f1", "accuracy", ignore_index=-100)
    hard.update(output, [labels], ROWS)
    assert [soft.compute()[name] for name in ("f1", "accuracy")] == [
        hard.compute()[name] for name in ("f1", "accuracy")
    ]


def test_a_dice_loss_has_the_metrics_of_classes_also_with_one_channel() -> None:
    logits, mask = torch.tensor([[[[2.0, -1.0], [3.0, -2.0]]]]), torch.tensor([[[1, 1], [0, 0]]])
    totals = metrics("dice", "mean_iou", {"name": "f1", "of_class": 1})
    totals.update(logits, [mask], 1)
    values = totals.compute()
    assert values["f1_class_1"] == 0.5
    assert values["mean_iou"] == pytest.approx(1 / 3)


def test_without_targets_a_metric_is_not_a_number_and_so_is_one_of_scores_that_are_none() -> None:
    totals = metrics("cross_entropy", "auroc", "f1", "accuracy", "perplexity", "top_2")
    assert all(math.isnan(value) for value in totals.compute().values())
    output, labels = single("cross_entropy")
    totals = metrics("cross_entropy", "auroc")
    totals.update(torch.where(torch.arange(CLASSES) == 1, torch.nan, output), [labels], ROWS)
    assert math.isnan(totals.compute()["auroc"])


def test_scores_so_great_that_their_probabilities_are_equal_in_fp32_keep_their_order() -> None:
    totals = metrics("bce_with_logits", "auroc")
    totals.update(torch.tensor([20.0, 22.0, 24.0, 26.0]), [torch.tensor([0.0, 0, 1, 1])], 4)
    assert totals.compute()["auroc"] == 1.0


def test_each_of_several_losses_has_the_metrics_that_fit_it_or_that_name_its_output() -> None:
    losses = [
        LossConfig(name="cross_entropy", output="kind", label="k", ignore_index=-100),
        LossConfig(name="mse", output="size", label="s", ignore_index=-100, weight=2.0),
        LossConfig(name="mse", output="age", label="a", ignore_index=-100),
    ]
    entries = ["f1_macro", {"name": "rmse", "output": "size"}, "mae"]
    totals = EvaluationMetrics(
        Losses(losses, ["kind", "size", "age"]), [MetricConfig.model_validate(each) for each in entries], device=CPU
    )
    outputs = [torch.eye(3), torch.zeros(3, 1), torch.zeros(3)]
    totals.update(outputs, [torch.tensor([0, 1, 1]), torch.tensor([2.0, 2, 2]), torch.tensor([1.0, 1, 4])], 3)
    values = totals.compute()
    assert set(values) == {
        *("loss", "kind/loss", "kind/f1_macro", "size/loss", "size/rmse", "size/mae", "age/loss", "age/mae")
    }
    assert (values["size/rmse"], values["size/mae"], values["age/mae"]) == (2.0, 2.0, 2.0)
    assert values["loss"] == pytest.approx(values["kind/loss"] + 2 * 4.0 + 6.0)
    assert totals.confusion == {"kind": [[1, 0, 0], [0, 1, 1], [0, 0, 0]]}


@pytest.mark.parametrize("entry", ["top_6", {"name": "recall", "of_class": 5}])
def test_a_class_or_a_k_that_the_output_does_not_have_is_refused(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"metrics: (top_6 needs 6|recall_class_5: the output has 5)"):
        measured("cross_entropy", entry, [ROWS])
