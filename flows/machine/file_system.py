"""Whether the file system of Onward's home does what durable files, locks and shards need. Each thing is tried."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from onward.flows.machine.machine_findings import Finding, Level, gib
from onward.trainer.run.durable_files import fsync, write_durably
from onward.trainer.run.home import nearest_existing, onward_home

LEAST_BYTES = 500 << 20
FEW_BYTES = 5 << 30
LEAST_INODES = 1_000
FEW_INODES = 20_000
MOVE_HOME = "set ONWARD_HOME to a directory on a local disk, or on a file system that can"


def home_directory() -> Iterator[Finding]:
    """Find out whether the home belongs to this user alone, and can be written."""
    home = onward_home()
    if not home.exists():
        # the run makes the missing directories below the nearest one that exists
        nearest = nearest_existing(home)
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            yield Finding.ok("home", f"{home} will be made by the first run, for its owner alone")
        else:
            fix = "set ONWARD_HOME to a directory of yours"
            yield Finding.problem("home", f"{home} cannot be made: no right in {nearest}", fix)
        return
    if not home.is_dir():
        fix = "set ONWARD_HOME to a directory"
        yield Finding.problem("home", f"{home} is no directory", fix)
        return
    found = home.stat()
    mode = stat.S_IMODE(found.st_mode)
    # the worst first: each home gets one finding
    if not os.access(home, os.W_OK | os.X_OK):
        fix = f"`chmod u+rwx {home}`, or set ONWARD_HOME to a directory of yours"
        yield Finding.problem("home", f"no right to write to {home} (mode {mode:04o})", fix)
    elif found.st_uid != os.getuid():
        what = f"{home} belongs to user id {found.st_uid}, and you are {os.getuid()}"
        yield Finding.note("home", what, "set ONWARD_HOME to a directory of yours")
    elif mode & 0o077:
        what = f"other users can enter {home} (mode {mode:04o}): data, weights and the login of the servers are in it"
        yield Finding.note("home", what, f"chmod 700 {home}")
    else:
        yield Finding.ok("home", f"{home} is for its owner alone (mode {mode:04o})")


def disk_space() -> Iterator[Finding]:
    """Compare the free bytes and inodes of the home and of the directory for temporary files with what is usual."""
    places = {"disk of the home": onward_home(), "disk of TMPDIR": Path(tempfile.gettempdir())}
    for check, path in places.items():
        place = nearest_existing(path)
        found = os.statvfs(place)
        free = found.f_bavail * found.f_frsize
        total = found.f_blocks * found.f_frsize
        inodes = found.f_favail
        level: Level = "problem" if free < LEAST_BYTES else "note" if free < FEW_BYTES else "ok"
        what = f"{gib(free)} of {gib(total)} are free at {place}"
        if found.f_files:  # else it has no such limit
            what += f", and {inodes:,} inodes"
            few: Level = "problem" if inodes < LEAST_INODES else "note" if inodes < FEW_INODES else "ok"
            # the worse of bytes and inodes decides
            level = max(level, few, key=("ok", "note", "problem").index)
        variable = "TMPDIR" if check.endswith("TMPDIR") else "ONWARD_HOME"
        fix = f"make room (`onward gc`), or set {variable} to a directory on a larger disk; `onward plan` says what a "
        fix += "run writes"
        yield Finding(check=check, level=level, what=what, fix="" if level == "ok" else fix)


def file_system() -> Iterator[Finding]:
    """Try each feature in a directory of its own in the home."""
    parent = nearest_existing(onward_home())
    try:
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=".doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        what = f"no directory can be made in {parent}: {error.strerror}"
        yield Finding.problem("file system", what, MOVE_HOME)
        return
    works = []
    with folder as name:
        for what, (level, needed, attempt) in FEATURES.items():
            try:
                wrong = attempt(Path(name))
            except OSError as error:
                wrong = str(error.strerror)
            if wrong:
                said = f"no {what} in {parent}: {wrong}; {needed}"
                yield Finding(check="file system", level=level, what=said, fix=MOVE_HOME)
            else:
                works.append(what)
    if works:
        what = f"at {parent} works: {', '.join(works)}"
        yield Finding.ok("file system", what)


def _fsync(folder: Path) -> str:
    write_durably(folder / "durable", bytes(4096))
    fsync(folder)
    return ""


def _lock(folder: Path) -> str:
    # two descriptors of one file in this process stand for two processes: flock belongs to the open file
    with (folder / "lock").open("wb") as one, (folder / "lock").open("wb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "two processes would get the same lock"
    return ""


def _hard_link(folder: Path) -> str:
    (folder / "linked").write_text("x")
    # some file systems make a copy in place of a link, without an error
    os.link(folder / "linked", folder / "link")
    return "" if (folder / "link").stat().st_nlink == 2 else "it is a copy"


FEATURES: dict[str, tuple[Level, str, Callable[[Path], str]]] = {
    "fsync of files and directories": ("problem", "checkpoints would not survive a power cut", _fsync),
    "flock": ("problem", "two processes could train in one run directory", _lock),
    "hard links": ("problem", "the login of Onward's own servers is made so", _hard_link),
}
"""What is tried -> level if it does not work, what needs it, and the attempt: it returns what is wrong, or raises."""
