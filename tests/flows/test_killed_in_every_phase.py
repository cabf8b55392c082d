"""The flow is killed in each of twelve phases: nothing is left running, and the next command gives the same file."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.run.directory import RunDir
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1800),
]
SETTINGS = ("train.num_steps=200", "launch.rehearsal='off'")

PHASES: dict[str, Callable[[RunDir], object]] = {
    "the run directory is made": lambda run: run.lock.exists(),
    "the configuration is written": lambda run: run.config.exists(),
    "the run is announced in MLflow": lambda run: run.identity.exists(),
    "the preflight begins": lambda run: (run.root / "preflight").exists(),
    "the preflight has ended": lambda run: run.runtime.exists(),
    "data is sharded": lambda run: any((run.root.parents[1] / "shards").glob("*")),
    "ranks are started": lambda run: run.fence.exists(),
    "a step is made": lambda run: reached(run, 1),
    "a checkpoint is written": lambda run: any(run.checkpoints.glob("step-*")),
    "training has ended": lambda run: run.train.exists() or run.result(1).exists(),
    "the file is verified": lambda run: any(run.export.glob(".verifying-*")),
    "the file is registered": lambda run: run.exported.exists(),
}
"""Phase -> whether a run has come to it."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    with workshop.server():  # its own life is in tests/infra; here it would take half of the time
        yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> dict[str, Any]:
    return workshop.onward("run", str(workshop.root / "config.toml"), *SETTINGS)


def new_directory(workshop: Workshop, known: set[Path]) -> RunDir | None:
    folder = workshop.home / "runs"
    found = set(folder.iterdir()) - known if folder.exists() else set()
    return RunDir(found.pop()) if found else None


@pytest.mark.parametrize("phase", list(PHASES))
def test_a_flow_that_is_killed_leaves_no_process_and_the_next_command_gives_the_same_file(
    phase: str, workshop: Workshop, undisturbed: dict[str, Any]
) -> None:
    shutil.rmtree(workshop.home / "shards")
    known = set((workshop.home / "runs").iterdir())
    process = workshop.start("run", str(workshop.root / "config.toml"), *SETTINGS)
    deadline = time.monotonic() + 600
    while (run := new_directory(workshop, known)) is None or not PHASES[phase](run):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    until(lambda: not workshop.processes(), limit_s=15)
    announced = run.identity.exists()
    words = ("resume", run.root.name) if announced else ("run", str(workshop.root / "config.toml"), *SETTINGS)
    facts = workshop.onward(*words)
    assert facts["sha256"] == undisturbed["sha256"]
    assert facts["state"] == "exported"
    if announced:
        (mlflow_run,) = workshop.mlflow_runs(run)
        assert mlflow_run.info.status == "FINISHED"
    until(lambda: not workshop.processes(), limit_s=15)
    with contextlib.closing(sqlite3.connect(workshop.home / "prefect" / "prefect.db")) as shown:
        (state,) = shown.execute("select state_type from flow_run where id = ?", [run.root.name]).fetchone()
    assert state == "CRASHED"
