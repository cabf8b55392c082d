"""ZeRO on real ranks: the same training as one process, with a share of the memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight, slices
from onward.trainer.model.weight_casts import insert_casts
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.pipeline.balance import choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import find_cut_points
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Stage, build_stages
from onward.trainer.parallel.replicas.norms import sum_over_world
from onward.trainer.parallel.replicas.zero import Sharded
from onward.trainer.parallel.stage_weights import is_trained, running_statistic_retention
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm

NUM_STEPS = 3
LEARNING_RATE, EPSILON = 1e-2, 1e-3
ROWS = 3
"""Of a micro-batch."""


def stage_of(name: str, *, compute: str = "fp32") -> tuple[Stage, list[Weight]]:
    """The graph as one stage of several units, and its stored tensors."""
    build, data, num_units = MODELS[name]
    module = to_module(build())
    insert_casts(module, PrecisionConfig.model_validate({"compute": compute}))
    found = estimate_costs(module, [data(ROWS, 0)[0]])
    points = choose_unit_cuts(
        module, find_cut_points(module.graph, found), node_work(module.graph, found), (), num_units
    )
    (stage,) = build_stages(module, [split(module, points)], found)
    assert len(stage.chain.units) == num_units
    retention = running_statistic_retention(stage)
    weights = [
        Weight(name, tensor, Placement.full(tensor.shape), is_trained(tensor), retention=retention.get(name, 0.0))
        for name, tensor in named_weights(module).items()
    ]
    return stage, weights


# -- training


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return F.mse_loss(outputs, labels, reduction="sum")
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")


def text(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 30, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def images(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def table(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 1, generator=generator)


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[int, int], tuple[Tensor, Tensor]], int]] = {
    "tied": (graphs.tiny_transformer, text, 4),
    "batch norm": (graphs.tiny_resnet, images, 3),
    "uneven": (lambda: graphs.tiny_mlp(inputs=5, hidden=7), table, 2),
}
"""Name -> graph, its data, number of units."""


def micro_batches(name: str, step: int, replica: int) -> list[tuple[Tensor, Tensor]]:
    """The first replica has one more than the others."""
    data = MODELS[name][1]
    return [data(ROWS, 100 * step + 10 * replica + place) for place in range(3 if replica == 0 else 2)]


def accumulate(module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], passes: int) -> float:
    """Forward and backward passes of one replica, idle ones where it has no micro-batch; returns its loss."""
    total = 0.0
    for place in range(passes):
        idle = place >= len(batches)
        inputs, labels = batches[0] if idle else batches[place]
        module.train(not idle)
        (outputs,) = as_tuple(module(inputs))
        loss = loss_of(outputs, labels) / 100 * (0.0 if idle else 1.0)
        loss.backward()
        total += loss.item()
    return total


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@torch.no_grad()
def evaluated(module: nn.Module, name: str) -> Tensor:
    module.eval()
    return as_tuple(module(MODELS[name][1](ROWS, 7)[0]))[0]


@dataclass(eq=False)
class Seen:
    """What one step of a training comes to."""

    loss: float
    norm: float
    outputs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        """Bit by bit."""
        assert isinstance(other, Seen)
        own, theirs = ([*seen.gradients.values(), *seen.weights.values(), seen.outputs] for seen in (self, other))
        return (self.loss, self.norm) == (other.loss, other.norm) and all(map(torch.equal, own, theirs))


def alone(name: str, num_replicas: int) -> list[Seen]:
    """The training as one process without any of this makes it."""
    module = to_module(MODELS[name][0]())
    weights = dict(named_weights(module).items())
    trained = {name: tensor for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, eps=EPSILON)
    seen = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = [batch for replica in range(num_replicas) for batch in micro_batches(name, step, replica)]
        loss = accumulate(module, batches, len(batches))
        gradients = {name: tensor.grad.clone() for name, tensor in trained.items() if tensor.grad is not None}
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()])).item()
        optimizer.step()
        own = {name: tensor.detach().clone() for name, tensor in weights.items()}
        seen.append(Seen(loss, norm, evaluated(module, name), gradients, own))
    return seen


class Training:
    """One rank's part of a training: `step()` is one weight update."""

    def __init__(
        self, mpi: MPIContext, name: str, config: ParallelConfig, *, compute: str = "fp32", **how: Any
    ) -> None:
        dims = ParallelDims.of(config)
        self.mesh = make_mesh(mpi, dims, timeout_s=30)
        stage, weights = stage_of(name, compute=compute)
        self.name, self.replica, self.chain = name, dims.coordinate(mpi.rank).data, stage.chain
        shared: dict[str, Any] = {"shared": {}, "timeout_s": 30, **how}
        self.engine = Sharded([stage], weights, config=config, mesh=self.mesh, mpi=mpi, **shared)
        self.trained = [weight for weight in self.engine.weights if weight.trained]
        tensors = [weight.tensor for weight in self.trained]
        self.optimizer = torch.optim.AdamW(tensors, lr=LEARNING_RATE, eps=EPSILON)
        self.places = [tensor.data_ptr() for tensor in tensors]
        self.steps = 0

    def step(self) -> Seen:
        batches = micro_batches(self.name, self.steps, self.replica)
        self.engine.begin(3, 1.0, len(batches))
        loss = accumulate(self.chain, batches, 3)
        norm = reduced_norm(self.engine)
        (total,) = sum_over_world([loss], torch.device("cpu"))
        gradients = self.whole({w.name: (w.tensor.grad, w.placement) for w in self.trained})
        self.optimizer.step()
        self.steps += 1
        outputs = evaluated(self.chain, self.name)
        own = self.whole({weight.name: (weight.tensor, weight.placement) for weight in self.engine.weights})
        return Seen(total, norm, outputs, gradients, own)

    def whole(self, parts: dict[str, tuple[Any, Placement]]) -> dict[str, Tensor]:
        """Put together what the replicas have. Where several have the same, they must agree."""
        found = {}
        for name, (tensor, placement) in parts.items():
            sums, counts = torch.zeros(2, *placement.shape)
            for local, place in placement.boxes():
                sums[slices(place)] = tensor.detach()[slices(local)]
                counts[slices(place)] = 1
            low, high = sums.masked_fill(counts == 0, math.inf), sums.masked_fill(counts == 0, -math.inf)
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            assert torch.equal(low, high), f"{name}: ranks that hold the same part differ, or there is a gap"
            found[name] = low
        return found


