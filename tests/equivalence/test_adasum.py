"""Promise 8: Adasum of equal gradients is their mean, of orthogonal ones their sum; on any number of replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.parallel.replicas import reducer as reduce
from onward.trainer.parallel.replicas.reducer import Reducer
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm
from tests.trainer.parallel.replicas.test_reducer import mesh_of

Vectors = np.ndarray[Any, np.dtype[np.float64]]
WIDTH = 6


def in_theory(gradients: list[Vectors]) -> Vectors:
    """The definition, in doubles: those beyond a power of two join the first ones, then neighbours pair up."""
    power = 1 << (len(gradients).bit_length() - 1)
    vectors = [pair(vector, *gradients[power + n : power + n + 1]) for n, vector in enumerate(gradients[:power])]
    while len(vectors) > 1:
        vectors = [pair(*vectors[n : n + 2]) for n in range(0, len(vectors), 2)]
    return vectors[0]


def pair(a: Vectors, b: Vectors | None = None) -> Vectors:
    if b is None:
        return a
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def gradients_of(case: str, num_replicas: int) -> list[Vectors]:
    """Each replica's own mean gradient of one weight of `WIDTH` elements."""
    random = np.random.default_rng(0)
    equal, drawn = random.standard_normal(WIDTH), random.standard_normal((num_replicas, WIDTH))
    return {
        "equal": [equal] * num_replicas,
        "orthogonal": [np.eye(WIDTH)[n] * (n + 1) for n in range(num_replicas)],
        "any": list(drawn),
        "one is zero": [np.zeros(WIDTH), *drawn[1:]],
    }[case]


CASES = ["equal", "orthogonal", "any", "one is zero"]
ROUTES = [("torch", "none"), ("mpi", "none"), ("torch", "fp16"), ("mpi", "bf16")]


