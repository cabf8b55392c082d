"""Read what torch's profiler has recorded of the profiled steps, and write it as a trace."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from torch.autograd.profiler import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile

from onward.trainer.onnx_import.lowering.node_origins import Origin
from onward.trainer.parallel.profiling.accounting import Interval, Label, Timeline
from onward.trainer.parallel.profiling.node_ranges import LOSS, PHASES, RECOMPUTED, STEP, NodeRanges
from onward.trainer.run.durable_files import durable_file

OTHERS = {
    "loss": "loss",
    "data wait": "data wait",
    "pipeline": "between nodes",
    "gradient reduction": "gradient reduction",
    "weights": "gathering weights",
    "optimizer": "optimizer",
    "other": "other",
    "idle": "device idle",
}
"""Label of what is not a node -> its row. `between nodes`: autograd, messages of the pipeline and waiting for its other
stages, and what the profiler costs. `gathering weights`: of ZeRO. `device idle`: no kernel ran on the GPU."""
BACKWARD = "autograd::engine::evaluate_function: "
NAMED_BYTES = 256 << 20
"""Of a larger trace the backward ranges keep autograd's names: parsing it would take too much memory."""


def timeline_of(recorded: profile, ranges: NodeRanges) -> Timeline:
    """Return the ranges of a recording with their labels."""
    results: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    steps: list[tuple[int, int]] = []
    host: dict[int, list[Interval]] = {}
    launches: dict[int, tuple[int, int]] = {}
    kernels: list[tuple[int, int, int]] = []
    main = -1
    for event in results.events():
        name = event.name()
        begin = event.start_ns()
        end = begin + event.duration_ns()
        thread = event.start_thread_id()
        if event.device_type() != DeviceType.CPU:
            # ranges are repeated on the GPU's side, where they are no kernels
            if not event.is_user_annotation():
                kernels.append((begin, end, event.linked_correlation_id()))
            continue
        launches[event.correlation_id()] = (thread, begin)
        if event.is_user_annotation() and name.startswith(STEP) and name[len(STEP) :].isdigit():
            steps.append((begin, end))
            main = thread
        elif label := label_of(name, event.sequence_nr(), ranges, is_range=event.is_user_annotation()):
            host.setdefault(thread, []).append(Interval(begin, end, label))
    return Timeline(steps, host, main, launches if kernels else {}, kernels)


def label_of(name: str, sequence_number: int, ranges: NodeRanges, *, is_range: bool) -> Label | None:
    """Return what a range of the profiler is spent on; None if that is known from the range around it alone."""
    if name.startswith(BACKWARD):
        # the hooks of the reducer run in it
        if name.endswith("AccumulateGrad"):
            return Label("gradient reduction")
        # autograd's own functions, such as sums of gradients, belong to no node
        origin = ranges.of_sequence_number(sequence_number)
        return _label(origin, "backward") if origin else Label("pipeline")
    if not is_range:
        return None
    if name in PHASES:
        return Label(name)
    if name.startswith("FSDP::"):
        return Label("gradient reduction" if "reduce" in name or "backward" in name else "weights")
    # a second forward pass is time of the backward pass
    again = name.endswith(RECOMPUTED)
    origin = ranges.origins.get(name.removesuffix(RECOMPUTED))
    return _label(origin, "backward" if again else "forward") if origin else None


def _label(origin: Origin, phase: str) -> Label:
    return Label(LOSS.name if origin == LOSS else origin.output, phase)


def write_trace(recorded: profile, path: Path, ranges: NodeRanges) -> None:
    """Write the events in Chrome's format, which Perfetto reads; backward ranges get the names of their nodes, too."""
    with durable_file(path) as partial:
        plain = partial.with_name(f"{partial.name}.json")
        try:
            recorded.export_chrome_trace(str(plain))
            # 3: a trace is large, and higher levels take much longer
            with gzip.open(partial, "wb", compresslevel=3) as packed:
                if plain.stat().st_size > NAMED_BYTES:
                    with plain.open("rb") as file:
                        shutil.copyfileobj(file, packed)
                else:
                    packed.write(json.dumps(_named(json.loads(plain.read_bytes()), ranges)).encode())
        finally:
            plain.unlink(missing_ok=True)


def _named(trace: dict[str, Any], ranges: NodeRanges) -> dict[str, Any]:
    for event in trace["traceEvents"]:
        name = event.get("name", "")
        given = event.get("args", {})
        if name.startswith(BACKWARD) and (origin := ranges.of_sequence_number(given.get("Sequence number", -1))):
            event["name"] = f"{ranges.name_of(origin)} (backward)"
            given["autograd"] = name.removeprefix(BACKWARD)
    return trace
