"""Decide whether a disk is what an error is about, and say in one sentence what is wrong with it and what to do.

    an error in this process    storage_error   by its number, or by the text of a library that gives none
    one in another process      its record is the error that `storage_error` has made there
    a process without a record, a server that only says that it failed
                                storage_cause   looks at the disks that they write to

A full disk, a quota, a lack of inodes, a read-only file system and a device that fails are one class of error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onward.trainer.errors import ConfigError, OnwardError, StorageUnavailable
from onward.trainer.run.home import onward_home
from onward.trainer.run.outcomes.ending_kinds import MAKE_ROOM, has_own_cause

FULL_BYTES = 1 << 16
"""A disk with less free space is full."""
TO_DO: Mapping[int, str] = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: f"{MAKE_ROOM}, or ask for a larger quota",
    errno.EROFS: "mount it for writing",
    errno.EIO: "repair the disk or its connection",
    errno.ESTALE: "mount it again",
    errno.EFBIG: "raise the limit of the size of files (`ulimit -f`)",
}
"""Number of an error of the disk -> what to do."""
CONTINUE = "then `onward resume`, or the command again"
OTHER_TEXTS: Mapping[str, int] = {
    "Stale NFS file handle": errno.ESTALE,
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
}
"""What SQLite and old systems say in place of the system's own text."""
_TEXTS = {**{os.strerror(number): number for number in TO_DO}, **OTHER_TEXTS}
_PATTERN = re.compile(
    f"(?P<text>{'|'.join(map(re.escape, _TEXTS))})(?:: (?:'(?P<file>/[^'\n]+)'(?: -> '(?P<to>/[^'\n]+)')?"
    "|the disk of (?P<path>/\\S+)))?"
)
"""Such a text, and what Python, or a sentence of this module, names behind it."""


def says_storage(text: str) -> bool:
    """Return whether a text, such as the recorded error of a rank, is about a disk."""
    return _PATTERN.search(text) is not None


def storage_error(error: BaseException | str, place: Path, *, needed: int = 0) -> StorageUnavailable | None:
    """Return the error to raise in place of one that a disk has caused, or of its text; None for any other.

    place: the directory that was written to, if the error names no file. needed: bytes; 0 = not known.
    """
    found = _of_chain(error) if isinstance(error, BaseException) else _of_text(error)
    if isinstance(found, StorageUnavailable) or found is None:
        return found
    number, name = found
    return _error(number, Path(name) if name else place, needed)


def storage_cause(error: BaseException | str, *places: Path) -> StorageUnavailable | None:
    """Return as `storage_error`; of an error that does not say why, what is wrong with a disk that it may depend on.

    places: directories, the likeliest first; those of Onward's home and of temporary files follow.
    """
    if has_own_cause(type(error).__name__):  # before the disks are tried, each with a file
        place = Path.cwd()
        with contextlib.suppress(ConfigError):  # ONWARD_HOME is no directory, which may be this very error
            place = places[0] if places else onward_home()
        return storage_error(error, place)
    number, place = _broken_place(places)
    # the error may name the disk itself, and with the file
    if own := storage_error(error, place):
        return own
    if not number:
        return None
    first = str(error).partition("\n")[0]
    if isinstance(error, BaseException):  # an error of a library has a text for programmers
        first = type(error).__name__ + (f": {first}" if isinstance(error, OnwardError) else "")
    return StorageUnavailable(f"{_error(number, place)} (it follows: {first})")


def broken_storage(*places: Path) -> StorageUnavailable | None:
    """Return why the disk of a directory takes no file; None if all do. `places`: see `storage_cause`."""
    number, place = _broken_place(places)
    return _error(number, place) if number else None


@contextlib.contextmanager
def storage_explained(*places: Path) -> Iterator[None]:
    """Raise StorageUnavailable in place of an error inside that a disk has caused. `places`: see `storage_cause`."""
    try:
        yield
    except Exception as error:
        if (storage := storage_cause(error, *places)) and storage is not error:
            raise storage from error
        raise


def shows_broken_storage(place: Path) -> StorageUnavailable | None:
    """Return what is wrong with the disk of a directory by what it says of itself; nothing is written there."""
    number = _look(place, writes=False)
    return _error(number, place) if number else None


def storage_problem(folder: Path, needed: int = FULL_BYTES) -> str:
    """Return why no file of `needed` bytes could be written to a folder, or any to where a run writes beside it, and
    what to do; "" if they could."""
    try:
        _probe(folder)
        # the probe finds errors of the device, and the free bytes whether a checkpoint would fit
        free = _free(folder)
    except OSError as error:
        known = _number(error)
        return _advised(known, folder, needed) if known else f"{folder} cannot be written: {error.strerror}"
    if free < needed:
        return _advised(errno.ENOSPC, folder, needed)
    number, place = _broken_place(())
    return _advised(number, place, 0) if number else ""


