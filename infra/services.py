"""Onward's own servers on this machine, for those who use them: lease, start, find, stop.

Three services, all on 127.0.0.1, all under one home directory, each with a keeper (infra/keeper.py):

    prefect   the flow server, SQLite      needed by every `onward run` that has no server of its own
    mlflow    the tracking server, SQLite  to look at (a run writes to the store directly)
    worker    starts deployed runs

Parallel runs share one server; it leaves a few seconds after the last of them, however that ended.
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

from onward.infra.supervisor import (
    DRAIN_S,
    SERVICES,
    START_S,
    TERM_S,
    directory,
    healthy,
    kept,
    log_tail,
    opened,
    pin,
    pinned,
    read_state,
    signal_all,
    try_exclusive,
    unpin,
)


class ServiceError(Exception):
    """A server does not start or does not answer; the sentence says which, why, and what to do."""


# -- what a user of the servers calls


@contextlib.contextmanager
def lease(home: Path) -> Iterator[None]:
    """Hold the servers: as long as this process lives inside, they are not stopped for want of users."""
    with opened(home, "lease") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for keepers that are just leaving
        yield


def ensure(home: Path, names: Iterable[str]) -> dict[str, str]:
    """Start those of the services that do not run; return name -> address of each. Call inside `lease`.

    Raises ServiceError with the end of the server's log.
    """
    with opened(home, "starting") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return {name: _ensured(home, name) for name in names}


def running(home: Path) -> dict[str, str]:
    """name -> address of the services that run and are healthy ('' for one that listens nowhere)."""
    found = {name: healthy(home, name) for name in SERVICES}
    return {name: url for name, url in found.items() if url is not None}


def up(home: Path, names: Iterable[str] = tuple(SERVICES)) -> dict[str, str]:
    """Start services that stay until `down`; return name -> address."""
    with lease(home):
        was_pinned = pinned(home)
        pin(home)
        try:
            return ensure(home, names)
        except ServiceError:
            if not was_pinned:
                unpin(home)
            raise


def down(home: Path) -> tuple[list[str], list[str]]:
    """Stop all services; returns (those stopped, those left to a run that still needs them).

    The worker goes first and gives its runs time to save. Takes at most about a minute.
    """
    unpin(home)
    found = [name for name in ("worker", "mlflow", "prefect") if kept(home, name)]
    for name in found:
        if name != "prefect" or not _leased(home):
            _stop_keeper(home, name)
    left = [name for name in found if kept(home, name)]
    return [name for name in found if name not in left], left


def configured_prefect() -> str:
    """The API address the user chose, by PREFECT_API_URL or a Prefect profile; '' when none is chosen."""
    if url := os.environ.get("PREFECT_API_URL", ""):
        return url.rstrip("/")
    prefect_home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", prefect_home / "profiles.toml"))
    if not profiles.exists():
        return ""
    ask = "from prefect.settings import get_current_settings as s; print(s().api.url or '')"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip().rstrip("/")


def check_reachable(url: str) -> None:
    """Raises ServiceError when the user's own Prefect server does not answer within 10 s."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is Prefect's to say
    except OSError as error:
        raise ServiceError(
            f"the configured Prefect server {url} does not answer ({error}); start it, or unset PREFECT_API_URL "
            "(or `prefect profile use` another) to let Onward run its own"
        ) from None


# -- one service


def _leased(home: Path) -> bool:
    with opened(home, "lease") as file:
        return not try_exclusive(file)


def _ensured(home: Path, name: str) -> str:
    """Start a service unless it runs, wait until it is healthy, return its address."""
    keeper: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (url := healthy(home, name)) is not None:
            return url
        if keeper is None and not kept(home, name):
            keeper = subprocess.Popen(
                [sys.executable, "-m", "onward.infra.supervisor", str(home), name],
                cwd=home,  # a directory of Onward's own: `-m` looks for modules in the working directory first
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        if keeper is not None and keeper.poll() and not kept(home, name):
            break
        time.sleep(0.1)
    raise ServiceError(
        f"the {name} server does not start (it has {START_S:g} s); its log "
        f"{directory(home) / name}.log ends:\n{log_tail(home, name, 2000)}"
    )


def _stop_keeper(home: Path, name: str) -> None:
    """SIGTERM to a keeper and wait until it has stopped its service; in the end, SIGKILL to both."""
    pid = read_state(home, name).get("pid")
    if pid is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper = psutil.Process(pid)
        family = keeper.children(recursive=True)
        keeper.terminate()
        longest_s = 3 * TERM_S + (DRAIN_S if name == "worker" else 0.0)
        _, alive = psutil.wait_procs([keeper], timeout=longest_s)
        signal_all([*alive, *(family if alive else [])], signal.SIGKILL)
