"""Servers and databases that fail during a run: what is printed, what the run does, and what is sent afterwards."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.infra.tracking import Tracker
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.stores import points
from tests.support.workshop import Workshop, reached, until

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
    Path(f"/tmp/keeper_{kind}.err").write_text(error)
    # the file is there; it is not registered, which is what the exit status says
    assert process.returncode == 3, error[-3000:]
    assert f"verified and complete at {run.export}/model.onnx: `onward resume` registers it" in error
    assert len(error.splitlines()) < MOST_LINES
    assert "Traceback" not in error
    workshop.onward("resume", run.root.name)
    sent_once(run)
