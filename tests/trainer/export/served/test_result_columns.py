"""Outputs become classes with probabilities, labels, or numbers; masks are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.trainer.export.served.result_columns import NoColumns, result_columns, sigmoid, softmax


def meaning(loss: str, name: str = "y", classes: tuple[str, ...] = (), label: tuple[str, ...] = ("kind",)) -> Any:
    return {"name": name, "loss": loss, "classes": classes, "label": label}


SCORES = np.array([[2.0, 1.0, -1.0], [0.0, 0.0, 3.0]], np.float32)


def test_without_names_classes_are_numbers() -> None:
    found = result_columns({"y": SCORES}, [meaning("cross_entropy")])
    assert found["class"].tolist() == [0, 2]
    np.testing.assert_allclose(found["probability"], np.exp([2.0, 3.0]) / np.exp(SCORES).sum(axis=1), rtol=1e-6)
    assert list(found)[2:] == ["probability_0", "probability_1", "probability_2"]


def test_the_best_classes_in_place_of_all() -> None:
    found = result_columns({"y": SCORES}, [meaning("cross_entropy", classes=("a", "b", "c"))], top=2)
    assert list(found) == ["class", "probability", "class_2", "probability_2"]
    assert found["class_2"].tolist() == ["b", "a"], "of equal scores the first class"


def test_more_than_20_classes_have_no_column_each() -> None:
    assert list(result_columns({"y": np.eye(21)}, [meaning("cross_entropy")])) == ["class", "probability"]


def test_one_label_is_yes_or_no_and_several_are_listed() -> None:
    found = result_columns({"y": np.array([[1.0], [-3.0]])}, [meaning("bce_with_logits", label=("late",))])
    assert found["class"].tolist() == [1, 0]
    np.testing.assert_allclose(found["probability"], sigmoid(np.array([1.0, 3.0])), rtol=1e-6)
    np.testing.assert_allclose(found["probability_late"], sigmoid(np.array([1.0, -3.0])), rtol=1e-6)
    several = result_columns({"y": SCORES}, [meaning("bce_with_logits", label=("red", "big", "old"))])
    assert several["classes"].tolist() == ["red big", "red big old"]


def test_numbers_are_named_after_their_labels() -> None:
    assert list(result_columns({"y": np.zeros((2, 1))}, [meaning("mse", label=("price",))])) == ["predicted_price"]
    assert list(result_columns({"y": np.zeros((2, 2))}, [meaning("l1", label=("x", "y"))])) == [
        "predicted_x",
        "predicted_y",
    ]
    assert list(result_columns({"y": np.zeros((2, 2, 1))}, [meaning("mse", label=("t",))])) == [
        "predicted_t_0",
        "predicted_t_1",
    ]


def test_columns_of_several_outputs_begin_with_their_label() -> None:
    meanings = [meaning("cross_entropy", "a", label=("kind",)), meaning("mse", "b", label=("centre",))]
    found = result_columns({"a": SCORES[:, :2], "b": np.zeros((2, 2))}, meanings)
    assert list(found) == [
        *("kind_class", "kind_probability", "kind_probability_0", "kind_probability_1"),
        *("predicted_centre_0", "predicted_centre_1"),
    ]


@pytest.mark.parametrize(("loss", "shape"), [("cross_entropy", (1, 3, 8, 8)), ("mse", (1, 2, 2)), ("ctc", (1, 9, 5))])
def test_results_for_each_position_are_refused(loss: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(NoColumns, match=r"write masks into a folder, or the output into a file \.npz"):
        result_columns({"y": np.zeros(shape)}, [meaning(loss)])


def test_large_scores_do_not_overflow() -> None:
    large = np.array([[1e4, -1e4]], np.float32)
    np.testing.assert_array_equal(softmax(large), [[1.0, 0.0]])
    np.testing.assert_array_equal(sigmoid(large), [[1.0, 0.0]])
