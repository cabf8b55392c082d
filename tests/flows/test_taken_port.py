"""Another account takes the port of a Prefect server that was killed: it is sent no login, and runs end and begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from onward.infra.servers import service_state, services
from tests.support.other_account import needs_root, other_account
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1800),
    needs_root,
]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path)
    yield workshop
    workshop.close()


def test_who_takes_the_port_of_a_killed_server_is_sent_no_login(workshop: Workshop) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    run = workshop.new_run(limit_s=600)
    until(lambda: reached(run, 50), limit_s=600)
    url = service_state.read_state(workshop.home, "prefect")["url"]
    (server,) = psutil.Process(service_state.read_state(workshop.home, "prefect")["pid"]).children()
    with other_account(urlsplit(url).port or 0) as other:
        server.kill()
        other.take()
        assert other.port == urlsplit(url).port
        until(lambda: "prefect" not in services.running(workshop.home), limit_s=120)
        short = ("train.num_steps=10", "train.evaluation_period=10", "name=second")
        workshop.onward("run", str(workshop.root / "config.toml"), *short, limit_s=900)  # on another port
        out, error = process.communicate(timeout=900)
        connections, _, logins = other.ended()
    assert connections > 0, "the first run has gone on asking there"
    assert logins == 0
    assert process.returncode == 0, error[-3000:]
    assert json.loads(out)["state"] == "exported"
    assert error.count("its Prefect server does not answer any more") == 1
    assert "Traceback" not in error
    assert "This is an error of Onward's" not in error
