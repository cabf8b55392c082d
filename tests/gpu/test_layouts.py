"""Ranks on the device: a world of one over NCCL under mpirun, and layouts of several ranks that share the device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.infra.job.launcher import LaunchError
from onward.infra.job.mpirun import Mpirun
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RankReport, read_record
from tests.equivalence import layouts
from tests.equivalence.layouts import ALONE, LAYOUTS, NUM_STEPS, TOLERANCE, Case
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import graphs, rank_server
from tests.support.ranks import ROOT, SETTINGS
from tests.support.runs import losses, make_run, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
SHARED = {"launch": {"device": DEVICE.type}}
MODELS = ("GPT-2: fused QKV, tied",) if REHEARSAL else ("GPT-2: fused QKV, tied", "conv net: skips, BatchNorm")
CASES = [
    *((layout, 0) for layout in ("dp2", "tp2", "pp2")),
    *(("dp2", zero) for zero in ((3,) if REHEARSAL else (1, 2, 3))),
    *(() if REHEARSAL else (("dp2 x tp2", 0), ("dp2 x pp2", 0), ("tp2 x pp2", 0))),
]
"""(layout, ZeRO), compared with one rank."""


# -- under mpirun


def needs_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("this Python has no package mpi4py")
    try:
        Mpirun().program()
    except LaunchError as error:
        pytest.skip(str(error))


def under_mpirun(command: str, run: RunDir, *, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """`mpirun -n 1 python -m onward.trainer COMMAND RUN_DIR`, as users start it; forked in a rehearsal."""
    python = rank_server.command() if REHEARSAL else (sys.executable,)
    words = ["-n", str(num_ranks), "--bind-to", "none", *python, "-m", "onward.trainer", command, str(run.root)]
    return subprocess.run(
        [str(Mpirun().program()), *words],
        env=os.environ | SETTINGS,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_world_of_one_passes_the_preflight_and_trains_under_mpirun(tmp_path: Path, record_property: Record) -> None:
    needs_mpi()
    sections = SHARED | {"train": {"num_steps": 4, "global_batch_size": 8}}
    run = make_run(tmp_path / "mpirun", graphs.tiny_transformer(), tiny_text(40), **sections)
    ended = under_mpirun("preflight", run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = read_record(run.root / "preflight" / "rank-00000.json", RankReport)
    assert report.device.startswith(DEVICE.type)
    assert report.all_reduce == report.all_reduce_expected == 1.0
    record_property("free_bytes", report.memory_bytes)
    ended = under_mpirun("train", run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    beside = make_run(tmp_path / "beside", graphs.tiny_transformer(), tiny_text(40), **sections)
    ranks.train(beside)  # what all other checks use in place of mpirun
    assert losses(run) == losses(beside)


# -- several ranks on one device


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], RunDir]:
    """case -> its finished run; the cases of one model and world size are trained by one start of the ranks."""
    folder, done, failed = tmp_path_factory.mktemp("layouts"), dict[Case, RunDir](), dict[tuple[str, int], str]()

    def trained(case: Case) -> RunDir:
        key = case.model, case.world_size
        if case not in done and key not in failed:
            together = [case, *(each for each in every_case(case.model) if each.world_size == case.world_size)]
            runs = {each: layouts.make_case(each, folder / each.name) for each in dict.fromkeys(together)}
            done.update(runs)
            try:
                roots = [str(run.root) for run in runs.values()]
                ranks.call(case.world_size, "tests.equivalence.layouts:train_all", roots, folder=folder)
            except AssertionError as error:  # the layouts before the one that failed are there
                failed[key] = str(error)
        assert done[case].checkpoint(NUM_STEPS).exists(), failed.get(key, "no checkpoint")
        return done[case]

    return trained


def every_case(model: str) -> list[Case]:
    return [Case(model, layout, zero, SHARED) for layout, zero in CASES]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.split(":")[0])
@pytest.mark.parametrize(("layout", "zero"), CASES)
def test_ranks_that_share_the_device_train_what_one_rank_trains(
    model: str, layout: str, zero: int, trained: Callable[[Case], RunDir], record_property: Record
) -> None:
    found = layouts.differences(trained(Case(model, layout, zero, SHARED)), trained(Case(model, ALONE, 0, SHARED)))
    for kind, difference in found.items():
        record_property(kind, difference)
    assert max(found.values()) <= TOLERANCE
    assert LAYOUTS[layout]
