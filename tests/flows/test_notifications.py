"""The automation of docs/how-to/mlflow-and-prefect.md on a real server: a run fails, and its web hook is called."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.infra.servers.login import login
from tests.support.workshop import Workshop, signed_in, until
from tests.support.workshop import api as ask

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("only_servers")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "mlflow-and-prefect.md"


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path)
    yield workshop
    try:
        workshop.onward("down")
    finally:
        workshop.close()


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """The address of a web hook, and what was posted to it."""
    posted: list[str] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_automation_of_the_page_calls_a_web_hook_when_a_run_fails_and_only_then(
    workshop: Workshop, listener: tuple[str, list[str]]
) -> None:
    (program,) = re.findall(r'```python title="notify\.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    (workshop.root / "notify.py").write_text(program)
    address, posted = listener
    url = workshop.onward("up")["prefect"].removesuffix("/v2/runs")
    given = {
        **workshop.environment,
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_API_AUTH_STRING": login(workshop.home),
        "PREFECT_HOME": str(workshop.home / "prefect"),
    }
    made = subprocess.run(
        [sys.executable, "notify.py", address], cwd=workshop.root, env=given, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    (automation,) = ask(signed_in(url, workshop.home), "/automations/filter", {})
    assert automation["enabled"]

    config = str(workshop.root / "config.toml")
    short = ("train.num_steps=20", "train.evaluation_period=20")
    workshop.onward("run", config, *short)
    assert not posted, "a run that is done is no failure"
    failed = workshop.start("run", config, *short, "optimizer.learning_rate=1e30", "train.clip_norm=0")
    _, said = failed.communicate(timeout=300)
    assert failed.returncode == 6, said
    until(lambda: posted, limit_s=120)
    assert posted[0].startswith("config-2: Diverged: "), posted
    assert "loss nan" in posted[0]
