"""What sends gradients on a GPU: a stream of its own, ranks that share the GPU under mpirun, memory in segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.infra.job.mpirun import environment_of_ranks
from onward.trainer.parallel.replicas.transport import CommunicationStream
from onward.trainer.run.records import RankReport, read_record
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.gpu.test_layouts import needs_mpi, under_mpirun
from tests.support import graphs
from tests.support.runs import losses, make_run, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
NUM_STEPS = 3
SECTIONS: dict[str, Any] = {"train": {"num_steps": NUM_STEPS, "global_batch_size": 8, "evaluation_period": 0}}
SHARED = {"device": DEVICE.type, "ranks_per_gpu": 1 if REHEARSAL else 2}
ROUTES: dict[str, tuple[dict[str, Any], float]] = {
    "sum": ({}, 1e-5),
    "fp16": ({"compression": "fp16"}, 2e-3),
    "bf16": ({"compression": "bf16"}, 2e-2),
    "adasum": ({"reduction": "adasum_all"}, 1e-4),
}
"""Name -> [parallel], and how far losses may be from those of CPU ranks, relative."""


def test_what_is_queued_on_the_stream_of_communication_waits_for_gradients_and_is_waited_for() -> None:
    """Kernels that take long on both streams: a wait that were missing would read what is not there yet."""
    background = CommunicationStream(DEVICE)
    flat = torch.zeros(1 << 20, device=DEVICE)

    def delay() -> None:
        if DEVICE.type == "cuda":
            torch.cuda._sleep(20_000_000)

    def double() -> None:
        delay()
        flat.mul_(2)

    for number in range(1, 6):
        delay()
        flat.fill_(number)
        wait = background.send(double)
        beside = torch.ones(8, device=DEVICE) * 3  # the default stream goes on meanwhile
        wait()
        assert (flat + 1).unique().tolist() == [2 * number + 1]
        assert beside.tolist() == [3.0] * 8
    background.close()


@pytest.mark.parametrize("route", ("fp16", "adasum") if REHEARSAL else ROUTES)
def test_two_replicas_on_the_device_train_as_two_on_the_cpu(
    tmp_path: Path, record_property: Record, route: str
) -> None:
    """On a GPU gradients are compressed and exchanged on a stream, by the thread of the backward pass."""
    parallel, tolerance = ROUTES[route]
    found = {}
    for where, launch in (("device", SHARED), ("cpu", {"device": "cpu"})):
        sections = SECTIONS | {"parallel": {"data": 2, **parallel}, "launch": launch}
        run = make_run(tmp_path / where, graphs.tiny_transformer(), tiny_text(40), **sections)
        ranks.train(run)
        found[where] = losses(run)
    assert found["cpu"].keys() == found["device"].keys()
    difference = max(abs(found["device"][step] / found["cpu"][step] - 1) for step in found["cpu"])
    record_property("relative_difference_of_losses", difference)
    assert difference <= tolerance


def test_two_ranks_share_the_gpu_under_mpirun_over_gloo(tmp_path: Path, record_property: Record) -> None:
    needs_mpi()
    sections = SECTIONS | {"parallel": {"data": 2}, "launch": SHARED}
    run = make_run(tmp_path / "mpirun", graphs.tiny_transformer(), tiny_text(40), **sections)
    ended = under_mpirun("preflight", run, num_ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reports = [read_record(run.root / "preflight" / f"rank-0000{rank}.json", RankReport) for rank in (0, 1)]
    assert {(report.device, report.backend) for report in reports} == {(str(DEVICE), "gloo")}
    record_property("gpu", reports[0].gpu)
    ended = under_mpirun("train", run, num_ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    beside = make_run(tmp_path / "beside", graphs.tiny_transformer(), tiny_text(40), **sections)
    ranks.train(beside)
    assert losses(run) == pytest.approx(losses(beside), rel=1e-6)


def test_memory_is_taken_in_segments_that_grow(record_property: Record) -> None:
    """torch reads the variable that mpirun's environment has; the allocator says whether the driver allows it."""
    program = (
        "import json, torch\n"
        f"tensor = torch.zeros(1 << 20, device={str(DEVICE)!r})\n"
        "found = torch.cuda.memory_snapshot() if tensor.is_cuda else []\n"
        "print(json.dumps([each['is_expandable'] for each in found]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_of_ranks(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    expandable = json.loads(ended.stdout)
    record_property("segments", len(expandable))
    assert all(expandable)
    assert bool(expandable) == (DEVICE.type == "cuda")
