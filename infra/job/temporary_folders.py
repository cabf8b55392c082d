"""Directories in TMPDIR that are removed with their owner, or by the next command if the owner was killed.

    TMPDIR/onward-forks-x1y2/owner.lock     a flock on it is held by the owner, and by who inherits the descriptor
    TMPDIR/onward-TAG/owner.lock            that of an MPI job, which its processes use also after the flow's end

The kernel gives the lock back however a process ends. A directory is removed by others only if it belongs to this user,
if its lock can be taken, and, that of a job, if no process of the job is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from onward.infra.job.job_guard import living_tags

LOCK = "owner.lock"
MOST_TRIES = 5
"""Times that a new directory may be taken for an abandoned one, in the moment before it is locked."""
UNLOCKED_S = 60.0
"""Longest time from the making of a directory to its lock."""
_held: dict[Path, int] = {}
"""Directory of this process -> the descriptor of its lock."""


@contextlib.contextmanager
def owned_folder(prefix: str) -> Iterator[Path]:
    """Yield an empty directory, in a new one with a name that begins with `prefix`; remove both at the end."""
    folder = make(lambda: Path(tempfile.mkdtemp(prefix=prefix)))
    try:
        inner = folder / "files"  # the lock is no file of whoever asks
        inner.mkdir()
        yield inner
    finally:
        remove(folder)


def make(created: Callable[[], Path]) -> Path:
    """Return a directory that `created` has just made, as one of this process. Raises OSError."""
    for _ in range(MOST_TRIES):
        # between making and locking another command may take it for abandoned and remove it: then a new one is made
        folder = created()
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # the lock was taken, but of a file that is removed meanwhile it protects nothing
            if (folder / LOCK).exists():
                _held[folder] = descriptor
                return folder
            os.close(descriptor)
        except FileNotFoundError:
            continue
        except OSError:  # it takes no lock, as on a full disk
            shutil.rmtree(folder, ignore_errors=True)
            raise
    raise FileNotFoundError(f"{folder} was removed {MOST_TRIES} times by another process")


def lock_of(folder: Path) -> int:
    """Return the descriptor of the lock of a directory of this process, for a process that inherits it."""
    return _held[folder]


def remove(folder: Path) -> None:
    """Remove a directory of this process; what cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def abandoned() -> list[Path]:
    """Return the directories of this user whose owners were killed."""
    return [folder for folder in _candidates() if _if_abandoned(folder, delete=False)]


def remove_abandoned() -> list[Path]:
    """Remove the directories of this user whose owners were killed; return them."""
    return [folder for folder in _candidates() if remove_if_abandoned(folder)]


def remove_if_abandoned(folder: Path) -> bool:
    """Remove a directory if its owner was killed; return whether it was."""
    return _if_abandoned(folder, delete=True)


def _candidates() -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(Path(tempfile.gettempdir()).glob("onward-*"))
    return []


def _if_abandoned(folder: Path, *, delete: bool) -> bool:
    """Return whether a directory is abandoned, after it was removed if asked for."""
    with contextlib.suppress(OSError):
        # a link could lead into a directory of somebody else
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        if not (folder / LOCK).exists():
            # its owner was killed before it had a lock
            is_left = time.time() - found.st_mtime >= UNLOCKED_S and not any(folder.iterdir())
            if is_left and delete:
                folder.rmdir()
            return is_left
        # TMPDIR is open to every account, which may have put a link there
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # raises BlockingIOError, an OSError, while the owner lives
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tag = re.fullmatch(r"onward-([0-9a-f]{32})", folder.name)
            # the flow that held the lock is gone, but ranks that it started may still write here
            if tag and tag[1] in living_tags():
                return False
            if delete:
                _delete(folder)
            return True
        finally:
            os.close(descriptor)
    return False


def _delete(folder: Path) -> None:
    """Remove a directory, its lock last: a removal that is killed goes on with the next one."""
    for entry in list(os.scandir(folder)):
        if entry.name == LOCK:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
    (folder / LOCK).unlink()
    folder.rmdir()
