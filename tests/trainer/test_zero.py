"""ZeRO on real ranks: the same training as one process, with a share of the memory."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests import graphs
from tests.ranks import run_ranks
from trainer import graph
from trainer.config import ParallelConfig
from trainer.cut import Chain, Part, Stage
from trainer.distributed import MPIContext, ParallelDims, make_mesh
from trainer.graph import ImportedGraph
from trainer.placement import Placement, slices
from trainer.recompute import recompute
from trainer.reduce import gradient
from trainer.weights import Weight
from trainer.zero import Sharded

NUM_STEPS = 3
LEARNING_RATE, EPSILON = 1e-2, 1e-3
ROWS = 3
"""Of a micro-batch."""


# -- stages of several units


def chain_of(module: ImportedGraph, num_units: int) -> Chain:
    """The graph as units of about equally many nodes; weights that several units use are theirs in common."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    inputs = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    results = output.all_input_nodes
    parts = []
    for unit in range(num_units):
        own = nodes[len(nodes) * unit // num_units : len(nodes) * (unit + 1) // num_units]
        later = set(nodes[len(nodes) * (unit + 1) // num_units :]) | {output}
        gives = [node for node in own if any(user in later for user in node.users)]
        reads = [n for n in (*inputs, *nodes) if n not in own and any(user in own for user in n.users)]
        parts.append(part_of(module, own, reads, gives))
    return Chain(parts, reads=[node.name for node in inputs], gives=[node.name for node in results])


def part_of(module: nn.Module, own: Sequence[fx.Node], reads: Sequence[fx.Node], gives: Sequence[fx.Node]) -> Part:
    copied = fx.Graph()
    known = {node: copied.placeholder(node.name) for node in reads}

    def find(node: fx.Node) -> fx.Node:
        if node not in known:
            known[node] = copied.node_copy(node, find)
        return known[node]

    for node in own:
        find(node)
    copied.output(tuple(known[node] for node in gives))
    return Part(fx.GraphModule(module, copied), tuple(n.name for n in reads), tuple(n.name for n in gives))


def stage_of(model: onnx.ModelProto, num_units: int) -> tuple[Stage, list[Weight]]:
    module = graph.to_module(model)
    weights = [
        Weight(name, tensor, Placement.whole(tensor.shape), isinstance(tensor, nn.Parameter) and tensor.requires_grad)
        for name, tensor in graph.weights(module).items()
    ]
    chain = chain_of(module, num_units)
    return Stage(0, 1, chain, (), tuple(range(len(chain.reads))), chain.gives, (), ()), weights


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
    module = graph.to_module(MODELS[name][0]())
    weights = dict(graph.weights(module).items())
    trained = {name: tensor for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)}
    statistics = list(graph.running_statistics(module).values())
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, eps=EPSILON)
    seen = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        before, after, loss = [s.clone() for s in statistics], [], 0.0
        for replica in range(num_replicas):
            for statistic, value in zip(statistics, before, strict=True):
                statistic.copy_(value)
            loss += accumulate(module, batches := micro_batches(name, step, replica), len(batches))
            after.append([s.clone() for s in statistics])
        for place, statistic in enumerate(statistics):
            statistic.copy_(torch.stack([values[place] for values in after]).mean(0))
        gradients = {name: tensor.grad.clone() for name, tensor in trained.items() if tensor.grad is not None}
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()])).item()
        optimizer.step()
        own = {name: tensor.detach().clone() for name, tensor in weights.items()}
        seen.append(Seen(loss, norm, evaluated(module, name), gradients, own))
    return seen


class Training:
    """One rank's part of a training: `step()` is one weight update."""

    def __init__(self, mpi: MPIContext, name: str, config: ParallelConfig) -> None:
        dims = ParallelDims.of(config)
        self.mesh = make_mesh(mpi, dims, timeout_s=30)
        stage, weights = stage_of(MODELS[name][0](), MODELS[name][2])
        self.name, self.replica, self.chain = name, dims.coordinate(mpi.rank).data, stage.chain
        self.engine = Sharded([stage], weights, config=config, mesh=self.mesh, mpi=mpi, shared={}, timeout_s=30)
        self.trained = [weight for weight in self.engine.weights if weight.trained]
        tensors = [weight.tensor for weight in self.trained]
        self.optimizer = torch.optim.AdamW(tensors, lr=LEARNING_RATE, eps=EPSILON)
        self.places = [tensor.data_ptr() for tensor in tensors]
        self.steps = 0

    def step(self) -> Seen:
        self.engine.begin(3)
        loss = accumulate(self.chain, micro_batches(self.name, self.steps, self.replica), 3)
        norm = float(self.engine.reduce())
        (total,) = self.engine.sum(loss)
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


