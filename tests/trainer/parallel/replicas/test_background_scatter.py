"""Gradients are reduce-scattered while the CPU computes, with the bits of gloo's reduce-scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.mesh import new_group
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.replicas import zero as zero_module
from onward.trainer.parallel.replicas.background_scatter import BackgroundScatter, ring_order
from tests.support.ranks import run_ranks
from tests.trainer.parallel.replicas.test_zero import Training

LENGTHS = (1, 2, 3, 7, 8, 101, 4097, 65537, 131072, 131073, 300001)
"""Even and odd; the last ones are longer than a segment of gloo's ring."""
SIZES = (2, 3, 4)
STEPS = 3
HERE = "tests.trainer.parallel.replicas.test_background_scatter"


def quick(mpi: MPIContext) -> dict[str, Any]:
    """What is asked of four ranks: starting them takes longer."""
    return {
        "bits": differing_bits(mpi),
        "early": returns_early(mpi),
        "trainings": differing_trainings(mpi, [("uneven", 0, 2), ("tied", 2, 3)]),
    }


def all_trainings(mpi: MPIContext) -> list[str]:
    models = (("tied", 0), ("uneven", 0), ("tied", 2))
    return differing_trainings(mpi, [(*model, zero) for model in models for zero in (1, 2, 3)])


def differing_bits(mpi: MPIContext) -> list[tuple[int, int]]:
    """(Ranks, length) of each reduce-scatter whose result is another one than gloo's."""
    found = []
    for size in SIZES:
        group = new_group(range(size), timeout_s=30)
        for length in LENGTHS if group is not None else ():
            gradients = torch.randn(size * length, generator=torch.Generator().manual_seed(mpi.rank))
            wanted, output = torch.empty(2, length)
            dist.reduce_scatter_tensor(wanted, gradients, group=group)
            scatter = BackgroundScatter()
            scatter(output, gradients, group, dist.ReduceOp.SUM)
            scatter.wait()
            if not torch.equal(output, wanted):
                found.append((size, length))
    return found


def returns_early(mpi: MPIContext) -> list[float]:
    """Of two ranks, the second one begins only when it has a message that the first one sends after it has begun."""
    group = new_group((0, 1), timeout_s=30)
    if group is None:
        return []
    scatter, output, message = BackgroundScatter(), torch.zeros(2), torch.ones(1)
    if mpi.rank == 1:
        dist.recv(message, 0)
    scatter(output, torch.arange(4.0), group, dist.ReduceOp.SUM)
    if mpi.rank == 0:
        dist.send(message, 1)
    scatter.wait()
    return output.tolist()


def differing_trainings(mpi: MPIContext, cases: list[tuple[str, int, int]]) -> list[str]:
    """Trainings of three micro-batches a step that have other bits than with FSDP's own collectives."""
    found = []
    for name, shard, zero in cases:
        config = ParallelConfig(data=mpi.world_size, zero=zero, shard=shard)  # type: ignore[arg-type]
        in_background = Training(mpi, name, config)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(zero_module, "gather_in_background", lambda chain: None)
            patched.setattr(zero_module, "scatter_with", lambda chain, scatter: None)
            waiting = Training(mpi, name, config)
        if any(in_background.step() != waiting.step() for _ in range(STEPS)):
            found.append(f"{name}, ZeRO {zero}, groups of {shard or mpi.world_size}")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(4, f"{HERE}:quick", timeout_s=180)


@pytest.mark.slow
@pytest.mark.mpi
def test_sums_have_the_bits_of_gloos_reduce_scatter(ranks: list[dict[str, Any]]) -> None:
    assert [rank["bits"] for rank in ranks] == [[]] * 4


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_computes_on_before_the_others_have_begun(ranks: list[dict[str, Any]]) -> None:
    assert [rank["early"] for rank in ranks] == [[0.0, 2.0], [4.0, 6.0], [], []]


@pytest.mark.mpi
def test_trainings_have_the_bits_of_those_that_wait(ranks: list[dict[str, Any]]) -> None:
    assert [rank["trainings"] for rank in ranks] == [[]] * 4


@pytest.mark.slow
@pytest.mark.mpi
def test_every_training_has_the_bits_of_one_that_waits() -> None:
    assert run_ranks(4, f"{HERE}:all_trainings", timeout_s=180) == [[]] * 4


def test_a_part_that_no_segment_divides_has_a_border_between_two_orders() -> None:
    assert list(ring_order(8, 4, 1, 3)) == [(0, 8, [0, 2, 1])]
    # chunks of gloo's ring have two segments of 4 elements: rank 1's part begins in the first of them
    assert list(ring_order(7, 4, 1, 3)) == [(0, 1, [2, 1, 0]), (1, 7, [0, 2, 1])]
