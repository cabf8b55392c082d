"""The list of runs, with an index of those that do not run: describing one again takes some milliseconds.

    HOME/runs.index     a line with the format and a checksum, then JSON: directory -> [stamp, status]

An entry counts as long as its run directory has the same stamp, the times at which what decides a status was changed.
A run that runs has no entry, nor one whose flow was killed: why depends on the disk and on the last start of the
machine. The index is a cache: without it, or if it is damaged, all entries are made again. Of two
processes that write it at once one wins, and the entries of the other are made again by the next command.

Importing this module loads the standard library alone: `onward runs` needs nothing else if all runs have an entry.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.run.home import onward_home

State: TypeAlias = Literal["running", "exported", "trained", "stopped", "failed", "interrupted", "damaged"]
Status: TypeAlias = dict[str, Any]
"""A RunStatus (run_status.py) as JSON."""
Entry: TypeAlias = tuple[list[int], Status]
FORMAT = 2
"""Another number, in a version whose RunStatus has other fields, lets all entries be made again."""
BEGUN = ("identity.json", "config.json")
"""Files of which a run directory has one: it is known by name, or has settings with which it can go on."""
STAMPED = ("", "lock", "ending.json", *BEGUN, "events.jsonl", "attempts", "errors", "checkpoints", "export")
"""What decides the status of a run that does not run. A flow that works on it writes its lock first, and other records
are renamed into the directory itself."""
UNSETTLED = ("running", "interrupted")
"""States of runs that have no entry."""
SETTLED_S = 2.0
"""Age of the newest change from which on an entry is kept: file systems do not tell two changes in one moment apart."""


def listed_runs() -> list[tuple[str, Status]]:
    """Return the directory's name and the status of each run under the home, newest first; damaged ones come last."""
    home = onward_home()
    known = _read(home)
    entries = {}
    unsettled = []
    for name in _directories(home / "runs"):
        stamp = _stamp(f"{home}/runs/{name}")
        if stamp is None:
            continue
        # nothing has changed since the entry was made, so the records need not be read
        if (entry := known.get(name)) and entry[0] == stamp:
            entries[name] = entry
            continue
        status = _described(home / "runs" / name)
        # such a status changes without a change of the directory
        if status["state"] in UNSETTLED or time.time_ns() - max(stamp[1:]) < SETTLED_S * 1e9:
            unsettled.append((name, status))
        else:
            entries[name] = (stamp, status)
    if entries != known:
        _write(home, entries)
    # sorted twice: by name, so that runs of the same moment keep a fixed order
    found = sorted([*((name, status) for name, (_, status) in entries.items()), *unsettled])
    return sorted(found, key=lambda each: str(each[1]["created_at"]), reverse=True)


def _directories(runs: Path) -> list[str]:
    """Return the names of the directories of runs; a name with a dot in front is a half deleted one."""
    try:
        return sorted(each.name for each in os.scandir(runs) if not each.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stamp(folder: str) -> list[int] | None:
    """Return the inode of a directory and the times of its changes; None if it is no run that has begun."""
    times = []
    for name in STAMPED:
        try:
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116 - thousands of times
            times.append(found.st_mtime_ns)
        except OSError:
            times.append(0)
        if not name:
            inode = found.st_ino if times[0] else 0
    begun = any(times[STAMPED.index(name)] for name in BEGUN)
    return [inode, *times] if inode and begun else None


def _described(folder: Path) -> Status:
    # imports what a plain list of indexed runs does not need
    from onward.flows.run_state.run_status import described_run
    from onward.trainer.run.directory import RunDir

    return described_run(RunDir(folder)).model_dump(mode="json")


def _read(home: Path) -> dict[str, Entry]:
    """Return the entries of the index; {} if there is none, or if it is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        head, _, content = read_bounded(home / "runs.index", RECORD_BYTES).partition(b"\n")
        if head == _head(home, content):
            return {name: (stamp, status) for name, (stamp, status) in json.loads(content).items()}
    return {}


def _write(home: Path, entries: dict[str, Entry]) -> None:
    """Replace the index. It is no loss if that is not possible, or if a power failure damages it."""
    content = json.dumps(entries, separators=(",", ":")).encode()
    # renamed without fsync: a damaged index is made again
    partial = home / f".runs.index.{os.getpid()}.partial"
    with contextlib.suppress(OSError):
        try:
            partial.write_bytes(_head(home, content) + b"\n" + content)
            partial.replace(home / "runs.index")
        finally:
            partial.unlink(missing_ok=True)


def _head(home: Path, content: bytes) -> bytes:
    """Return the first line of the index: the statuses name files below the home."""
    return json.dumps(["onward runs", FORMAT, str(home), zlib.crc32(content)]).encode()