def everything(mpi: MPIContext) -> dict[str, Any]:
    """All that two ranks are asked for: starting them takes longer."""
    return {
        "distances": distances(mpi, CASES),
        "conduct": conduct(mpi),
        "oddities": oddities(mpi),
        "halves": halves(mpi),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.trainer.test_zero:everything")


@pytest.mark.mpi
def test_trainings_with_zero_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for case, found in zip(CASES, rank["distances"], strict=True):
            assert found < 1e-5, case


@pytest.mark.mpi
@pytest.mark.slow
def test_four_replicas_and_groups_of_two_that_are_replicas_of_each_other_do_too() -> None:
    cases = [
        (name, {"data": 4, "zero": zero, "shard": shard}) for name in MODELS for zero in (1, 2, 3) for shard in (0, 2)
    ]
    for rank in run_ranks(4, "tests.trainer.test_zero:distances", cases, timeout_s=300):
        for case, found in zip(cases, rank, strict=True):
            assert found < 1e-5, case


@pytest.mark.mpi
@pytest.mark.slow
def test_one_replica_is_a_size() -> None:
    assert max(run_ranks(1, "tests.trainer.test_zero:distances", [("tied", {"zero": 3, "data": 1})])[0]) < 1e-5


# -- what is kept, what is sent, what is undone


class Sent(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.__name__.removesuffix("_base_.default").removesuffix("_.default")] += 1
        return function(*args, **(kwargs or {}))


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def gathered(training: Training) -> list[Tensor]:
    return [parameter for parameter in training.chain.parameters() if not isinstance(parameter, DTensor)]


def kept(training: Training) -> dict[str, int]:
    """Bytes after the last backward pass but one of a step, and between steps."""
    training.step()
    training.engine.begin(3)
    batches = micro_batches(training.name, 9, 0)
    accumulate(training.chain, batches[:2], 2)
    whole = gathered(training)
    within = {"whole weights": bytes_of(whole), "whole gradients": bytes_of(weight.grad for weight in whole)}
    accumulate(training.chain, batches[2:], 1)
    training.engine.reduce()
    states = [value for state in training.optimizer.state.values() for value in state.values() if value.ndim]
    return within | {
        "whole weights between steps": bytes_of(gathered(training)),
        "weights": bytes_of(weight.tensor for weight in training.trained),
        "gradients": bytes_of(weight.tensor.grad for weight in training.trained),
        "optimizer": bytes_of(states),
    }


def sent(training: Training) -> dict[str, int]:
    """Collectives of a step until `reduce`."""
    training.engine.begin(3)
    with Sent() as mode:
        accumulate(training.chain, micro_batches(training.name, 9, training.replica), 3)
    training.engine.reduce()
    return dict(mode.counts)


def undone(training: Training) -> bool:
    """Whether running statistics move in a step, and are back after `undo`; no weight moves."""
    tensors = [weight.tensor for weight in training.engine.weights]
    before = [tensor.clone() for tensor in tensors]
    training.engine.begin(3)
    accumulate(training.chain, micro_batches(training.name, 9, training.replica), 3)
    training.engine.reduce()
    moved = any(not torch.equal(*pair) for pair in zip(before, tensors, strict=True))
    training.engine.undo()
    return moved and all(torch.equal(*pair) for pair in zip(before, tensors, strict=True))


def overflow(training: Training) -> list[float]:
    """The norm after an infinite input on rank 1 alone, and its gradients halved."""
    training.engine.begin(3)
    batches = micro_batches(training.name, 9, 0)
    if training.replica:
        batches = [(inputs * math.inf, labels) for inputs, labels in batches]
    accumulate(training.chain, batches, 3)
    return [float(training.engine.reduce()), *training.engine.sum(1.0, training.replica)]


def halved(training: Training) -> bool:
    """Whether `multiply` scales every gradient."""
    training.engine.begin(3)
    accumulate(training.chain, micro_batches(training.name, 9, training.replica), 3)
    training.engine.reduce()
    before = [gradient(weight).clone() for weight in training.trained]
    training.engine.multiply(0.5)
    return all(torch.equal(gradient(weight), was / 2) for weight, was in zip(training.trained, before, strict=True))


def reloaded(training: Training) -> bool:
    """Whether a step computes with weights that were changed in place after an evaluation."""
    with torch.no_grad():
        before = evaluated(training.chain, training.name)
        for weight in training.engine.weights:
            weight.tensor.mul_(0.5)
    training.engine.begin(0)
    return not torch.allclose(before, evaluated(training.chain, training.name))


def conduct(mpi: MPIContext) -> dict[str, Any]:
    """Of each stage of ZeRO, what the tests below look at."""
    found: dict[str, Any] = {}
    for zero in (1, 2, 3):
        config = ParallelConfig(data=2, zero=zero)
        training, again = Training(mpi, "tied", config), Training(mpi, "tied", config)
        (first, second), (other, same) = ([one.step(), one.step()] for one in (training, again))
        images = Training(mpi, "batch norm", config)
        found[str(zero)] = {
            "kept": kept(training),
            "sent": sent(training),
            "repeated": first == other and second == same,
            "undone": undone(images),
            "halved": halved(training),
            "reloaded": reloaded(training),
            "overflow": overflow(images),
        }
    return found


TRAINED_BYTES = 4 * sum(tensor.numel() for tensor in graph.weights(graph.to_module(MODELS["tied"][0]())).values())
UNITS = MODELS["tied"][2] + 1
"""Weights that travel together: those of each unit, and the tied one."""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("zero", "whole_weights", "whole_gradients", "gathers", "scatters"),
    [(1, 1, 1, UNITS, UNITS), (2, 1, 0, UNITS, 3 * UNITS), (3, 0, 0, 6 * UNITS, 3 * UNITS)],
)
def test_each_stage_of_zero_keeps_and_sends_what_it_says(
    ranks: list[dict[str, Any]], zero: int, whole_weights: int, whole_gradients: int, gathers: int, scatters: int
) -> None:
    for found in ranks:
        rank = found["conduct"][str(zero)]
        assert rank["kept"] == {
            "whole weights": whole_weights * TRAINED_BYTES,
            "whole gradients": whole_gradients * TRAINED_BYTES,
            "whole weights between steps": 0,
            "weights": TRAINED_BYTES // 2,
            "gradients": TRAINED_BYTES // 2,
            "optimizer": TRAINED_BYTES,
        }
        assert rank["sent"] == {"_allgather": gathers, "_reduce_scatter": scatters}


