"""Run Prefect's or MLflow's server behind a check of each request: `python -m ... NAME HOME LISTENER`.

    browser or client --> check: Host, Origin, for MLflow the login --> Prefect's or MLflow's own application

Every web page that a user visits can send requests to 127.0.0.1. A request under another host name (DNS rebinding: a
name of the page's owner resolves to 127.0.0.1) gets status 400, one from a page of another origin 403, and one without
the login 401. For MLflow's pages the browser asks for it. Prefect's page asks for it itself, so the page is open, and
the requests that it makes are not. Both servers run as one process each, the web server included.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hmac
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.importer import import_from_string

from onward.infra.servers.databases import named_database
from onward.infra.servers.login import login
from onward.infra.servers.service_state import lock_database

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

HOSTS = ("127.0.0.1", "localhost")
HEALTH = ("/health", "/api/health")
"""Paths that answer without a login, to those who wait for the server."""
PREFECTS_PAGES = re.compile(r"(?!/(api|docs|redoc|openapi\.json)(/|$)).*")
"""Paths of the pages that ask for the login: the files of Prefect's package, which are the same everywhere, and
`/ui-settings`, which says that a login is asked for."""


class RequestCheck:
    """An ASGI application that answers refused requests itself and passes on all others."""

    def __init__(self, application: Application, *, login: str = "", page: re.Pattern[str] | None = None) -> None:
        self._application = application
        self._credentials = b"Basic " + base64.b64encode(login.encode()) if login else b""
        """What the Authorization header must be; empty = any."""
        self._page = page
        """The paths of a page that asks for the login itself. Its web sockets begin with a message that has it."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not (refusal := self._refusal(scope)):
            await self._application(scope, receive, send)
            return
        status, reason = refusal
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: status 403
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if status == 401 and not self._page:  # else the browser would ask for it beside the page
            headers.append((b"www-authenticate", b'Basic realm="Onward", charset="UTF-8"'))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reason.encode()})

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused, or None."""
        # a header may come twice, and a proxy and this server must not read different ones
        values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.lower(), []).append(value)
        hosts = [value.decode("latin-1").lower() for value in values.get(b"host", [])]
        # any port: the user may forward one to this one
        if len(hosts) != 1 or (hosts[0].rpartition(":")[0] not in HOSTS and hosts[0] not in HOSTS):
            return 400, f"This server answers only as {' or '.join(HOSTS)}.\n"
        # a page of another site could send requests from the user's browser
        if any(value.decode("latin-1").lower() != f"http://{hosts[0]}" for value in values.get(b"origin", [])):
            return 403, "This server answers no page of another origin.\n"
        if self._credentials and not self._is_open(scope):
            given = values.get(b"authorization", [])
            # compared in constant time, so that the time of the answer tells nothing of the login
            if len(given) != 1 or not hmac.compare_digest(given[0], self._credentials):
                return 401, "Log in; `onward ui` says with what.\n"
        return None

    def _is_open(self, scope: Message) -> bool:
        """Return whether a request needs no login."""
        path = scope["path"]
        if self._page:
            if scope["type"] == "websocket":  # it has no method
                return True
            if scope["method"] == "GET" and self._page.fullmatch(path):
                return True
        return path in HEALTH


def main(name: str, home: Path, listener: int) -> None:
    """Run a server until SIGTERM. listener: the file descriptor of its socket.

    Who connects while the application is made, which takes seconds, waits for the answer.
    """
    gc.disable()  # what is imported stays: looking through it for garbage takes a tenth of the start
    application = _prefect() if name == "prefect" else _mlflow(home)
    page = PREFECTS_PAGES if name == "prefect" else None
    checked = RequestCheck(application, login=login(home), page=page)
    gc.freeze()
    gc.enable()
    server = uvicorn.Server(uvicorn.Config(checked, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=listener)])


def _prefect() -> Application:
    os.environ["PREFECT__SERVER_FINAL"] = "1"  # as `prefect server start` makes it: it takes less memory
    _lock_at_the_beginning()
    _answer_to_try_again()
    application: Application = import_from_string("prefect.server.api.server:create_app")()
    return application


def _lock_at_the_beginning() -> None:
    """Let each transaction of Prefect's that may write wait for the others when it begins.

    Prefect begins most of them DEFERRED: they read, and lock the database when they first write. If another one has
    written meanwhile, SQLite does not wait, and the request ends with status 503.
    """
    configuration = import_from_string("prefect.server.database.configurations:AioSqliteConfiguration")
    begin = configuration.begin_transaction
    configuration.begin_transaction = lambda self, session, with_for_update=False: begin(self, session, True)


def _answer_to_try_again() -> None:
    """Let clients repeat what fails because the database server does not answer, as Prefect lets them for other errors.

    Prefect forgets the error of a refused connection, and answers with status 500, which ends a flow.
    """
    server = import_from_string("prefect.server.api.server:custom_internal_exception_handler").__globals__
    is_temporary = server["is_client_retryable_exception"]
    server["is_client_retryable_exception"] = lambda error: isinstance(error, OSError) or is_temporary(error)


def _mlflow(home: Path) -> Application:
    """Return the application that `mlflow server` runs, over the store of this home directory."""
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    database = home / "mlflow" / "mlflow.db"
    named = named_database("mlflow")
    store = named or f"sqlite:///{database}"
    # what `mlflow server` sets for the process that it starts
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: store,
        constants.REGISTRY_STORE_URI_ENV_VAR: store,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(home / "mlflow" / "artifacts"),
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }
    with lock_database(None if named else database):  # a run may make it, too
        initialize_backend_stores(store, store, "mlflow-artifacts:/")
    application: Application = import_from_string("mlflow.server.fastapi_app:app")
    return application


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
