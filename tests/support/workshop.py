"""What the tests of whole runs share: a tiny model with its data, the command line, and a way to watch."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import urlsplit

import numpy as np
import onnx
import psutil

from onward.infra.mlflow.tracking import Tracker
from onward.infra.servers import services
from onward.infra.servers.login import login
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.graphs import tiny_conv_net

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "data.npz"
[train]
global_batch_size = 8
num_steps = 600
evaluation_period = 300
[optimizer]
learning_rate = 1e-3
[parallel]
data = 2
[launch]
device = "cpu"
threads_per_rank = 1
[checkpoint]
period = 50
[monitor]
report = false
"""
"""Without a report, which takes seconds; the tests that read one ask for it."""


def until(claim: Callable[[], Any], *, limit_s: float) -> Any:
    """The claim's first true value; fails when there is none within the limit."""
    deadline = time.monotonic() + limit_s
    while not (value := claim()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.1)
    return value


@dataclass(frozen=True)
class Workshop:
    """A directory with a model, data, a configuration, and an Onward home of its own."""

    root: Path
    kept: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def made(cls, root: Path) -> Self:
        onnx.save_model(tiny_conv_net(num_classes=4), root / "model.onnx")
        random = np.random.default_rng(0)
        labels = np.arange(200) % 4
        images = random.normal(size=(200, 3, 8, 8)) + labels[:, None, None, None]
        np.savez(root / "data.npz", image=images.astype(np.float32), label=labels)
        (root / "config.toml").write_text(CONFIG)
        return cls(root)

    @classmethod
    @contextlib.contextmanager
    def entered(cls, root: Path) -> Iterator[Workshop]:
        """A workshop in `root`, which is the working directory meanwhile. At the end its processes are killed."""
        with contextlib.chdir(root), contextlib.closing(cls.made(root)) as workshop:
            yield workshop

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def environment(self) -> dict[str, str]:
        cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        # OpenMP's threads spin while they wait, and beside other tests a rank of two threads is then 20 times slower
        return {**cleared, "ONWARD_HOME": str(self.home), "GOMP_SPINCOUNT": "0"}

    def start(self, *words: str, stderr: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        """`onward WORDS --json`, started. A run writes no report, unless WORDS ask for one."""
        if words[0] == "run" and not any(word.startswith("monitor.report") for word in words):
            words = (*words, "monitor.report=false")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make what runs in the background deaf to it
        return subprocess.Popen(
            [sys.executable, "-m", "onward.flows.cli", *words, "--json"],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def onward(self, *words: str, status: int = 0, limit_s: float = 600.0) -> dict[str, Any]:
        """`onward WORDS --json`, ended with `status`: the one JSON object on its stdout."""
        return finished(self.start(*words), status=status, limit_s=limit_s)

    def refusal(self, *words: str) -> str:
        """What a command that ends with status 2 prints on stderr."""
        process = self.start(*words)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 2, error
        return error

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a command, as a scheduler does that gives no warning, and wait until nothing of it is left."""
        process.kill()
        process.communicate(timeout=60)
        until(lambda: not self.processes(), limit_s=60)

    def new_run(self, *, limit_s: float = 300.0) -> RunDir:
        """The run that is about to begin: the first one whose directory does not exist yet when this is called."""
        before = set(self._runs())
        return RunDir(until(lambda: next(iter(set(self._runs()) - before), None), limit_s=limit_s))

    def _runs(self) -> list[Path]:
        return [path.parent for path in (self.home / "runs").glob("*/identity.json")]

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        """Keep a Prefect server running, which each command uses then in place of one that starts and ends with it."""
        self.home.mkdir(exist_ok=True)
        with services.lease(self.home):
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # its supervisor goes on
                services.ensure(self.home, ["prefect"])
            self.kept.update(process.pid for process in self.processes())
            try:
                yield
            finally:
                self.kept.clear()

    def processes(self) -> list[psutil.Process]:
        """Every living process of this home, but for those of `server`."""
        return [process for process in psutil.process_iter() if process.pid not in self.kept and self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            named = process.environ().get("ONWARD_HOME") == str(self.home) or str(self.home) in process.cmdline()
            return named and process.status() != psutil.STATUS_ZOMBIE
        return False

    def close(self) -> None:
        """Kill what a failed test left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def prefect_states(self) -> dict[str, str]:
        """The final state of each flow run of `train-onnx`, by its id."""
        with contextlib.closing(sqlite3.connect(self.home / "prefect" / "prefect.db")) as shown:
            rows = shown.execute(
                "select id, state_type from flow_run where flow_id in (select id from flow where name = 'train-onnx')"
            )
            return dict(rows.fetchall())

    def prefect_artifact(self, key: str, run: RunDir) -> str:
        """The newest artifact of that key that a flow run of this run has made."""
        with contextlib.closing(sqlite3.connect(self.home / "prefect" / "prefect.db")) as shown:
            rows = shown.execute("select data, flow_run_id from artifact where key = ? order by created", (key,))
            found = [data for data, _ in rows.fetchall() if str(run.root) in data]
        return str(json.loads(found[-1]))

    def mlflow_runs(self, run: RunDir) -> list[Any]:
        """The MLflow runs of one run."""
        identity = read_record(run.identity, RunIdentity)
        client = Tracker(identity.tracking_uri)._client
        experiment = client.get_experiment_by_name("onward")
        assert experiment
        return list(client.search_runs([experiment.experiment_id], f"tags.`onward.run_id` = '{identity.run_id}'"))


@dataclass(frozen=True)
class Team(Workshop):
    """A workshop whose commands have variables in their environment."""

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **self.variables}


def finished(process: subprocess.Popen[str], *, status: int = 0, limit_s: float = 600.0) -> dict[str, Any]:
    """The JSON object a command printed, once it has ended with `status`."""
    out, error = process.communicate(timeout=limit_s)
    assert process.returncode == status, f"exit status {process.returncode}: {(error or '')[-3000:]}"
    found: dict[str, Any] = json.loads(out) if out else {}
    return found


def repeated(text: str) -> list[str]:
    """The lines that a log or a terminal has more than once, without the time at their beginning."""
    lines = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ", "", line).strip() for line in text.splitlines()]
    return [line for line, number in Counter(filter(None, lines)).items() if number > 1]


def reached(run: RunDir, step: int, *, attempt: int = 1) -> bool:
    """Whether training has made a step, in this attempt or a later one."""
    return any(event.step >= step and event.attempt >= attempt for event, _ in read_events(run.events))


def ranks_of(run: RunDir) -> list[psutil.Process]:
    """The living ranks of a run's training job, rank 0 first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-3:] == ["onward.trainer", "train", str(run.root)]:
                found.append((int(process.environ().get("OMPI_COMM_WORLD_RANK", -1)), process))
    return [process for rank, process in sorted(found, key=lambda pair: pair[0]) if rank >= 0]


def signed_in(url: str, home: Path) -> str:
    """An address of a home's own server with the login in it, as `api` takes it."""
    return url.replace("://", f"://{login(home)}@", 1).removesuffix("/v2/runs")


def api(url: str, path: str, body: dict[str, Any] | None = None, *, method: str = "") -> Any:
    """One call of a Prefect server's API; GET without a body, else POST. `url`: see `signed_in`."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(
        f"{parts.scheme}://{host}/api{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(credentials.encode()).decode(),
        },
        method=method or ("GET" if body is None else "POST"),
    )
    for pause_s in (0.5, 1.0, 2.0, 4.0):
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                content = response.read()
            break
        except urllib.error.HTTPError as error:
            if error.code != 503:  # the database is locked for a moment; Prefect's own client tries again, too
                raise
            time.sleep(pause_s)
    else:
        raise AssertionError(f"{path}: the server answers with status 503")
    return json.loads(content) if content else None
