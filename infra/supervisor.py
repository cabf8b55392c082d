"""One server on this machine and the small process that keeps it: starts it, watches who needs it, ends it.

A service is needed while somebody holds a shared lock on `services/lease` (the kernel lets go of it however its
holder dies), or `services/pinned` names this boot of the machine. So nothing stays behind after `kill -9`. Under
Onward's home:

    services/lease            shared flock: those who need the servers
    services/pinned           exists between `onward up` and `onward down`; inside: the boot id
    services/starting         exclusive flock: one starts at a time
    services/prefect.keeper   exclusive flock by a living keeper; inside: its pid, and the address once healthy
    services/prefect.log      what the server printed
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

POOL = "onward"
"""The Prefect work pool that deployed runs wait in."""
LINGER_S = 4.0
"""How long a server stays after its last user: two runs in a row share it."""
START_S = 120.0
"""Longest a service may take until it is healthy; a new home's first start makes the databases."""
DRAIN_S = 40.0
"""Longest the deployed runs may take to save and leave when the worker is stopped."""
TERM_S = 5.0
"""From SIGTERM to SIGKILL."""


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine: the proxy that the environment may name does not know them."""


@dataclass(frozen=True)
class Service:
    """One kind of server."""

    command: Callable[[Path, int], list[str]]
    """(home, port) -> what to run."""
    port: int
    """The port to prefer; 0 = it listens nowhere."""
    health: str
    """The path that answers 200 when the server is ready; without a port, what its log says then."""


def _prefect_command(home: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def _mlflow_command(home: Path, port: int) -> list[str]:
    (home / "mlflow").mkdir(parents=True, exist_ok=True)
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"),
        *("--artifacts-destination", str(home / "mlflow" / "artifacts")),
    ]


def _worker_command(home: Path, port: int) -> list[str]:
    # Never --limit: with it, Prefect's worker dies when a run that still lives is scheduled again.
    return [
        *(sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"),
        *("--name", f"onward-{socket.gethostname()}", "--install-policy", "never"),
    ]


SERVICES: Mapping[str, Service] = {
    "prefect": Service(_prefect_command, port=4200, health="/api/health"),
    "mlflow": Service(_mlflow_command, port=5000, health="/health"),
    "worker": Service(_worker_command, port=0, health="started!"),
}


def environment(home: Path, *, prefect_url: str = "") -> dict[str, str]:
    """What the servers and their clients are told; `prefect_url` as `ensure` returned it.

    No telemetry, no temporary servers, few retries against an MLflow that is down, and a browser page
    from elsewhere cannot drive the server.
    """
    told = {
        "ONWARD_HOME": str(home),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        **QUIET,
    }
    if prefect_url:
        told["PREFECT_API_URL"] = f"{prefect_url}/api"
        told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = prefect_url
    return told


QUIET: Mapping[str, str] = {
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,infra,trainer",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Settings that go with any Prefect or MLflow server, Onward's own or not."""


# -- the keeper


def keep(home: Path, name: str) -> int:
    """Run one service until nobody needs it, it dies, or SIGTERM; returns the exit status.

    The body of the keeper process: `python -m infra.supervisor HOME NAME`.
    """
    with opened(home, f"{name}.keeper") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another keeper was faster
        write_state(state, {"pid": os.getpid()})
        asked_to_stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked_to_stop.append(number))
        started = _started(home, name, stop=lambda: bool(asked_to_stop))
        if started is None:
            return 1
        process, url = started
        write_state(state, {"pid": os.getpid(), "url": url})
        with _until_unneeded(home, process, stop=lambda: bool(asked_to_stop)):
            _stop(process, drain_s=DRAIN_S if name == "worker" else 0.0)
        return 0


def _started(home: Path, name: str, *, stop: Callable[[], bool]) -> tuple[psutil.Popen, str] | None:
    """Start the server and wait until it is healthy; a port lost to somebody else is exchanged for another."""
    service = SERVICES[name]
    for attempt in range(3):
        port = free_port(service.port if attempt == 0 else 0) if service.port else 0
        process = _launch(home, name, port)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None and not stop():
            if _serves(process, port, service.health) if port else service.health in log_tail(home, name, 65536):
                return process, f"http://127.0.0.1:{port}" if port else ""
            time.sleep(0.1)
        died_by_itself = process.poll() is not None
        _stop(process, drain_s=0.0)
        if not died_by_itself or "address already in use" not in log_tail(home, name, 65536):
            return None
    return None


