"""The reducer, alone and on real ranks: sums, order, overflow, drift, ragged steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from trainer import reduce
from trainer.distributed import MPIContext
from trainer.errors import TrainingFailed
from trainer.reduce import Reducer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1))


def gradients_over_replicas(mpi: MPIContext, bucket_bytes: int) -> list[list[float]]:
    """Each replica has its own rows; the last one has none. Returns the reduced gradients and the norm."""
    reduce.BUCKET_BYTES = bucket_bytes
    module = network()
    reducer = Reducer(module.parameters(), (), dist.group.WORLD)
    rows = torch.arange(12.0).reshape(4, 3)[mpi.rank * 2 : mpi.rank * 2 + 2]
    for _ in range(2):  # the second step must not see anything of the first
        reducer.clear()
        if mpi.rank < 2:
            module(rows[:1]).sum().backward()
            reducer.arm()
            module(rows[1:]).sum().backward()
        norm = reducer.reduce()
    return [*(parameter.grad.flatten().tolist() for parameter in module.parameters()), [float(norm)]]


@pytest.mark.mpi
@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_gradients_are_summed_over_replicas_even_one_without_samples(bucket_bytes: int) -> None:
    results = run_ranks(3, "tests.trainer.test_reduce:gradients_over_replicas", bucket_bytes)
    module = network()
    module(torch.arange(12.0).reshape(4, 3)).sum().backward()
    expected = [parameter.grad.flatten() for parameter in module.parameters()]
    assert results[0] == results[1] == results[2]
    for found, wanted in zip(results[0], expected, strict=False):
        torch.testing.assert_close(torch.tensor(found), wanted)
    assert results[0][-1][0] == pytest.approx(float(torch.linalg.vector_norm(torch.cat(expected))), rel=1e-6)


def overflow_on_rank_one(mpi: MPIContext) -> list[float]:
    module = network()
    reducer = Reducer(module.parameters(), (), dist.group.WORLD)
    reducer.clear()
    reducer.arm()
    (module(torch.ones(1, 3)).sum() * (float("inf") if mpi.rank == 1 else 1.0)).backward()
    norm = float(reducer.reduce())
    return [norm, *reducer.sum(not math.isfinite(norm), mpi.rank)]


@pytest.mark.mpi
def test_an_overflow_on_one_replica_is_seen_by_all() -> None:
    for norm, overflows, ranks in run_ranks(2, "tests.trainer.test_reduce:overflow_on_rank_one"):
        assert not math.isfinite(norm)
        assert overflows == 2
        assert ranks == 1


def drift(mpi: MPIContext, by: float) -> str:
    module = network()
    reducer = Reducer(module.parameters(), (), dist.group.WORLD)
    with torch.no_grad():
        module[2].weight[0, 0] += by * mpi.rank
    try:
        reducer.check_agreement(dict(module.named_parameters()))
    except TrainingFailed as error:
        return str(error)
    return ""


@pytest.mark.mpi
def test_replicas_that_drift_apart_by_one_bit_are_found_and_named() -> None:
    assert run_ranks(2, "tests.trainer.test_reduce:drift", 0.0) == ["", ""]
    for said in run_ranks(2, "tests.trainer.test_reduce:drift", 1e-7):
        assert "1 of 5 tensors differ between 2 replicas" in said
        assert "2.weight" in said


def averaged_statistics(mpi: MPIContext) -> list[list[float]]:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    reducer = Reducer(norm.parameters(), [norm.running_mean, norm.running_var], dist.group.WORLD)
    reducer.clear()
    norm(torch.randn(8, 3) + mpi.rank)
    mine = norm.running_mean.tolist()
    reducer.reduce()
    average = norm.running_mean.tolist()
    reducer.undo()
    return [mine, average, norm.running_mean.tolist()]


@pytest.mark.mpi
def test_running_statistics_are_averaged_over_replicas_and_can_be_undone() -> None:
    (first, average, undone), (second, other, _) = run_ranks(2, "tests.trainer.test_reduce:averaged_statistics")
    assert average == other == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert first != second
    assert undone == [0.0, 0.0, 0.0], "a skipped update leaves them as they were"


def sent_before_the_end_of_backward(mpi: MPIContext) -> list[int]:
    reduce.BUCKET_BYTES = 1  # every parameter in a bucket of its own
    module = network()
    reducer = Reducer(module.parameters(), (), dist.group.WORLD)
    sent: list[int] = []
    module[0].weight.register_hook(lambda gradient: sent.append(reducer.num_sent))  # the last gradient to be made
    reducer.clear()
    reducer.arm()
    module(torch.ones(1, 3)).sum().backward()
    reducer.reduce()
    return sent


@pytest.mark.mpi
def test_gradients_travel_while_the_backward_pass_still_runs() -> None:
    for sent in run_ranks(2, "tests.trainer.test_reduce:sent_before_the_end_of_backward"):
        assert sent[0] >= 3, (
            "of 5 gradients, those of the later layers are on their way before the first layer's is made"
        )
