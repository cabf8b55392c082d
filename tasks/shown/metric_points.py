"""The points of the event log under the names that MLflow and TensorBoard show: one name for one thing.

train/        loss, learning rate, gradient norm, norms of weights
evaluation/   an evaluation's metrics; the same points belong to the checkpoint and to the exported file of the step
test/         the exported file's metrics on data.test_source
perf/         what training costs: samples_per_s, tokens_per_s, step_s, data_wait, tflops, mfu, memory_bytes
              (trainer/parallel/observing/throughput.py), and checkpoint_stall_s
system/       processor, memory, disk and GPU of each node (trainer/run/machine/node_usage.py)
exported/     what only the exported file has, such as its parity
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from onward.infra.mlflow.model_package import Point
from onward.infra.mlflow.tracking import metric_name
from onward.trainer.config.sections.metrics import AVERAGE_METRICS
from onward.trainer.events import Evaluated, Event, Scalars, Times, Usage
from onward.trainer.run.history import RunHistory

PERFORMANCE = ("samples_per_s", "tokens_per_s", "step_s", "data_wait", "tflops", "mfu", "memory_bytes")
"""Scalars that the event log has as `train/NAME`."""
SAME = 1e-3
"""Greatest relative difference between onnxruntime's value of a metric and the trained module's."""


def shown_name(key: str) -> str:
    """Return the name under which a scalar of the event log is shown."""
    group, _, name = key.partition("/")
    return f"perf/{name}" if group == "train" and name in PERFORMANCE else key


def values_of(event: Event) -> dict[str, float]:
    """Return name -> value of each metric of one event; {} for one without metrics."""
    match event:
        case Scalars() | Evaluated():
            return {shown_name(key): value for key, value in event.values.items()}
        case Usage():
            return {f"system/{event.node}/{key}": value for key, value in event.values.items()}
        case Times() if "checkpoint" in event.seconds:
            return {"perf/checkpoint_stall_s": event.seconds["checkpoint"]}
    return {}


def points_of(event: Event) -> Iterator[Point]:
    """Yield the metric points of one event, under names that MLflow accepts; skip values that are not numbers."""
    for name, value in values_of(event).items():
        yield Point(metric_name(name), float(value), event.at_ms, event.step)


def points_of_step(history: RunHistory, step: int) -> tuple[Point, ...]:
    """Return the points of a step's evaluations: of several attempts the first points, which alone are sent."""
    points: dict[str, Point] = {}
    for event in history.evaluations:
        if event.step == step:
            # the right side wins, which has the points of the earlier attempt
            points = {point.key: point for point in points_of(event)} | points
    return tuple(points.values())


def points_of_file(sent: Iterable[Point], *, average: bool) -> tuple[Point, ...]:
    """Return those points of an evaluation that describe the exported weights: their average, or they themselves."""
    of_average = f"{AVERAGE_METRICS}/"
    return tuple(point for point in sent if point.key.startswith(of_average) == average)


def only_of_file(measured: Mapping[str, float], sent: Iterable[Point], *, average: bool) -> dict[str, float]:
    """Return the metrics of an exported file that no point says already, as `exported/NAME`.

    measured: `evaluation/NAME` -> value under onnxruntime, on all rows; an evaluation may have been on some of them.
    """
    prefix = f"{AVERAGE_METRICS}/" if average else "evaluation/"
    known = {point.key: point.value for point in sent}
    return {
        f"exported/{name}": value
        for name, value in measured.items()
        if not math.isclose(
            value, known.get(metric_name(name.replace("evaluation/", prefix, 1)), math.nan), rel_tol=SAME, abs_tol=SAME
        )
    }
