"""Measure how long a file takes beside another one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.trainer.export.onnx_runner import OnnxRunner
from onward.trainer.onnx_graph.onnxruntime_session import Device, open_session

LATENCY_ROUNDS = 15
"""Runs of each of the two files, alternately; the figure is the ratio of the medians."""


def latency_on_evaluation(exported: Path, variant: Path, runner: OnnxRunner, device: Device = "cpu") -> float:
    """Return the variant's time for one evaluation batch over the exported file's. runner: of the exported file."""
    feed, sessions = next(runner.feeds()), [open_session(path, device=device) for path in (exported, variant)]
    return latency_ratio(sessions, [{value.name: feed[value.name] for value in s.get_inputs()} for s in sessions])


def latency_ratio(sessions: Sequence[Any], feeds: Sequence[Mapping[str, Any]]) -> float:
    """Return the time of the second of two sessions over that of the first, each with its inputs."""
    times: list[list[float]] = [[], []]
    for _ in range(LATENCY_ROUNDS + 1):
        for session, feed, column in zip(sessions, feeds, times, strict=True):  # alternately: both meet the same load
            started_at = time.perf_counter()
            session.run(None, dict(feed))
            column.append(time.perf_counter() - started_at)
    ours, theirs = (statistics.median(column[1:]) for column in times)  # the first run of each warms up
    return theirs / ours
