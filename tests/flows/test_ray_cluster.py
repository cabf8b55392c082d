"""Runs on a real Ray cluster of two nodes: the bits of mpirun, also after faults, and nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.records import AttemptResult, read_record
from tests.support import graphs
from tests.support.ranks import ROOT
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.runs import assert_equal_bits, events, final_tensors, make_run, tiny_images, train_run
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]
SETTINGS = {
    "train": {"global_batch_size": 8, "num_steps": 200, "log_period": 2},
    "checkpoint": {"period": 20},
    "parallel": {"data": 2},
}
ATTEMPTS = """
import sys
from pathlib import Path
from onward.tasks.train import train
from onward.trainer.errors import TrainingFailed
from onward.trainer.run.directory import RunDir
while True:
    try:
        train.fn(RunDir(Path(sys.argv[1])))
        break
    except TrainingFailed as failed:
        if not failed.again:
            raise
"""
"""The task `train` and its retries, without a flow."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes(2) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run under mpirun."""
    run = make_run(tmp_path_factory.mktemp("mpirun"), graphs.tiny_conv_net(), tiny_images(80), **SETTINGS)
    train_run(run, timeout_s=400)
    return run


@pytest.fixture
def run(cluster: RayNodes, undisturbed: RunDir, tmp_path: Path) -> Iterator[RunDir]:
    """A run on the cluster. After the test it has the bits of mpirun, and has left nothing."""
    launch = {"launcher": "ray", "start_timeout_s": 300, "stop_grace_s": 60}
    run = make_run(tmp_path, graphs.tiny_conv_net(), tiny_images(80), **SETTINGS, launch=launch)
    yield run
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))
    assert_nothing_left(run, cluster)


def assert_nothing_left(run: RunDir, cluster: RayNodes) -> None:
    until(lambda: not ranks_of(run), limit_s=60)
    until(lambda: cluster.status() == (2, 2.0, []), limit_s=120)


@contextlib.contextmanager
def trained(run: RunDir, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The attempts of a run, in a process of their own."""
    paths = os.pathsep.join([str(ROOT / ".package"), str(ROOT)])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as output:
        attempts = subprocess.Popen(
            [sys.executable, "-c", ATTEMPTS, str(run.root)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=output,
            stderr=output,
        )
    try:
        yield attempts
    finally:
        attempts.kill()
        attempts.wait(60)


def come_to(run: RunDir, step: int, attempts: subprocess.Popen[bytes], log: Path, *, attempt: int = 1) -> None:
    until(lambda: attempts.poll() is not None or reached(run, step, attempt=attempt), limit_s=400)
    assert attempts.poll() is None, log.read_text()[-3000:]


def ranks_of(run: RunDir) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, KeyError):
            if process.cmdline()[-3:] == ["onward.trainer", "train", str(run.root)]:
                found[int(process.environ()["RANK"])] = process
    return found


def test_a_killed_rank_and_a_killed_node_are_named_and_the_run_goes_on(
    run: RunDir, cluster: RayNodes, tmp_path: Path
) -> None:
    log = tmp_path / "attempts.log"
    with trained(run, log) as attempts:
        come_to(run, 40, attempts, log)
        ranks_of(run)[1].kill()
        come_to(run, 90, attempts, log, attempt=2)
        cluster.kill_newest()
        cluster.add()
        assert attempts.wait(400) == 0, log.read_text()[-3000:]
    first, second, last = endings(run)
    assert (first.kind, second.kind, last.kind) == ("rank_lost", "host_lost", "done"), (first, second, last)
    assert first.rank == 1
    assert "was ended by SIGKILL" in first.sentence
    assert re.search(r"^ray: rank \d lost its node ", run.log(2).read_text(), re.M)
    assert [event.step > 0 for event in events(run, "start")] == [False, True, True]


def test_a_stopped_run_saves_and_goes_on_from_there(run: RunDir, cluster: RayNodes, tmp_path: Path) -> None:
    log = tmp_path / "attempts.log"
    with trained(run, log) as attempts:
        come_to(run, 40, attempts, log)
        attempts.send_signal(signal.SIGINT)
        attempts.wait(120)
    saved = events(run, "checkpoint")[-1].step
    assert read_record(run.result(1), AttemptResult).step == saved
    assert endings(run)[-1].kind == "stopped"
    assert_nothing_left(run, cluster)
    with trained(run, log) as attempts:
        assert attempts.wait(400) == 0, log.read_text()[-3000:]
    assert [event.step for event in events(run, "start")] == [0, saved]


def test_what_a_killed_flow_has_started_saves_and_ends(run: RunDir, cluster: RayNodes, tmp_path: Path) -> None:
    log = tmp_path / "attempts.log"
    with trained(run, log) as attempts:
        come_to(run, 40, attempts, log)
        attempts.kill()
    assert_nothing_left(run, cluster)
    with trained(run, log) as attempts:
        assert attempts.wait(400) == 0, log.read_text()[-3000:]


def test_a_killed_launcher_leaves_nothing_and_is_started_again(run: RunDir, cluster: RayNodes, tmp_path: Path) -> None:
    log = tmp_path / "attempts.log"
    with trained(run, log) as attempts:
        come_to(run, 40, attempts, log)
        children = psutil.Process(attempts.pid).children()
        next(child for child in children if "onward.infra.job.ray_ranks" in child.cmdline()).kill()
        assert attempts.wait(400) == 0, log.read_text()[-3000:]
    first, last = endings(run)
    assert (first.kind, last.kind) == ("rank_lost", "done")
    assert "ray was ended by SIGKILL" in first.sentence


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("ray"))
    yield workshop
    workshop.close()


def test_a_whole_run_is_exported_and_more_ranks_than_the_cluster_takes_are_refused_before_anything_is_started(
    workshop: Workshop, cluster: RayNodes
) -> None:
    settings = ("launch.rehearsal='off'", "launch.launcher='ray'", "train.num_steps=20")
    words = ("run", str(workshop.root / "config.toml"), *settings)
    command = workshop.start(*words, "parallel.data=4")
    _, error = command.communicate(timeout=300)
    assert command.returncode == 3, error
    assert "the Ray cluster has room for 2 ranks, but the job needs 4, each with 1 CPU" in error
    assert "with 1 CPUs and 0 GPUs" in error
    assert not [*workshop.home.glob("runs/*")]
    assert workshop.onward(*words)["state"] == "exported"
