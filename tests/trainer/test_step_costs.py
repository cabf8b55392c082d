"""A step reads the device once and calls few collectives; an evaluation reads it once, however many batches it has.

The counts before and after are in docs/reference/measurements.md; a change that needs another one should say why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.step_costs import LAYOUTS, measure

STEP: dict[str, dict[str, int]] = {
    "1 rank": {},
    "1 rank, 4 micro-batches": {},
    "1 rank, fp16 with loss scale, 4 micro-batches": {},
    # the number of targets, one bucket of gradients, the totals of the step
    "2 replicas": {"all_reduce": 3},
    "2 replicas, 4 micro-batches": {"all_reduce": 3},
    # and the number of updates of the running statistics, and what they added
    "2 replicas, BatchNorm, 4 micro-batches": {"all_reduce": 5},
    "2 replicas, ZeRO 2": {"all_reduce": 2, "_allgather_base": 1, "alltoall_base": 1},
    # 12 in each micro-batch, of activations and of numbers per label; replicated gradients are made equal
    "2 tensor-parallel ranks": {"all_reduce": 12 + 1, "broadcast": 1},
    "2 tensor-parallel ranks, 4 micro-batches": {"all_reduce": 4 * 12 + 1, "broadcast": 1},
    # an activation and its gradient for each micro-batch; the gradient of the tied embedding
    "2 pipeline stages, 4 micro-batches": {"all_reduce": 1, "send": 4, "recv": 4, "reduce": 1, "broadcast": 1},
}
"""Collectives of a step on rank 0. No layout reads anything from the device but the totals of the step."""
EVALUATION: dict[str, dict[str, int]] = {
    **{name: {"all_reduce": 1} for name in STEP},
    "2 replicas, ZeRO 2": {"all_reduce": 1, "_allgather_base": 1},
    "2 tensor-parallel ranks": {"all_reduce": 12 * 9 + 1},
    "2 tensor-parallel ranks, 4 micro-batches": {"all_reduce": 12 * 9 + 1},
    "2 pipeline stages, 4 micro-batches": {"all_reduce": 1, "send": 12},
}
"""The same of an evaluation of 12 batches in all."""
QUICK = [
    "1 rank, fp16 with loss scale, 4 micro-batches",
    "2 replicas, BatchNorm, 4 micro-batches",
    "2 replicas, ZeRO 2",
    "2 tensor-parallel ranks, 4 micro-batches",
    "2 pipeline stages, 4 micro-batches",
]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="quick"), pytest.param(list(LAYOUTS), id="all", marks=pytest.mark.slow)]
)
def test_a_step_and_an_evaluation_read_the_device_once_and_call_no_collective_more(
    names: list[str], tmp_path: Path
) -> None:
    for name, found in measure(tmp_path, names).items():
        expected = {f"step: {kind}": number for kind, number in STEP[name].items()}
        expected |= {f"evaluation: {kind}": number for kind, number in EVALUATION[name].items()}
        expected["step: read trainer/parallel/replicas/norms.py:sum_over_world"] = 1
        expected["evaluation: read trainer/model/metrics/evaluation_metrics.py:compute"] = 1
        assert found == expected, name
