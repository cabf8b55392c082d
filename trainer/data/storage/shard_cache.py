"""Keep the shard files of a server that are being read in a directory of limited size, shared by all ranks of a host.

    ONWARD_HOME/streamed/SHA256.arrow             a whole file of this SHA-256; its time of change: when it was opened
    ONWARD_HOME/streamed/.SHA256.BYTES.partial    one that is being fetched; it counts with all of its bytes
    ONWARD_HOME/streamed/.lock                    held for a moment by whoever makes room

A process that reads a file has a shared lock on it, one that fetches a file an exclusive one on the part that is there.
The kernel releases a lock when its process ends, however that happens: so a file without a lock may be deleted, and a
part without a lock was left by a process that died. Deleted are the files that were opened longest ago.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.config.urls import redacted
from onward.trainer.data.formats.finished_shards import ORIGIN, ShardOrigin
from onward.trainer.data.storage.shards import ShardFile, ShardServer
from onward.trainer.errors import ConfigError, DataError, RuntimeUnavailable, ServerUnavailable, StorageUnavailable
from onward.trainer.quantities import shown_size
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.home import streamed_files
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.download_cleaning import DAY_S, Cleaned
from onward.trainer.run.remote.remote_files import download_to
from onward.trainer.run.remote.stores import RemoteFile, list_files

log = logging.getLogger(__name__)

LIMIT = "ONWARD_SHARD_CACHE_GB"
"""The environment variable with the most that the files may take, in gigabytes; without it half of the free disk."""
WAIT_S = 75.0
"""Longest time that rows are waited for: less than the 100 s after which a rank counts as hanging by default."""
PAUSE_S = 1.0
LOOK_S = 0.1


@dataclass(frozen=True)
class StoredFile:
    """A file on a server."""

    url: str
    bytes: int
    sha256: str


class ShardCache:
    """The files of one directory, for any number of processes and threads. limit: in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self.limit = limit

    @classmethod
    def of_home(cls) -> ShardCache:
        """Return the cache in Onward's home. Raises ConfigError for a limit that is no number."""
        folder = streamed_files()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(folder, _limit_of(folder))

    def hold(self, file: StoredFile, release_others: Callable[[], None]) -> tuple[Path, int]:
        """Return the path of a file and a descriptor; until that is closed, no process deletes the file.

        release_others: closes the other files of the caller, where they leave no room. Raises DataError for content
        that is not that of the digest, ServerUnavailable where the server does not answer, and RuntimeUnavailable where
        other runs leave no room.
        """
        deadline = time.monotonic() + WAIT_S
        has_room = True
        while (descriptor := self._locked(file)) is None:
            if time.monotonic() > deadline and not has_room:
                raise RuntimeUnavailable(
                    f"{self._folder} has no room for {redacted(file.url)} ({shown_size(file.bytes)}): other runs read "
                    f"from nearly all of its {shown_size(self.limit)} since {WAIT_S:g} s; set {LIMIT} to more, or "
                    "start one run after the other"
                )
            if time.monotonic() > deadline:
                raise _too_slow(file)
            has_room = self.fetch(file, lambda: time.monotonic() > deadline, tries_again=True)
            if not has_room:
                release_others()
                time.sleep(LOOK_S)
        return self._path(file), descriptor

    def clean(self, days: float) -> Cleaned:
        """Delete what was not opened for some days, and is neither read nor fetched."""
        sizes: dict[bool, list[int]] = {True: [], False: []}
        with self._making_room():
            for path in [*self._folder.glob("*.arrow"), *self._folder.glob(".*.partial")]:
                state = path.stat()
                is_old = state.st_mtime <= time.time() - days * DAY_S
                sizes[is_old and _delete_unlocked(path)].append(state.st_size)
        return Cleaned(len(sizes[True]), sum(sizes[True]), len(sizes[False]), sum(sizes[False]))

    def hold_if_room(self, file: StoredFile, is_over: Callable[[], bool]) -> int | None:
        """Return a descriptor as `hold` does, without waiting; None if files that are read leave no room.

        is_over: whether the download is to end before it is complete, which raises ServerUnavailable.
        """
        descriptor = self._locked(file)
        # a server that does not answer is tried again by whoever needs the rows
        if descriptor is None and self.fetch(file, is_over, tries_again=False):
            descriptor = self._locked(file)
        return descriptor

    def fetch(self, file: StoredFile, is_over: Callable[[], bool], *, tries_again: bool) -> bool:
        """Bring a file into the cache if it is not there; return False if files that are being read leave no room.

        is_over: whether to end before that; what came is kept. tries_again: also a server that does not answer, until
        then. Returns True as well when another process still fetches the file. Raises as `hold`.
        """
        partial = self._folder / f".{file.sha256}.{file.bytes}.partial"
        with self._making_room():
            if self._path(file).exists():
                return True
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
            is_fetched_here = _try_lock(descriptor)
            if is_fetched_here and not self._has_room(file, partial, descriptor):
                return False
        try:
            if not is_fetched_here:
                # another process fetches it, and the caller looks again when that has ended
                _wait_for(descriptor, is_over if tries_again else lambda: True)
                return True
            _download(file, partial, is_over, tries_again=tries_again)
            fsync(partial)
            # under the lock, so that whoever makes room counts the file once
            with self._making_room():
                partial.replace(self._path(file))
            fsync(self._folder)
            return True
        except ServerUnavailable:
            raise  # the next one who wants the file goes on with what came
        except BaseException:
            # the name may be that of another process already, where this part has none any more
            if is_fetched_here and os.fstat(descriptor).st_nlink:
                partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _path(self, file: StoredFile) -> Path:
        return self._folder / f"{file.sha256}.arrow"

    def _locked(self, file: StoredFile) -> int | None:
        """Return a descriptor of the file with a shared lock on it; None if the file is not there."""
        try:
            descriptor = os.open(self._path(file), os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # it may have been deleted after it was opened and before it was locked
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
        os.utime(descriptor)
        return descriptor

    @contextlib.contextmanager
    def _making_room(self) -> Iterator[None]:
        with (self._folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _has_room(self, file: StoredFile, partial: Path, descriptor: int) -> bool:
        """Make room as `_make_room`; where there is none, remove the part and its lock, for which others would wait."""
        is_made = False
        try:
            is_made = self._make_room(file, partial)
        finally:
            if not is_made:
                partial.unlink()
                os.close(descriptor)
        return is_made

    def _make_room(self, file: StoredFile, partial: Path) -> bool:
        """Delete files until one more fits below the limit and on the disk; return whether it does."""
        used = 0
        files: list[tuple[int, int, Path]] = []
        for path in self._folder.iterdir():
            if path.suffix not in (".arrow", ".partial") or path == partial:
                continue
            with contextlib.suppress(FileNotFoundError):  # whoever fetched it has removed it
                state = path.stat()
                # a part takes all of its bytes in the end; of a process that died it is deleted like a file
                size = state.st_size if path.suffix == ".arrow" else int(path.name.split(".")[2])
                files.append((state.st_mtime_ns, size, path))
                used += size
        for _, size, path in sorted(files):
            if used + file.bytes <= self.limit and self._free() >= file.bytes:
                return True
            if _delete_unlocked(path):
                used -= size
        if used + file.bytes > self.limit:
            return False
        if self._free() < file.bytes:
            raise StorageUnavailable(
                f"{redacted(file.url)} needs {shown_size(file.bytes)}, and the disk of {self._folder} has "
                f"{shown_size(self._free())} free, where the shard files take {shown_size(used)}; make room there, or "
                f"set {LIMIT} to what the disk can hold"
            )
        return True

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free


def _limit_of(folder: Path) -> int:
    if given := os.environ.get(LIMIT):
        try:
            return int(float(given) * 1e9)
        except (ValueError, OverflowError):
            raise ConfigError(f"{LIMIT} is {given[:40]!r}, but must be a number of gigabytes, such as 200") from None
    used = 0
    for path in folder.glob("*.arrow"):
        with contextlib.suppress(FileNotFoundError):  # another process makes room
            used += path.stat().st_size
    # what is used already counts, so that the limit does not shrink while the cache fills
    return (used + shutil.disk_usage(folder).free) // 2


def _try_lock(descriptor: int) -> bool:
    """Lock an open file for this descriptor alone; return whether that was possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # whoever had it before may have removed the name
    return os.fstat(descriptor).st_nlink > 0


def _delete_unlocked(path: Path) -> bool:
    """Delete a file unless a process reads or fetches it; return whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        if is_unused := _try_lock(descriptor):
            path.unlink(missing_ok=True)
        return is_unused
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, is_over: Callable[[], bool]) -> None:
    """Return when no other process fetches the file, or `is_over`."""
    while not is_over():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        time.sleep(LOOK_S)


def _too_slow(file: StoredFile) -> ServerUnavailable:
    return ServerUnavailable(
        f"{redacted(file.url)} ({shown_size(file.bytes)}) was not here after {WAIT_S:g} s, in which the rows of a step "
        "wait for it; the next attempt goes on with what came. For a network as slow as this make smaller files"
    )


def _download(file: StoredFile, partial: Path, is_over: Callable[[], bool], *, tries_again: bool) -> None:
    """Fill a file, on which this process has a lock, and compare its digest."""
    wrong = 0
    too_late = _too_slow(file)
    while True:
        try:
            remote = RemoteFile(file.url, file.url.rpartition("/")[2], file.bytes, {})
            if not download_to(remote, partial, is_over):
                raise too_late
        except (ServerUnavailable, StorageUnavailable):
            raise
        except RuntimeUnavailable as error:
            if (size := _size_at(file.url)) not in (None, file.bytes):
                raise DataError(_damaged(file, f"has {size} bytes, not the {file.bytes} of the manifest")) from None
            if not tries_again or is_over():
                raise ServerUnavailable(error.problems) from error
            too_late = ServerUnavailable(error.problems)
            log.warning("%s; trying again", error)
            time.sleep(PAUSE_S)
            continue
        if (found := sha256(partial)) == file.sha256:
            return
        # content that is wrong once may be that of a connection; wrong twice it is that of the server
        wrong += 1
        if wrong == 2:
            raise DataError(_damaged(file, f"has SHA-256 {found[:12]}, not the {file.sha256[:12]} of the manifest"))
        # not removed: the lock is on this file
        os.truncate(partial, 0)


def _damaged(file: StoredFile, how: str) -> str:
    return f"{redacted(file.url)} {how}: the file on the server is damaged; copy it there again"


def _size_at(url: str) -> int | None:
    """Return the size of a file on a server; None if the server does not answer."""
    try:
        return list_files(url, exact=True)[0].size
    except RuntimeUnavailable:
        return None


# -- shards at a URL


class ServedShards(ShardServer):
    """The files of shards at a URL."""

    def __init__(self, url: str, cache: ShardCache) -> None:
        self._url = url
        self._cache = cache

    def hold(self, file: ShardFile, release_others: Callable[[], None]) -> tuple[Path, int]:
        """Return a local copy and a descriptor that keeps it there. Raises as `ShardCache.hold`."""
        return self._cache.hold(self._stored(file), release_others)

    def hold_if_possible(self, file: ShardFile, is_over: Callable[[], bool]) -> int | None:
        """Bring a file into the cache; return a descriptor as `hold` does, None where there is no room or no answer.

        is_over: whether to end before that. Raises DataError as `hold`.
        """
        try:
            return self._cache.hold_if_room(self._stored(file), is_over)
        except RuntimeUnavailable as error:
            if not is_over():
                log.warning("not fetched yet: %s", error)
            return None

    def problem(self, file: ShardFile) -> str:
        """Return one sentence if a file does not have the content that was written; else ""."""
        try:
            path, descriptor = self.hold(file, lambda: None)
        except DataError as error:
            return str(error)
        try:
            digest = sha256(path)
        finally:
            os.close(descriptor)
        return "" if digest == file.sha256 else f"{path}, a copy of {self._url}/{file.name}, has changed: delete it"

    def _stored(self, file: ShardFile) -> StoredFile:
        return StoredFile(f"{self._url}/{file.name}", file.bytes, file.sha256)


def server_of(directory: Path) -> ServedShards | None:
    """Return where the files of a directory of shards are fetched from; None if they are in it.

    Raises ConfigError for a limit of the cache that is no number.
    """
    if not (directory / ORIGIN).is_file():
        return None
    return ServedShards(read_record(directory / ORIGIN, ShardOrigin).url, ShardCache.of_home())
