"""Record why something failed although the disk is full: space for the record is taken at the start.

    at the start     attempts/001/rank-00001.reserved   64 KiB of zeros, on the disk
    on a failure     the error is written over the zeros, and the file is renamed to errors/001-rank-00001.json
    without one      the file is deleted

The blocks of the file exist before the disk fills up, and writing over them takes no further space.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.durable_files import fsync, write_durably

RESERVED_BYTES = 1 << 16
"""More than an error with its traceback has."""
NO_SPACE = "No space left on device"
"""What every library says of a full disk, but SQLite."""
FULL_BYTES = 1 << 16
"""A disk with less free space is full."""


def reserve(path: Path) -> None:
    """Take the space of a record that is written when everything else has failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(bytes(RESERVED_BYTES))
        file.flush()
        os.fsync(file.fileno())


def write_reserved(path: Path, record: BaseModel, reserved: Path) -> None:
    """Write a record durably, in the space that `reserved` has taken; like any other file if that is gone."""
    content = record.model_dump_json(indent=2).encode()
    try:
        file = reserved.open("r+b")
    except OSError:
        write_durably(path, content)
        return
    with file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    reserved.replace(path)
    fsync(path.parent)


# -- a full disk


def disk_full(error: BaseException, place: Path) -> RuntimeUnavailable | None:
    """Return the error to raise instead of one that a full disk has caused; None for any other error.

    place: the directory that was written to.
    """
    if not any(_says_full(each) for each in _chain(error)):
        return None
    names = [name for each in _chain(error) if isinstance(each, OSError) and isinstance(name := each.filename, str)]
    return RuntimeUnavailable(f"{no_space(Path(names[0]) if names else place)}; make room, then go on")


def no_space(path: Path) -> str:
    """Return "no space is left on the disk of PATH", with the numbers."""
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    free, usage = os.statvfs(place), shutil.disk_usage(place)
    inodes = f", {free.f_favail:,} inodes are free" if free.f_files and not free.f_favail else ""
    return f"{NO_SPACE}: the disk of {path} has {usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB free{inodes}"


def is_full(place: Path) -> bool:
    """Return whether the disk of an existing directory has no room for a further file."""
    free = os.statvfs(place)
    return free.f_bavail * free.f_frsize < FULL_BYTES or (free.f_files > 0 and not free.f_favail)


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # of native code, which has no `errno`: safetensors, Arrow, SQLite
    return any(text in str(error) for text in (NO_SPACE, "database or disk is full"))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it followed from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
