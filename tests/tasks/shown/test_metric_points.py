"""One name for one thing: the points of the event log, and which of them belong to a checkpoint and to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.infra.mlflow.model_package import Point
from onward.tasks.shown.metric_points import only_of_file, points_of, points_of_file, points_of_step
from onward.trainer.events import RECORDS, Evaluated, EventWriter
from onward.trainer.run.history import RunHistory


def names(kind: str, **fields: object) -> dict[str, float]:
    return {point.key: point.value for point in points_of(RECORDS[kind](at_ms=1, attempt=1, step=5, **fields))}


def test_each_metric_is_in_the_group_of_what_it_measures() -> None:
    values = {"train/loss": 0.5, "train/samples_per_s": 640.0, "train/data_wait": 0.01, "train/step_s": 0.05}
    assert names("scalars", values=values) == {
        "train/loss": 0.5,
        "perf/samples_per_s": 640.0,
        "perf/data_wait": 0.01,
        "perf/step_s": 0.05,
    }
    costs = ("tokens_per_s", "tflops", "mfu", "memory_bytes")
    found = names("scalars", values={f"train/{name}": 1.0 for name in costs})
    assert found == {f"perf/{name}": 1.0 for name in costs}
    assert names("evaluation", values={"evaluation/loss": 0.5}) == {"evaluation/loss": 0.5}
    assert names("times", seconds={"steps": 9.0, "checkpoint": 1.5}) == {"perf/checkpoint_stall_s": 1.5}
    assert names("checkpoint", path="step-5") == {}


def test_of_several_attempts_the_first_evaluation_of_a_step_counts_as_it_does_in_mlflow(tmp_path: Path) -> None:
    log = EventWriter(tmp_path / "events.jsonl", attempt=1, rank=0)
    history = RunHistory(tmp_path / "events.jsonl")
    history.read()
    assert points_of_step(history, 5) == ()
    log.emit(Evaluated(step=5, values={"evaluation/loss": 0.5}))
    history.read()
    (first,) = points_of_step(history, 5)
    log.emit(Evaluated(step=5, values={"evaluation/loss": 0.4}))
    log.emit(Evaluated(step=10, values={"evaluation/loss": 0.3}))
    history.read()
    assert points_of_step(history, 5) == (first,)
    assert [(point.step, point.value) for point in points_of_step(history, 10)] == [(10, 0.3)]
    log.close()


SENT = [Point("evaluation/loss", 0.5, 1, 5), Point("evaluation/average/loss", 0.25, 1, 5)]


@pytest.mark.parametrize(
    ("average", "measured", "own"),
    [
        (False, {"evaluation/loss": 0.5002}, {}),
        (True, {"evaluation/loss": 0.25}, {}),
        (True, {"evaluation/loss": 0.5}, {"exported/evaluation/loss": 0.5}),
        (False, {"evaluation/loss": 0.6}, {"exported/evaluation/loss": 0.6}),  # on all rows, not on some of them
        (False, {"evaluation/accuracy": 0.9}, {"exported/evaluation/accuracy": 0.9}),
    ],
)
def test_an_exported_file_has_the_points_of_its_weights_and_of_its_own_what_differs(
    average: bool, measured: dict[str, float], own: dict[str, float]
) -> None:
    sent = points_of_file(SENT, average=average)
    assert [point.key for point in sent] == ["evaluation/average/loss" if average else "evaluation/loss"]
    assert only_of_file(measured, sent, average=average) == own
