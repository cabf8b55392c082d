"""Time the training loop beside a loop written by hand, turn and turn about, in one process on one device.

    trainer.loop.train    | 20 warm-up |        | 10 |      | 10 |      ...      50 timed steps
    written by hand                    | 20 | 10 |    | 10 |      | 10 | ...      50 timed steps
                                              ---> time

Onward's side is `trainer.loop.train` itself, unchanged, in one rank: it calls `heartbeat.beat(step)` at the start of
every step, and there its time is taken and the other side runs. So it reads its batches from shards and copies them to
the device, while the loop written by hand has one batch there. On a GPU the times are those of CUDA events; in a
rehearsal (tests/gpu/device.py) everything is tiny and runs on the CPU.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import Heartbeat
from onward.trainer.loop import train
from onward.trainer.run.directory import RunDir
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REHEARSAL, synchronize
from tests.support.runs import Array, events, make_run

WARM_UP, TIMED, BLOCK = (1, 2, 1) if REHEARSAL else (20, 50, 10)
"""Steps of each side: before the first timed one, timed, and in one turn."""

LEARNING_RATE = 1e-4

PEAK_TFLOPS = {
    "H100 80GB HBM3": {"bf16": 989.0, "fp16": 989.0, "tf32": 495.0, "fp32": 67.0},
    "H200": {"bf16": 989.0, "fp16": 989.0, "tf32": 495.0, "fp32": 67.0},
}
"""Part of the name of an SXM module -> its dense TFLOP/s by type, from NVIDIA's data sheets."""


# -- runs


@contextmanager
def connected() -> Iterator[MPIContext]:
    """Join a world of one rank on the device, as a rank of a job does."""
    if REHEARSAL:  # compiling would take minutes
        torch.compiler.set_stance("force_eager")
    threads = 1 if REHEARSAL else len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        yield ranks.join(str(Path(folder) / "store"), 0, 1, timeout_s=100, threads=threads)
        dist.destroy_process_group()


@contextmanager
def run_of(
    model: onnx.ModelProto, columns: Mapping[str, Array], /, *, prefix: str = "measure-", **sections: Any
) -> Iterator[RunDir]:
    """Make a run directory whose training data are these rows, in this order in every epoch; removed afterwards.

    A step takes all of them, so that each step computes on the same samples. Tensors of the model are stored in a file
    of their own: a protobuf message holds at most 2 GiB.
    """
    rows = len(next(iter(columns.values())))
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        saved = onnx.ModelProto()
        saved.CopyFrom(model)  # `save_model` takes the tensors out of what it is given
        onnx.save_model(saved, folder / "saved.onnx", save_as_external_data=True, location="model.data")
        np.savez(folder / "evaluation.npz", **{key: value[:2] for key, value in columns.items()})
        given = {
            "train": {"global_batch_size": rows, "num_steps": 1_000_000, "shuffle": False, "log_period": 1},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "data": {"evaluation_source": str(folder / "evaluation.npz")},
            "launch": {"device": DEVICE.type},
        }
        merged = {key: given.get(key, {}) | dict(sections.get(key, {})) for key in given.keys() | sections.keys()}
        yield make_run(folder, saved, columns, **merged)


class Enough(Exception):
    """Raised at the start of a step to end a training that has been measured, without a checkpoint."""


