"""The check in front of Onward's own servers, by raw requests: another host name, origin or login gets nothing."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from onward.infra.servers import web_server
from onward.infra.servers.web_server import Message, Receive, RequestCheck, Send
from tests.support.requests import ask, handshake

FOREIGN = ("evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.", "0.0.0.0", "[::1]")


async def application(scope: Message, receive: Receive, send: Send) -> None:
    """Answer every request, and accept every WebSocket."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


@contextlib.contextmanager
def checked(login: str = "", page: re.Pattern[str] | None = None) -> Iterator[int]:
    """Run a checked application in a thread; yield its port."""
    guarded = RequestCheck(application, login=login, page=page)
    config = uvicorn.Config(guarded, port=0, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield int(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join()


def test_a_request_under_another_host_name_is_refused() -> None:
    with checked() as port:
        for host in ("", "localhost", f"localhost:{port}", "LOCALHOST:8080", "127.0.0.1"):
            assert ask(port, host=host) == (200, "inside"), host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost.",
            "0.0.0.0",
            "[::1]",
        ):
            assert ask(port, host=host)[0] == 400, host
        assert handshake(port, "/", host="evil.example").split()[1] == "403"
        assert handshake(port, "/").split()[1] == "101"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
            assert stream.recv(4096).split()[1] == b"400"
            stream.close()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stream:
            stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert stream.recv(4096).split()[1] == b"400"


def test_a_page_of_another_origin_gets_nothing() -> None:
    with checked() as port:
        assert ask(port, Origin=f"http://127.0.0.1:{port}")[0] == 200
        assert ask(port, host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
        for origin in ("http://evil.example", "null", f"http://localhost:{port}", "http://127.0.0.1:1"):
            assert ask(port, method="POST", Origin=origin)[0] == 403, origin
        assert handshake(port, "/", Origin="http://evil.example").split()[1] == "403"


def test_without_the_login_only_the_health_check_is_answered() -> None:
    with checked("onward:secret") as port:
        assert ask(port, "/health") == (200, "inside")
        assert ask(port, login="onward:secret") == (200, "inside")
        for wrong in ("", "onward:", "onward:secret2", "secret"):
            assert ask(port, login=wrong)[0] == 401, wrong
        for path in ("/health/", "/x/health", "//health", "/health%2f..", "/health/../api"):
            assert ask(port, path)[0] == 401, path
        assert handshake(port, "/").split()[1] == "403"
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.getheader("WWW-Authenticate", "").startswith("Basic ")  # the browser asks the user
        assert "secret" not in answer.read().decode()
        connection.close()


def test_a_page_that_asks_for_the_login_itself_is_open_and_what_it_asks_is_not() -> None:
    with checked("onward:secret", web_server.PREFECTS_PAGES) as port:
        for path in ("/", "/v2/runs", "/v2/assets/x.js", "/runs/flow-run/x", "/ui-settings", "/api/health", "/apis"):
            assert ask(port, path) == (200, "inside"), path
        for path in ("/api", "/api/", "/api/flows/filter", "/api/ready", "/api/docs", "/docs", "/docs/", "/redoc"):
            assert ask(port, path)[0] == 401, path
            assert ask(port, path, login="onward:secret")[0] == 200, path
        for path in ("/openapi.json", "/docs/oauth2-redirect", "/api%0a/x", "/x%0a"):
            assert ask(port, path)[0] == 401, path
        assert ask(port, "/", method="POST")[0] == 401
        assert handshake(port, "/").split()[1] == "101", "its first message has the login"
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/api/")
        assert connection.getresponse().getheader("WWW-Authenticate") is None, "the browser would ask beside the page"
        connection.close()
