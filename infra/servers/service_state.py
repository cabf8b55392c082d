"""The files in `services/HOST/` under Onward's home, through which servers and their users of one host find each other.

    lease                 every user of the servers holds a shared flock on it
    pinned                exists from `onward up` to `onward down`; contains the boot id of the machine
    starting              exclusive flock: one process at a time starts servers
    prefect.supervisor    exclusive flock held by the server's supervisor; contains its pid, and the address of the
                          server as soon as it is healthy (the same for mlflow and worker)
    prefect.log           output of the server

The kernel releases a flock when its holder ends, also after `kill -9`, so a lock is never out of date.

A home may be on a file system that several hosts share. Each has servers of its own, because they listen on 127.0.0.1.
Prefect's database cannot be written by two hosts (SQLite's write-ahead log is in the memory of one), so it belongs to
the server that holds `HOME/prefect/server.lock`; the server of another host has one beside its files here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import time
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from onward.infra.job.process_identity import boot_id
from onward.infra.servers.port_owner import is_ours
from onward.infra.servers.service_definitions import SERVICES

MOST_BYTES = 1 << 16
"""Of the files here that say something of a server."""
LEAVING_S = 30.0
"""Longest wait for a server of this host that is just ending."""
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine directly; a proxy that the environment names cannot reach them."""


@functools.cache
def this_host() -> str:
    """Return a name of this host and of its network, in which 127.0.0.1 means the same to all processes.

    Several hosts may have one name, such as `localhost`; a container has its own network on the kernel of its host.
    """
    network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - a link whose target is no path
    return f"{socket.gethostname()}-{zlib.crc32(f'{boot_id()} {network}'.encode()):08x}"


def directory(home: Path) -> Path:
    directory = home / "services" / this_host()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def open_lock_file(home: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file of the services directory for locking; closing it releases the lock."""
    with (directory(home) / name).open("a+b") as file:
        yield file


def try_lock(file: IO[bytes]) -> bool:
    """Take an exclusive lock on an open file without waiting; return whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def prefect_database(home: Path) -> Iterator[tuple[Path, str, list[int]]]:
    """Yield the database for a Prefect server of this host, the host that has the home's, and files that lock it.

    The host is "" for the home's own database, which is locked as long as a process has these files open.
    """
    common = home / "prefect"
    with contextlib.ExitStack() as stack:
        try:
            common.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((common / "server.lock").open("a+b"))
        except OSError:  # the server cannot write there either, and its log will say why
            yield common / "prefect.db", "", []
            return
        holder = {"key": this_host()}
        deadline = time.monotonic() + LEAVING_S
        while not (is_ours_now := try_lock(lock)) and holder.get("key") == this_host() and time.monotonic() < deadline:
            time.sleep(0.1)  # a server of this host, whose supervisor was killed, is just ending
            holder = _parsed(_content(common / "server.lock"))
        if is_ours_now:
            write_state(lock, {"host": socket.gethostname(), "key": this_host()})
            yield common / "prefect.db", "", [lock.fileno()]
        else:
            yield directory(home) / "prefect.db", str(holder.get("host") or "another host"), []


@contextlib.contextmanager
def lock_database(database: Path | None) -> Iterator[None]:
    """Hold a lock while a new database gets its tables: when two processes create them at once, both fail."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- pinned: the servers run without users


def pin(home: Path) -> None:
    """Let the servers run without users until `unpin` or the next start of the machine."""
    (directory(home) / "pinned").write_text(boot_id())


def unpin(home: Path) -> None:
    (directory(home) / "pinned").unlink(missing_ok=True)


def is_pinned(home: Path) -> bool:
    return _content(directory(home) / "pinned").decode(errors="replace") == boot_id()


def _content(path: Path) -> bytes:
    """Return the first bytes of a small file; b"" without one. Opening a FIFO would wait for ever."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(MOST_BYTES)


# -- the supervisor of one server


def is_supervised(home: Path, name: str) -> bool:
    """Return whether a supervisor of this server is running."""
    path = directory(home) / f"{name}.supervisor"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        # a lock that can be taken has no holder; closing the file gives it back
        return not try_lock(file)


def write_state(file: IO[bytes], state: Mapping[str, Any]) -> None:
    file.truncate(0)
    # the file is open for appending, so this writes from its beginning
    file.write(json.dumps(state).encode())
    file.flush()


def read_state(home: Path, name: str) -> dict[str, Any]:
    """Return what the running supervisor wrote: `pid`, and `url` once its server is healthy; {} without one.

    Of Prefect's also `beside`: the host that has the home's database, if it is another one. `database` is that of a
    database server, without a password; "" = a file of the home.
    """
    # the file outlives its supervisor, and then says nothing about the present
    if not is_supervised(home, name):
        return {}
    return _parsed(_content(directory(home) / f"{name}.supervisor"))


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError):
        return {}  # write_state is between its truncate and its write
    return state if isinstance(state, dict) else {}


def healthy_url(home: Path, name: str) -> str | None:
    """Return the address of a healthy server ('' for one that does not listen), else None."""
    url = read_state(home, name).get("url")
    # by whose program it is, too: another account may have taken the port of a server that has died
    answers = url and is_ours(url) and responds(url + SERVICES[name].health)
    return url if url == "" or answers else None


def responds(url: str) -> bool:
    """Return whether an address of this machine answers with status 200."""
    try:
        with _WITHOUT_PROXY.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def log_tail(home: Path, name: str, size: int) -> str:
    """Return the last `size` bytes of a server's log as text."""
    path = directory(home) / f"{name}.log"
    return path.read_bytes()[-size:].decode(errors="replace") if path.exists() else ""
