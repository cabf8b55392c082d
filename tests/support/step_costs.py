"""Count what a step of training and an evaluation cost besides arithmetic: collectives, host reads, uploads.

    python -m tests.support.step_costs        the counts behind the table in docs/reference/measurements.md

A host read is a number, or the size of a result, that the host needs from a tensor; an upload is a tensor made from
numbers of the host. On a GPU each of them waits until the device has computed all that was called before. The counts
are taken on the CPU, from the operators and methods that are called in the main thread. The loader's thread reads rows,
not results.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import Heartbeat
from onward.trainer.loop import train
from onward.trainer.parallel.observing import throughput
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.run.directory import RunDir
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_images, tiny_text

READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}
"""Operators that need a value on the host: a number, or the size of a result."""
READING_METHODS = ("tolist", "numpy", "cpu")
"""Methods that copy to the host, which call no operator on the CPU."""
OF_THE_HOST = ("trainer/data/", "trainer/parallel/pipeline/stage_schedules.py:forward")
"""Where tensors are read that are never on a device: rows, and the number of a micro-batch."""
COUNTED_STEP = 3
"""By then everything that is made once has been made."""

Counts = dict[str, int]


class StepCosts(TorchDispatchMode):
    """Count, inside `counted`, the operators that communicate, read and upload."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = ""
        """What is counted now: `step` or `evaluation`; empty for nothing."""
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname.removesuffix("_")
        if func.namespace in ("c10d", "_c10d_functional"):
            self.add({"wait_tensor": ""}.get(name, name.replace("allreduce", "all_reduce")))
        elif name in READS or (func._opname == "index" and any(_is_mask(each) for each in args[1])):
            self.add("read", sys._getframe(1))
        elif name == "lift_fresh":
            self.add("upload", sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def add(self, kind: str, frame: FrameType | None = None) -> None:
        """Count one of a kind; reads and uploads with their place in Onward's code."""
        place = _place(frame)
        if kind and self.phase and not place.startswith(OF_THE_HOST):
            self.found[f"{self.phase}: {kind} {place}".rstrip()] += 1

    @contextmanager
    def methods(self) -> Iterator[None]:
        """Count calls of READING_METHODS inside a block."""

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.add("read", sys._getframe(1))
                return method(tensor, *args, **kwargs)

            return wrapper

        with mock.patch.multiple(Tensor, **{name: counted(getattr(Tensor, name)) for name in READING_METHODS}):
            yield


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _place(frame: FrameType | None) -> str:
    """Return file and function of the innermost frame in Onward's code."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "trainer" in path.parts and "onward" in path.parts:
            return f"{'/'.join(path.parts[path.parts.index('trainer') :])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def count_one_step(mpi: MPIContext, roots: list[str]) -> list[Counts]:
    """Train each run and return what one of its steps costs on this rank: kind -> number."""
    return [_count(mpi, RunDir(Path(root))) for root in roots]


def _count(mpi: MPIContext, run: RunDir) -> Counts:
    costs, steps = StepCosts(), 0
    run_step, evaluate = Pipeline.run, Pipeline.evaluate

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        # a step ends where the next one begins
        nonlocal steps
        steps += 1
        costs.phase = "step" if steps == COUNTED_STEP else ""
        return run_step(*args, **kwargs)

    def counted_evaluation(*args: Any, **kwargs: Any) -> Any:
        # the second one: the first makes what is made once
        costs.phase = "evaluation" if steps else ""
        values = evaluate(*args, **kwargs)
        costs.phase = ""
        return values

    how = {"attempt": run.current_attempt, "heartbeat": Heartbeat(run.heartbeat)}
    with (
        mock.patch.multiple(Pipeline, run=counted_step, evaluate=counted_evaluation),
        # the memory of the ranks is compared once a second, in whichever step that is: here in the first one only
        mock.patch.object(throughput, "MEMORY_PERIOD_S", math.inf),
        costs.methods(),
        costs,
    ):
        train(run, mpi, **how, stop_requested=lambda: False)
    return dict(costs.found)


# -- layouts

CONV = (graphs.tiny_conv_net_with_batch_norm, tiny_images)
TEXT = (graphs.tiny_transformer, tiny_text)
LAYOUTS: Mapping[str, tuple[Any, int, int, dict[str, Any]]] = {
    "1 rank": (TEXT, 1, 1, {}),
    "1 rank, 4 micro-batches": (TEXT, 1, 4, {}),
    "1 rank, fp16 with loss scale, 4 micro-batches": (
        TEXT,
        1,
        4,
        {"precision": {"compute": "fp16", "loss_scale": ("dynamic", 16.0)}},
    ),
    "2 replicas": (TEXT, 2, 1, {"parallel": {"data": 2}}),
    "2 replicas, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"data": 2}}),
    "2 replicas, BatchNorm, 4 micro-batches": (CONV, 2, 4, {"parallel": {"data": 2}}),
    "2 replicas, ZeRO 2": (TEXT, 2, 1, {"parallel": {"data": 2, "zero": 2}}),
    "2 tensor-parallel ranks": (TEXT, 2, 1, {"parallel": {"tensor": 2}}),
    "2 tensor-parallel ranks, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"tensor": 2}}),
    "2 pipeline stages, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"pipeline": 2}}),
}
"""Name -> (model and data, ranks, micro-batches of a step and replica, settings)."""


def measure(folder: Path, names: Iterable[str] = tuple(LAYOUTS)) -> dict[str, Counts]:
    """Return what one step and one evaluation cost on rank 0 of layouts."""
    found: dict[str, Counts] = {}
    wanted = sorted(names, key=list(LAYOUTS).index)
    for num_ranks in (1, 2):
        same_size = [name for name in wanted if LAYOUTS[name][1] == num_ranks]
        roots = [str(_make(folder / name.replace(" ", "_"), name).root) for name in same_size]
        (first, *_) = run_ranks(num_ranks, "tests.support.step_costs:count_one_step", roots, timeout_s=300)
        found |= dict(zip(same_size, first, strict=True))
    return found


def _make(folder: Path, name: str) -> RunDir:
    (model, data), _, num_micro_batches, sections = LAYOUTS[name]
    replicas = sections.get("parallel", {}).get("data", 1)
    run = make_run(
        folder,
        model(),
        data(120),
        **sections,
        train={
            "global_batch_size": 2 * num_micro_batches * replicas,
            "gradient_accumulation_steps": num_micro_batches,
            "num_steps": COUNTED_STEP + 1,
        },
    )
    run.begin_attempt()
    return run


def main() -> None:
    """Print a row for each layout."""
    with tempfile.TemporaryDirectory() as folder:
        for name, counts in measure(Path(folder)).items():
            print(name)
            for kind, number in sorted(counts.items()):
                print(f"    {number:3} {kind}")


if __name__ == "__main__":
    main()
