"""Real servers in a home of their own: how long they run, who stops them, what their errors say."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from onward.infra.servers import service_definitions, service_state, services, supervisor
from tests.support.workshop import api, signed_in

pytestmark = pytest.mark.usefixtures("only_servers")

USER = """
import sys, time
from pathlib import Path
from onward.infra.servers import services
with services.lease(Path(sys.argv[1])):
    print(services.ensure(Path(sys.argv[1]), ["prefect"])["prefect"], flush=True)
    sys.stdin.read()
"""
"""A process that needs the Prefect server until its stdin closes."""


def until(claim: Callable[[], bool], *, limit_s: float) -> bool:
    """Return whether the claim became true within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if claim():
            return True
        time.sleep(0.05)
    return claim()


def of_home(home: Path) -> list[psutil.Process]:
    """Return every process of a home directory, found by its environment or its command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("ONWARD_HOME") == str(home) or str(home) in process.cmdline()
            if mine and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
    return found


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    services.down(home)
    assert until(lambda: not of_home(home), limit_s=15), of_home(home)


@contextlib.contextmanager
def user(home: Path, program: str = USER) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_two_users_share_one_server_that_stops_after_the_last_of_them(shared_home: Path) -> None:
    with user(shared_home) as (_, second_url):
        with user(shared_home) as (first, first_url):
            assert first_url == second_url == services.running(shared_home)["prefect"]
            first.send_signal(signal.SIGKILL)
            first.wait()
        still_there = not until(lambda: "prefect" not in services.running(shared_home), limit_s=2 * supervisor.LINGER_S)
        assert still_there
    assert until(lambda: not of_home(shared_home), limit_s=15), of_home(shared_home)


LEASE = """
import sys
from pathlib import Path
from onward.infra.servers import services
with services.lease(Path(sys.argv[1])):
    print("holds it", flush=True)
    sys.stdin.read()
"""


def test_servers_whose_last_user_is_just_leaving_count_as_unused(tmp_path: Path) -> None:
    with user(tmp_path, LEASE) as (process, _):
        assert not services._is_unused(tmp_path, limit_s=0.3)
        threading.Timer(0.3, process.terminate).start()
        assert services._is_unused(tmp_path, limit_s=60.0)


@pytest.mark.slow
def test_a_server_ends_with_its_killed_supervisor_and_the_next_user_starts_another(shared_home: Path) -> None:
    with user(shared_home):
        its_supervisor = psutil.Process(service_state.read_state(shared_home, "prefect")["pid"])
        (server,) = its_supervisor.children()
        its_supervisor.kill()
        assert until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, limit_s=10)
        with user(shared_home) as (_, url):
            assert services.running(shared_home) == {"prefect": url}


@pytest.mark.slow
def test_the_next_user_of_a_server_that_was_killed_starts_another_at_its_port_with_its_database(
    shared_home: Path,
) -> None:
    with user(shared_home) as (_, url):
        made = api(signed_in(url, shared_home), "/flows/", {"name": "kept"})
        (server,) = psutil.Process(service_state.read_state(shared_home, "prefect")["pid"]).children()
        server.kill()
        assert until(lambda: services.running(shared_home) == {}, limit_s=10)
        with user(shared_home) as (_, next_url):
            assert services.running(shared_home) == {"prefect": next_url}
            assert next_url == url
            assert api(signed_in(next_url, shared_home), f"/flows/{made['id']}")["name"] == "kept"
    assert until(lambda: not of_home(shared_home), limit_s=15), of_home(shared_home)


def test_a_server_listens_at_another_port_than_the_one_in_use() -> None:
    with supervisor.listen(0) as stranger:
        taken = stranger.getsockname()[1]
        with supervisor.listen(taken) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
            assert listener.getsockname()[1] != taken


PROGRAM = """
import os, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

