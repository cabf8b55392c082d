"""ZeRO within a pipeline: several micro-batches on their way, a weight that two stages share, units recomputed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight, slices
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.pipeline.stage import Chain, Part, Stage
from onward.trainer.parallel.recomputation.recompute import recompute
from onward.trainer.parallel.replicas.norms import gradient
from onward.trainer.parallel.replicas.zero import Sharded
from tests.support.one_loss import OneLoss
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm

WORDS, WIDTH, LENGTH, ROWS, MICRO_BATCHES = 11, 6, 4, 3, 4


class Words(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.weight[ids],)


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + torch.tanh(F.linear(x, self.weight)),)


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x @ self.weight.t(),)


def parts() -> list[tuple[str, Part]]:
    """Name of the weight, and what computes with it: 8 parts. The first and the last have the same."""
    random = torch.Generator().manual_seed(0)
    words = torch.randn(WORDS, WIDTH, generator=random)
    layers = [torch.randn(WIDTH, WIDTH, generator=random) / 2 for _ in range(6)]
    found = [("words", Part(Words(words.clone()), ("ids",), ("x0",)))]
    found += [(f"layer.{n}", Part(Layer(layer), (f"x{n}",), (f"x{n + 1}",))) for n, layer in enumerate(layers)]
    return [*found, ("words", Part(Head(words.clone()), ("x6",), ("logits",)))]


def stages(num: int) -> list[tuple[Stage, list[Weight]]]:
    named = parts()
    size = len(named) // num
    found = []
    for index in range(num):
        own = named[index * size : (index + 1) * size]
        members = [part for _, part in own]
        chain = Chain(members, input_names=members[0].input_names, output_names=members[-1].output_names)
        first, last = index == 0, index == num - 1
        value = torch.empty(ROWS, LENGTH, WIDTH, device="meta", requires_grad=True)
        stage = Stage(
            index,
            num,
            chain,
            received_names=() if first else chain.input_names,
            input_positions=(0,) if first else (),
            output_names=chain.output_names,
            received_meta=() if first else (value,),
            output_meta=(torch.empty(ROWS, LENGTH, WORDS, device="meta", requires_grad=True),) if last else (value,),
        )
        weights = [
            Weight(name, p, Placement.full(p.shape), True, counted=name != "words" or first)
            for name, part in own
            for p in part.module.parameters()
        ]
        found.append((stage, weights))
    return found


def batches(replica: int) -> list[Batch]:
    random = torch.Generator().manual_seed(replica)
    ids = torch.randint(0, WORDS, (MICRO_BATCHES, ROWS, LENGTH + 1), generator=random)
    found = [Batch((each[:, :-1],), (each[:, 1:],), ROWS, (each[:, 1:].numel(),)) for each in ids]
    return [*found, replace(found[0], is_padding=True)]  # gone through apart, in a mode of its own


class CrossEntropy(OneLoss):
    def total(self, outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten(), reduction="sum")


@functools.cache
def alone(num_replicas: int) -> dict[str, Tensor]:
    """Every gradient, from one process."""
    named = parts()
    named[-1][1].module.weight = named[0][1].module.weight
    chain = Chain([part for _, part in named], input_names=("ids",), output_names=("logits",))
    every = [batch for replica in range(num_replicas) for batch in batches(replica) if not batch.is_padding]
    for batch in every:
        (labels,) = batch.labels
        loss = CrossEntropy().total(chain(*batch.inputs), labels)
        (loss / len(every) / labels.numel()).backward()
    return {name: part.module.weight.grad for name, part in named}


def steps(mpi: MPIContext, cases: list[dict[str, object]]) -> list[list[float]]:
    """How far the gradients and the norm of two steps with ZeRO are from those of one process."""
    found = []
    for case in cases:
        again, config = bool(case.pop("again")), ParallelConfig(**case)  # type: ignore[arg-type]
        dims = ParallelDims.of(config)
        here, mesh = dims.coordinate(mpi.rank), make_mesh(mpi, dims, timeout_s=30)
        every = stages(dims.pipeline * config.stages_per_rank)
        own = every[here.pipeline :: dims.pipeline]
        if again:
            for stage, _ in own:
                recompute(stage.chain, "whole", (0,))
        weights = [weight for _, members in own for weight in members]
        holders = sorted({0, (len(every) - 1) % dims.pipeline})
        mine = [stage for stage, _ in own]
        engine = Sharded(mine, weights, config=config, mesh=mesh, mpi=mpi, shared={"words": holders}, timeout_s=30)
        pipeline = Pipeline(
            mine,
            CrossEntropy(),
            schedule=config.schedule,
            stages_for=lambda inputs, mine=mine: mine,
            autocast=nullcontext,
            device=mpi.device,
            group_pipeline=mesh.get_group("pipeline"),
            group_data=mesh.get_group("data"),
        )
        wanted = alone(dims.data)
        expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in wanted.values()]))
        off = 0.0
        for _ in range(2):
            pipeline.run(batches(here.data), engine, scale=1.0)
            off = max(off, abs(reduced_norm(engine) / float(expected) - 1))
            for weight in engine.weights:
                difference = [
                    gradient(weight)[slices(local)] - place
                    for local, place in weight.placement.take(wanted[weight.name])
                ]
                off = max(off, *(float(each.abs().max() / expected) for each in difference))
        found.append(off)
        dist.barrier()
    return found


def cases() -> list[dict[str, object]]:
    schedules = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]
    return [
        {"pipeline": 2, "data": 2, "zero": zero, "schedule": schedule, "stages_per_rank": per_rank, "again": again}
        for zero in (1, 2, 3)
        for schedule, per_rank in schedules
        for again in (False, True)
    ]


@pytest.mark.mpi
@pytest.mark.slow
def test_every_stage_of_zero_in_every_schedule_makes_the_gradients_of_one_process() -> None:
    for rank in run_ranks(4, "tests.trainer.parallel.replicas.test_zero_pipeline:steps", cases(), timeout_s=300):
        for case, off in zip(cases(), rank, strict=True):
            assert off < 1e-5, case
