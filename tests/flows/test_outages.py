"""Servers and databases that fail during a run: what is printed, what the run does, and what is sent afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from onward.infra import service_state
from onward.infra.tracking import Tracker
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.stores import free_port, points
from tests.support.workshop import Workshop, api, reached, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
]

MOST_LINES = 60
"""Lines on stderr of a whole run of which MLflow is away from step 50 on."""


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path)
    yield workshop
    workshop.close()


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        connection.execute("begin exclusive")
        yield
        connection.rollback()


@contextlib.contextmanager
def replaced(database: Path, content: bytes | None) -> Iterator[None]:
    aside = database.with_name("aside.db")
    shutil.copyfile(database, aside)
    for each in database.parent.glob("mlflow.db-*"):
        each.unlink()
    if content is None:
        database.unlink()
    else:
        database.write_bytes(content)
    yield
    aside.replace(database)


OUTAGES: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "locked": locked,
    "removed": lambda database: replaced(database, None),
    "garbage": lambda database: replaced(database, b"no database at all " * 1000),
}


def sent_once(run: RunDir) -> None:
    """Every point of the event log is in MLflow, once."""
    identity = read_record(run.identity, RunIdentity)
    steps = sorted({e.step for e, _ in read_events(run.events) if "train/loss" in e.fields.get("values", {})})
    assert len(steps) > 100
    tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
    assert [step for step, _ in points(tracker, "train/loss")] == steps
    assert tracker._client.get_run(tracker.run_id).info.status == "FINISHED"


@pytest.mark.parametrize("kind", OUTAGES)
def test_a_run_ends_with_its_result_and_few_lines_while_mlflow_is_away_and_a_resume_sends_all(
    kind: str, workshop: Workshop
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    run = workshop.new_run()
    until(lambda: reached(run, 50), limit_s=300)
    with OUTAGES[kind](workshop.home / "mlflow" / "mlflow.db"):
        _, error = process.communicate(timeout=400)
    # the file is there; it is not registered, which is what the exit status says
    assert process.returncode == 3, error[-3000:]
    assert f"verified and complete at {run.export}/model.onnx: `onward resume` registers it" in error
    assert len(error.splitlines()) < MOST_LINES
    assert "Traceback" not in error
    workshop.onward("resume", run.root.name)
    sent_once(run)


def test_a_run_whose_own_prefect_server_is_killed_goes_on_and_is_shown_as_completed(workshop: Workshop) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    run = workshop.new_run()
    until(lambda: reached(run, 50), limit_s=300)
    (server,) = psutil.Process(service_state.read_state(workshop.home, "prefect")["pid"]).children()
    server.kill()
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error[-3000:]
    assert json.loads(out)["state"] == "exported"
    assert "Traceback" not in error
    assert len(error.splitlines()) < MOST_LINES
    database = workshop.home / "prefect" / "prefect.db"
    with contextlib.closing(sqlite3.connect(database)) as shown:
        rows = shown.execute("select state_type from flow_run where id = ?", [run.root.name]).fetchall()
    assert rows == [("COMPLETED",)]


@contextlib.contextmanager
def users_server(home: Path, port: int) -> Iterator[psutil.Popen]:
    """A Prefect server that somebody else has started."""
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    words = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home.parent / "server.log").open("ab") as log:
        server = psutil.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: service_state.responds(f"http://127.0.0.1:{port}/api/health"), limit_s=120)
        yield server
    finally:
        for each in [*server.children(recursive=True), server] if server.is_running() else []:
            each.kill()
        server.wait()


def test_a_run_whose_users_prefect_server_dies_ends_with_its_result_and_one_line_and_is_completed_afterwards(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, home = free_port(), workshop.root / "prefect"
    home.mkdir()
    given = {**workshop.environment, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    monkeypatch.setattr(Workshop, "environment", given)
    with users_server(home, port) as server:
        process = workshop.start("run", str(workshop.root / "config.toml"))
        run = workshop.new_run()
        until(lambda: reached(run, 50), limit_s=300)
        server.kill()
        out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error[-3000:]
    assert json.loads(out)["state"] == "exported"
    assert error.count("its Prefect server does not answer any more") == 1
    assert "Traceback" not in error
    assert len(error.splitlines()) < MOST_LINES
    sent_once(run)  # MLflow did not wait for Prefect
    with users_server(home, port):
        workshop.onward("run", str(workshop.root / "config.toml"), "train.num_steps=10", "train.evaluation_period=10")
        assert api(f"http://127.0.0.1:{port}", f"/flow_runs/{run.root.name}")["state_type"] == "COMPLETED"
