"""The files in `services/` under Onward's home, through which servers and their users find each other.

    lease                 every user of the servers holds a shared flock on it
    pinned                exists from `onward up` to `onward down`; contains the boot id of the machine
    starting              exclusive flock: one process at a time starts servers
    prefect.supervisor    exclusive flock held by the server's supervisor; contains its pid, and the address of the
                          server as soon as it is healthy (the same for mlflow and worker)
    prefect.log           output of the server

The kernel releases a flock when its holder ends, also after `kill -9`, so a lock is never out of date.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from onward.infra.job.process_identity import boot_id
from onward.infra.servers.port_owner import is_ours
from onward.infra.servers.service_definitions import SERVICES

MOST_BYTES = 1 << 16
"""Of the files here that say something of a server."""
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine directly; a proxy that the environment names cannot reach them."""


def directory(home: Path) -> Path:
    directory = home / "services"
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
    """Return what the running supervisor wrote: `pid`, and `url` once its server is healthy; {} without one."""
    # the file outlives its supervisor, and then says nothing about the present
    if not is_supervised(home, name):
        return {}
    try:
        state = json.loads(_content(directory(home) / f"{name}.supervisor"))
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
