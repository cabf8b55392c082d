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

from onward.infra.mlflow.tracking import Tracker, metric_name
from onward.infra.servers import service_state
from onward.trainer.events import Event, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.stores import Server, client, free_port, points
from tests.support.workshop import Workshop, api, finished, ranks_of, reached, until

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
    steps = sorted({e.step for e, _ in read_events(run.events) if "train/loss" in getattr(e, "values", {})})
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


def points_of_the_logs(run: RunDir) -> dict[str, dict[int, tuple[float, int]]]:
    """Metric -> step -> (value, ms since 1970) in the event log and in those of the nodes, under MLflow's names.

    Of a step that was made again after a failure, the first values.
    """
    costs = ("samples_per_s", "tokens_per_s", "step_s", "data_wait", "tflops", "mfu", "memory_bytes")
    groups = dict.fromkeys(costs, "perf")
    found: dict[str, dict[int, tuple[float, int]]] = {}

    def add(name: str, value: object, event: Event) -> None:
        if isinstance(value, int | float):
            found.setdefault(name, {}).setdefault(event.step, (float(value), event.at_ms))

    for path in (run.events, *run.nodes.glob("*.jsonl")):
        for event, _ in read_events(path):
            if event.kind in ("scalars", "evaluation"):
                for key, value in event.values.items():
                    add(
                        f"{groups.get(key.partition('/')[2], key.partition('/')[0])}/{key.partition('/')[2]}",
                        value,
                        event,
                    )
            elif event.kind == "usage":
                for key, value in event.values.items():
                    add(f"system/{event.node}/{key}", value, event)
            elif event.kind == "times" and "checkpoint" in event.seconds:
                add("perf/checkpoint_stall_s", event.seconds["checkpoint"], event)
    return found


@pytest.mark.timeout(3600)
def test_an_mlflow_server_that_is_killed_and_started_again_has_every_point_of_the_event_log_once(
    workshop: Workshop,
) -> None:
    server = Server(workshop.root / "server")
    server.start()
    try:
        given = (f"monitor.tracking_uri='{server.uri}'", "train.num_steps=3000", "checkpoint.period=100")
        process = workshop.start("run", str(workshop.root / "config.toml"), *given)
        run = workshop.new_run(limit_s=600)
        until(lambda: reached(run, 150), limit_s=600)
        server.kill()
        until(lambda: reached(run, 250), limit_s=600)
        ranks_of(run)[1].kill()  # so that steps are made again while the server is away
        until(lambda: reached(run, 400, attempt=2), limit_s=600)
        assert not run.closed.exists(), "the run was to go on with its server"
        server.start()
        facts = finished(process, limit_s=1500)
        assert (facts["state"], facts["attempts"]) == ("exported", 2)

        identity = read_record(run.identity, RunIdentity)
        tracker, logged = Tracker(identity.tracking_uri, identity.mlflow_run_id), points_of_the_logs(run)
        assert tracker.tracking_uri == server.uri
        assert {name.partition("/")[0] for name in logged} == {"train", "evaluation", "perf", "system"}
        steps = sorted(logged["train/loss"])
        assert steps[-1] == 3000
        asked = client(tracker)
        shown = asked.get_run(tracker.run_id)
        assert shown.info.status == "FINISHED"
        for name, points_of_it in logged.items():
            history = asked.get_metric_history(tracker.run_id, metric_name(name))
            found = sorted((each.step, each.value, each.timestamp) for each in history)
            assert found == [(step, *points_of_it[step]) for step in sorted(points_of_it)], name
        others = set(shown.data.metrics) - {metric_name(name) for name in logged}
        assert {name.partition("/")[0] for name in others} <= {"exported"}, others
    finally:
        server.kill()


def test_a_run_whose_own_prefect_server_is_killed_ends_with_its_result_and_one_line_and_is_completed_afterwards(
    workshop: Workshop,
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    run = workshop.new_run()
    until(lambda: reached(run, 50), limit_s=300)
    (server,) = psutil.Process(service_state.read_state(workshop.home, "prefect")["pid"]).children()
    server.kill()
    out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error[-3000:]
    assert json.loads(out)["state"] == "exported"
    assert error.count("its Prefect server does not answer any more") == 1
    assert "Traceback" not in error
    assert len(error.splitlines()) < MOST_LINES
    workshop.onward("run", str(workshop.root / "config.toml"), "train.num_steps=10", "train.evaluation_period=10")
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
