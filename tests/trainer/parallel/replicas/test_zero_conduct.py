"""What ZeRO keeps, sends and undoes, of weights of every kind, on real ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight, slices
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.pipeline.stage import Chain, Part, Stage
from onward.trainer.parallel.planning.dry_run import MemoryCounter
from onward.trainer.parallel.recomputation.recompute import recompute
from onward.trainer.parallel.replicas import fsdp_groups
from onward.trainer.parallel.replicas.norms import gradient, sum_over_world
from onward.trainer.parallel.replicas.zero import Sharded
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm
from tests.trainer.parallel.replicas.test_zero import MODELS, Training, accumulate, evaluated, micro_batches


def everything(mpi: MPIContext) -> dict[str, Any]:
    """All that two ranks are asked for: starting them takes longer."""
    return {asked.__name__: asked(mpi) for asked in (conduct, oddities, branches, halves, order, loading)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.trainer.parallel.replicas.test_zero_conduct:everything")


def sharded(mpi: MPIContext, stage: Stage, weights: Sequence[Weight], zero: int) -> Sharded:
    """Two replicas."""
    config = ParallelConfig(data=2, zero=zero)  # type: ignore[arg-type]
    mesh = make_mesh(mpi, ParallelDims.of(config), timeout_s=30)
    return Sharded([stage], weights, config=config, mesh=mesh, mpi=mpi, shared={}, timeout_s=30)


# -- what is kept, what is sent, what is undone


class Order(TorchDispatchMode):
    """What is done after what: G for a gather, S for a reduce-scatter, m for a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # on the CPU a reduce-scatter is an all-to-all, whose sums follow
        letters = {"_allgather_base_.default": "G", "alltoall_base_.default": "S", "mm.default": "m"}
        self.seen += letters.get(function.__name__, "")
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
    with Order() as mode:
        accumulate(training.chain, micro_batches(training.name, 9, training.replica), 3)
    training.engine.reduce()
    return {"gathers": mode.seen.count("G"), "scatters": mode.seen.count("S")}


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
    return [reduced_norm(training.engine), *sum_over_world([1.0, training.replica], torch.device("cpu"))]


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


TRAINED_BYTES = 4 * sum(tensor.numel() for tensor in named_weights(to_module(MODELS["tied"][0]())).values())
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
        assert rank["sent"] == {"gathers": gathers, "scatters": scatters}


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
        unit, plain = Odd(), Odd()
        stage = Stage(
            0, 1, Chain([Part(unit, ("x",), ("y",))], input_names=("x",), output_names=("y",)), (), (0,), ("y",), (), ()
        )
        weights = [
            Weight(name, tensor, BLOCKS if name == "blocks" else Placement.full(tensor.shape), tensor.requires_grad)
            for name, tensor in unit.named_parameters()
        ]
        engine = sharded(mpi, stage, weights, zero)
        rows = torch.arange(20.0).reshape(4, 5) / 20
        engine.begin(1)
        stage.chain(rows[2 * mpi.rank : 2 * mpi.rank + 2])[0].square().sum().backward()
        norm = reduced_norm(engine)
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


