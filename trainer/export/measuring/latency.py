"""Measure how long a file takes beside another one: processor time of one thread, in turns, or no figure at all.

file      ▇ ▇ ▇ ▇      one run of each after the other, so that both meet the same load; the ratio of each pair
variant    ▅ ▅ ▅ ▅     is taken, and the median of these ratios is told if most of them agree
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.onnx_graph.files.onnxruntime_session import Device, open_session

log = logging.getLogger(__name__)

LEAST_ROUNDS = 15
MOST_ROUNDS = 101
LEAST_S = 0.005
MOST_TIMES = 1000
"""Processor time of one measurement, for which small files run several times."""
MOST_S = 2.0
"""Time after which no more than the least number of rounds is made."""
SPREAD = 0.25
"""The middle half of the ratios may differ by this share of their median; else the figure would be noise."""


def latency_on_evaluation(exported: Path, variant: Path, runner: OnnxRunner, device: Device = "cpu") -> float:
    """Return the variant's time for one evaluation batch over the exported file's, NaN if it cannot be measured.

    runner: of the exported file.
    """
    feed = next(runner.feeds())
    sessions = [open_session(path, device=device, threads=1) for path in (exported, variant)]
    feeds = [{value.name: feed[value.name] for value in session.get_inputs()} for session in sessions]
    return latency_ratio(sessions, feeds, device)


def latency_ratio(sessions: Sequence[Any], feeds: Sequence[Mapping[str, Any]], device: Device = "cpu") -> float:
    """Return the time of the second of two sessions over that of the first, each with its inputs; NaN if it is noise.

    On the CPU it is the processor time of this thread, which other programs do not add to: the sessions must run in it
    (`open_session(threads=1)`).
    """
    # on a GPU this thread only waits, so that its processor time says nothing
    clock: Callable[[], float] = time.thread_time if device == "cpu" else time.perf_counter

    def timed(session: Any, feed: Mapping[str, Any], times: int) -> float:
        began_at = clock()
        for _ in range(times):
            session.run(None, dict(feed))
        return clock() - began_at

    pairs = list(zip(sessions, feeds, strict=True))
    for session, feed in pairs:
        timed(session, feed, 1)  # which warms up
    # a run of a small file takes less than a look at the clock and the memory of other programs
    times = max(1, min(MOST_TIMES, round(LEAST_S / max(timed(*pairs[0], 1), 1e-6))))
    ratios = list[float]()
    until = time.monotonic() + MOST_S
    while len(ratios) < LEAST_ROUNDS or (len(ratios) < MOST_ROUNDS and time.monotonic() < until):
        ours, theirs = (timed(session, feed, times) for session, feed in pairs)
        ratios.append(theirs / max(ours, 1e-9))
    low, middle, high = statistics.quantiles(ratios, n=4)
    if high - low > SPREAD * middle:
        log.info(
            "the time beside the file is not told: the middle half of %d ratios is %.2g to %.2g", len(ratios), low, high
        )
        return math.nan
    return middle
