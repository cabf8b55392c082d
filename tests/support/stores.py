"""Real MLflow stores for the tests: one SQLite database for a whole session, and servers that can be killed."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from onward.infra.mlflow.mlflow_store import local_store
from onward.infra.mlflow.tracking import Tracker
from tests.support.shared_files import made_once

if TYPE_CHECKING:
    from mlflow import MlflowClient


def points_of(tracker: Tracker) -> list[tuple[str, int]]:
    """Return (metric, step) of every point that is stored for a run; twice what is stored twice."""
    # the run has the newest value of each metric only; the history is one call for each
    runs = client(tracker)
    names = runs.get_run(tracker.run_id).data.metrics
    return [(name, point.step) for name in names for point in runs.get_metric_history(tracker.run_id, name)]


@functools.cache
def tracking_store() -> str:
    """The URI of a SQLite store that all tests of this process share."""
    home = Path(tempfile.mkdtemp(prefix="onward-store-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return new_store(home)


def new_store(home: Path) -> str:
    """Return the URI of a new SQLite store under `home`, a copy of one that MLflow makes in seconds in each session."""

    def write(path: Path) -> None:
        Tracker(f"sqlite:///{path}")._client.search_experiments(max_results=1)

    uri = local_store(home)
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made_once("mlflow.db", write), database)
    return uri


def new_run(uri: str = "", key: str = "") -> Tracker:
    """A Tracker of a run that was just started, in a store (the shared one)."""
    tracker = Tracker(uri or tracking_store())
    tracker.start_run("tests/all", key=key or uuid.uuid4().hex, name="a-run", tags={}, params={})
    return tracker


def client(tracker: Tracker) -> MlflowClient:
    """MLflow's own client of a tracker's store: what the tests ask."""
    from mlflow import MlflowClient

    return MlflowClient(tracker.tracking_uri, tracker.tracking_uri)


def points(tracker: Tracker, key: str) -> list[tuple[int, float]]:
    """(step, value) of every point of a metric that the store has, in the order of steps."""
    return sorted((point.step, point.value) for point in client(tracker).get_metric_history(tracker.run_id, key))


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real `mlflow server` on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"),
                    *("--artifacts-destination", str(self.folder / "artifacts")),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                start_new_session=True,
            )
        give_up_at = time.monotonic() + 120
        while not self._healthy():
            said = (self.folder / "server.log").read_text()
            assert self._process.poll() is None, f"mlflow server ended: {said}"
            assert time.monotonic() < give_up_at, f"mlflow server does not answer: {said}"
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        if self._process:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None
