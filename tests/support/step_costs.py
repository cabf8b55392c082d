"""Count what one step of training costs besides its arithmetic: collectives, and host reads of device values.

    python -m tests.support.step_costs        the table in docs/reference/measurements.md

On a GPU each host read waits until the device has computed everything before it, and so does each tensor made on the
device from a value on the host. The counts are taken on the CPU, from the operators that are called; the loader's
thread, which reads rows and not results, is not counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_images, tiny_text

READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}
"""Operators that need a value on the host: a number, or the size of a result."""
READING_METHODS = ("tolist", "numpy", "cpu")
"""Methods that copy to the host, which call no operator on the CPU."""
OF_THE_HOST = {("trainer/parallel/pipeline/schedules.py", "forward"): "the number of a micro-batch, never on a device"}
COUNTED_STEP = 3
"""By then everything that is made once has been made."""

Counts = dict[str, int]


class StepCosts(TorchDispatchMode):
    """Count, while `counting` is true, the operators that communicate, read and upload."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counting = False
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
        if kind and self.counting and place not in OF_THE_HOST:
            self.found[f"{kind} {':'.join(place)}" if frame else kind] += 1

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


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return (file, function) of the innermost frame in Onward's code."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "trainer" in path.parts and "onward" in path.parts:
            return "/".join(path.parts[path.parts.index("trainer") :]), frame.f_code.co_name
        frame = frame.f_back
    return "", ""


def count_one_step(mpi: MPIContext, roots: list[str]) -> list[Counts]:
    """Train each run and return what one of its steps costs on this rank: kind -> number."""
    return [_count(mpi, RunDir(Path(root))) for root in roots]


def _count(mpi: MPIContext, run: RunDir) -> Counts:
    costs, steps, original = StepCosts(), 0, Pipeline.run

    def at_the_start_of_a_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        costs.counting = steps == COUNTED_STEP
        return original(*args, **kwargs)

    how = {"attempt": run.current_attempt, "heartbeat": Heartbeat(run.heartbeat)}
    with mock.patch.object(Pipeline, "run", at_the_start_of_a_step), costs.methods(), costs:
        train(read_config(run), run, mpi, **how, stop_requested=lambda: False)
    return dict(costs.found)


# -- layouts

CONV = (graphs.tiny_conv_net_with_batch_norm, tiny_images)
TEXT = (graphs.tiny_transformer, tiny_text)
LAYOUTS: Mapping[str, tuple[Any, int, int, dict[str, Any]]] = {
    "1 rank": (TEXT, 1, 1, {}),
    "1 rank, 4 micro-batches": (TEXT, 1, 4, {}),
    "1 rank, fp16 with loss scale": (TEXT, 1, 1, {"precision": {"compute": "fp16", "initial_scale": 16.0}}),
    "2 replicas": (TEXT, 2, 1, {"parallel": {"data": 2}}),
    "2 replicas, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"data": 2}}),
    "2 replicas, BatchNorm": (CONV, 2, 1, {"parallel": {"data": 2}}),
    "2 replicas, ZeRO 2": (TEXT, 2, 1, {"parallel": {"data": 2, "zero": 2}}),
    "2 tensor-parallel ranks": (TEXT, 2, 1, {"parallel": {"tensor": 2}}),
    "2 tensor-parallel ranks, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"tensor": 2}}),
    "2 pipeline stages, 4 micro-batches": (TEXT, 2, 4, {"parallel": {"pipeline": 2}}),
}
"""Name -> (model and data, ranks, micro-batches of a step and replica, settings)."""


def measure(folder: Path) -> dict[str, Counts]:
    """Return what one step costs on rank 0, for every layout."""
    found: dict[str, Counts] = {}
    for num_ranks in (1, 2):
        names = [name for name, (_, ranks, _, _) in LAYOUTS.items() if ranks == num_ranks]
        roots = [str(_make(folder / name.replace(" ", "_"), name).root) for name in names]
        (first, *_) = run_ranks(num_ranks, "tests.support.step_costs:count_one_step", roots, timeout_s=300)
        found |= dict(zip(names, first, strict=True))
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
