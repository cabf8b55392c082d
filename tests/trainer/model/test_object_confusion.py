"""Which classes are found for which: objects are matched with certain boxes, whatever the classes of both."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.events import ClassPrecision
from onward.trainer.model.metrics.mean_precision import MeanPrecision

LOSS = LossConfig.model_validate({"name": "yolov8", "image_size": [100, 100], "strides": [8]})
LEFT, RIGHT, BELOW = [0.0, 0.0, 0.2, 0.2], [0.5, 0.0, 0.7, 0.2], [0.0, 0.5, 0.4, 0.9]
HALF = [0.1, 0.0, 0.3, 0.2]
"""A third of LEFT and it is in both."""


def classes_of(found: list[list[list[float]]], objects: list[list[list[float]]]) -> list[ClassPrecision]:
    """The classes of some images. found: class, score, corners; objects: class, corners, flag."""
    most = max(map(len, objects))
    padded = [[*rows, *[[-1.0] * 6] * (most - len(rows))] for rows in objects]
    measure = MeanPrecision(MetricConfig.model_validate({"name": "map"}), torch.device("cpu"))
    boxes: list[Tensor] = [torch.tensor(rows).reshape(-1, 6) for rows in found]
    measure.add(boxes, torch.tensor(padded).reshape(len(objects), -1), LOSS)
    measure.value((), measure.lists(), 1)
    return measure.classes


def test_objects_are_counted_by_class_and_found_class() -> None:
    found = classes_of(
        [
            # the right class; the other class; where no object is; a box of a low score
            [[0, 0.9, *LEFT], [1, 0.8, *RIGHT], [2, 0.7, 0.8, 0.8, 0.9, 0.9], [0, 0.2, *BELOW]],
            # the better box has the object, and the other one has none
            [[1, 0.6, *LEFT], [0, 0.5, *LEFT]],
            # too little of the object; and what is found in a crowd
            [[0, 0.9, *HALF], [1, 0.9, *BELOW]],
            [],
        ],
        [
            [[0, *LEFT, 0], [0, *RIGHT, 0], [0, *BELOW, 0]],
            [[0, *LEFT, 0]],
            [[0, *LEFT, 0], [1, *BELOW, 1]],
            [[2, *LEFT, 0]],
        ],
    )
    assert [each.of_class for each in found] == [0, 1, 2]
    assert [list(each.found_as) for each in found] == [[1, 2, 0, 2], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert [each.without_object for each in found] == [2, 0, 1]
    assert [sum(each.found_as) for each in found] == [each.objects for each in found]


def test_without_any_certain_box_no_object_is_found() -> None:
    (found,) = classes_of([[[0, 0.1, *LEFT]], []], [[[0, *LEFT, 0]], [[0, *LEFT, 0], [0, *RIGHT, 0]]])
    assert (found.found_as, found.without_object) == ([0, 3], 0)


def test_without_a_place_for_temporary_files_only_the_table_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    (found,) = classes_of([[[0, 0.9, *LEFT]]], [[[0, *LEFT, 0]]])
    assert (found.map, found.found_as) == (pytest.approx(1), ())
    assert "not counted: [Errno 28] No space left" in caplog.text