@pytest.mark.mpi
@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_a_step_can_be_repeated_scaled_undone_and_overflows_everywhere(ranks: list[dict[str, Any]], zero: str) -> None:
    for found in ranks:
        rank = found["conduct"][zero]
        assert rank["repeated"], "bit by bit"
        assert rank["halved"]
        assert rank["undone"]
        assert rank["reloaded"]
        norm, ranks, numbers = rank["overflow"]
        assert not math.isfinite(norm)
        assert (ranks, numbers) == (2, 1)


# -- weights of every kind


class Odd(nn.Module):
    """A unit with a scalar, a frozen weight, one that is not used, and half of a weight that is divided in blocks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(6, 5, generator=generator), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.scale * F.linear(torch.tanh(x), self.blocks.t() @ self.frozen),)


BLOCKS = Placement((12, 5), (((0, 3), (6, 9)), ((0, 5),)))


def oddities(mpi: MPIContext) -> dict[str, Any]:
    """What becomes of each weight, and how far its gradient is from that of one process."""
    found: dict[str, Any] = {}
    for zero in (1, 3):
        config, unit, plain = ParallelConfig(data=2, zero=zero), Odd(), Odd()
        stage = Stage(0, 1, Chain([Part(unit, ("x",), ("y",))], reads=("x",), gives=("y",)), (), (0,), ("y",), (), ())
        weights = [
            Weight(name, tensor, BLOCKS if name == "blocks" else Placement.whole(tensor.shape), tensor.requires_grad)
            for name, tensor in unit.named_parameters()
        ]
        mesh = make_mesh(mpi, ParallelDims.of(config), timeout_s=30)
        engine = Sharded([stage], weights, config=config, mesh=mesh, mpi=mpi, shared={}, timeout_s=30)
        rows = torch.arange(20.0).reshape(4, 5) / 20
        engine.begin(1)
        stage.chain(rows[2 * mpi.rank : 2 * mpi.rank + 2])[0].square().sum().backward()
        norm = float(engine.reduce())
        plain(rows)[0].square().sum().backward()
        whole = {name: tensor.grad for name, tensor in plain.named_parameters() if tensor.grad is not None}
        whole["unused"] = torch.zeros(3)
        expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in whole.values()]))
        off = abs(norm / float(expected) - 1)
        for weight in engine.weights:
            if weight.trained:
                wanted = torch.zeros(weight.placement.shape)
                for local, place in Placement.take(BLOCKS, wanted) if weight.name == "blocks" else ():
                    place.copy_(whole["blocks"][slices(local)])
                wanted = wanted if weight.name == "blocks" else whole[weight.name]
                for local, place in weight.placement.take(wanted):
                    off = max(off, float((gradient(weight)[slices(local)] - place).abs().max() / expected))
        found[str(zero)] = [off, {weight.name: weight.placement.intervals for weight in engine.weights}]
    return found


@pytest.mark.mpi
def test_scalars_stay_whole_and_blocks_are_divided_further_and_what_is_unused_has_no_gradient(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(ranks):
        for zero, (off, places) in found["oddities"].items():
            assert off < 1e-5
            assert places["blocks"] == [[[[0, 3], [6, 9]][rank]], [[0, 5]]]
            assert places["scale"] == []
            assert places["unused"] == [[[[0, 2], [2, 3]][rank]]]
            assert places["frozen"] == [[[0, 6] if zero == "1" else [3 * rank, 3 * rank + 3]], [[0, 5]]]


# -- with halves and recomputation


class Casts(TorchDispatchMode):
    """How many copies of weights in half precision are alive."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self._all: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten._to_copy and result.numel() == self._numel:
            self._all.append(StorageWeakRef(result.untyped_storage()))
            self.most = max(self.most, self.alive)
        return result

    @property
    def alive(self) -> int:
        return sum(not reference.expired() for reference in self._all)


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + torch.tanh(x) @ self.weight.t(),)


