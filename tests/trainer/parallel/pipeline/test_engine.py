"""A pipeline of stages computes what its stages compute one after the other: losses, gradients, statistics, metrics.

Every rank also runs all the stages by itself and compares.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as pipelining_backward

from onward.trainer.config.pipeline_schedules import PIPELINE_SCHEDULES, PipelineSize, ScheduleName
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.failures import lost_a_peer
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import UnsupportedModel
from onward.trainer.parallel.pipeline import stage_schedules as schedules
from onward.trainer.parallel.pipeline.engine import Pipeline, stage_group
from onward.trainer.parallel.pipeline.stage import Chain, Part, Stage
from onward.trainer.parallel.pipeline.stage_schedules import Autocast, ScheduledStages
from tests.support.one_loss import OneLoss
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
CLASSES = 5
INPUTS = ("x", "ids")  # [B, 6] float; [B, L] int64


# -- a graph in four parts with everything that may cross a cut


class Begin(nn.Module):
    """Returns h for the next part and the last, a mask and a length without gradient, and an output of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.early = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(6, 3)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        length = ids.sum(1)
        return torch.tanh(self.norm(self.linear(x))), length % 2 == 0, length, self.early(x)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        return (self.norm(torch.relu(self.linear(h))),)


class Transposed(nn.Module):
    """Returns a tensor that is not contiguous, [B, 4, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Tensor, even: Tensor) -> tuple[Tensor, ...]:
        return (self.linear(h * torch.where(even, 1.0, 0.5)[:, None]).unflatten(1, (2, 4)).transpose(1, 2),)


class End(nn.Module):
    """Reads an input of the graph that an earlier part reads too, and a value of three parts before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(self, turned: Tensor, h: Tensor, length: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        # the sum over `expand` makes gradients with strides of 0
        near = turned.flatten(1).unsqueeze(1).expand(-1, 2, -1).sum(1) + h
        return (self.linear(near + self.words(ids).mean(1)) / length.clamp(min=1)[:, None],)


def parts() -> list[Part]:
    torch.manual_seed(0)
    return [
        Part(Begin(), ("x", "ids"), ("h", "even", "length", "early")),
        Part(Middle(), ("h",), ("h1",)),
        Part(Transposed(), ("h1", "even"), ("h2",)),
        Part(End(), ("h2", "h", "length", "ids"), ("late",)),
    ]


OUTPUTS = ("late", "early")


def into_stages(members: Sequence[Part], num_stages: int) -> list[Stage]:
    """Distribute the parts over stages; a value passes through every stage up to its last reader."""
    size = len(members) // num_stages
    stages, receives = [], ()
    for index in range(num_stages):
        mine, later = members[index * size : (index + 1) * size], members[(index + 1) * size :]
        inputs = tuple(place for place, name in enumerate(INPUTS) if any(name in part.input_names for part in mine))
        known = (*receives, *(name for part in mine for name in part.output_names))
        needed = {name for part in later for name in part.input_names} | set(OUTPUTS)
        gives = tuple(name for name in known if name in needed) if later else OUTPUTS
        chain = Chain(mine, input_names=(*receives, *(INPUTS[place] for place in inputs)), output_names=gives)
        stages.append(Stage(index, num_stages, chain, receives, inputs, gives, (), ()))
        receives = gives
    return stages


def with_meta(stages: Sequence[Stage], inputs: Sequence[Tensor]) -> list[Stage]:
    """Return all stages with the meta tensors of what crosses between them for these inputs."""
    values: tuple[Tensor, ...] = ()
    found = []
    for stage in stages:
        with torch.enable_grad():  # eval(): BatchNorm refuses a single row in training
            gives = copy.deepcopy(stage.chain).eval()(*values, *(inputs[place] for place in stage.input_positions))
        crossing, produced = (tuple(map(meta_of, some)) for some in (values, gives))
        found.append(replace(stage, received_meta=crossing, output_meta=produced))
        values = gives
    return found


def meta_of(value: Tensor) -> Tensor:
    return value.detach().to("meta").requires_grad_(value.requires_grad)


class BothOutputs(OneLoss):
    """A loss that reads both outputs of the graph."""

    def total(self, outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        late, early = outputs
        return F.cross_entropy(late, labels, reduction="sum") + early.square().sum()


class Gradients:
    """Zeroes gradients at the beginning of a step, as the reducer does."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages, self.begun = stages, []

    def begin(self, num_backwards: int, num_targets: float, num_batchnorm_updates: int) -> None:
        self.begun.append(num_backwards)
        for stage in self._stages:
            for weight in stage.chain.parameters():
                weight.grad = torch.zeros_like(weight)


def batch(seed: int, size: int = 3, length: int = 4, **how: Any) -> Batch:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=random)
    ids = torch.randint(0, 9, (size, length), generator=random)
    return Batch((x, ids), (torch.randint(0, CLASSES, (size,), generator=random),), size, (size,), **how)


class Setup:
    """This rank's stages of a graph in a mesh, and the same graph on one rank."""

    def __init__(
        self,
        mpi: MPIContext,
        *,
        data: int = 1,
        schedule: ScheduleName = "1f1b",
        per_rank: int = 1,
        make: Callable[[], list[Part]] = parts,
        autocast: Autocast = nullcontext,
        timeout_s: float = 20,
    ) -> None:
        dims = ParallelDims(data=data, pipeline=mpi.world_size // data)
        mesh = make_mesh(mpi, dims, timeout_s=timeout_s)
        here = dims.coordinate(mpi.rank)
        self.replica, self.data = here.data, mesh.get_group("data")
        every = into_stages(make(), dims.pipeline * per_rank)
        self.stages = every[here.pipeline :: dims.pipeline]

        def stages_for(inputs: Sequence[Tensor]) -> list[Stage]:
            with autocast():
                return with_meta(every, inputs)[here.pipeline :: dims.pipeline]

        kind = {"losses": BothOutputs(), "autocast": autocast, "device": CPU}
        groups = {"group_pipeline": stage_group(mesh, timeout_s=timeout_s), "group_data": self.data}
        self.pipeline = Pipeline(self.stages, schedule=schedule, stages_for=stages_for, **kind, **groups)
        self.uncut = into_stages(make(), 4)
        own = mesh.get_group("tensor")
        self.uncut_pipeline = Pipeline(
            self.uncut, schedule="", stages_for=lambda _: [], **kind, group_pipeline=own, group_data=own
        )

    def step(self, mine: list[Batch], everyone: list[Batch]) -> float:
        """Run one step in the pipeline and on one rank; return the largest difference in loss, gradients and buffers.

        With several replicas buffers are not compared, because each replica has other batches.
        """
        engine = Gradients(self.stages)
        torch.manual_seed(1)
        share = self.pipeline.run(mine, engine, scale=2.0)
        dist.all_reduce(share)
        expected = self.uncut_pipeline.run(everyone, Gradients(self.uncut), scale=2.0)
        for stage in self.stages:
            for weight in stage.chain.parameters():
                dist.all_reduce(weight.grad, group=self.data)
        assert engine.begun[-1] == len(mine)
        return max(abs(float(share - expected)), *self.differences(statistics=self.data.size() == 1))

    def differences(self, *, statistics: bool) -> Iterator[float]:
        """Yield the largest difference of each gradient and of each running statistic."""
        ours = {id(part): part for stage in self.stages for part in stage.chain.parts}
        theirs = [part for stage in self.uncut for part in stage.chain.parts]
        for part in ours.values():
            (same,) = [other for other in theirs if other.output_names == part.output_names]
            for (name, weight), other in zip(part.module.named_parameters(), same.module.parameters(), strict=True):
                wanted = torch.zeros_like(other) if other.grad is None else other.grad
                assert wanted.abs().max() > 0 or not weight.requires_grad, f"{name} has no gradient to compare"
                yield float((weight.grad - wanted).abs().max())
            for found, wanted in zip(part.module.buffers(), same.module.buffers(), strict=True) if statistics else ():
                yield float((found - wanted).abs().max())


# -- training


def frozen() -> list[Part]:
    """Parts of which the first is frozen, so that what crosses the first cut has no gradient."""
    made = parts()
    made[0].module.requires_grad_(False)
    return made


def every_schedule(mpi: MPIContext, cases: list[list[Any]]) -> dict[str, float]:
    ScheduledStages.MAX_SCHEDULES = 2  # so that some are discarded and made again
    found = {}
    for schedule, per_rank, num, *options in cases:
        schedules.INTEGERS_AS_FLOATS |= "integers carried as floats" in options
        make = frozen if "frozen" in options else parts
        autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16) if "bf16" in options else nullcontext
        setup = Setup(mpi, schedule=schedule, per_rank=per_rank, make=make, autocast=autocast)
        steps = [
            [batch(seed) for seed in range(num)],
            [batch(seed + 50) for seed in range(num)],  # the same shapes: nothing is left of the step before
            [*(batch(seed + 9, length=6) for seed in range(num)), batch(40, size=2, length=3, group=1)],
            [batch(41, size=2 + seed % 2, length=2, group=seed) for seed in range(3)],
        ]
        found[str([schedule, per_rank, num, *options])] = max(setup.step(mine, mine) for mine in steps)
    return found


@pytest.mark.mpi
def test_every_schedule_on_two_ranks_computes_the_gradients_of_the_uncut_graph() -> None:
    cases = [["gpipe", 1, 3], ["1f1b", 1, 4], ["1f1b", 1, 5], ["interleaved", 2, 4], ["interleaved", 2, 5]]
    cases += [["zero_bubble", 1, 4], ["zero_bubble", 2, 4], ["1f1b", 1, 4, "bf16"], ["1f1b", 1, 4, "frozen"]]
    cases += [["zero_bubble", 2, 4, "bf16"], ["1f1b", 1, 2, "integers carried as floats"]]
    if not hasattr(pipelining_backward, "_autograd_grad_for_inputs"):
        # torch 2.11 cannot split a backward pass where a value without a gradient crosses; the engine refuses it
        cases = [case for case in cases if case[0] != "zero_bubble"]
    for differences in run_ranks(2, "tests.trainer.parallel.pipeline.test_engine:every_schedule", cases):
        assert len(differences) == len(cases)
        assert max(differences.values()) < 2e-6, differences


@pytest.mark.slow
@pytest.mark.mpi
def test_every_schedule_on_four_ranks_computes_the_gradients_of_the_uncut_graph() -> None:
    cases = [["gpipe", 1, 4], ["1f1b", 1, 4], ["1f1b", 1, 9], ["zero_bubble", 1, 8]]
    for differences in run_ranks(4, "tests.trainer.parallel.pipeline.test_engine:every_schedule", cases):
        assert len(differences) == len(cases)
        assert max(differences.values()) < 2e-6, differences


@pytest.mark.parametrize(
    ("wanted", "num_micro_batches", "num_ranks", "stages_per_rank", "found"),
    [
        ("1f1b", 8, 4, 1, "Schedule1F1B"),
        ("1f1b", 3, 4, 1, "ScheduleGPipe"),
        ("gpipe", 8, 4, 1, "ScheduleGPipe"),
        ("interleaved", 8, 4, 1, "Schedule1F1B"),
        ("interleaved", 8, 4, 2, "ScheduleInterleaved1F1B"),
        ("interleaved", 1, 4, 2, "ScheduleInterleaved1F1B"),
        ("interleaved", 9, 4, 2, "ScheduleLoopedBFS"),  # two rounds of 4.5
        ("gpipe", 8, 4, 2, "ScheduleLoopedBFS"),
        ("zero_bubble", 8, 4, 1, "ScheduleInterleavedZeroBubble"),
        ("zero_bubble", 8, 4, 2, "ScheduleInterleavedZeroBubble"),
        ("zero_bubble", 3, 4, 1, "ScheduleGPipe"),
        ("zero_bubble", 3, 4, 2, "ScheduleInterleaved1F1B"),
    ],
)
def test_a_schedule_that_cannot_run_so_many_micro_batches_is_replaced_by_the_most_similar_one(
    wanted: ScheduleName, num_micro_batches: int, num_ranks: int, stages_per_rank: int, found: str
) -> None:
    size = PipelineSize(num_ranks, stages_per_rank, num_micro_batches)
    assert PIPELINE_SCHEDULES[wanted].torch_classes(size)[0] == found


# -- replicas, evaluation, arithmetic


def replicas(mpi: MPIContext) -> dict[str, float]:
    """2 x 2 ranks: the last micro-batch of the second replica is padding."""
    setup = Setup(mpi, data=2)
    row = batch(9, size=1, length=2, is_padding=True, group=1)
    wild = replace(row, inputs=(row.inputs[0] * 1e30, row.inputs[1]))  # its loss is infinite
    found = {}
    for name, idle in {"idle": row, "infinite": wild}.items():
        full = [[batch(1), batch(2)], [batch(3), batch(4)]]
        mine = [*full[setup.replica], (batch(8, size=2, group=1), idle)[setup.replica]]
        found[name] = setup.step(mine, [*full[0], *full[1], batch(8, size=2, group=1)])
    before = [buffer.clone() for stage in setup.stages for buffer in stage.chain.buffers()]
    setup.step([(batch(5), idle)[setup.replica]], [batch(5)])
    after = [buffer for stage in setup.stages for buffer in stage.chain.buffers()]
    same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return found | {"statistics": float(bool(before) and same != (setup.replica == 1))}


class Sums:
    """Sums like EvaluationMetrics, which takes seconds to import."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], size: int) -> None:
        loss = F.cross_entropy(outputs[0], labels[0], reduction="sum")
        self.sums += torch.tensor([float(loss), float((outputs[0].argmax(1) == labels[0]).sum()), size])

    def compute(self) -> dict[str, float]:
        dist.all_reduce(self.sums)
        loss, right, count = self.sums.tolist()
        return {"loss": loss / count, "accuracy": right / count, "count": count}


def evaluated(mpi: MPIContext) -> dict[str, dict[str, float]]:
    """Over 2 x 2 ranks, the second replica's last batch idle; and by hand."""
    found = {}
    full = [[batch(seed) for seed in seeds] for seeds in (range(4), range(4, 8))]
    last = [batch(8, size=2, group=1), batch(9, size=1, is_padding=True, group=1)]
    for per_rank in (1, 2):
        setup = Setup(mpi, data=2, schedule="interleaved", per_rank=per_rank)
        mine = [*full[setup.replica], last[setup.replica]]
        before = [buffer.clone() for stage in setup.stages for buffer in stage.chain.buffers()]
        found[f"{per_rank}"] = setup.pipeline.evaluate(iter(mine), Sums(), lambda: None)
        after = [buffer for stage in setup.stages for buffer in stage.chain.buffers()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    everyone = [*full[0], *full[1], last[0]]
    by_hand = into_stages(parts(), 1)[0].chain.eval()
    logits = torch.cat([by_hand(*each.inputs)[0] for each in everyone])
    labels = torch.cat([each.labels[0] for each in everyone])
    accuracy = float((logits.argmax(1) == labels).float().mean())
    loss = float(F.cross_entropy(logits, labels))
    return {**found, "by hand": {"loss": loss, "accuracy": accuracy, "count": 26}}


def two_replicas_of_two_stages(mpi: MPIContext) -> list[Any]:
    return [replicas(mpi), evaluated(mpi)]


@pytest.mark.mpi
def test_two_replicas_of_a_pipeline_equal_one_whether_or_not_both_have_samples_left() -> None:
    for differences, metrics in run_ranks(4, "tests.trainer.parallel.pipeline.test_engine:two_replicas_of_two_stages"):
        assert max(differences.values()) < 2e-6, differences
        assert metrics["1"] == pytest.approx(metrics["by hand"], rel=1e-6)
        assert metrics["2"] == pytest.approx(metrics["by hand"], rel=1e-6)


# -- what goes wrong


class RightOnce(torch.autograd.Function):
    """A product whose backward pass is right only once; zero_bubble calls it twice."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        context.times = 0
        return x * weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        context.times += 1
        return gradient * weight, (gradient * x).sum(0) * (context.times == 1)


class Scaled(Transposed):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, h: Tensor, even: Tensor) -> tuple[Tensor, ...]:
        return super().forward(RightOnce.apply(h, self.scale), even)


def with_an_unsplittable_backward() -> list[Part]:
    first, second, third, last = parts()
    return [first, second, replace(third, module=Scaled()), last]


class Planted(Transposed):
    """Fails as soon as it computes."""

    def forward(self, h: Tensor, even: Tensor) -> tuple[Tensor, ...]:
        raise UnsupportedModel("planted")


def ending(setup: Setup) -> list[Any]:
    """Return how a step ends: the error, whether it only reports a lost peer, and after how many seconds."""
    started_at = time.monotonic()
    try:
        setup.pipeline.run([batch(seed) for seed in range(4)], Gradients(setup.stages), scale=1.0)
    except Exception as error:
        return [f"{type(error).__name__}: {error}", lost_a_peer(error), time.monotonic() - started_at]
    return ["none", False, 0.0]


def failing(mpi: MPIContext) -> list[list[Any]]:
    from mpi4py import MPI

    together = MPI.COMM_WORLD.Barrier
    ends = [ending(Setup(mpi, schedule="zero_bubble", make=with_an_unsplittable_backward, timeout_s=2))]
    together()
    setup = Setup(mpi, timeout_s=2)
    setup.step([batch(1), batch(2)], [batch(1), batch(2)])
    if mpi.rank == 1:
        time.sleep(4)
    ends.append(ending(setup))
    together()
    setup = Setup(mpi, timeout_s=2)
    if mpi.rank == 1:
        setup.stages[0].chain.units[0].forward = Planted().forward
    return [*ends, ending(setup)]


@pytest.mark.mpi
def test_when_a_rank_ends_its_neighbours_report_a_lost_peer() -> None:
    first, second = run_ranks(2, "tests.trainer.parallel.pipeline.test_engine:failing")
    refused, hung, planted = zip(first, second, strict=True)
    assert refused[1][0] == (
        "UnsupportedModel: parallel.schedule 'zero_bubble' computes a gradient of units.0.scale with a relative error "
        "of 1.0e+00 (0.001 is allowed); use 'interleaved' or '1f1b'"
    )
    assert planted[1][0] == "UnsupportedModel: planted"
    assert not planted[1][1]
    for left_alone in (refused[0], hung[0], planted[0]):
        assert left_alone[1], left_alone
        assert left_alone[2] < 10
