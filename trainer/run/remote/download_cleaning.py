"""Delete local copies of remote files that no run needs and that were not used for a while.

CACHE/KEY/a.csv          a copy                  kept if a run that can go on names it, or if it was used lately
CACHE/KEY/train/...      links to such copies    so are the copies
CACHE/.KEY.partial       a part of a file        kept for the next start, a day at least
CACHE/.KEY.lock          empty                   always kept: another process may wait for it
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

DAY_S = 86400.0


@dataclass(frozen=True)
class Cleaned:
    """What was deleted and what is left of a cache."""

    deleted: int
    deleted_bytes: int
    kept: int
    kept_bytes: int


def mark_used(cache: Path, copy: Path) -> None:
    """Note that a copy is used now: the time of change of CACHE/KEY says when it was used last."""
    for key in _keys(cache, copy):
        os.utime(cache / key)


def clean(cache: Path, needed: Collection[Path], days: float) -> Cleaned:
    """Delete what was not used in the last `days`, except the copies in `needed` and those that they link to."""
    if not cache.is_dir():
        return Cleaned(0, 0, 0, 0)
    now = time.time()
    kept_keys = {key for path in needed for key in _keys(cache, path)}
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for entry in sorted(cache.iterdir()):
        if entry.name.endswith(".lock"):
            continue
        # another process may be writing a part of a file
        least_days = max(days, 1.0) if entry.name.startswith(".") else days
        # which it renames when it is whole
        with contextlib.suppress(FileNotFoundError):
            is_kept = entry.name in kept_keys or entry.stat().st_mtime > now - least_days * DAY_S
            size = _bytes(entry)
            if not is_kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            sizes[is_kept].append(size)
    return Cleaned(len(sizes[False]), sum(sizes[False]), len(sizes[True]), sum(sizes[True]))


def _keys(cache: Path, copy: Path) -> set[str]:
    """Return the directories of the cache that a copy is in, and that its links lead to."""
    places = [copy]
    # a copy of a directory has a link for each file, which the cache keeps in a directory of its own
    if copy.is_dir():
        places += [path.resolve() for path in copy.rglob("*") if path.is_symlink()]
    cached = [path for path in places if cache in path.parents]
    return {path.relative_to(cache).parts[0] for path in cached if path.exists()}


def _bytes(entry: Path) -> int:
    paths = entry.rglob("*") if entry.is_dir() else [entry]
    files = (path for path in paths if path.is_file())
    # what a link leads to is counted where it lies
    return sum(path.stat().st_size for path in files if not path.is_symlink())