class StepStarts(Heartbeat):
    """Calls a function with the number of each step of the training loop, before it begins."""

    def __init__(self, run: RunDir, at_step: Callable[[int], None]) -> None:
        super().__init__(run.heartbeat)
        self._at_step = at_step

    def beat(self, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
        super().beat(step, longest_step_s=longest_step_s)
        if step is not None:
            self._at_step(step)


def train_until_enough(run: RunDir, mpi: MPIContext, at_step: Callable[[int], None]) -> None:
    """Train with the training loop; `at_step` is called before each step, and raises Enough to end it.

    Collective: every rank of the world.
    """
    if mpi.rank == 0:
        run.begin_attempt()
    dist.barrier()
    heartbeat, attempt = StepStarts(run, at_step), run.current_attempt
    try:
        train(run, mpi, attempt=attempt, heartbeat=heartbeat, stop_requested=lambda: False)
    except Enough:  # a checkpoint may still be written in the background, into a directory that is about to be removed
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    finally:
        free()


def free() -> None:
    """Free what nothing refers to, on the device as well."""
    gc.collect()
    torch.compiler.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# -- time


def mark() -> Any:
    """Return a point in time: on a GPU, when its default stream gets here."""
    if DEVICE.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def intervals_ms(marks: Sequence[Any]) -> list[float]:
    """Return the milliseconds between each mark and the next; waits for the device."""
    synchronize()
    on_gpu = DEVICE.type == "cuda"
    return [a.elapsed_time(b) if on_gpu else 1e3 * (b - a) for a, b in itertools.pairwise(marks)]


@dataclass(frozen=True)
class Times:
    """Milliseconds of the timed steps of both sides, in the order they were made."""

    onward: list[float]
    by_hand: list[float]
    first_step_s: float
    """From the start of `train` to the start of step 2: reading, building, compiling, evaluation, step 1."""

    @property
    def onward_ms(self) -> float:
        return statistics.median(self.onward)

    @property
    def by_hand_ms(self) -> float:
        return statistics.median(self.by_hand)

    def figures(self) -> dict[str, float]:
        """Return the medians and how many times as fast as the loop written by hand Onward is, with its spread."""
        turns = range(0, len(self.onward), BLOCK)
        speeds = [
            statistics.median(self.by_hand[turn : turn + BLOCK]) / statistics.median(self.onward[turn : turn + BLOCK])
            for turn in turns
        ]
        return {
            "onward_ms": self.onward_ms,
            "by_hand_ms": self.by_hand_ms,
            "times_as_fast": self.by_hand_ms / self.onward_ms,
            "times_as_fast_least": min(speeds),
            "times_as_fast_greatest": max(speeds),
            "first_step_s": self.first_step_s,
        }


def time_training(run: RunDir, mpi: MPIContext, steps: int = TIMED, warm_up: int = WARM_UP) -> list[float]:
    """Train with the training loop alone; return the milliseconds of each step after the warm-up."""
    marks: list[Any] = []

    def at_step(step: int) -> None:
        if step > warm_up:
            marks.append(mark())
        if len(marks) > steps:
            raise Enough

    train_until_enough(run, mpi, at_step)
    return intervals_ms(marks)


def side_by_side(run: RunDir, mpi: MPIContext, update: Callable[[], object]) -> Times:
    """Train with the training loop, and between blocks of its steps make updates by hand; see the drawing above."""
    onward: list[float] = []
    by_hand: list[float] = []
    marks: list[Any] = []
    started_at, first_step_s = time.perf_counter(), 0.0

    def at_step(step: int) -> None:
        nonlocal marks, first_step_s
        if step == 2:
            synchronize()
            first_step_s = time.perf_counter() - started_at
        done = step - 1 - WARM_UP
        if done < 0:
            return
        if done == 0:
            for _ in range(WARM_UP):
                update()
        if marks:
            marks.append(mark())
        if done % BLOCK == 0:
            onward.extend(intervals_ms(marks))
            if done == TIMED:
                raise Enough
            by_hand.extend(_block(update))
            synchronize()
            marks = [mark()]

    train_until_enough(run, mpi, at_step)
    return Times(onward, by_hand, first_step_s)


def _block(update: Callable[[], object]) -> list[float]:
    synchronize()
    marks = [mark()]
    for _ in range(BLOCK):
        update()
        marks.append(mark())
    return intervals_ms(marks)


# -- the loop written by hand


@contextmanager
def arithmetic(compute: str) -> Iterator[None]:
    """Compute in fp32, tf32, bf16 or fp16 as one does by hand: TF32 switched on, or autocast."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32  # Onward's, which sets them once
    products.allow_tf32 = convolutions.allow_tf32 = compute == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)
    cast: AbstractContextManager[Any] = torch.autocast(DEVICE.type, dtype) if dtype else nullcontext()
    try:
        with cast:
            yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def by_hand(
    module: nn.Module, inputs: Sequence[Tensor], labels: Tensor, *, compute: str, compiled: bool = False
) -> Callable[[], Tensor]:
    """Return a function that makes one update with cross-entropy, clipping and fused AdamW, and returns the loss.

    It waits for nothing: the loss stays on the device. `compiled`: module and loss as one graph of static shapes.
    """
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def loss_of(inputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(module(*inputs).flatten(0, -2), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(compute):
            loss = forward(inputs, labels)
        # outside of autocast, as torch's documentation says; TF32 is switched for the backward pass, too
        with arithmetic("tf32" if compute == "tf32" else "fp32"):
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return update


# -- comparing


def peak_tflops(compute: str) -> float | None:
    """Return the device's dense peak for a type; None where it is unknown."""
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"
    return next((peaks[compute] for part, peaks in PEAK_TFLOPS.items() if part in name), None)


def step_flops(module: nn.Module, inputs: Sequence[Tensor], labels: Tensor) -> int:
    """Count the operations of matrix products and convolutions, forward and backward; causal attention in full."""
    meta = copy.deepcopy(module).to("meta")
    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(
            meta(*(value.to("meta") for value in inputs)).flatten(0, -2), labels.to("meta").flatten()
        )
        loss.backward()
    return counter.get_total_flops()


def compare(
    mpi: MPIContext,
    model: onnx.ModelProto,
    module: nn.Module,
    columns: Mapping[str, Array],
    *,
    compute: str,
    compiled: bool = False,
    unit: str,
    per_sample: int = 1,
    tolerance: float = 2e-2,
    goal: str = "",
    **sections: Any,
) -> dict[str, object]:
    """Measure one model in one precision beside the loop written by hand; return the figures.

    module: the same model with the same weights, on the CPU; it is copied. columns: the samples of one step, the
    model's inputs in order and then `label`. unit: what each sample has `per_sample` of. Raises AssertionError where
    the first losses differ by more than `tolerance`: then there is nothing to compare.
    """
    tensors = [torch.from_numpy(column).to(DEVICE) for column in columns.values()]
    inputs, labels = tensors[:-1], tensors[-1]
    flops = step_flops(module, inputs, labels)
    update = by_hand(copy.deepcopy(module).to(DEVICE), inputs, labels, compute=compute, compiled=compiled)
    first: list[float] = []

    def noted() -> None:
        loss = update()
        if not first:
            first.append(float(loss))

    sections = {"precision": {"compute": compute}, "graph": {"compile": compiled}} | sections
    with run_of(model, columns, **sections) as run:
        times = side_by_side(run, mpi, noted)
        ours = events(run, "scalars")[0].values["train/loss"]
    assert abs(ours - first[0]) <= tolerance * abs(first[0]), f"the first losses are {ours:g} and {first[0]:g}"
    peak = peak_tflops(compute)
    return {
        **times.figures(),
        f"{unit}_per_s": 1e3 * per_sample * len(labels) / times.onward_ms,
        "tflop_per_step": flops / 1e12,
        "mfu": flops / (times.onward_ms * 1e9) / peak if peak else "unknown",
        "mfu_by_hand": flops / (times.by_hand_ms * 1e9) / peak if peak else "unknown",
        "first_loss": ours,
        "first_loss_by_hand": first[0],
        **({"goal": goal} if goal else {}),
    }
