"""Connections to a port that another account of the machine holds end before a byte is sent, whichever client it is."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import threading
import urllib.request
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import requests
import websockets

from onward.infra.mlflow.mlflow_store import TrackingUnavailable
from onward.infra.mlflow.tracking import Tracker
from onward.infra.servers import port_owner
from onward.infra.servers.login import keep_from_others, login
from onward.infra.servers.port_owner import is_ours, owner_of, refuse_others
from tests.support.other_account import UID, needs_root, other_account

REFUSED = "user id 65534|All connection attempts failed"
"""The second is what anyio makes of the first."""
HEADERS = {"Authorization": "Basic c2VjcmV0"}


async def _with_httpx(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(url, headers=HEADERS)


async def _with_websockets(url: str) -> None:
    async with websockets.connect(url.replace("http", "ws", 1), additional_headers=HEADERS):
        pass


CLIENTS: dict[str, Callable[[str], object]] = {
    "urllib": lambda url: urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS), timeout=30).close(),
    "requests": lambda url: requests.get(url, headers=HEADERS, timeout=30),
    "httpx": lambda url: httpx.get(url, headers=HEADERS, trust_env=False),
    "httpx, asynchronous": lambda url: asyncio.run(_with_httpx(url)),
    "websockets": lambda url: asyncio.run(_with_websockets(url)),
}


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks of a test end with it."""
    monkeypatch.setattr(port_owner, "_ports", set())
    monkeypatch.setattr(socket.socket, "connect", socket.socket.connect)
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", BaseSelectorEventLoop.sock_connect)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def own() -> Iterator[int]:
    """The port of a web server of this account."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "websockets"])
def test_a_port_of_this_account_is_spoken_to(own: int, client: str) -> None:
    assert is_ours(f"http://127.0.0.1:{own}")
    refuse_others(f"http://127.0.0.1:{own}/api")
    CLIENTS[client](f"http://127.0.0.1:{own}/")
    CLIENTS[client](f"http://localhost:{own}/")


def test_a_port_at_which_nobody_listens_is_nobodys() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert owner_of(closed.getsockname()) is None
        closed.listen()
        assert owner_of(closed.getsockname()) == os.geteuid()
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as everywhere:
        assert owner_of(("127.0.0.1", everywhere.getsockname()[1])) == os.geteuid()


@needs_root
@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_port_of_another_account_is_sent_nothing(client: str) -> None:
    with other_account() as other:
        other.take()
        assert not is_ours(f"http://127.0.0.1:{other.port}")
        CLIENTS["urllib"](f"http://127.0.0.1:{other.port}/")  # it does note logins
        refuse_others(f"http://localhost:{other.port}/api")
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises((OSError, httpx.ConnectError, requests.ConnectionError), match=REFUSED):
                CLIENTS[client](f"http://{host}:{other.port}/")
        connections, spoken_to, logins = other.ended()
    assert (spoken_to, logins) == (1, 1)
    assert connections >= 1


@needs_root
def test_a_connection_stays_another_accounts_when_the_port_has_become_ours() -> None:
    with other_account() as other:
        other.take()
        with socket.create_connection(("127.0.0.1", other.port)) as connection:
            there, here = connection.getpeername(), connection.getsockname()
            while owner_of(there, here) is None or not accepted(there, here):
                pass
            assert owner_of(there) == owner_of(there, here) == UID


def accepted(there: tuple[str, int], here: tuple[str, int]) -> bool:
    """Whether the other end of a connection has been accepted."""
    rows = [row for table in port_owner.TABLES for row in port_owner._connections(table, port_owner._written(there))]
    return any(row.remote in port_owner._written(here) and row.inode for row in rows)


@needs_root
def test_mlflows_client_sends_the_login_to_no_other_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    user, _, password = login(tmp_path).partition(":")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    with other_account() as other:
        other.take()
        with pytest.raises(TrackingUnavailable, match="user id 65534"):
            Tracker(f"http://127.0.0.1:{other.port}", "0" * 32).page()
        assert other.ended()[1:] == (0, 0)


def test_only_the_login_of_the_home_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    assert not keep_from_others("http://127.0.0.1:4200/api", "onward:mine")
    known = login(tmp_path)
    assert not keep_from_others("http://127.0.0.1:4200/api", "onward:mine"), "a server of the user's"
    assert not keep_from_others("http://127.0.0.1:4200/api", "")
    assert port_owner._ports == set()
    assert keep_from_others("http://127.0.0.1:4200/api", known)
    assert port_owner._ports == {4200}