# -- what an error says


def _of_chain(error: BaseException) -> StorageUnavailable | tuple[int, str] | None:
    """Return the number of the disk's error in a chain of errors, and the file that it names, or ""."""
    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, StorageUnavailable):
            return each
    for each in chain:
        if isinstance(each, OSError) and (number := _number(each)):
            name = each.filename2 or each.filename  # of two files, the one that is written
            return number, os.fspath(name) if isinstance(name, str | Path) else ""
    # native code has no `errno`: safetensors, Arrow, SQLite. What an own error quotes, such as a row, proves nothing
    texts = [str(each) for each in chain if not has_own_cause(type(each).__name__)]
    return None if has_own_cause(type(error).__name__) else _of_text("\n".join(texts))


def _of_text(text: str) -> tuple[int, str] | None:
    found = _PATTERN.search(text)
    if found is None:
        return None
    names = (found["to"], found["file"], found["path"])
    return _TEXTS[found["text"]], next(filter(None, names), "")


def _number(error: BaseException) -> int:
    """Return the number of an error of the operating system that is about a disk; 0 for any other error."""
    if not isinstance(error, OSError) or error.errno is None or error.errno not in TO_DO:
        return 0
    # not of a file that is refused for its size (trainer/bounds.py)
    return int(error.errno) if error.strerror == os.strerror(error.errno) else 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it followed from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# -- what a disk looks like


def _own_places() -> Iterator[Path]:
    """Yield the directories that a run and its servers write to beside their own."""
    home = onward_home()
    yield from (home, home / "prefect", home / "mlflow", home / "shards")
    # not `tempfile.gettempdir`, which takes another directory in place of a full one
    yield Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def _broken_place(places: Sequence[Path]) -> tuple[int, Path]:
    """Return the first directory whose disk takes no file, behind the number of what is wrong; (0, the first one)."""
    all_places = (*places, *_own_places())
    found = ((number, place) for place in all_places if (number := _look(place)))
    return next(found, (0, all_places[0]))


def _look(place: Path, *, writes: bool = True) -> int:
    """Return the number of what is wrong with the disk of a directory; 0 if it takes a small file, or seems to."""
    folder = _existing(place)
    try:
        # from the cheapest look to the one that writes
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return errno.EROFS
        if _is_full(folder):
            return errno.ENOSPC
        if writes and folder == place and folder.is_dir():
            _probe(folder)
    except OSError as error:
        return _number(error)
    return 0


def _probe(folder: Path) -> None:
    """Write a small file to a directory and remove it. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
    try:
        os.write(descriptor, bytes(4096))
        # without it a full or broken disk shows only later, when the kernel writes
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _is_full(folder: Path) -> bool:
    return _free(folder) < FULL_BYTES or _without_inodes(folder)


def _without_inodes(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = os.statvfs(_existing(path))
        return found.f_files > 0 and not found.f_favail
    return False


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if _exists(each))


def _exists(path: Path) -> bool:
    with contextlib.suppress(OSError):  # of a device that fails
        return path.exists()
    return False


# -- the sentence


def _error(number: int, path: Path, needed: int = 0) -> StorageUnavailable:
    return StorageUnavailable(f"{_advised(_verified(number, path), path, needed)}, {CONTINUE}")


def _advised(number: int, path: Path, needed: int) -> str:
    """Return what is wrong with the disk of a path, and what to do."""
    # without inodes it is the number of files that counts, and not their size
    to_do = "delete files" if number == errno.ENOSPC and _without_inodes(path) else TO_DO[number]
    return f"{_sentence(number, path, needed)}; {to_do}"


def _verified(number: int, path: Path) -> int:
    """Return the number of what the disk shows, if SQLite calls it an error of the device."""
    return (_look(path) or number) if number == errno.EIO else number


def _sentence(number: int, path: Path, needed: int) -> str:
    """Return what is wrong with the disk of a path, with the numbers."""
    what = {
        errno.EROFS: f"the disk of {path} is mounted read-only",
        errno.EIO: f"the disk of {path} reports an error of its device",
        errno.ESTALE: f"the disk of {path} was taken away by its server",
        errno.EFBIG: f"{path} may not become larger",
    }.get(number)
    return f"{os.strerror(number)}: {what or _room(path, needed)}"


def _room(path: Path, needed: int) -> str:
    try:
        found = os.statvfs(_existing(path))
    except OSError as error:
        return f"the disk of {path}, which does not say how much is free: {error.strerror}"
    free = f"{found.f_bavail * found.f_frsize:,} bytes free" + (f" of the {needed:,} that are needed" if needed else "")
    inodes = f", and none of its {found.f_files:,} inodes" if _without_inodes(path) else ""
    return f"the disk of {path} has {free}{inodes}"
