"""The reducer on real ranks: sums over replicas and stages, order, the global norm, overflow, ragged steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight, share
from onward.trainer.parallel.replicas import norms
from onward.trainer.parallel.replicas import reducer as reduce
from onward.trainer.parallel.replicas.reducer import Reducer
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1))


def weights_of(module: nn.Module) -> list[Weight]:
    """All that the module stores, as a rank that holds it whole has it."""
    stored = [*module.named_parameters(), *module.named_buffers()]
    return [weight(name, tensor, trained=tensor.requires_grad) for name, tensor in stored]


def weight(name: str, tensor: Tensor, *, trained: bool = True, counted: bool = True, stage: int = 0) -> Weight:
    return Weight(name, tensor, Placement.full(tensor.shape), trained, counted, stage=stage)


def mesh_of(mpi: MPIContext, **sizes: int) -> DeviceMesh:
    return make_mesh(mpi, ParallelDims(**sizes), timeout_s=30)


def reducer_of(mpi: MPIContext, weights: list[Weight], **others: Any) -> Reducer:
    """Over replicas alone, unless `others` say otherwise."""
    settings = {"mesh": mesh_of(mpi, data=mpi.world_size), "shared": {}, "config": ParallelConfig(), "timeout_s": 30}
    return Reducer(weights, mpi=mpi, **settings | others)


# -- one replica


def gradients_of_one_replica(mpi: MPIContext) -> list[list[list[float]]]:
    """The gradients of a, b and c, doubled, of one micro-batch, then of two, then of one again."""
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    unreached = nn.Parameter(torch.ones(3))
    weights = [weight("a", a), weight("b", b), weight("c", unreached)]
    reducer = reducer_of(mpi, weights)
    found = []
    for number in (1, 2, 1):
        reducer.begin(number)
        for _ in range(number):
            # torch hands out two views of one tensor as the gradients of a and b
            ((a.view(4) + b.view(4)) * torch.arange(4.0)).sum().backward()
        reducer.reduce()
        reducer.multiply(2.0)
        found.append([each.tensor.grad.flatten().tolist() for each in weights])
    return found


def test_gradients_that_torch_makes_as_views_of_one_tensor_are_multiplied_and_added_once() -> None:
    (found,) = run_ranks(1, "tests.trainer.parallel.replicas.test_reducer:gradients_of_one_replica")
    once = [0.0, 2.0, 4.0, 6.0]
    twice = [0.0, 4.0, 8.0, 12.0]
    assert found == [[each, each, [0.0] * 3] for each in (once, twice, once)]


# -- buckets


def test_buckets_fit_the_link_and_the_first_one_is_smaller() -> None:
    assert reduce.BUCKET_BYTES == {"gloo": (4 << 20, 4 << 20), "nccl": (1 << 20, 25 << 20)}
    weights = [weight(str(number), torch.zeros(length)) for number, length in enumerate((1, 1, 3, 1, 9, 1))]
    packs = reduce._pack(weights, first=8, most=20)
    assert [[each.name for each in pack] for pack in packs] == [["0", "1"], ["2", "3"], ["4"], ["5"]]


def gradients_in_buckets(mpi: MPIContext) -> dict[str, list[Any]]:
    """The norm and the gradients of a network whose rows are random, for several sizes of buckets."""
    found = {}
    for first, most in ((1, 1), (200, 4000), (1 << 20, 25 << 20)):
        reduce.BUCKET_BYTES["gloo"] = (first, most)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(31, 57), nn.Tanh(), nn.Linear(57, 43), nn.Tanh(), nn.Linear(43, 7))
        reducer = reducer_of(mpi, weights_of(module))
        torch.manual_seed(1 + mpi.rank)
        reducer.begin(1)
        module(torch.randn(16, 31)).square().sum().backward()
        norm = reduced_norm(reducer)
        gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        found[str(most)] = [norm, gradients.tolist()]
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("num_replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_size_of_buckets_changes_no_bit_of_two_replicas_and_only_rounding_of_more(num_replicas: int) -> None:
    """Two numbers have one sum; of more, gloo and NCCL add in an order that depends on the position in the bucket."""
    results = run_ranks(num_replicas, "tests.trainer.parallel.replicas.test_reducer:gradients_in_buckets")
    assert all(result == results[0] for result in results)
    one, *others = results[0].values()
    for other in others:
        if num_replicas == 2:
            assert other == one
        torch.testing.assert_close(torch.tensor(other[1]), torch.tensor(one[1]), rtol=0, atol=1e-6 * max(one[1]))
        assert other[0] == pytest.approx(one[0], rel=1e-6)


# -- replicas


def replicas_with_rows(mpi: MPIContext) -> dict[str, Any]:
    """Each replica has its own two rows, as two micro-batches; the last replica has none."""
    found = {}
    for bucket_bytes in (1, 40, 1 << 20):
        reduce.BUCKET_BYTES["gloo"] = (bucket_bytes, bucket_bytes)
        module = network()
        reducer = reducer_of(mpi, weights_of(module))
        rows = torch.arange(12.0).reshape(4, 3)[mpi.rank * 2 : mpi.rank * 2 + 2]
        for _ in range(2):  # the second step must not see anything of the first
            reducer.begin(2)
            for row in rows:
                module(row).sum().backward()
            norm = reduced_norm(reducer)
        gradients = [parameter.grad.flatten().tolist() for parameter in module.parameters()]
        reducer.multiply(0.5)
        halved = [parameter.grad.flatten().tolist() for parameter in module.parameters()]
        found[str(bucket_bytes)] = [
            gradients,
            halved,
            norm,
            norms.sum_over_world([mpi.rank, torch.tensor(0.5)], mpi.device),
        ]
    return found | {
        "sent": sent_before_the_end_of_backward(mpi),
        "overflow": overflow_on_rank_one(mpi),
        "statistics": joined_statistics(mpi),
    }


def sent_before_the_end_of_backward(mpi: MPIContext) -> list[int]:
    """Buckets sent when the gradient that is made last is made, in each of two backward passes."""
    reduce.BUCKET_BYTES["gloo"] = (1, 1)  # every parameter in a bucket of its own
    module = network()
    reducer = reducer_of(mpi, weights_of(module))
    sent: list[int] = []
    module[0].weight.register_hook(lambda gradient: sent.append(reducer.num_sent))
    reducer.begin(2)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
    reducer.reduce()
    return sent


def overflow_on_rank_one(mpi: MPIContext) -> list[float]:
    module = network()
    reducer = reducer_of(mpi, weights_of(module))
    reducer.begin(1)
    (module(torch.ones(1, 3)).sum() * (float("inf") if mpi.rank == 1 else 1.0)).backward()
    return [reduced_norm(reducer)]


MOVES = (2, 1, 0)
"""Micro-batches of each replica."""


def through_norm(norm: nn.BatchNorm1d, replicas: Iterable[int]) -> None:
    for replica in replicas:
        for number in range(MOVES[replica]):
            norm(torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * replica + number)) + replica)


def joined_statistics(mpi: MPIContext) -> list[list[float]]:
    norm = nn.BatchNorm1d(3, momentum=0.3)
    frozen = nn.Parameter(torch.full((2,), float(mpi.rank)), requires_grad=False)
    moved = [replace(each, retention=0.7) if each.name == "running_mean" else each for each in weights_of(norm)]
    reducer = reducer_of(mpi, [*moved, weight("frozen", frozen, trained=False)])
    for _ in range(2):
        reducer.begin(1, 1.0, MOVES[mpi.rank])
        through_norm(norm, [mpi.rank])
        reducer.reduce()
    joined, unknown = norm.running_mean.tolist(), norm.running_var.tolist()
    reducer.begin(1, 1.0, MOVES[mpi.rank])
    through_norm(norm, [mpi.rank])
    reducer.reduce()
    reducer.undo()
    return [joined, norm.running_mean.tolist(), unknown, frozen.tolist()]


@pytest.mark.mpi
def test_gradients_are_summed_and_statistics_joined_over_replicas_even_one_without_samples() -> None:
    results = run_ranks(3, "tests.trainer.parallel.replicas.test_reducer:replicas_with_rows")
    module = network()
    module(torch.arange(12.0).reshape(4, 3)).sum().backward()
    expected = [parameter.grad.flatten() for parameter in module.parameters()]
    for bucket_bytes in ("1", "40", str(1 << 20)):
        assert results[0][bucket_bytes] == results[1][bucket_bytes] == results[2][bucket_bytes]
        gradients, halved, norm, sums = results[0][bucket_bytes]
        for found, half, wanted in zip(gradients, halved, expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), wanted)
            torch.testing.assert_close(torch.tensor(half), wanted / 2)
        assert norm == pytest.approx(float(torch.linalg.vector_norm(torch.cat(expected))), rel=1e-6)
        assert sums == [3, 1.5]
    for result in results:
        first, last = result["sent"]
        assert first == 0, "gradients are not complete before the last micro-batch"
        assert last >= 3, "of 5, those of the later layers are on their way before the first layer's is made"
        assert not math.isfinite(result["overflow"][0]), "an overflow on one replica is seen by all"
    alone, last = nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3, momentum=0.3)
    for _ in range(2):
        through_norm(alone, range(3))
        through_norm(last, [1])
    for rank, (joined, undone, unknown, frozen) in enumerate(result["statistics"] for result in results):
        assert joined == results[0]["statistics"][0] == pytest.approx(alone.running_mean.tolist(), rel=1e-6)
        assert undone == joined, "a skipped update leaves them as they were"
        assert unknown == pytest.approx(last.running_var.tolist(), rel=1e-6), "the last replica's that has samples"
        assert frozen == [rank, rank], "frozen weights are not touched"


# -- stages and divided weights


def layouts(mpi: MPIContext) -> dict[str, Any]:
    return {"stages": stages_that_share(mpi), "divided": divided_weights(mpi), "adasum": tied_under_adasum(mpi)}


def stages_that_share(mpi: MPIContext) -> dict[str, Any]:
    """2 replicas x 3 stages. `head` is held by stages 0 and 2, twice on stage 2; stage 1 has nothing at all."""
    mesh = mesh_of(mpi, data=2, pipeline=3)
    stage, replica = divmod(mpi.rank, 2)
    copies = range((1, 0, 2)[stage])
    head = [weight("head", nn.Parameter(torch.zeros(5)), counted=stage == 0, stage=copy) for copy in copies]
    own = [] if stage == 1 else [weight(f"own{stage}", nn.Parameter(torch.zeros(3)))]
    copies = range(2 if stage == 0 else 0)
    twin = [weight("twin", nn.Parameter(torch.zeros(2)), counted=copy == 0, stage=copy) for copy in copies]
    reducer = reducer_of(mpi, [*own, *head, *twin], mesh=mesh, shared={"head": [0, 2], "twin": [0]})
    results: dict[str, Any] = {}
    for poison in (None, "head", "own2", "not counted"):
        reducer.begin(2)
        for _ in range(2):
            for number, each in enumerate(reducer.weights, start=1):
                (each.tensor.sum() * number * 10.0**stage * (1 + replica)).backward()
        if (poison == "head" and mpi.rank == 5) or (poison == "own2" and mpi.rank == 4):
            next(each for each in reducer.weights if each.name == poison).tensor.grad[0] = math.nan
        if poison == "not counted" and mpi.rank == 4:
            reducer.weights[-1].tensor.grad[0] = math.inf
        norm = reduced_norm(reducer)
        results[str(poison)] = [norm, [(each.name, each.tensor.grad.tolist()) for each in reducer.weights]]
    return results


def divided_weights(mpi: MPIContext) -> dict[str, Any]:
    """3 replicas x 2 tensor-parallel ranks: seven rows, 3 on one rank and 4 on the other, and a vector on both."""
    reduce.BUCKET_BYTES["gloo"] = (1 << 20, 1 << 20)
    mesh = mesh_of(mpi, data=3, tensor=2)
    replica, tensor = divmod(mpi.rank, 2)
    start, stop = share(7, tensor, 2)
    part, whole = nn.Parameter(torch.zeros(stop - start, 5)), nn.Parameter(torch.zeros(1001))
    place = Placement.full([7, 5]).narrow(0, start, stop)
    statistic = weight("statistic", torch.zeros(2), trained=False)
    weights = [Weight("part", part, place, True), weight("whole", whole, counted=tensor == 0), statistic]
    reducer = reducer_of(mpi, weights, mesh=mesh)
    reducer.begin(1)
    (part.sum() * (1 + tensor) + (whole * drawn(replica)).sum()).backward()
    whole.grad[0] += tensor * 1e-3  # as an atomic addition on a GPU might
    statistic.tensor[0] = 3.0 * replica + tensor * 1e-3
    norm = reduced_norm(reducer)
    return {"norm": norm, "whole": whole.grad.tolist(), "statistic": statistic.tensor.tolist()}


def drawn(replica: int) -> Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(replica))


def tied_under_adasum(mpi: MPIContext) -> list[float]:
    """3 replicas x 2 stages that share a weight, every replica on a host of its own: stage s of replica r gives
    (s + 1) in element r."""
    mesh = mesh_of(mpi, data=3, pipeline=2)
    stage, replica = divmod(mpi.rank, 3)
    head = weight("head", nn.Parameter(torch.zeros(3)), counted=stage == 0)
    config = ParallelConfig(reduction="adasum_all")
    reducer = reducer_of(mpi, [head], mesh=mesh, shared={"head": [0, 1]}, config=config)
    reducer.begin(1)
    (head.tensor[replica] * (stage + 1) / 3).backward()
    norm = reduced_norm(reducer)
    reducer.close()
    return [*head.tensor.grad.tolist(), norm]


@pytest.mark.mpi
def test_what_several_ranks_hold_has_one_gradient_and_counts_once_in_the_norm() -> None:
    results = run_ranks(6, "tests.trainer.parallel.replicas.test_reducer:layouts")
    # per replica: own0 1, head 2, twin 3 + 4; own2 100, head 200 + 300; times 2 passes, times 1 + 2 for the replicas
    sums = {"own0": 6.0, "head": 6.0 * 502, "twin": 6.0 * 7, "own2": 600.0}
    sizes = {"own0": 3, "head": 5, "twin": 2, "own2": 3}
    norm = math.sqrt(sum(sizes[name] * sums[name] ** 2 for name in sums))
    for rank, result in enumerate(results):
        found, gradients = result["stages"]["None"]
        assert found == pytest.approx(norm, rel=1e-6)
        held = [["own0", "head", "twin", "twin"], [], ["own2", "head", "head"]]
        assert [name for name, _ in gradients] == held[rank // 2]
        assert all(gradient == [sums[name]] * sizes[name] for name, gradient in gradients)
        assert not any(math.isfinite(result["stages"][poison][0]) for poison in ("head", "own2", "not counted"))

    whole = sum(drawn(replica) for replica in range(3))
    norm = math.sqrt(15 * 3.0**2 + 20 * 6.0**2 + float(whole.double().square().sum()))
    for result in (each["divided"] for each in results):
        assert result == results[0]["divided"], "the same bits, though neighbours' buckets differ"
        assert result["norm"] == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(torch.tensor(result["whole"]), whole)
        assert result["statistic"] == [6.0, 0.0], "the last replica's, on both ranks"

    for result in results:
        assert result["adasum"] == pytest.approx([3, 3, 3, math.sqrt(27)], rel=1e-6), "first the stages, then the hosts"


def test_the_norm_of_sixteen_million_elements_is_right_to_six_digits() -> None:
    values = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().square().sum())
    assert square(values) == pytest.approx(exact, rel=1e-6)
    assert square(values[:5].half()) == pytest.approx(float(values[:5].half().double().square().sum()))


def test_the_norm_adds_tensors_of_any_size_and_type_and_a_square_beyond_fp32() -> None:
    tensors = [torch.full(shape, 2.0) for shape in ((), (3,), (0,), (5000,))]
    tensors += [torch.full((8000,), 2.0, dtype=torch.bfloat16), torch.full((2,), 1e30)]
    assert square(*tensors) == pytest.approx(4.0 * (1 + 3 + 5000 + 8000) + 2e60)
    assert square() == 0.0
    # of a tensor that another rank counts only whether it is finite matters
    assert square(torch.ones(4), uncounted=torch.full((9,), 7.0)) == 4.0
    assert math.isnan(square(torch.ones(2), uncounted=torch.tensor([math.inf])))


def square(*tensors: Tensor, uncounted: Tensor | None = None) -> float:
    """The squared norm of gradients that this rank counts, beside one that it does not."""
    held = [(tensor, True) for tensor in tensors] + ([] if uncounted is None else [(uncounted, False)])
    weights = [weight("w", torch.zeros_like(tensor), counted=counted) for tensor, counted in held]
    for each, (tensor, _) in zip(weights, held, strict=True):
        each.tensor.grad = tensor
    return float(norms.local_squares(weights, torch.device("cpu")))
