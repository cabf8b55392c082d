"""A run over two hosts of which one crashes: whole `onward run`s, over ssh, in namespaces with their own network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.machines import Machines, machines, missing
from tests.support.runs import assert_close, assert_equal_bits, final_tensors
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
    with machines(workshop.root / "machines", 2) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> RunDir:
    run = workshop.onward("run", str(workshop.root / "config.toml"), *SETTINGS)
    return RunDir(Path(run["directory"]))


@pytest.mark.parametrize("comes_back", [False, True], ids=["fewer", "wait"])
def test_a_crashed_host_is_named_and_the_run_goes_on_without_it_or_with_it_once_it_is_back(
    workshop: Workshop, cluster: Machines, undisturbed: RunDir, comes_back: bool
) -> None:
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SETTINGS]
    words += [f"launch.hostfile='{cluster.hostfile(1)}'", f"launch.on_host_lost='{'wait' if comes_back else 'fewer'}'"]
    log = workshop.root / f"{comes_back}.log"
    command = cluster.start(words, workshop.environment, log)
    run = workshop.new_run()
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
        assert "going on with 1 of 2 replicas on h0 (launch.on_host_lost)" in said
        assert_close(final_tensors(run), final_tensors(undisturbed), 1e-4)
