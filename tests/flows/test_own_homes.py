"""Hosts of one job with a home of their own each get the run from its store, and train the bits of a shared home."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Networks, RunIdentity, TrainResult, read_record
from tests.support.machines import Machines, machines, missing
from tests.support.runs import assert_equal_bits, final_tensors
from tests.support.workshop import Workshop, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("own-homes"))
    workshop.home.mkdir()
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def cluster(workshop: Workshop) -> Iterator[Machines]:
    with machines(workshop.root / "machines", 2) as found:
        yield found


@pytest.fixture
def apart(workshop: Workshop, cluster: Machines) -> Iterator[None]:
    """h1 has an empty home under the same path, and no model."""
    hidden = workshop.root / "hidden.onnx"
    hidden.write_text("")
    cluster.do("h1", "mount", "-t", "tmpfs", "none", str(workshop.home))
    cluster.do("h1", "mount", "--bind", str(hidden), str(workshop.root / "model.onnx"))
    yield
    cluster.do("h1", "umount", str(workshop.home))
    cluster.do("h1", "umount", str(workshop.root / "model.onnx"))


def start(workshop: Workshop, cluster: Machines, name: str, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = workshop.root / f"{name}-{time.monotonic_ns()}.log"
    settings = ["launch.rehearsal='off'", "train.num_steps=120", "train.evaluation_period=60", "monitor.report_to=[]"]
    settings += [f"launch.hostfile='{cluster.hostfile(1)}'", "checkpoint.period=20", *more]
    command = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *settings]
    return cluster.start([*command, "--name", name, "--continue"], workshop.environment, log), log


def run_named(workshop: Workshop, name: str) -> RunDir:
    records = workshop.home.glob("runs/*/identity.json")
    return next(RunDir(path.parent) for path in records if read_record(path, RunIdentity).name == name)


def on_h1(workshop: Workshop, cluster: Machines, *words: str) -> str:
    return subprocess.run([*cluster.on("h1"), *words], capture_output=True, text=True).stdout


def test_a_host_with_a_home_of_its_own_trains_the_bits_of_a_shared_one_also_killed_and_resumed(
    workshop: Workshop, cluster: Machines, apart: Any
) -> None:
    # with ZeRO each rank writes its part of the state into checkpoints, on its own host
    sharded = ("parallel.zero=1", "optimizer.name='adamw'")
    store = workshop.root / "store"
    job, log = start(workshop, cluster, "apart", f"checkpoint.store='{store}'", *sharded)
    until(lambda: job.poll() is not None or list(workshop.home.glob("runs/*/checkpoints/step-000000040")), limit_s=400)
    assert job.poll() is None, log.read_text()[-4000:]
    subprocess.run([*cluster.on("h1"), "pkill", "-9", "-f", "onward.trainer train"], check=True)
    assert job.wait(400) == 0, log.read_text()[-4000:]
    said = log.read_text()
    assert "h1 at 10.77.31.11, with a home of its own: " in said
    assert " of the run in " in said
    run = run_named(workshop, "apart")
    assert read_record(run.networks, Networks).own_homes == ("h1",)
    assert read_record(run.train, TrainResult).attempts == 2
    assert not run.own_home.exists()
    assert on_h1(workshop, cluster, "ls", str(workshop.home / "runs")) == "", "nothing stays of a run that is over"
    cluster.do("h1", "umount", str(workshop.home))
    cluster.do("h1", "umount", str(workshop.root / "model.onnx"))
    try:
        job, log = start(workshop, cluster, "shared", *sharded)
        assert job.wait(400) == 0, log.read_text()[-4000:]
    finally:
        cluster.do("h1", "mount", "-t", "tmpfs", "none", str(workshop.home))
        cluster.do("h1", "mount", "--bind", str(workshop.root / "hidden.onnx"), str(workshop.root / "model.onnx"))
    assert_equal_bits(final_tensors(run), final_tensors(run_named(workshop, "shared")))


def test_without_a_store_it_is_refused_with_the_choices(workshop: Workshop, cluster: Machines, apart: Any) -> None:
    job, log = start(workshop, cluster, "refused")
    assert job.wait(200) == 3
    said = " ".join(log.read_text().split())
    assert "h1 does not see what the first host has written to" in said
    assert "or set checkpoint.store, from which such a host gets the run" in said
