"""Images with more objects than a detector has queries, and more classes than it has scores, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.data.completed_settings import completed
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import read_config
from tests.support.detectors import detector_file
from tests.trainer.export.preprocessing.test_box_nodes import detector_run, grid_loss, set_model


def problems_of(folder: Path, model: Any, loss: Any, *, num_queries: int = 0, **data: Any) -> list[str]:
    config = completed(read_config(detector_run(folder, model, loss, resize="pad")))
    if num_queries:
        config = config.model_copy(
            update={"loss": tuple(each.model_copy(update={"num_queries": num_queries}) for each in config.loss)}
        )
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    try:
        _, manifest, _ = make_training_shards(config, folder / "cache")
    except ConfigError as error:
        return list(error.problems)
    return data_problems(config, manifest.table, fitted=manifest.fitted)


def set_loss(**settings: Any) -> list[dict[str, Any]]:
    return [{"name": "set_classes", "output": ["logits", "boxes"], **settings}]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_more_objects_than_queries(tmp_path: Path, scores: str) -> None:
    train, held = problems_of(tmp_path, set_model(), set_loss(scores=scores), num_queries=2)
    assert train == (
        f"{tmp_path}/images/03.png has 3 objects, but output 'logits' has 2 queries for each image, each of which "
        "finds one object (1 of 4 train images have more than that): take a model with more queries, or leave objects "
        "out"
    )
    assert held.startswith(f"{tmp_path}/held/03.png has 3 objects")


def test_as_many_objects_as_queries_are_no_problem(tmp_path: Path) -> None:
    assert problems_of(tmp_path, set_model(), set_loss()) == []


@pytest.mark.parametrize(("kind", "number"), [("set", 3), ("yolov8", 2), ("ssd", 2)])
def test_more_classes_than_scores(tmp_path: Path, kind: str, number: int) -> None:
    model, loss = (set_model(), set_loss()) if kind == "set" else (detector_file(kind), grid_loss(kind))
    (problem,) = problems_of(tmp_path, model, loss, classes=("red", "green", "blue", "grey"))
    assert problem.startswith("data.classes has 4 class names for column 'boxes' (red, green, blue, grey), but output ")
    assert f"has {number} classes" in problem