def distance(found: Seen, wanted: Seen) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    pairs = [
        (torch.tensor(found.loss), torch.tensor(wanted.loss)),
        (torch.tensor(found.norm), torch.tensor(wanted.norm)),
    ]
    pairs.append((found.outputs, wanted.outputs))
    for mine, theirs in ((found.gradients, wanted.gradients), (found.weights, wanted.weights)):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs)


def distances(mpi: MPIContext, cases: list[tuple[str, dict[str, int]]]) -> list[float]:
    """Of each training, from the same one in one process: over all its steps."""
    found, wanted_of = [], functools.cache(alone)
    for name, sizes in cases:
        wanted = wanted_of(name, sizes["data"])
        training = Training(mpi, name, ParallelConfig(**sizes))
        found.append(max(distance(training.step(), step) for step in wanted))
        assert training.places == [weight.tensor.data_ptr() for weight in training.trained], "other memory"
    return found


CASES = [(name, {"data": 2, "zero": zero}) for name in MODELS for zero in (1, 2, 3)]


@pytest.mark.mpi
def test_trainings_with_zero_equal_one_process() -> None:
    for rank in run_ranks(2, "tests.trainer.parallel.replicas.test_zero:distances", CASES):
        for case, found in zip(CASES, rank, strict=True):
            assert found < 1e-5, case


@pytest.mark.mpi
@pytest.mark.slow
def test_four_replicas_and_groups_of_two_that_are_replicas_of_each_other_do_too() -> None:
    cases = [
        (name, {"data": 4, "zero": zero, "shard": shard}) for name in MODELS for zero in (1, 2, 3) for shard in (0, 2)
    ]
    for rank in run_ranks(4, "tests.trainer.parallel.replicas.test_zero:distances", cases, timeout_s=300):
        for case, found in zip(cases, rank, strict=True):
            assert found < 1e-5, case


@pytest.mark.mpi
@pytest.mark.slow
def test_one_replica_is_a_size() -> None:
    assert (
        max(run_ranks(1, "tests.trainer.parallel.replicas.test_zero:distances", [("tied", {"zero": 3, "data": 1})])[0])
        < 1e-5
    )