def outcomes(mpi: MPIContext, num_parts: int) -> dict[str, Any]:
    """What each case gives on each route, every rank being a host: for two weights, the second one all ones.

    num_parts: ranks that divide the first weight, and hold the second whole.
    """
    mesh = mesh_of(mpi, data=mpi.world_size // num_parts, tensor=num_parts)
    replica, part = divmod(mpi.rank, num_parts)
    num_replicas, found = mpi.world_size // num_parts, {}
    start, stop = WIDTH * part // num_parts, WIDTH * (part + 1) // num_parts
    for transport, compression in ROUTES:
        divided, ones = nn.Parameter(torch.zeros(stop - start)), nn.Parameter(torch.zeros(3, 1))
        place = Placement.full([WIDTH]).narrow(0, start, stop)
        whole = Placement.full([3, 1])
        weights = [Weight("divided", divided, place, True), Weight("ones", ones, whole, True, counted=part == 0)]
        routes = {"transport": transport, "compression": compression}
        config = ParallelConfig(reduction="adasum_all", **routes)  # type: ignore[arg-type]
        reducer = Reducer(weights, mesh=mesh, mpi=mpi, config=config, shared={}, timeout_s=30)
        for case in CASES:
            own = torch.tensor(gradients_of(case, num_replicas)[replica][start:stop], dtype=torch.float32)
            reducer.begin(1)  # a share of the step's targets that is the same on all replicas
            (((divided * own).sum() + ones.sum()) / num_replicas).backward()
            norm = reduced_norm(reducer)
            found[f"{transport} {compression} {case}"] = [divided.grad.tolist(), ones.grad.flatten().tolist(), norm]
        reducer.close()
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_replicas", "num_parts"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        (3, 1),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(5, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_equal_gradients_give_their_mean_and_orthogonal_ones_their_sum(num_replicas: int, num_parts: int) -> None:
    results = run_ranks(num_replicas * num_parts, "tests.equivalence.test_adasum:outcomes", num_parts)
    for transport, compression in ROUTES:
        for case in CASES:
            ranks = [result[f"{transport} {compression} {case}"] for result in results]
            replicas = [ranks[n : n + num_parts] for n in range(0, len(ranks), num_parts)]
            assert all(replica == replicas[0] for replica in replicas), "every replica has the same bits"
            found = np.concatenate([divided for divided, _, _ in replicas[0]])
            given = gradients_of(case, num_replicas)
            tolerance = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[compression]
            assert found == pytest.approx(in_theory(given), rel=tolerance, abs=5 * tolerance)
            if case == "equal":
                assert found == pytest.approx(given[0], rel=tolerance, abs=tolerance)
            if case == "orthogonal":
                assert found == pytest.approx(sum(given), rel=tolerance, abs=tolerance)
            assert all(ones == pytest.approx([1.0] * 3, rel=tolerance) for _, ones, _ in replicas[0])
            assert replicas[0][0][2] == pytest.approx(np.sqrt(found @ found + 3), rel=max(tolerance, 1e-6))


HOSTS = [("torch", "aabbc"), ("mpi", "aabbc"), ("mpi", "aaabb"), ("torch", "aaaaa")]
"""Transport, and the host of each rank."""
INTERLEAVED = [("torch", "abbab"), ("mpi", "abbab")]
"""With `mpirun --map-by node` the ranks of a host do not follow each other."""
TARGETS = [[2, 2, 2, 2, 2], [1, 5, 0, 0, 4]]


def hosts_of_several(mpi: MPIContext, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """5 replicas on several hosts or one; with equal and unequal targets; and with a bucket of one element."""
    reduce.BUCKET_BYTES["gloo"] = (40, 40)  # two buckets
    mesh, found = mesh_of(mpi, data=5), {}
    for transport, hosts in cases:
        names = {"long": 7, "short": 3, "single": 1}
        weights = [
            Weight(name, nn.Parameter(torch.zeros(length)), Placement.full([length]), True)
            for name, length in names.items()
        ]
        here = replace(mpi, host=hosts[mpi.rank])
        config = ParallelConfig(reduction="adasum", transport=transport)  # type: ignore[arg-type]
        reducer = Reducer(weights, mesh=mesh, mpi=here, config=config, shared={}, timeout_s=30)
        for targets in TARGETS:
            reducer.begin(1, targets[mpi.rank])
            for number, weight in enumerate(weights):
                own = torch.tensor(sums_over_targets(number, weight.tensor.numel(), targets)[mpi.rank])
                (weight.tensor * own.float() / sum(targets)).sum().backward()
            reducer.reduce()
            found[f"{transport} {hosts} {targets}"] = [each.tensor.grad.tolist() for each in weights]
        reducer.close()
    return found


def sums_over_targets(number: int, length: int, targets: list[int]) -> list[Vectors]:
    """Each replica's gradient, summed over its targets."""
    random = np.random.default_rng(number)
    return [random.standard_normal((5, length))[:count].sum(0) for count in targets]


def members(hosts: str) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    return [[n for n in range(5) if hosts[n] == name] for name in dict.fromkeys(hosts)]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "cases", [pytest.param(HOSTS, marks=pytest.mark.slow, id="neighbours"), pytest.param(INTERLEAVED, id="interleaved")]
)
def test_replicas_of_a_host_are_one_large_batch_and_hosts_without_targets_change_nothing(
    cases: list[tuple[str, str]],
) -> None:
    results = run_ranks(5, "tests.equivalence.test_adasum:hosts_of_several", cases)
    assert all(result == results[0] for result in results)
    for transport, hosts in cases:
        for targets in TARGETS:
            found = results[0][f"{transport} {hosts} {targets}"]
            for number, (vector, length) in enumerate(zip(found, (7, 3, 1), strict=True)):
                sums = sums_over_targets(number, length, targets)
                means = [sum(sums[n] for n in host) / max(1, sum(targets[n] for n in host)) for host in members(hosts)]
                assert vector == pytest.approx(in_theory(means), rel=1e-5, abs=1e-6)
