"""Use Onward's own servers on this machine: hold a lease on them, start, find and stop them.

Three services, all on 127.0.0.1 and under one home directory, each started by a supervisor (supervisor.py):

    prefect   the flow server              used by every `onward run` for which no other server is configured
    mlflow    the tracking server          for the browser; a run writes to the database directly
    worker    runs deployments

Both servers have SQLite files in the home, or the databases that databases.py finds in the environment.

Parallel runs of a host share one server. It stops some seconds after the last of them has ended, also when that was
killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from onward.infra.servers.databases import mlflow_problem, named_database, prefect_problem, without_password
from onward.infra.servers.service_definitions import SERVICES
from onward.infra.servers.service_state import (
    directory,
    healthy_url,
    is_pinned,
    is_supervised,
    log_tail,
    open_lock_file,
    pin,
    read_state,
    try_lock,
    unpin,
)
from onward.infra.servers.supervisor import DRAIN_TIMEOUT_S, START_TIMEOUT_S, TERM_TIMEOUT_S, signal_all

LEAVING_TIMEOUT_S = 15.0
"""Longest time from the end of the worker to that of the processes of its runs, which have saved by then."""


class ServiceError(Exception):
    """A server does not start or does not answer; the message says which, why, and what to do."""


@contextlib.contextmanager
def lease(home: Path) -> Iterator[None]:
    """Use the servers: they are not stopped while this process is inside."""
    with open_lock_file(home, "lease") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for a supervisor that is just stopping its server
        yield


def ensure(home: Path, names: Iterable[str]) -> dict[str, str]:
    """Start those of the services that do not run; return name -> address of each. Call inside `lease`.

    Raises ServiceError with the end of the server's log when one does not start.
    """
    with open_lock_file(home, "starting") as file:
        # one process starts the servers, and the others wait here and then find them
        fcntl.flock(file, fcntl.LOCK_EX)
        return {name: _start_if_needed(home, name) for name in names}


def running(home: Path) -> dict[str, str]:
    """Return name -> address of the healthy services ('' for one that does not listen)."""
    found = {name: healthy_url(home, name) for name in SERVICES}
    return {name: url for name, url in found.items() if url is not None}


def beside(home: Path) -> str:
    """Return the host whose Prefect server has the database of this home; "" if it is this one, or none runs here."""
    return str(read_state(home, "prefect").get("beside") or "")


def up(home: Path, names: Iterable[str] = tuple(SERVICES)) -> dict[str, str]:
    """Start services that run until `down`; return name -> address."""
    with lease(home):
        # A failed start must not remove the pin of servers that an earlier `up` has started.
        was_pinned = is_pinned(home)
        pin(home)
        try:
            return ensure(home, names)
        except ServiceError:
            if not was_pinned:
                unpin(home)
            raise


def down(home: Path) -> tuple[list[str], list[str]]:
    """Stop all services; return the names of those stopped and of those that a run still uses.

    The worker is stopped first, and its runs get time to save and to leave. Takes at most about a minute.
    """
    unpin(home)
    # in this order, because the worker's runs report their end to the other two
    found = [name for name in ("worker", "mlflow", "prefect") if is_supervised(home, name)]
    leaving_s = LEAVING_TIMEOUT_S if "worker" in found else 0.0
    for name in found:
        # Prefect stops last and only without users: a run that cannot report its end would look as if it still ran
        if name != "prefect" or _is_unused(home, limit_s=leaving_s):
            _stop_supervisor(home, name)
    left = [name for name in found if is_supervised(home, name)]
    return [name for name in found if name not in left], left


def configured_prefect() -> str:
    """Return the API address that PREFECT_API_URL or the active Prefect profile names; '' when neither does."""
    if url := os.environ.get("PREFECT_API_URL", ""):
        return url.rstrip("/")
    prefect_home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", prefect_home / "profiles.toml"))
    if not profiles.exists():
        return ""
    # In a process of its own: importing Prefect here would fix its settings before `prefect_server` has set them.
    program = "from prefect.settings import get_current_settings as s; print(s().api.url or '')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip().rstrip("/")


def check_reachable(url: str) -> None:
    """Raise ServiceError when the user's own Prefect server does not answer within 10 s."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return
    except urllib.error.HTTPError:
        return  # it answers; Prefect's client reports a missing permission itself
    except OSError as error:
        raise ServiceError(
            f"the configured Prefect server {url} does not answer ({error}); start it, or unset PREFECT_API_URL "
            "(or `prefect profile use` another) to let Onward run its own"
        ) from None


def _is_unused(home: Path, *, limit_s: float) -> bool:
    """Return whether the servers have no user, or lose the last one within the limit."""
    deadline = time.monotonic() + limit_s
    with open_lock_file(home, "lease") as file:
        while not (unused := try_lock(file)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return unused


def _start_if_needed(home: Path, name: str) -> str:
    """Start a service unless it runs, wait until it is healthy, and return its address."""
    supervisor: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        # looked at first in each turn: another process may have started it
        if (url := healthy_url(home, name)) is not None:
            _refuse_other_database(home, name)
            return url
        if supervisor is None and not is_supervised(home, name):
            if url := named_database(name):
                problem = prefect_problem(url) if name == "prefect" else mlflow_problem(url)
                if problem:
                    raise ServiceError(f"the {name} server is not started: {problem}")
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "onward.infra.servers.supervisor", str(home), name],
                cwd=home,  # `-m` imports from the working directory first, so it must not be one of the user's
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # otherwise Ctrl-C in the terminal would stop the server too
            )
        # it has ended with an error, and no other supervisor has taken over
        if supervisor and supervisor.poll() and not is_supervised(home, name):
            break
        time.sleep(0.1)
    log = log_tail(home, name, 2000).strip()
    path = f"{directory(home) / name}.log"
    if not log:  # it has failed at nothing yet
        why = f"its log {path} is empty, as on a machine with too much to do; try again when less runs on it"
    else:
        why = f"the end of its log {path} shows why:\n{log}"
    raise ServiceError(f"the {name} server does not start (time limit {START_TIMEOUT_S:g} s); {why}")


def _refuse_other_database(home: Path, name: str) -> None:
    """Raise ServiceError if the environment names another database than that of a server that runs."""
    wanted = without_password(named_database(name))
    used = read_state(home, name).get("database") or "a file of Onward's home"
    if wanted not in ("", used):
        raise ServiceError(
            f"the environment names the database {wanted}, and the {name} server that runs here uses {used}: stop it "
            "with `onward down`, or change the environment"
        )


def _stop_supervisor(home: Path, name: str) -> None:
    """Send SIGTERM to a supervisor and wait until it has stopped its server; after a time limit SIGKILL to both."""
    pid = read_state(home, name).get("pid")
    if pid is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(pid)
        # taken before SIGTERM: the children of a process that has ended are not found any more
        family = supervisor.children(recursive=True)
        supervisor.terminate()
        timeout_s = 3 * TERM_TIMEOUT_S + (DRAIN_TIMEOUT_S if name == "worker" else 0.0)
        _, alive = psutil.wait_procs([supervisor], timeout=timeout_s)
        signal_all([*alive, *(family if alive else [])], signal.SIGKILL)
