"""A worker that shares no disk with the machine that deploys: another mount namespace, with an empty home.

What a run needs travels in the parameters of its deployment, in the signed limits, in MLflow and at URLs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward.infra.mlflow.registry import Registry
from onward.infra.servers.service_state import responds
from tests.support.remote_servers import web_server
from tests.support.stores import Server, free_port
from tests.support.workshop import Team, api, until

ALLOWED = not os.geteuid() and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not ALLOWED, reason="a mount namespace needs root"),
]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
ELSEWHERE = """
mount --make-rprivate /
mount -t tmpfs tmpfs {hidden}
mount -t tmpfs tmpfs {own}
cd {own}
exec {python} -m onward.flows.deploying.worker
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables that name a Prefect server, an MLflow server that serves artifacts, and a key."""
    mlflow = Server(tmp_path / "mlflow")
    port = free_port()
    words = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with (tmp_path / "prefect.log").open("wb") as log:
        prefect = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        mlflow.start()
        until(lambda: responds(f"http://127.0.0.1:{port}/api/health"), limit_s=300)
        yield {
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "MLFLOW_TRACKING_URI": mlflow.uri,
            "ONWARD_DEPLOY_KEY": "0123456789abcdef-of-the-team",
        }
    finally:
        mlflow.kill()
        prefect.terminate()
        prefect.wait(60)


def test_a_worker_with_an_empty_home_trains_a_registered_model_on_data_at_a_url_and_registers_it(
    tmp_path: Path, servers: dict[str, str]
) -> None:
    here, own = tmp_path / "here", tmp_path / "own"
    for folder in (here, own):
        folder.mkdir()
    team = replace(Team.made(here), variables=servers)
    config = str(here / "config.toml")
    data = (here / "data.npz").read_bytes()
    url = servers["PREFECT_API_URL"].removesuffix("/api")
    with ExitStack() as stack:
        web = stack.enter_context(web_server({"data/train.npz": data}))
        team.onward("run", config, "train.num_steps=20", "export.register_as='shapes'")
        before = sorted(here.rglob("*"))
        script = ELSEWHERE.format(hidden=here, own=own, python=sys.executable)
        log = stack.enter_context((tmp_path / "worker.log").open("wb"))
        environment = {**team.environment, "ONWARD_HOME": str(own / "home")}
        worker = subprocess.Popen(["unshare", "--mount", "sh", "-ec", script], env=environment, stdout=log, stderr=log)
        stack.callback(worker.wait, 60)
        stack.callback(worker.terminate)
        until(lambda: _answers(url, "/work_pools/onward"), limit_s=300)
        words = ("model.path='models:/shapes/1'", f"data.source='{web.url}/data/train.npz'", "train.num_steps=30")
        team.onward("deploy", config, *words, "export.register_as='shapes'", "--name", "far")
        run = team.onward("deployments", "run", "far")["run"]
        state = until(lambda: (now := api(url, f"/flow_runs/{run}")["state"])["type"] in ENDED and now, limit_s=1200)
        assert state["type"] == "COMPLETED", (state, (tmp_path / "worker.log").read_text()[-3000:])
        inside = Path(f"/proc/{worker.pid}/root{own}")
        assert (inside / "home" / "runs" / run / "export" / "model.onnx").is_file()
        assert not list(own.iterdir())
        assert not list(Path(f"/proc/{worker.pid}/root{here}").iterdir())
    assert {path for path in here.rglob("*") if "runs" in path.parts} <= set(before)
    registry = Registry(servers["MLFLOW_TRACKING_URI"])
    second = registry.resolve("models:/shapes/2")
    assert second is not None
    # the files come from the server, to a machine that has neither home
    assert registry.download(second, tmp_path / "downloaded").is_file()
    (version,) = registry._client.search_model_versions("name = 'shapes' and version_number = 2")
    assert version.source.startswith("models:/")


def _answers(url: str, path: str) -> Any:
    try:
        return api(url, path)
    except OSError:
        return None
