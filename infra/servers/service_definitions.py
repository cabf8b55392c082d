"""The three servers that Onward can run on this machine: their commands, ports, health checks and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onward.infra.servers.login import login

POOL = "onward"
"""The Prefect work pool from which a worker takes deployed runs."""


@dataclass(frozen=True)
class Service:
    """One kind of server."""

    command: Callable[[Path, Sequence[int]], list[str]]
    """(home, the file descriptor of the listening socket, if it has one) -> the command line."""
    port: int
    """The preferred port; 0 = the service does not listen."""
    health: str
    """The URL path that returns 200 when the server is ready; without a port, the text in its log that shows it."""


def _web_server(name: str) -> Callable[[Path, Sequence[int]], list[str]]:
    words = [sys.executable, "-m", "onward.infra.servers.web_server", name]
    return lambda home, listener: [*words, str(home), *map(str, listener)]


SERVICES: Mapping[str, Service] = {
    "prefect": Service(_web_server("prefect"), port=4200, health="/api/health"),
    "mlflow": Service(_web_server("mlflow"), port=5000, health="/health"),
    "worker": Service(lambda *_: [sys.executable, "-m", "onward.flows.deploying.worker"], port=0, health="started!"),
}

CLIENT_SETTINGS: Mapping[str, str] = {
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "onward",
    # Onward retries MLflow calls itself; the defaults block one call for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # With a server, MLflow would print its address on stdout, into the JSON of `onward run --json`.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment for the use of any Prefect or MLflow server, Onward's own or not: no telemetry, no temporary servers."""


def environment(home: Path, *, prefect_url: str = "") -> dict[str, str]:
    """Return the environment of Onward's servers and their clients; `prefect_url` is the address without `/api`."""
    # what the user excepts stays; requests to this machine are excepted as well
    given = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    excepted = {*filter(None, given), "127.0.0.1", "localhost", "::1"}
    variables = {
        "ONWARD_HOME": str(home),
        # Else a proxy that the environment names would get the requests to the own servers, and the login with them.
        **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(sorted(excepted))),
        "PREFECT_HOME": str(home / "prefect"),
        # Prefect deletes old events, and what is left of flow runs that `onward gc` has deleted.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Else Prefect copies its pages into the directory where it is installed.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "prefect" / "pages"),
        **CLIENT_SETTINGS,
    }
    if prefect_url:
        variables["PREFECT_API_URL"] = f"{prefect_url}/api"
        # Without this a page of any web site that the user visits could call the server.
        variables["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = prefect_url
        variables["PREFECT_SERVER_API_AUTH_STRING"] = variables["PREFECT_API_AUTH_STRING"] = login(home)
    return variables
