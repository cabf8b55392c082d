"""Runs over several hosts of which one crashes: whole `onward run`s, over ssh, in namespaces with their own network."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.machines import Machines, machines, missing
from tests.support.runs import assert_close, assert_equal_bits, final_tensors, losses
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
SETTINGS = (
    *("launch.rehearsal='off'", "launch.heartbeat_timeout_s=15"),
    *("monitor.report_to=[]", "train.log_period=5", "train.evaluation_period=0"),
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("lost-hosts"))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def cluster(workshop: Workshop) -> Iterator[Machines]:
    with machines(workshop.root / "machines", 3) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> RunDir:
    run = workshop.onward("run", str(workshop.root / "config.toml"), *SETTINGS)
    return RunDir(Path(run["directory"]))


def started(
    workshop: Workshop, cluster: Machines, name: str, *more: str, slots: Sequence[int] = (1, 1)
) -> tuple[subprocess.Popen[bytes], RunDir, Path]:
    """A run on the first hosts, with so many ranks on each, and the log of its command."""
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SETTINGS]
    hostfile = workshop.root / f"{name}.hosts"
    hostfile.write_text("".join(f"h{number} slots={count}\n" for number, count in enumerate(slots)))
    log = workshop.root / f"{name}.log"
    command = cluster.start([*words, f"launch.hostfile='{hostfile}'", *more], workshop.environment, log)
    return command, workshop.new_run(), log


def assert_differs_by_rounding(run: RunDir, undisturbed: RunDir, tolerance: float = 1e-3) -> None:
    """Compare runs of 600 steps in different layouts: their rounding differs, and grows with the steps."""
    found, wanted = losses(run), losses(undisturbed)
    assert found.keys() == wanted.keys()
    for step in range(5, 201, 5):
        assert found[step] == pytest.approx(wanted[step], rel=1e-5)
    assert_close(final_tensors(run), final_tensors(undisturbed), tolerance)


@pytest.mark.parametrize("comes_back", [False, True], ids=["fewer", "wait"])
def test_a_crashed_host_is_named_and_the_run_goes_on_without_it_or_with_it_once_it_is_back(
    workshop: Workshop, cluster: Machines, undisturbed: RunDir, comes_back: bool
) -> None:
    policy = "wait" if comes_back else "fewer"
    command, run, log = started(workshop, cluster, policy, f"launch.on_host_lost='{policy}'")
    until(lambda: reached(run, 120), limit_s=180)
    cluster.crash("h1")
    if comes_back:
        until(lambda: "1 host does not answer: h1" in log.read_text(), limit_s=180)
    if comes_back or command.wait(300) == 0:
        cluster.boot(1)  # also for the next test
    assert command.wait(300) == 0, log.read_text()[-3000:]
    first, *others = endings(run)
    assert (first.kind, [ending.kind for ending in others]) == ("host_lost", ["done"]), log.read_text()[-3000:]
    said = log.read_text()
    assert "1 host does not answer: h1 (ssh: connect to host h1 port 22" in said
    if comes_back:
        assert_equal_bits(final_tensors(run), final_tensors(undisturbed))
    else:
        layout = "1 of 2 replicas, each with 2 micro-batches of 4 samples in a step on h0 (launch.on_host_lost)"
        assert f"going on with {layout}" in said
        assert others[0].began_ms - first.ended_ms < 15_000, "nothing is waited for"
        assert_close(final_tensors(run), final_tensors(undisturbed), 1e-4)


def test_a_pipeline_that_lost_a_host_goes_on_in_the_layout_that_fits(
    workshop: Workshop, cluster: Machines, undisturbed: RunDir
) -> None:
    layout = ("parallel.data=1", "parallel.pipeline=2", "train.gradient_accumulation_steps=2")
    command, run, log = started(workshop, cluster, "pipeline", *layout, "launch.on_host_lost='fewer'")
    until(lambda: reached(run, 120), limit_s=180)
    cluster.crash("h1")
    assert command.wait(400) == 0, log.read_text()[-3000:]
    cluster.boot(1)
    assert [ending.kind for ending in endings(run)] == ["host_lost", "done"]
    assert "going on with data 1 x tensor 1 x pipeline 1, each with " in log.read_text()
    assert_differs_by_rounding(run, undisturbed, 1e-4)


@pytest.mark.parametrize(
    ("axis", "slots", "layout"),
    [
        ("tensor", (2, 2), "1 of 2 replicas, each with 2 micro-batches of 4 samples in a step on h0"),
        ("pipeline", (2, 2), "1 of 2 replicas, each with 4 micro-batches of 2 samples in a step on h0"),
        ("tensor", (1, 3), "data 1 x tensor 1 x pipeline 1, each with "),
    ],
    ids=["tensor", "pipeline", "no replica fits"],
)
def test_two_replicas_of_two_ranks_that_lost_a_host_go_on_in_the_layout_that_fits(
    workshop: Workshop, cluster: Machines, undisturbed: RunDir, axis: str, slots: tuple[int, int], layout: str
) -> None:
    axes = {"tensor": "parallel.convolutions='always'", "pipeline": "train.gradient_accumulation_steps=2"}
    more = (f"parallel.{axis}=2", axes[axis], "launch.on_host_lost='fewer'")
    command, run, log = started(workshop, cluster, f"{axis}-{slots[0]}", *more, slots=slots)
    until(lambda: reached(run, 120) or command.poll() is not None, limit_s=180)
    assert command.poll() is None, log.read_text()[-3000:]
    cluster.crash("h1")
    ended = command.wait(400)
    cluster.boot(1)  # also for the next test
    assert ended == 0, log.read_text()[-3000:]
    first, second = endings(run)
    assert (first.kind, second.kind) == ("host_lost", "done")
    assert f"going on with {layout}" in log.read_text()
    assert_differs_by_rounding(run, undisturbed)


def test_all_hosts_that_are_left_compute_and_one_that_is_back_is_used_after_the_next_checkpoint(
    workshop: Workshop, cluster: Machines
) -> None:
    more = ("parallel.data=3", "train.global_batch_size=24", "train.num_steps=3000")
    command, run, log = started(workshop, cluster, "back", *more, "launch.on_host_lost='fewer'", slots=(1, 1, 1))
    until(lambda: reached(run, 120), limit_s=180)
    cluster.crash("h2")
    until(lambda: reached(run, 0, attempt=2), limit_s=180)
    layout = "2 of 3 replicas, each with 2 micro-batches of 6 samples in a step on h0, h1 (launch.on_host_lost)"
    assert f"going on with {layout}" in log.read_text()
    cluster.boot(2)
    assert command.wait(500) == 0, log.read_text()[-3000:]
    first, second, third = endings(run)
    assert [each.kind for each in (first, second, third)] == ["host_lost", "preempted", "done"]
    assert "h2 can be used, and the ranks saved first" in second.sentence
    assert (second.step, second.retry) == (second.checkpoint, 1), "no step is made again"
    assert "all 3 hosts answer again: the layout is the configured one" in log.read_text()
    # of the same samples in the same order the losses differ by rounding, which grows with the steps
    found = losses(run)
    # an attempt that saves and ends early shows its last step, too
    assert sorted(found) == sorted({*range(5, 3001, 5), second.step})
    same = workshop.onward("run", str(workshop.root / "config.toml"), *SETTINGS, *more)
    wanted = losses(RunDir(Path(same["directory"])))
    for step in range(5, second.step, 5):
        assert found[step] == pytest.approx(wanted[step], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_host_that_is_cut_off_or_frozen_is_noticed_in_15_seconds_by_default(
    workshop: Workshop, cluster: Machines, fault: str
) -> None:
    """With the settings as they are: 120 s without a heartbeat, 100 s in a collective."""
    more = ("launch.heartbeat_timeout_s=120", "train.num_steps=1500")
    command, run, log = started(workshop, cluster, fault, *more)
    until(lambda: reached(run, 120), limit_s=180)
    began_at = time.time()
    (cluster.cut if fault == "cut" else cluster.freeze)("h1")
    until(lambda: run.ending(1).exists(), limit_s=120)
    (first,) = endings(run)
    noticed_s = first.detected_ms / 1000 - began_at
    assert (first.kind, list(first.silent_hosts)) == ("host_lost", ["h1"])
    assert 5 < noticed_s < 15
    until(lambda: "waiting up to 600 s" in log.read_text(), limit_s=60)
    (cluster.heal if fault == "cut" else cluster.thaw)("h1")
    assert command.wait(400) == 0, log.read_text()[-3000:]
    assert [each.kind for each in endings(run)] == ["host_lost", "done"]
    until(lambda: not [each for each in cluster.processes("h1") if "onward" in " ".join(each.cmdline())], limit_s=60)


def test_a_lost_head_is_taken_over_by_another_host_and_ends_when_it_comes_back(
    workshop: Workshop, cluster: Machines
) -> None:
    """A frozen host keeps its locks, as one that died keeps them on a network file system."""
    settings = (*SETTINGS, "train.num_steps=3000")
    undisturbed = RunDir(Path(workshop.onward("run", str(workshop.root / "config.toml"), *settings)["directory"]))
    hostfile = workshop.root / "head.hosts"
    hostfile.write_text("h1\nh2\n")
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *settings]
    words += [f"launch.hostfile='{hostfile}'", "--name", "night", "--continue"]
    first = cluster.start(words, workshop.environment, workshop.root / "head-0.log")
    run = workshop.new_run()
    until(lambda: reached(run, 120), limit_s=180)
    # the ranks of the other hosts train on for the minute after which the lease is over: not to the last step
    with cluster.slow_link("h2", megabits_per_s=100, delay_s=0.02):
        cluster.freeze("h0")
        second = cluster.start(words, workshop.environment, workshop.root / "head-1.log", host="h1")
        said = (workshop.root / "head-1.log").read_text
        until(lambda: reached(run, 0, attempt=2), limit_s=300)
    cluster.thaw("h0")
    assert first.wait(60) == 72
    assert "another host has taken" in (workshop.root / "head-0.log").read_text()
    assert second.wait(300) == 0, said()[-3000:]
    assert said().count("was not renewed for 60 s: its host is taken for lost") == 2
    assert endings(run)[-1].kind == "done"
    assert run.current_attempt == 2
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))
