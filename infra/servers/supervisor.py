"""The supervisor process of one server: starts it, and stops it when it has no users any more.

    onward run (A) --shared lock--+
                                  +--> services/lease <--tries the exclusive lock every 0.3 s-- supervisor
    onward run (B) --shared lock--+                                                                |
                                                                                          starts and stops
                                                                                                   v
    user of the server --reads pid and address--> services/prefect.supervisor              prefect server

The supervisor takes the port and hands the listening socket on: no other program can have it meanwhile. A server
that ends by itself is not started again: its log says why, and the next user starts another one at the same port.

A user of the servers holds a shared lock on `services/lease` (a flock). The supervisor can take the exclusive lock only
when there is no user left; it then waits LINGER_S and tries again before it stops the server. It stops with the lock
held, so a new user waits until the server is gone and then starts another one. `services/pinned` (`onward up`) keeps
the server running without users. Because the kernel releases the locks of killed processes, no server stays behind
after `kill -9` of its users; a server whose supervisor is killed gets SIGTERM from the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from onward.infra.job.child_program import signalled_with_parent
from onward.infra.servers.databases import PREFECT, named_database, without_password
from onward.infra.servers.service_definitions import SERVICES, environment
from onward.infra.servers.service_state import (
    directory,
    healthy_url,
    is_pinned,
    log_tail,
    open_lock_file,
    prefect_database,
    read_state,
    responds,
    try_lock,
    write_state,
)

LINGER_S = 4.0
"""Seconds that a server runs on after its last user, so that two successive runs share it."""
START_TIMEOUT_S = 120.0
"""Longest time until a service is healthy; the first start under a new home creates the databases."""
DRAIN_TIMEOUT_S = 40.0
"""Longest time that deployed runs get to save a checkpoint when the worker is stopped."""
BACKLOG = 2048
"""Connections that may wait until the server answers; uvicorn's own number."""
TERM_TIMEOUT_S = 5.0
"""From SIGTERM to SIGKILL."""
LOG_TAIL_BYTES = 1 << 16


def supervise(home: Path, name: str) -> int:
    """Run one server until it has no users, or SIGTERM arrives; return the exit status of this process."""
    with open_lock_file(home, f"{name}.supervisor") as state, open_lock_file(home, "lease") as lease:
        if not try_lock(state):
            return 0  # another supervisor was started at the same time and was first
        # read before the state is written anew: the former state has the port
        port = _port(home, name)
        write_state(state, {"pid": os.getpid()})
        # the handler only takes note, and the loops look at the list: a handler runs in the middle of anything
        signals = []
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
        process, url, beside = _launch(home, name, port)
        if not _wait_until_healthy(home, name, process, url, signals):
            _stop(process, drain_s=0.0)
            return 1
        # only now: users take an address in the file for that of a healthy server
        database = without_password(named_database(name))
        write_state(state, {"pid": os.getpid(), "url": url, "beside": beside, "database": database})
        _wait_until_unused(home, lease, process, signals)
        # the state stays: the next supervisor starts the server at the same port, where its users look for it
        if process.poll() is not None:
            return 1
        _stop(process, drain_s=DRAIN_TIMEOUT_S if name == "worker" else 0.0)
        # an empty state says that it was stopped on purpose
        write_state(state, {})
        return 0


def _port(home: Path, name: str) -> int:
    """Return the port of a server that has ended by itself, where its users look for it; else the usual one."""
    former = re.fullmatch(r"http://127\.0\.0\.1:(\d{1,5})", str(read_state(home, name).get("url")))
    return int(former[1]) if former else SERVICES[name].port


def listen(preferred: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1 at the preferred port; at any other one if that is in use."""
    try:
        return socket.create_server(("127.0.0.1", preferred), backlog=BACKLOG)
    except (OSError, OverflowError):
        # port 0: the kernel chooses a free one
        return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)


def _launch(home: Path, name: str, port: int) -> tuple[psutil.Popen, str, str]:
    """Start a server; return its process, its address, and the host that has the home's database of Prefect.

    The address is "" for a server that does not listen, the host "" unless this one has a database of its own.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory(home) / f"{name}.log").open("wb"))
        # the server inherits the socket in which it listens; it must not open the port itself, which others could take
        # first
        listening: list[int] = []
        locks: list[int] = []
        url = beside = ""
        variables: dict[str, str] = {}
        if port:
            listener = stack.enter_context(listen(port))
            listening = [listener.fileno()]
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if name == "prefect" and not named_database(name):
            # the server holds the locks until it ends, also after `kill -9` of this process
            database, beside, locks = stack.enter_context(prefect_database(home))
            variables = {PREFECT[0]: f"sqlite+aiosqlite:///{database}"}
        # the worker and the pages of the other servers need the address of Prefect's
        prefect_url = url if name == "prefect" else healthy_url(home, "prefect")
        process = psutil.Popen(
            signalled_with_parent(SERVICES[name].command(home, listening), signal.SIGTERM),
            env={**os.environ, **environment(home, prefect_url=prefect_url or ""), **variables},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[*listening, *locks],
        )
    return process, url, beside


def _wait_until_healthy(home: Path, name: str, process: psutil.Popen, url: str, signals: Sequence[int]) -> bool:
    """Return whether a server that was just started becomes healthy."""
    health = SERVICES[name].health
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None and not signals:
        # the worker has no port; it is ready when its log says so
        if responds(url + health) if url else health in log_tail(home, name, LOG_TAIL_BYTES):
            return True
        time.sleep(0.1)
    return False


def _wait_until_unused(home: Path, lease: IO[bytes], process: psutil.Popen, signals: Sequence[int]) -> None:
    """Wait until the servers have no users, this one has ended, or a signal has arrived.

    Without users the lease is locked afterwards: a new user waits for it, and then finds no supervisor.
    """
    used_at = time.monotonic()
    while process.poll() is None and not signals:
        if is_pinned(home) or not try_lock(lease):
            used_at = time.monotonic()
        # the lease is locked now, and stays so: no user can come between this look and the end
        elif time.monotonic() - used_at > LINGER_S:
            return
        else:
            fcntl.flock(lease, fcntl.LOCK_UN)
        time.sleep(0.3)


def _stop(process: psutil.Popen, *, drain_s: float) -> None:
    """Send SIGTERM, then SIGKILL, to the process tree; `drain_s`: time that its children first get to save."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if drain_s:
            _drain(process, drain_s)
        # before the parent ends: afterwards its children belong to init, and are not found any more
        family = process.children(recursive=True)
        if drain_s:
            process.kill()  # it is suspended, so it cannot handle SIGTERM; a worker has nothing to save
        else:
            process.terminate()
        _, alive = psutil.wait_procs([process, *family], timeout=TERM_TIMEOUT_S)
        signal_all(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=TERM_TIMEOUT_S)


def _drain(worker: psutil.Popen, timeout_s: float) -> None:
    """Let a worker's runs save a checkpoint and exit.

    The worker is suspended meanwhile, so that it starts no other run. It gets no SIGTERM, because a worker that exits
    kills its runs.
    """
    worker.suspend()
    # the flows alone: they end their ranks themselves when they get SIGTERM
    runs = worker.children()
    signal_all(runs, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(map(_is_alive, runs)) and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, which the suspended worker cannot reap, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":  # python -m onward.infra.servers.supervisor HOME NAME
    sys.exit(supervise(Path(sys.argv[1]), sys.argv[2]))