def halves(mpi: MPIContext) -> dict[str, list[Any]]:
    """Gradients of each stage of ZeRO in bf16; copies of weights after the forward pass, and at most."""
    found = {}
    for zero, again in (("2", False), ("3", False), ("3", True)):
        layers = [Layer(seed) for seed in range(4)]
        parts = [Part(layer, (f"x{place}",), (f"x{place + 1}",)) for place, layer in enumerate(layers)]
        stage = Stage(0, 1, Chain(parts, reads=("x0",), gives=("x4",)), (), (0,), ("x4",), (), ())
        weights = [Weight(str(n), it.weight, Placement.whole((16, 16)), True) for n, it in enumerate(layers)]
        if again:
            recompute(stage.chain, "whole", (1, 2))
        config = ParallelConfig(data=2, zero=int(zero))
        mesh = make_mesh(mpi, ParallelDims.of(config), timeout_s=30)
        engine = Sharded([stage], weights, config=config, mesh=mesh, mpi=mpi, shared={}, timeout_s=30)
        engine.begin(1)
        with Casts(256) as casts:
            with torch.autocast("cpu", torch.bfloat16):
                (y,) = stage.chain(torch.ones(2, 16) / (1 + mpi.rank))
            alive = casts.alive
            y.float().sum().backward()
        engine.reduce()
        gradients = [gradient(weight).tolist() for weight in engine.weights]
        found[f"{zero}{' recomputed' * again}"] = [gradients, alive, casts.most]
    return found


@pytest.mark.mpi
def test_zero_3_keeps_no_copies_of_weights_in_half_precision(ranks: list[dict[str, Any]]) -> None:
    for rank in (found["halves"] for found in ranks):
        assert rank["2"][0] == rank["3"][0] == rank["3 recomputed"][0], "the same bits"
        assert rank["2"][1:] == [3, 3], "autograd keeps all but the first, whose input needs no gradient"
        assert rank["3"][1:] == rank["3 recomputed"][1:] == [0, 1]
