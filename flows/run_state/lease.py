"""Renew the lock of a run, and free one that its host renews no longer, so that another host can take the run over.

    a process ends                  the kernel releases its flock at once
    a host dies, freezes, or is     on a network file system the flock may stay for minutes, or for ever: the time of
    cut off                         the file is not touched for LEASE_S, and another host puts a new file in its place
    such a host comes back          it finds another file in the place of its own, and ends with status 72

The number of the attempt fences the ranks, too: those of an older attempt write no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from onward.infra.job.process_identity import this_process
from onward.infra.job.slurm_jobs import batch_job
from onward.infra.servers.service_state import try_lock
from onward.trainer.errors import Fenced

log = logging.getLogger(__name__)

RENEW_S = 10.0
LEASE_S = 60.0
"""How long a lock of another host may not be renewed. Only changes of its time count: the clocks of hosts differ."""
LOOK_S = 1.0
Stamp = tuple[int, int]
"""Which file it is, and when it was renewed."""


@contextlib.contextmanager
def renewed(lock: IO[bytes], path: Path) -> Iterator[None]:
    """Sign a lock that this process holds, and renew it inside. The process ends when another host has replaced it."""
    _sign(lock)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(lock, path, ended), name=f"lease of {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # the caller closes the lock next, and the kernel may give its number to another file
        thread.join()


def _sign(lock: IO[bytes]) -> None:
    """Write into a lock which process holds it."""
    with contextlib.suppress(OSError):  # on a full disk only a status lacks it
        # the former holder may have had a longer text
        lock.truncate(0)
        lock.write(json.dumps({**this_process(), "slurm_job": batch_job(), "renewed_s": RENEW_S}).encode())
        lock.flush()
        os.utime(lock.fileno())


def _renew(lock: IO[bytes], path: Path, ended: threading.Event) -> None:
    while True:
        with contextlib.suppress(OSError):  # of a file system that does not answer just now
            if is_replaced(lock, path):
                # not printed on stderr, which is the file flow.log during a run
                log.error("another host has taken %s over: this process ends", path)
                # at once: whatever it would write now belongs to the other one. The guard of a job ends the ranks
                os._exit(Fenced.exit_code)
            # this changes st_ctime alone: st_mtime says since when the lock is held
            found = os.fstat(lock.fileno())
            os.utime(lock.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        if ended.wait(RENEW_S):
            return


def is_replaced(lock: IO[bytes], path: Path) -> bool:
    """Return whether another file is in the place of a lock. Raises OSError of a file system that does not answer."""
    try:
        return os.fstat(lock.fileno()).st_ino != path.stat().st_ino
    except OSError as error:
        # what NFS says of an open file that another host has replaced
        if error.errno == errno.ESTALE:
            return True
        raise


def free_abandoned(paths: Sequence[Path]) -> list[Path]:
    """Free those locks that another host holds and does not renew, and return them. Takes LEASE_S if there are any."""
    watched = {path: stamp for path in paths if (stamp := _stamp_of_other_host(path))}
    # chosen before the wait: a host that has made such a file by now and lives replaces the lock meanwhile
    claims = {path: _next_claim(path, stamp) for path, stamp in watched.items()}
    deadline = time.monotonic() + LEASE_S
    while watched and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        watched = {path: stamp for path, stamp in watched.items() if _stamp_of_other_host(path) == stamp}
    return [path for path, stamp in watched.items() if _replace(path, stamp, claims[path])]


def _stamp_of_other_host(path: Path) -> Stamp | None:
    """Return the stamp of a lock that another host holds; None for any other one."""
    me = this_process()
    try:
        # on NFS only a file that is open for writing can be locked
        with path.open("r+b") as lock:
            holder = json.loads(lock.read(1 << 16))
            found = os.fstat(lock.fileno())
            # of this host the kernel knows; earlier versions renew nothing
            is_here = (holder["host"], holder["boot"]) == (me["host"], me["boot"])
            if is_here or not holder.get("renewed_s") or try_lock(lock):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found.st_ino, found.st_ctime_ns


def _next_claim(path: Path, stamp: Stamp) -> Path:
    """Return a file beside an abandoned lock that no host has made yet: who makes it may replace the lock."""
    names = (path.with_name(f".{path.name}-{stamp[0]}-{stamp[1]}-{number}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _replace(path: Path, stamp: Stamp, claim: Path) -> bool:
    """Put a new, free lock in the place of an abandoned one; return whether this process has done it."""
    try:
        # of several hosts that find it abandoned, one makes this file
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    # its holder may have come back, or another host has put a new file there
    if _stamp_of_other_host(path) != stamp:
        claim.unlink(missing_ok=True)
        return False
    try:
        claim.replace(path)
    except FileNotFoundError:
        # this process stood still for so long that another one has taken the run over, and removed what was left
        return False
    # of hosts that died before they could replace it
    for left in path.parent.glob(f".{path.name}-{stamp[0]}-{stamp[1]}-*"):
        left.unlink(missing_ok=True)
    return True
