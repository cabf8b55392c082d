"""Time a pipeline loses to filling and emptying, beside what theory says: schedule x ranks x micro-batches.

    python -m tests.bench.pipeline_bubble [--ranks 2 4] [--micro-batches 4 8 16] [--forward-ms 20]

Stages that sleep instead of computing, the backward pass twice as long as the forward pass, so that few cores stand
for many. The bubble is the part of a step in which a rank does not sleep: 1 - work / step, of the median of a few
steps after the first. Theory is (P - 1) / (V M + P - 1) for P ranks of V stages and M micro-batches; torch's
zero-bubble schedule should lie below it. What a step takes over that is messages and Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.pipeline.engine import Pipeline, stage_group
from onward.trainer.parallel.pipeline.stage import Chain, Part, Stage
from tests.support.one_loss import OneLoss
from tests.support.ranks import run_ranks

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
"""(schedule, stages of each rank)"""
STEPS = 3


class Sleep(torch.autograd.Function):
    """The value itself, after a while, and so back."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """As long for the gradient of what it receives as for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (Sleep.apply(x, self.seconds, self.seconds) * Sleep.apply(self.weight, 0.0, self.seconds),)


class Sum(OneLoss):
    def total(self, outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        return outputs[0].sum()


@dataclass(frozen=True)
class Gradients:
    stages: list[Stage]

    def begin(self, num_backwards: int, num_targets: float, num_batchnorm_updates: int) -> None:
        for stage in self.stages:
            stage.chain.zero_grad()


def step_s(mpi: MPIContext, cases: list[tuple[str, int, int]], forward_s: float) -> list[float]:
    """Median wall time of a step for each (schedule, stages of a rank, micro-batches); the same work in all."""
    dims = ParallelDims(pipeline=mpi.world_size)
    mesh = make_mesh(mpi, dims, timeout_s=60)
    groups = {"group_pipeline": stage_group(mesh, timeout_s=60), "group_data": mesh.get_group("data")}
    found = []
    for schedule, per_rank, num in cases:
        num_stages = dims.pipeline * per_rank
        mine = range(mpi.rank, num_stages, dims.pipeline)
        stages = [_stage(index, num_stages, forward_s / per_rank) for index in mine]
        kind = {"schedule": schedule, "stages_for": lambda _, stages=stages: stages, "autocast": nullcontext}
        pipeline = Pipeline(stages, Sum(), device=mpi.device, **kind, **groups)
        batches = [Batch((torch.ones(4, 8, requires_grad=True),), (None,), 4, (4,)) for _ in range(num)]
        times: list[float] = []
        for _ in range(STEPS + 1):
            started_at = time.perf_counter()
            pipeline.run(batches, Gradients(stages), scale=1.0)
            times.append(time.perf_counter() - started_at)
        found.append(statistics.median(times[1:]))
    return found


def _stage(index: int, num_stages: int, forward_s: float) -> Stage:
    chain = Chain([Part(Sleeper(forward_s), ("x",), ("y",))], input_names=("x",), output_names=("y",))
    value = torch.empty(4, 8, device="meta", requires_grad=True)
    if index == 0:
        return Stage(index, num_stages, chain, (), (0,), ("y",), (), (value,))
    return Stage(index, num_stages, chain, ("x",), (), ("y",), (value,), (value,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--forward-ms", type=float, default=20.0)
    options = parser.parse_args()
    print(f"{'schedule':<12} {'P':>2} {'V':>2} {'M':>3} {'step ms':>8} {'bubble':>7} {'theory':>7}")
    for ranks in options.ranks:
        cases = [(*schedule, num) for schedule in SCHEDULES for num in options.micro_batches]
        program = "tests.bench.pipeline_bubble:step_s"
        results = run_ranks(ranks, program, cases, options.forward_ms / 1000, timeout_s=600)
        for (schedule, per_rank, num), times in zip(cases, zip(*results, strict=True), strict=True):
            step, work = 1000 * max(times), 3 * options.forward_ms * num
            theory = (ranks - 1) / (per_rank * num + ranks - 1)
            print(
                f"{schedule:<12} {ranks:>2} {per_rank:>2} {num:>3} {step:>8.0f} {1 - work / step:>7.3f} {theory:>7.3f}"
            )


if __name__ == "__main__":
    main()
