"""The supervisor process of one server: starts it, keeps it running while it has users, and stops it.

    onward run (A) --shared lock--+
                                  +--> services/lease <--tries the exclusive lock every 0.3 s-- supervisor
    onward run (B) --shared lock--+                                                                |
                                                                                          starts and stops
                                                                                                   v
    user of the server --reads pid and address--> services/prefect.supervisor              prefect server

A server that ends by itself while it has users is started again on the same port and the same database, so that its
users find it where it was; after RESTARTS ends within RESTART_PERIOD_S the supervisor gives up.

A user of the servers holds a shared lock on `services/lease` (a flock). The supervisor can take the exclusive lock only
when there is no user left; it then waits LINGER_S and tries again before it stops the server. It stops with the lock
held, so a new user waits until the server is gone and then starts another one. `services/pinned` (`onward up`) keeps
the server running without users. Because the kernel releases the locks of killed processes, no server stays behind
after `kill -9` of its users; a server whose supervisor is killed gets SIGTERM from the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from onward.infra.port_owner import owner_of
from onward.infra.service_definitions import SERVICES, environment
from onward.infra.service_state import (
    directory,
    healthy_url,
    is_pinned,
    log_tail,
    open_lock_file,
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
RESTARTS = 5
RESTART_PERIOD_S = 600.0
PORT_TIMEOUT_S = 30.0
"""Longest time until the port of a server that has ended is free again."""
TERM_TIMEOUT_S = 5.0
"""From SIGTERM to SIGKILL."""
LOG_TAIL_BYTES = 1 << 16


def supervise(home: Path, name: str, port: int = 0) -> int:
    """Run one server until it has no users, or SIGTERM arrives; return the exit status of this process.

    port: that of a server which users still look for; 0 = the usual one, or any if that is in use.
    """
    with open_lock_file(home, f"{name}.supervisor") as state:
        if not try_lock(state):
            return 0  # another supervisor was started at the same time and was first
        write_state(state, {"pid": os.getpid()})
        stop_signals: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
        ends: list[float] = []
        while True:
            started = _start(home, name, stop=lambda: bool(stop_signals), port=port)
            if started is None:
                return 1
            process, url = started
            write_state(state, {"pid": os.getpid(), "url": url})
            with _wait_until_unused(home, process, stop=lambda: bool(stop_signals)) as is_unused:
                if is_unused or stop_signals or process.poll() is None:
                    _stop(process, drain_s=DRAIN_TIMEOUT_S if name == "worker" else 0.0)
                    return 0
            ends = [at for at in (*ends, time.monotonic()) if at > time.monotonic() - RESTART_PERIOD_S]
            if len(ends) > RESTARTS:
                return 1
            port = int(url.rpartition(":")[2]) if url else 0
            _clear(home, name, process)
            _sleep(2.0 ** (len(ends) - 1) - 1.0, stop=lambda: bool(stop_signals))


def _clear(home: Path, name: str, process: psutil.Popen) -> None:
    """Kill what a server that has ended left behind, and keep the log of how it ended."""
    for other in psutil.process_iter() if name != "worker" else ():  # a worker's runs go on without it
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(other.pid) == process.pid:
                other.kill()
    log = directory(home) / f"{name}.log"
    log.replace(log.with_suffix(".log.before"))


def _sleep(seconds: float, *, stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop():
        time.sleep(0.1)


def _start(home: Path, name: str, *, stop: Callable[[], bool], port: int = 0) -> tuple[psutil.Popen, str] | None:
    """Start the server and wait until it is healthy; return its process and address, or None when it failed.

    port: the one at which its users look for it; 0 = the usual one. Another one if that is in use.
    """
    service = SERVICES[name]
    # Another program may take the port between `free_port` and the server's bind: try again with any free port.
    for attempt in range(3):
        if port:
            _wait_for_port(port, stop=stop)
            chosen = free_port(port)  # another one if somebody else has taken it meanwhile
        else:
            chosen = free_port(service.port if attempt == 0 else 0) if service.port else 0
        process = _launch(home, name, chosen)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None and not stop():
            if chosen:
                ready = _serves(process, chosen, service.health)
            else:
                ready = service.health in log_tail(home, name, LOG_TAIL_BYTES)
            if ready:
                return process, f"http://127.0.0.1:{chosen}" if chosen else ""
            time.sleep(0.1)
        exited = process.poll() is not None
        _stop(process, drain_s=0.0)
        if not exited or "already in use" not in log_tail(home, name, LOG_TAIL_BYTES):
            return None  # "address already in use" is the operating system's, "Port N is already in use" Prefect's
    return None


def _wait_for_port(port: int, *, stop: Callable[[], bool]) -> None:
    """Wait until a port is free: the server that had it may be ending just now. No other account gives it back."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while free_port(port) != port and time.monotonic() < deadline and not stop():
        if owner_of(("127.0.0.1", port)) not in (None, os.geteuid()):
            return
        time.sleep(0.1)


def _launch(home: Path, name: str, port: int) -> psutil.Popen:
    own_url = f"http://127.0.0.1:{port}" if name == "prefect" else (healthy_url(home, "prefect") or "")
    with (directory(home) / f"{name}.log").open("wb") as log:
        return psutil.Popen(
            SERVICES[name].command(home, port),
            env={**os.environ, **environment(home, prefect_url=own_url)},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_terminate_with_parent,
        )


def _terminate_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends. Runs between fork and exec."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    # The parent may have ended before prctl; then no signal will come.
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def _serves(process: psutil.Popen, port: int, health: str) -> bool:
    """Return whether this process, and not another program on the same port, answers the health check."""
    with contextlib.suppress(psutil.Error):
        family = [process, *process.children(recursive=True)]
        listening = any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for member in family
            for connection in member.net_connections("tcp")
        )
        return listening and responds(f"http://127.0.0.1:{port}{health}")
    return False


@contextlib.contextmanager
def _wait_until_unused(home: Path, process: psutil.Popen, *, stop: Callable[[], bool]) -> Iterator[bool]:
    """Wait until the server is to be stopped or has ended, then run the body with whether nobody uses it.

    New users wait until the body has ended if nobody uses the server.
    """
    used_at = time.monotonic()
    is_unused = False
    with open_lock_file(home, "lease") as lease:
        while process.poll() is None and not stop():
            if is_pinned(home) or not try_lock(lease):
                used_at = time.monotonic()
            elif time.monotonic() - used_at > LINGER_S:
                is_unused = True
                break  # with the lock held: a new user waits for it, and then finds no supervisor
            else:
                fcntl.flock(lease, fcntl.LOCK_UN)
            time.sleep(0.3)
        # of a server that has ended by itself
        is_unused = is_unused or (not is_pinned(home) and try_lock(lease))
        yield is_unused


def _stop(process: psutil.Popen, *, drain_s: float) -> None:
    """Send SIGTERM, then SIGKILL, to the process tree; `drain_s`: time that its children first get to save."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if drain_s:
            _drain(process, drain_s)
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


def free_port(preferred: int) -> int:
    """Return the preferred port if it is free, else any free port (`preferred` 0: any)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port(0)
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # python -m onward.infra.supervisor HOME NAME PORT
    sys.exit(supervise(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
