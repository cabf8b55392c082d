"""Real servers of `onward up`: who gets an answer, what listens, and where the login is."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from onward.infra.servers.login import login
from onward.trainer.run.directory import RunDir
from tests.support.requests import ask, handshake
from tests.support.workshop import Workshop, api, reached, signed_in, until

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("only_servers"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    workshop.home.mkdir(mode=0o755)
    workshop.home.joinpath("runs").mkdir()
    yield workshop
    try:
        workshop.onward("down")
        until(lambda: not workshop.processes(), limit_s=15)
    finally:
        workshop.close()


@pytest.fixture(scope="module")
def links(workshop: Workshop) -> dict[str, str]:
    found: dict[str, str] = workshop.onward("up")
    return found


def port_of(links: dict[str, str], name: str) -> int:
    return urlsplit(links[name]).port or 0


def test_an_existing_home_is_closed_to_others(workshop: Workshop, links: dict[str, str]) -> None:
    assert workshop.home.stat().st_mode & 0o777 == 0o700
    assert Path(links["login"]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["/api/flows/filter", "/api/work_pools/filter", "/api/deployments/filter"])
def test_prefect_answers_with_the_login_alone_and_under_no_other_name(
    workshop: Workshop, links: dict[str, str], path: str
) -> None:
    port, right = port_of(links, "prefect"), login(workshop.home)
    assert ask(port, "/api/health")[0] == 200
    assert ask(port, path, method="POST", body="{}")[0] == 401
    assert ask(port, path, method="POST", body="{}", login="onward:guessed")[0] == 401
    assert ask(port, path, method="POST", body="{}", login=right)[0] == 200
    assert ask(port, path, method="POST", body="{}", login=right, host="evil.example")[0] == 400
    assert ask(port, path, method="POST", body="{}", login=right, Origin="http://evil.example")[0] == 403


def test_prefects_events_are_for_those_with_the_login(links: dict[str, str]) -> None:
    port = port_of(links, "prefect")
    for path in ("/api/events/in", "/api/events/out", "/api/logs/out"):
        assert handshake(port, path).split()[1] == "403", path  # it does not offer to send the login
        assert handshake(port, path, host="evil.example").split()[1] == "403", path


def test_prefects_pages_ask_for_the_whole_line(workshop: Workshop, links: dict[str, str]) -> None:
    """The requests of Prefect's login page: what the user types is sent as it is, in base 64."""
    port = port_of(links, "prefect")
    status, page = ask(port, urlsplit(links["prefect"]).path, Accept="text/html")
    assert (status, "<html" in page.lower()) == (200, True)
    status, settings = ask(port, "/ui-settings")
    assert (status, json.loads(settings)["auth"]) == (200, "BASIC")
    for path in ("/api/admin/version", "/api/docs", "/api/openapi.json", "/docs", "/redoc", "/openapi.json"):
        assert ask(port, path)[0] == 401, path
    assert ask(port, "/api/admin/version", login=login(workshop.home))[0] == 200
    assert (workshop.home / "prefect" / "pages" / "v2" / "index.html").exists(), "and not where Prefect is installed"


def test_mlflow_answers_with_the_login_alone_and_under_no_other_name(workshop: Workshop, links: dict[str, str]) -> None:
    port, right = port_of(links, "mlflow"), login(workshop.home)
    search = "/api/2.0/mlflow/experiments/search?max_results=5"
    for path in ("/", search, "/ajax-" + search[1:], "/static-files/index.html", "/graphql", "/version"):
        assert ask(port, path)[0] == 401, path
    status, page = ask(port, "/", login=right)
    assert (status, "<html" in page.lower()) == (200, True)
    status, found = ask(port, search, login=right)
    assert (status, "experiments" in json.loads(found)) == (200, True)
    assert ask(port, search, login=right, host="evil.example")[0] == 400


def test_a_deployed_run_completes_and_the_login_is_stored_nowhere_else(
    workshop: Workshop, links: dict[str, str]
) -> None:
    server = signed_in(links["prefect"], workshop.home)
    made = workshop.onward("deploy", str(workshop.root / "config.toml"), "train.num_steps=20", "--name", "once")
    begun = api(server, f"/deployments/{made['deployment_id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    shown, of_the_worker = set(), set()

    def ended() -> bool:
        for process in workshop.processes():
            try:
                shown.add(" ".join(process.cmdline()))
                if program_of(process) == "worker":
                    of_the_worker.update(listened_by(process))
            except psutil.Error:
                continue
        return api(server, f"/flow_runs/{begun}")["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED")

    until(ended, limit_s=300)
    assert api(server, f"/flow_runs/{begun}")["state"]["type"] == "COMPLETED"
    assert run.exported.exists()
    with_links = workshop.onward("ui")
    assert set(with_links) >= {"prefect", "mlflow", "login", "last run"}
    secret = login(workshop.home).partition(":")[2]
    encoded = base64.b64encode(login(workshop.home).encode()).decode()
    assert not [words for words in shown if secret in words or encoded in words]
    assert shown, "processes were looked at"
    assert {ip for ip, _ in of_the_worker} == {"127.0.0.1"}, "the page says where the worker listens, and when"
    held = re.compile(f"{re.escape(secret)}|{re.escape(encoded)}".encode())
    files = [path for path in workshop.root.rglob("*") if path.is_file() and held.search(path.read_bytes())]
    assert files == [Path(links["login"])]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "security.md"


def program_of(process: psutil.Process) -> str:
    """Return the name that the page's table has for a process."""
    words = process.cmdline()
    if "onward.infra.servers.web_server" in words:
        return {"prefect": "Prefect server", "mlflow": "MLflow server"}[words[3]]
    if "onward.flows.deploying.worker" in words or "worker" in words:
        return "worker"
    if "onward.trainer.fork_server" in words:  # the ranks are its forks, and it listens on a socket in a folder alone
        return "ranks"
    if words[-3:-1] == ["onward.trainer", "train"]:
        return "`mpirun`" if Path(words[0]).name in ("mpirun", "prterun") else "ranks"
    return " ".join(words)


def listened_by(process: psutil.Process) -> set[tuple[str, int]]:
    found = [at for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN]
    return {(at.laddr.ip, at.laddr.port) for at in found}


def test_the_page_says_what_listens_where(workshop: Workshop, links: dict[str, str]) -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]* \|$", PAGE.read_text(), re.MULTILINE)
    table = {name: address for name, address in rows if "port" in address}
    process = workshop.start("run", str(workshop.root / "config.toml"), "train.num_steps=3000")
    seen: dict[str, set[tuple[str, int]]] = {}
    try:
        run = workshop.new_run()
        until(lambda: reached(run, 20), limit_s=300)
        for each in workshop.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.setdefault(program_of(each), set()).update(listened_by(each))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    open_to_others = {name for name, found in seen.items() if {ip for ip, _ in found} - {"127.0.0.1"}}
    assert open_to_others == {name for name, address in table.items() if "all interfaces" in address} == {"`mpirun`"}, (
        seen
    )
    always = {name for name, address in table.items() if "127.0.0.1" in address and "while one" not in address}
    assert {name for name, found in seen.items() if found} == always, seen
    assert len({port for ip, port in seen["`mpirun`"] if ip == "0.0.0.0"}) == 1, seen
    assert len({port for ip, port in seen["`mpirun`"] if ip == "::"}) == 1, seen
    for name in ("Prefect", "MLflow"):
        assert seen[f"{name} server"] == {("127.0.0.1", port_of(links, name.lower()))}