def _launch(home: Path, name: str, port: int) -> psutil.Popen:
    own_url = f"http://127.0.0.1:{port}" if name == "prefect" else (healthy(home, "prefect") or "")
    with (directory(home) / f"{name}.log").open("wb") as log:
        return psutil.Popen(
            SERVICES[name].command(home, port),
            env={**os.environ, **environment(home, prefect_url=own_url)},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """Between fork and exec: a server whose keeper is killed ends too (mlflow passes the signal on)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def _serves(process: psutil.Popen, port: int, health: str) -> bool:
    """Whether it is this process (not a stranger on the same port) that answers."""
    with contextlib.suppress(psutil.Error):
        family = [process, *process.children(recursive=True)]
        listening = any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for member in family
            for connection in member.net_connections("tcp")
        )
        return listening and answers(f"http://127.0.0.1:{port}{health}")
    return False


@contextlib.contextmanager
def _until_unneeded(home: Path, process: psutil.Popen, *, stop: Callable[[], bool]) -> Iterator[None]:
    """Wait; enter the body when the service is to end, with new users kept out until the body is done."""
    idle_since = time.monotonic()
    with opened(home, "lease") as users:
        while process.poll() is None and not stop():
            if pinned(home) or not try_exclusive(users):
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > LINGER_S:
                break  # the lock is kept: who comes now waits, and then finds no keeper
            else:
                fcntl.flock(users, fcntl.LOCK_UN)
            time.sleep(0.3)
        yield


def _stop(process: psutil.Popen, *, drain_s: float) -> None:
    """SIGTERM, then SIGKILL, the whole tree; with `drain_s`, its children first get time to save and leave."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if drain_s:
            _drain(process, drain_s)
        family = process.children(recursive=True)
        if drain_s:
            process.kill()  # it stands still, and has nothing of its own to save
        else:
            process.terminate()
        _, alive = psutil.wait_procs([process, *family], timeout=TERM_S)
        signal_all(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=TERM_S)


def _drain(worker: psutil.Popen, longest_s: float) -> None:
    """Let a worker's runs save and leave, while it stands still, so that it starts no other.

    It is not asked to leave first: on its own way out it would kill its runs.
    """
    worker.suspend()
    runs = worker.children()
    signal_all(runs, signal.SIGTERM)
    give_up_at = time.monotonic() + longest_s
    while any(map(_lives, runs)) and time.monotonic() < give_up_at:
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    """Also false for one that ended and whose parent has not asked yet how."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# -- locks, addresses, logs


def directory(home: Path) -> Path:
    directory = home / "services"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def pin(home: Path) -> None:
    """Let the services stay without users: until `unpin`, or the machine's next start."""
    (directory(home) / "pinned").write_text(_boot())


def unpin(home: Path) -> None:
    (directory(home) / "pinned").unlink(missing_ok=True)


def pinned(home: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (directory(home) / "pinned").read_text() == _boot()
    return False


def _boot() -> str:
    """A new one each time the machine starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextlib.contextmanager
def opened(home: Path, name: str) -> Iterator[IO[bytes]]:
    """A file of the services directory, to lock; closing it lets go of the lock."""
    with (directory(home) / name).open("a+b") as file:
        yield file


def try_exclusive(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def kept(home: Path, name: str) -> bool:
    """Whether a keeper of this service lives."""
    path = directory(home) / f"{name}.keeper"
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not try_exclusive(file)


def write_state(file: IO[bytes], state: Mapping[str, Any]) -> None:
    file.truncate(0)
    file.write(json.dumps(state).encode())
    file.flush()


def read_state(home: Path, name: str) -> dict[str, Any]:
    """What the living keeper wrote: `pid`, and `url` once the service is healthy; {} without a keeper."""
    if not kept(home, name):
        return {}
    try:
        state = json.loads((directory(home) / f"{name}.keeper").read_bytes())
    except ValueError:
        return {}  # between its truncate and its write
    return state if isinstance(state, dict) else {}


def healthy(home: Path, name: str) -> str | None:
    """The address of a service that answers ('' for one that listens nowhere), else None."""
    url = read_state(home, name).get("url")
    return url if url is not None and (not url or answers(url + SERVICES[name].health)) else None


def answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port(preferred: int) -> int:
    """The preferred port if nobody has it, else any free one (0 = any)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port(0)
        return int(probe.getsockname()[1])


def log_tail(home: Path, name: str, size: int) -> str:
    path = directory(home) / f"{name}.log"
    return path.read_bytes()[-size:].decode(errors="replace") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