server = HTTPServer(("127.0.0.1", 0), Answering, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.handle_request()
sys.exit("enough")
"""
"""A server that ends by itself once its supervisor has found it healthy."""


def test_the_supervisor_ends_with_a_server_that_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(home: Path, listener: Sequence[int]) -> list[str]:
        return [sys.executable, "-c", PROGRAM, *map(str, listener)]

    service = service_definitions.Service(command, port=4200, health="/")
    monkeypatch.setattr(supervisor, "SERVICES", {"prefect": service})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with services.lease(tmp_path):
        assert supervisor.supervise(tmp_path, "prefect") == 1
    assert "enough" in (service_state.directory(tmp_path) / "prefect.log").read_text()
    assert not service_state.is_supervised(tmp_path, "prefect")


@pytest.mark.slow
def test_the_error_for_a_server_that_cannot_start_contains_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text("a file where the server's directory should be")
    with services.lease(tmp_path), pytest.raises(services.ServiceError, match=r"(?s)prefect .*unable to open database"):
        services.ensure(tmp_path, ["prefect"])


@pytest.mark.parametrize(
    ("log", "why"),
    [("", r"log .*prefect\.log is empty, as on a machine with too much to do"), ("no disk\n", r"shows why:\nno disk$")],
)
def test_the_error_for_a_server_that_is_not_there_in_time_says_what_is_known(
    log: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service_state.directory(tmp_path) / "prefect.log").write_text(log)
    monkeypatch.setattr(services, "START_TIMEOUT_S", 0.0)
    with pytest.raises(services.ServiceError, match=why):
        services.ensure(tmp_path, ["prefect"])


def test_an_unreachable_configured_server_is_an_error_with_a_remedy() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        with pytest.raises(services.ServiceError, match=r"does not answer.*unset PREFECT_API_URL"):
            services.check_reachable(url)


def test_a_pin_is_void_after_a_restart_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not service_state.is_pinned(tmp_path)
    service_state.pin(tmp_path)
    assert service_state.is_pinned(tmp_path)
    with monkeypatch.context() as restarted:
        restarted.setattr(service_state, "boot_id", lambda: "another")
        assert not service_state.is_pinned(tmp_path)
    service_state.unpin(tmp_path)
    assert not service_state.is_pinned(tmp_path)


class Answering(BaseHTTPRequestHandler):
    """Answers every request with status 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_servers_of_this_machine_are_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        server.timeout = 10
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert service_state.responds(f"http://127.0.0.1:{server.server_port}/health")
        thread.join()


RUN = """
import signal, sys, time
from pathlib import Path

def leave(number, frame):
    Path(sys.argv[1]).write_text("saved")
    sys.exit()

signal.signal(signal.SIGTERM, leave)
Path(sys.argv[1]).write_text("runs")
time.sleep(60)
"""

WORKER = """
import subprocess, sys, time

run, *files = sys.argv[1:]
for file in files:
    subprocess.run([sys.executable, "-c", run, file])
time.sleep(60)
"""
"""A worker with one run, which starts another one when that has ended."""


def test_a_stopped_worker_lets_its_run_save_and_starts_no_other_run(tmp_path: Path) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    worker = psutil.Popen([sys.executable, "-c", WORKER, RUN, *map(str, files)])
    assert until(lambda: files[0].exists() and files[0].read_text() == "runs", limit_s=20)
    supervisor._stop(worker, drain_s=20.0)
    assert not worker.is_running()
    assert files[0].read_text() == "saved"
    assert not files[1].exists()
    assert not of_home(files[0])


@pytest.mark.parametrize(
    ("variable", "profiles", "expected"),
    [
        ("", "", ""),
        ("http://a/api/", "", "http://a/api"),
        ("", 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://b/api"\n', "http://b/api"),
        ("http://a/api", 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://b/api"\n', "http://a/api"),
    ],
)
def test_the_configured_server_is_that_of_the_environment_else_of_the_active_profile(
    variable: str, profiles: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", variable)
    if not variable:
        monkeypatch.delenv("PREFECT_API_URL")
    if profiles:
        (tmp_path / "profiles.toml").write_text(profiles)
    assert services.configured_prefect() == expected


def test_servers_accept_no_other_origin_and_send_no_telemetry(tmp_path: Path) -> None:
    variables = service_definitions.environment(tmp_path, prefect_url="http://127.0.0.1:4200")
    assert variables["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4200"
    assert variables["DO_NOT_TRACK"] == variables["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert variables["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


@pytest.mark.slow
def test_a_second_host_has_a_server_with_a_database_of_its_own(tmp_path: Path) -> None:
    """Another host has the home's database as long as its server runs: here a file lock, which all hosts see."""
    (tmp_path / "prefect").mkdir()
    with (tmp_path / "prefect" / "server.lock").open("a+b") as held:
        assert service_state.try_lock(held)
        service_state.write_state(held, {"host": "h0", "key": "h0-1"})
        with user(tmp_path) as (_, url):
            assert services.beside(tmp_path) == "h0"
            assert api(signed_in(url, tmp_path), "/health") is True
            assert (service_state.directory(tmp_path) / "prefect.db").is_file()
            assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert until(lambda: not of_home(tmp_path), limit_s=30)


@pytest.mark.slow
def test_when_the_host_with_the_homes_database_is_gone_another_one_has_it(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    with (tmp_path / "prefect" / "server.lock").open("a+b") as held:
        assert service_state.try_lock(held)
        service_state.write_state(held, {"host": "h0", "key": "h0-1"})
        with user(tmp_path):
            assert services.beside(tmp_path) == "h0"
        assert until(lambda: not of_home(tmp_path), limit_s=30)
    with user(tmp_path):
        assert services.beside(tmp_path) == ""
        assert (tmp_path / "prefect" / "prefect.db").is_file()
    assert until(lambda: not of_home(tmp_path), limit_s=30)
