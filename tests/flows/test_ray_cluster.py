"""Whole runs on a real Ray cluster of two nodes: the bits of mpirun, also after faults, and nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.runs import assert_equal_bits, events, final_tensors
from tests.support.workshop import Workshop, finished, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]
SETTINGS = ("launch.rehearsal='off'", "monitor.report_to=[]", "train.log_period=5", "train.evaluation_period=0")
ON_RAY = (*SETTINGS, "launch.launcher='ray'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes(2) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("ray"))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> RunDir:
    """The run under mpirun."""
    run = workshop.onward("run", str(workshop.root / "config.toml"), *SETTINGS)
    return RunDir(Path(run["directory"]))


@pytest.fixture
def run(cluster: RayNodes, undisturbed: RunDir, workshop: Workshop) -> Iterator[tuple[RunDir, subprocess.Popen[str]]]:
    """A run on the cluster that has made 100 steps. Afterwards it has left nothing, and has the bits of mpirun."""
    command = workshop.start("run", str(workshop.root / "config.toml"), *ON_RAY)
    run = workshop.new_run()
    until(lambda: command.poll() is not None or reached(run, 100), limit_s=300)
    assert command.poll() is None, command.communicate()[1][-3000:]
    yield run, command
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))
    assert ranks_of(run) == {}
    until(lambda: cluster.status() == (2, 2.0, []), limit_s=60)


def ranks_of(run: RunDir) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, KeyError):
            if process.cmdline()[-3:] == ["onward.trainer", "train", str(run.root)]:
                found[int(process.environ()["RANK"])] = process
    return found


def test_a_killed_rank_and_a_killed_node_are_named_and_the_run_goes_on_with_the_bits_of_mpirun(
    run: tuple[RunDir, subprocess.Popen[str]], cluster: RayNodes
) -> None:
    directory, command = run
    ranks_of(directory)[1].kill()
    until(lambda: reached(directory, 250, attempt=2), limit_s=300)
    cluster.kill_newest()
    cluster.add()
    finished(command)
    first, second, last = endings(directory)
    assert (first.kind, second.kind, last.kind) == ("rank_lost", "host_lost", "done"), (first, second, last)
    assert first.rank == 1
    assert "was ended by SIGKILL" in first.sentence
    assert "ray cannot reach host" in second.sentence
    assert [event.step > 0 for event in events(directory, "start")] == [False, True, True]


def test_a_stopped_run_saves_and_a_resumed_one_has_the_bits_of_mpirun(
    run: tuple[RunDir, subprocess.Popen[str]], workshop: Workshop, cluster: RayNodes
) -> None:
    directory, command = run
    stopped = workshop.onward("stop", directory.root.name)
    command.communicate(timeout=120)
    assert stopped["state"] == "stopped"
    assert events(directory, "checkpoint")[-1].step == stopped["step"] > 100
    assert ranks_of(directory) == {}
    until(lambda: cluster.status() == (2, 2.0, []), limit_s=60)
    workshop.onward("resume", directory.root.name)


def test_after_a_killed_flow_nothing_is_left_on_the_cluster(
    run: tuple[RunDir, subprocess.Popen[str]], workshop: Workshop, cluster: RayNodes
) -> None:
    directory, command = run
    command.kill()
    command.communicate(timeout=60)
    until(lambda: not ranks_of(directory), limit_s=60)
    until(lambda: cluster.status() == (2, 2.0, []), limit_s=60)
    workshop.onward("resume", directory.root.name)


def test_more_ranks_than_the_cluster_takes_are_refused_with_the_numbers_before_anything_is_started(
    workshop: Workshop, cluster: RayNodes
) -> None:
    command = workshop.start("run", str(workshop.root / "config.toml"), *ON_RAY, "parallel.data=4")
    _, error = command.communicate(timeout=300)
    assert command.returncode == 2, error
    assert "the Ray cluster has room for 2 ranks, but the job needs 4, each with 1 CPU" in error
    assert "with 1 CPUs and 0 GPUs" in error
