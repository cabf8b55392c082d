"""Hosts that are there and do badly: behind a slow, long link, or with a full disk. Whole runs over ssh."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.checkpoint.verification import verify
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.full_disk import fill
from tests.support.machines import Machines, machines, missing
from tests.support.runs import assert_equal_bits, events, final_tensors
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
SETTINGS = ("launch.rehearsal='off'", "train.log_period=1", "train.evaluation_period=0", "monitor.report_to=[]")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A workshop whose home is a small disk of its own, which all hosts share."""
    workshop = Workshop.made(tmp_path_factory.mktemp("in-trouble"))
    workshop.home.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(workshop.home)], check=True)
    yield workshop
    workshop.close()
    subprocess.run(["umount", "--lazy", str(workshop.home)], check=True)


@pytest.fixture(scope="module")
def cluster(workshop: Workshop) -> Iterator[Machines]:
    with machines(workshop.root / "machines", 2) as found:
        yield found


def started(
    workshop: Workshop, cluster: Machines, name: str, *more: str
) -> tuple[subprocess.Popen[bytes], RunDir, Path]:
    """A run with a rank on each host, and the log of its command."""
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SETTINGS]
    log = workshop.root / f"{name}.log"
    hostfile = cluster.hostfile(1)
    command = cluster.start([*words, f"launch.hostfile='{hostfile}'", *more], workshop.environment, log)
    return command, workshop.new_run(), log


def step_s(run: RunDir) -> float:
    """Return the median time of a step, of those behind the first ones."""
    found = [float(e.values["train/step_s"]) for e in events(run, "scalars") if "train/step_s" in e.values]
    return statistics.median(found[3:])


def test_a_host_behind_a_slow_and_long_link_trains_the_same_bits_and_is_not_taken_for_lost(
    workshop: Workshop, cluster: Machines
) -> None:
    """2 Mbit/s and 200 ms each way: a login of ssh takes 5 s, longer than the usual limit for a lost host."""
    more = ("train.num_steps=40", "checkpoint.period=20", "launch.on_host_lost='fewer'")
    command, quick, log = started(workshop, cluster, "quick", *more)
    assert command.wait(300) == 0, log.read_text()[-3000:]
    with cluster.slow_link("h1", megabits_per_s=2, delay_s=0.2):
        command, slow, log = started(workshop, cluster, "slow", *more)
        assert command.wait(600) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert [each.kind for each in endings(slow)] == ["done"], said[-3000:]
    for false in ("does not answer", "lost", "WARNING", "different versions"):
        assert false not in said
    assert_equal_bits(final_tensors(slow), final_tensors(quick))
    print(f"a step: {step_s(quick) * 1e3:.1f} ms, behind the link {step_s(slow) * 1e3:.0f} ms")
    # a step waits for messages in both directions
    assert step_s(slow) > step_s(quick) + 0.2


def test_a_full_home_that_hosts_share_is_named_and_the_last_checkpoint_is_whole(
    workshop: Workshop, cluster: Machines
) -> None:
    more = ("train.num_steps=100000", "launch.retries=0")
    command, run, log = started(workshop, cluster, "full", *more)
    until(lambda: reached(run, 120), limit_s=180)
    ballast = fill(workshop.home)
    try:
        assert command.wait(200) == 3, log.read_text()[-3000:]
    finally:
        ballast.unlink()
    (ending,) = endings(run)
    assert ending.kind == "storage"
    assert "No space left on device: the disk of " in ending.sentence
    assert str(workshop.home) in ending.sentence
    newest = list_checkpoints(run)[-1]
    verify(newest)
    assert ending.checkpoint >= 100


def test_a_full_home_of_one_host_is_named_with_the_host_and_the_last_checkpoint_is_whole(
    workshop: Workshop, cluster: Machines
) -> None:
    """A host with a home of its own writes its part of each checkpoint there first."""
    cluster.do("h1", "mount", "-t", "tmpfs", "-o", "size=16m", "none", str(workshop.home))
    more = (f"checkpoint.store='{workshop.root}/store'", "parallel.zero=1", "optimizer.name='adamw'")
    try:
        command, run, log = started(workshop, cluster, "own", *more, "train.num_steps=100000", "launch.retries=0")
        until(lambda: reached(run, 120) or command.poll() is not None, limit_s=180)
        assert command.poll() is None, log.read_text()[-3000:]
        cluster.do("h1", "bash", "-c", f"cat /dev/zero > {workshop.home}/ballast || true")
        status = command.wait(200)
    finally:
        cluster.do("h1", "umount", "--lazy", str(workshop.home))
    assert status == 3, log.read_text()[-3000:]
    (ending,) = endings(run)
    assert ending.kind == "storage"
    where = f"could not be saved on h1: No space left on device: the disk of {workshop.home}"
    assert where in ending.sentence
    assert where in log.read_text().replace("\n", " ").split("onward run: ")[-1]
    verify(list_checkpoints(run)[-1])


def test_a_full_disk_for_temporary_files_of_one_host_is_named_with_the_host(
    workshop: Workshop, cluster: Machines
) -> None:
    folder = cluster.temporary["h1"][-1]
    cluster.do("h1", "mount", "-t", "tmpfs", "-o", "size=1m", "none", folder)
    cluster.do("h1", "bash", "-c", f"cat /dev/zero > {folder}/ballast || true")
    try:
        words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SETTINGS]
        log = workshop.root / "temporary.log"
        command = cluster.start(
            [*words, f"launch.hostfile='{cluster.hostfile(1)}'", "train.num_steps=50", "launch.retries=0"],
            workshop.environment,
            log,
        )
        status = command.wait(300)
    finally:
        cluster.do("h1", "umount", folder)
    said = " ".join(log.read_text().split())
    assert status == 3, said[-3000:]
    assert f"h1 cannot write temporary files to {folder} (no space left on device); make room there" in said
