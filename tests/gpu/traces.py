"""Profile steps of the training loop, and count what the profiler saw: kernels, copies, waits, idle time.

A trace is torch's (Chrome's format): a list of events with a category, a start and a duration in microseconds.

    host     | op: aten::_foreach_norm            |           cat "cpu_op", "user_annotation"
             |   launch |  launch |                           cat "cuda_runtime", "cuda_driver", args.correlation
    device                | kernel | kernel |   | copy |      cat "kernel", "gpu_memcpy", "gpu_memset", the same number
"""

from __future__ import annotations

import bisect
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.run.directory import RunDir
from tests.gpu.device import DEVICE, REHEARSAL, synchronize
from tests.gpu.measure import Enough, train_until_enough

Event = Mapping[str, Any]
Interval = tuple[float, float]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls that wait for the device. `cudaDeviceSynchronize` is not here: the profiler calls it, the loop does not."""
NORMS = ("aten::_foreach_norm", "aten::linalg_vector_norm", "aten::norm")
CASTS = ("aten::_to_copy", "aten::to")
LAYOUT_KERNELS = ("nchwToNhwc", "nhwcToNchw")

PROFILED_FROM, PROFILED = (2, 1) if REHEARSAL else (8, 3)
"""The first profiled step, and how many."""


class Recording:
    """Records the events between `start` and `stop`."""

    def start(self) -> None:
        """Begin to record."""
        synchronize()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> list[Event]:
        """End the recording; return its events."""
        synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events: list[Event] = json.loads(path.read_text())["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]


def profile_calls(function: Callable[[], object], times: int = PROFILED) -> list[Event]:
    """Call a function some times after a first one that is not recorded; return the events."""
    function()
    recording = Recording()
    recording.start()
    for _ in range(times):
        function()
    return recording.stop()


def profile_training(run: RunDir, mpi: MPIContext) -> list[Event]:
    """Train with the training loop; return the events of PROFILED steps from step PROFILED_FROM on."""
    found: list[Event] = []
    recording = Recording()

    def at_step(step: int) -> None:
        if step == PROFILED_FROM - 1:
            # the first recording of a process starts the profiler's library, which takes its time
            recording.start()
            recording.stop()
        if step == PROFILED_FROM:
            recording.start()
        if step == PROFILED_FROM + PROFILED:
            found.extend(recording.stop())
            raise Enough

    train_until_enough(run, mpi, at_step)
    return found


# -- what the events say


def step_figures(events: Sequence[Event], *, steps: int = PROFILED) -> dict[str, float]:
    """Return for one step: kernels, copies and waits, and the milliseconds that the device computes.

    `idle_share` is that of the time between the first and the last thing on the device, and the profiler slows the
    host down: `busy_ms` beside the time of a step without the profiler says more.
    """
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    kernels = [event for event in on_device if event["cat"] == "kernel"]
    busy, waits = length(union(on_device)), [event for event in events if event["name"].startswith(WAITS)]
    span = max(map(_end, on_device), default=0.0) - min((event["ts"] for event in on_device), default=0.0)
    kernel_us = sum(event["dur"] for event in kernels) or 1.0
    return {
        "kernels": len(kernels) / steps,
        "busy_ms": busy / 1e3 / steps,
        "idle_share": 1 - busy / span if span else 0.0,
        "copies_to_host": _copies(events, "DtoH") / steps,
        "copies_to_device": _copies(events, "HtoD") / steps,
        "waits": len(waits) / steps,
        "waits_ms": sum(event["dur"] for event in waits) / 1e3 / steps,
        "optimizer_us": device_us(events, _optimizer_steps(events)) / steps,
        "norm_us": device_us(events, NORMS) / steps,
        "cast_share": device_us(events, CASTS) / kernel_us,
        "layout_share": sum(e["dur"] for e in kernels if any(name in e["name"] for name in LAYOUT_KERNELS)) / kernel_us,
    }


def device_us(events: Iterable[Event], names: Collection[str]) -> float:
    """Return the microseconds of the kernels that were launched inside host events of these names."""
    events = list(events)
    by_thread: dict[Any, list[Event]] = {}
    for event in events:
        if event["name"] in names and event.get("cat") not in ON_DEVICE:
            by_thread.setdefault(event["tid"], []).append(event)
    windows = {thread: union(members) for thread, members in by_thread.items()}

    def inside(launch: Event) -> bool:
        mine = windows.get(launch["tid"], [])
        place = bisect.bisect_right(mine, (launch["ts"], math.inf)) - 1
        return place >= 0 and launch["ts"] <= mine[place][1]

    launches = (event for event in events if event.get("cat") in LAUNCHES and inside(event))
    launched = {launch["args"].get("correlation", -1) for launch in launches}
    return sum(e["dur"] for e in events if e.get("cat") == "kernel" and e["args"].get("correlation") in launched)


def overlap_share(events: Sequence[Event]) -> float:
    """Return the share of the copies to the device, by time, during which a kernel runs; 0 without copies."""
    copies = union(e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"])
    kernels = union(e for e in events if e.get("cat") == "kernel")
    shared = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in kernels)
    return shared / length(copies) if copies else 0.0


def slowest_kernels(events: Iterable[Event], count: int = 8) -> dict[str, float]:
    """Return kernel -> its share of the time of all kernels, the greatest first."""
    total: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            total[event["name"][:80]] += event["dur"]
    return {name: round(us / sum(total.values()), 4) for name, us in total.most_common(count)}


def union(events: Iterable[Event]) -> list[Interval]:
    """Return the intervals, in order and disjoint, in which at least one of the events is under way."""
    found: list[Interval] = []
    for start, end in sorted((event["ts"], _end(event)) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _copies(events: Iterable[Event], direction: str) -> int:
    return sum(event.get("cat") == "gpu_memcpy" and direction in event["name"] for event in events)


def _optimizer_steps(events: Iterable[Event]) -> set[str]:
    # torch records each call of an optimizer as "Optimizer.step#AdamW.step"
    return {event["name"] for event in events if event["name"].startswith("Optimizer.step#")}