class Branch(nn.Module):
    """A unit that uses one of two weights, as an If in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, which: Tensor) -> tuple[Tensor]:
        return (x @ (self.one if which else self.other),)


def branches(mpi: MPIContext) -> dict[str, list[float]]:
    """Sum of each gradient when the first replica uses one weight of a unit, and the second another."""
    found = {}
    for zero in (1, 2, 3):
        units = [Branch(), Branch()]
        parts = [Part(units[0], ("x", "which"), ("y",)), Part(units[1], ("y", "which"), ("z",))]
        chain = Chain(parts, input_names=("x", "which"), output_names=("z",))
        weights = [
            Weight(f"{place}.{name}", tensor, Placement.full(tensor.shape), True)
            for place, unit in enumerate(units)
            for name, tensor in unit.named_parameters()
        ]
        engine = sharded(mpi, Stage(0, 1, chain, (), (0, 1), ("z",), (), ()), weights, zero)
        engine.begin(2)
        for _ in range(2):
            chain(torch.full((1, 4), 1.0 + mpi.rank), torch.tensor(mpi.rank == 0))[0].sum().backward()
        engine.reduce()
        found[str(zero)] = sum_over_world([gradient(weight).sum() for weight in engine.weights], torch.device("cpu"))
    return found


@pytest.mark.mpi
def test_replicas_may_take_different_branches(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        # 2 micro-batches x 4 x 4 x 4 elements, x 1 on the first replica and 2 on the second
        assert found["branches"] == {zero: [128.0, 256.0, 128.0, 256.0] for zero in ("1", "2", "3")}


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


def layers(mpi: MPIContext, zero: int, recomputed: Sequence[int] = ()) -> tuple[Stage, Sharded]:
    """Four units of one matrix product each."""
    stage, weights = undivided(recomputed)
    return stage, sharded(mpi, stage, weights, zero)


def undivided(recomputed: Sequence[int] = ()) -> tuple[Stage, list[Weight]]:
    own = [Layer(seed) for seed in range(4)]
    parts = [Part(layer, (f"x{place}",), (f"x{place + 1}",)) for place, layer in enumerate(own)]
    stage = Stage(0, 1, Chain(parts, input_names=("x0",), output_names=("x4",)), (), (0,), ("x4",), (), ())
    weights = [Weight(str(place), it.weight, Placement.full((16, 16)), True) for place, it in enumerate(own)]
    recompute(stage.chain, "whole", recomputed)
    return stage, weights


def order(mpi: MPIContext) -> dict[str, str]:
    """Of two micro-batches: forward, backward, forward, backward."""
    found = {}
    for zero in (1, 2, 3):
        stage, engine = layers(mpi, zero)
        engine.begin(2)
        with Order() as mode:
            for _ in range(2):
                (y,) = stage.chain(torch.ones(2, 16))
                mode.seen += " "
                y.sum().backward()
                mode.seen += " "
        found[str(zero)] = mode.seen.strip()
    return found


def halves(mpi: MPIContext) -> dict[str, list[Any]]:
    """Gradients of each stage of ZeRO in bf16; copies of weights after the forward pass, and at most."""
    found = {}
    for name, zero, recomputed in (("2", 2, ()), ("3", 3, ()), ("3 recomputed", 3, (1, 2))):
        stage, engine = layers(mpi, zero, recomputed)
        engine.begin(1)
        with Casts(256) as casts:
            with torch.autocast("cpu", torch.bfloat16):
                (y,) = stage.chain(torch.ones(2, 16) / (1 + mpi.rank))
            alive = casts.alive
            y.float().sum().backward()
        engine.reduce()
        gradients = [gradient(weight).tolist() for weight in engine.weights]
        found[name] = [gradients, alive, casts.most]
    return found


class PlainTensors(MemoryCounter):
    """Counts no DTensors, whose content is another tensor."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        with contextlib.suppress(RuntimeError):  # a DTensor's own storage has no address
            storage.data_ptr()
            super()._add(storage)


def loading(mpi: MPIContext) -> list[int]:
    """Bytes on the device while four units of 1024 bytes are sharded: at most, and in the end. A copy stands for what
    is moved from the host; the weights themselves, for what the host has."""
    stage, weights = undivided()
    patched = pytest.MonkeyPatch()
    patched.setattr(fsdp_groups, "_moved", lambda data, device: data.clone())
    with PlainTensors() as counter:
        engine = sharded(mpi, stage, weights, 3)
    patched.undo()
    assert all(weight.tensor.numel() == 128 for weight in engine.weights)
    return [counter.peak_bytes, counter.current_bytes]


@pytest.mark.mpi
def test_while_it_is_loaded_the_device_holds_the_shards_and_one_unit(ranks: list[dict[str, Any]]) -> None:
    shards, unit = 4 * 512, 1024
    for rank in ranks:
        peak, end = rank["loading"]
        assert end == pytest.approx(shards, abs=256), "and a few numbers"
        assert peak <= shards + 1.5 * unit + 256, "FSDP copies the shard of a unit once; all units are 4096 bytes"


@pytest.mark.mpi
def test_zero_3_keeps_no_copies_of_weights_in_half_precision(ranks: list[dict[str, Any]]) -> None:
    for rank in (found["halves"] for found in ranks):
        assert rank["2"][0] == rank["3"][0] == rank["3 recomputed"][0], "the same bits"
        assert rank["2"][1:] == [3, 3], "autograd keeps all but the first, whose input needs no gradient"
        assert rank["3"][1:] == rank["3 recomputed"][1:] == [0, 1]


@pytest.mark.mpi
def test_weights_of_the_next_unit_travel_before_this_one_computes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["order"] == {
            "1": "GGmGmGmm mmmmmmm mmmm mmSmmSmmSmS",
            "2": "GGmGmGmm mmSmmSmmSmS mmmm mmSmmSmmSmS",
            "3": "GGmGmGmm GGmmSGmmSGmmSmS GGmGmGmm GGmmSGmmSGmmSmS",
        }
