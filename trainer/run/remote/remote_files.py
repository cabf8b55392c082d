"""Copy files from object stores and web servers into a local cache, once for each version, with fsspec.

    s3://bucket/train/a.csv   --listed: size, ETag-->   a version of a file
         |                                                  |
         |   blocks, each tried again after an error        v
         +----------> CACHE/.KEY.partial ---size, checksum, fsync, rename---> CACHE/KEY/a.csv

KEY is a digest of the URL, the size and what the store says of the version (checksum, ETag, or time of change). A
download that was interrupted continues where it ended, in the next process too. The final name appears by one rename,
after size and checksum are right, so that no part of a file is ever taken for the file.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TextIO
from urllib.parse import urlsplit

from onward.trainer.config.urls import redacted
from onward.trainer.errors import DataError, RuntimeUnavailable, StorageUnavailable, printable
from onward.trainer.quantities import shown_size
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.remote.stores import RemoteFile, digest, explained, list_files, open_store

log = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
"""Bytes of one request to an object store."""
LEAST_BLOCK_BYTES = 64 << 10
"""A request that fails is repeated with a quarter of the bytes, down to this."""
CHUNK_BYTES = 1 << 20
AT_A_TIME = 8
"""Files that are downloaded at a time."""
PAUSES_S = (0.2, 1.0, 3.0, 8.0)
"""Pauses after errors that follow each other without a byte between them; then the download has failed."""
LOG_PERIOD_S = 10.0


def download(files: Sequence[RemoteFile], cache: Path, label: str) -> list[tuple[RemoteFile, Path]]:
    """Return each file with its local copy CACHE/KEY/NAME, after downloading those that are not there yet.

    label: names them in the progress bar. Where the store says nothing of the version, a file is downloaded each time,
    and its content is the version of the file that is returned. Of processes that want the same file one downloads it.
    Raises DataError for content that is not what the store announced, StorageUnavailable for a full disk, and
    RuntimeUnavailable for a connection that fails again and again.
    """
    # a file without a version is never complete: it may have changed
    absent = [file for file in files if not _is_complete(file, cache)]
    if absent:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # Onward's home, for its owner alone
        cache.mkdir(exist_ok=True)
        _refuse_full_disk(absent, cache)
    bar = _Bar(label, sum(file.size for file in absent))
    try:
        with ThreadPoolExecutor(min(len(absent), AT_A_TIME) or 1) as threads:
            jobs = [threads.submit(_download, file, cache, bar) for file in absent]
            try:
                downloaded = {job: job.result() for job in jobs}
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)  # the first error ends the others
                raise
    finally:
        bar.clear()
    pinned = {file.url: downloaded[job] for file, job in zip(absent, jobs, strict=True)}
    if absent:
        log.info("downloaded %s: %d files, %s", label, len(absent), shown_size(sum(file.size for file in absent)))
    return [(found, _place(found, cache)) for found in (pinned.get(file.url, file) for file in files)]


def _download(file: RemoteFile, cache: Path, bar: _Bar) -> RemoteFile:
    """Download one file, unless another process does; return it with its version."""
    partial = cache / f".{file.key}.partial"
    with (cache / f".{file.key}.lock").open("wb") as lock, explained(file.url):
        # held during the download: other processes wait for the file in place of fetching it as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_complete(file, cache):
            return file
        if not file.version:
            partial.unlink(missing_ok=True)  # it may belong to another version
        bar.add(_size(partial), came=False)
        # content that is wrong once may be that of a connection; wrong twice it is that of the store
        for _ in range(2):
            _fill(file, partial, bar)
            if not (wrong := _wrong_content(file, partial)):
                break
            partial.unlink()
        else:
            raise DataError(f"{redacted(file.url)}: {wrong}, twice; the file in the store is damaged or being written")
        fsync(partial)
        if not file.version:
            # its own content is then the version under which the copy is kept
            file = replace(file, version={"content": sha256(partial)})
        place = _place(file, cache)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(place)
        fsync(place.parent)
        return file


def download_to(file: RemoteFile, target: Path, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Download one file of an object store to a path; what an interrupted download left there is kept.

    Return whether it is complete: it is not once `is_over`. Raises as `download`. The caller compares the content.
    """
    bar = _Bar(file.name, file.size)
    try:
        with explained(file.url):
            _fill(file, target, bar, is_over)
        return target.exists() and _size(target) >= file.size
    finally:
        bar.clear()


def joined_directory(files: Sequence[tuple[RemoteFile, Path]], cache: Path, name: str, *, links: bool) -> Path:
    """Return a directory CACHE/KEY/NAME that holds downloaded files under their relative names.

    links: it holds symbolic links; else, for a reader that refuses links, a copy of the first file and the others
    themselves, which are moved there.
    """
    place = cache / key_of([file for file, _ in files]) / name
    # it was renamed into its place, so it is complete
    if place.is_dir():
        return place
    partial = cache / f".{uuid.uuid4().hex}.partial"
    for file, local in files:
        target = partial / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if links:
            target.symlink_to(os.path.relpath(local, place.parent / name / PurePosixPath(file.name).parent))
        elif file is files[0][0]:
            shutil.copyfile(local, target)
            fsync(target)  # the directory that is renamed must not hold a part of the file
        else:
            local.replace(target)
    fsync(partial)
    place.parent.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # another process made the same directory
        partial.replace(place)
    shutil.rmtree(partial, ignore_errors=True)
    fsync(place.parent)
    return place


def key_of(files: Sequence[RemoteFile]) -> str:
    """Return the name of several files together in the cache."""
    return files[0].key if len(files) == 1 else digest([(file.name, file.key) for file in files])


# -- one download


def _fill(file: RemoteFile, partial: Path, bar: _Bar, is_over: Callable[[], bool] = lambda: False) -> None:
    """Append to `partial` until it has the file's size or `is_over`.

    Errors in between are retried, and what came stays.
    """
    failures = 0
    block = BLOCK_BYTES
    # an empty file is complete with 0 bytes, but must exist
    while (have := _size(partial)) < file.size or not partial.exists():
        if is_over():
            return
        try:
            with partial.open("ab") as target:
                for chunk in _chunks(file, have, block, target):
                    target.write(chunk)
                    bar.add(len(chunk))
                    # what the server sends beyond that has no end that is known
                    if _size(partial) > file.size or is_over():
                        break
            if _size(partial) == have and file.size:
                raise EOFError(f"the connection ended after {have} of {file.size} bytes")
        except Exception as error:
            if storage := storage_error(error, partial, needed=file.size):
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise storage from error
            if isinstance(error, DataError | RuntimeUnavailable | PermissionError | FileNotFoundError):
                raise  # it would fail again
            # a connection that brings bytes is slow and not broken
            failures = 0 if _size(partial) > have else failures + 1
            # a store or a proxy may end long answers: shorter requests get through
            block = max(block // 4, LEAST_BLOCK_BYTES)
            if failures > len(PAUSES_S):
                raise RuntimeUnavailable(
                    f"{redacted(file.url)}: the connection ended {failures} times after {_size(partial)} of "
                    f"{file.size} bytes ({type(error).__name__}); the next start goes on there"
                ) from error
            pause_s = PAUSES_S[max(failures - 1, 0)]
            log.warning("%s: %s; going on in %g s", redacted(file.url), type(error).__name__, pause_s)
            time.sleep(pause_s)


def _chunks(file: RemoteFile, have: int, block: int, target: Any) -> Iterator[bytes]:
    """Yield the bytes from `have` on. Where the server sends whole files only, empty `target` and yield all bytes."""
    store, path = open_store(file.url)
    if urlsplit(file.url).scheme not in ("http", "https"):
        # without a cache, because each byte is read once
        with store.open(path, "rb", block_size=block, cache_type="none") as opened:
            opened.seek(have)
            while data := opened.read(min(block, file.size - opened.tell())):
                yield data
        return
    # a compressed answer would have another length than the store announced
    headers = {"Accept-Encoding": "identity"}
    if have and not file.restarts and file.version:
        # If-Range: a file that was changed in the meantime is sent from its beginning
        tag = file.version.get("ETag") or file.version.get("Last-Modified", "")
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": tag} if tag and not tag.startswith("W/") else {})
    # block_size 0 streams the answer of one request
    with store.open(path, "rb", block_size=0, size=file.size, headers=headers) as opened:
        # the server has sent all from the beginning, so what is there already is dropped
        if have and not (opened.r.status == 206 and f"bytes {have}-" in opened.r.headers.get("Content-Range", "")):
            target.truncate(0)
        while data := opened.read(CHUNK_BYTES):
            yield data


def _wrong_content(file: RemoteFile, partial: Path) -> str:
    """Return how a complete download differs from what the store announced: size, checksum or version; else ""."""
    if (size := _size(partial)) != file.size:
        return f"it has {size} bytes, but the store announced {file.size}"
    for kind, expected in checksums(file.version):
        with partial.open("rb") as content:
            found = hashlib.file_digest(content, kind).hexdigest()
        if found != expected:
            return f"its {kind} is {found[:16]}..., but the store announced {expected[:16]}..."
    # bytes of two versions may have the announced size together
    [now] = list_files(file.url, exact=True)
    if (now.size, now.version) != (file.size, file.version):
        return "it changed while it was read"
    return ""


def checksums(version: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (algorithm, hexadecimal digest) of what the store says of the whole content."""
    for name in ("md5Hash", "Content-MD5", "content_md5"):
        if value := version.get(name):
            yield "md5", base64.b64decode(value).hex()
    for part in version.get("Digest", "").split(","):
        kind, _, value = part.strip().partition("=")
        if kind.lower() in ("sha-256", "md5"):
            yield kind.lower().replace("-", ""), base64.b64decode(value).hex()
    if "lfs" in version:  # Hugging Face: the SHA-256 of a large file
        yield "sha256", version["lfs"]


def _refuse_full_disk(files: Sequence[RemoteFile], cache: Path) -> None:
    # what an interrupted download left counts as there
    needed = sum(file.size - _size(cache / f".{file.key}.partial") for file in files)
    if needed > (free := shutil.disk_usage(cache).free):
        raise StorageUnavailable(
            f"{redacted(files[0].url)}: {len(files)} files need {shown_size(needed)}, but {cache} has "
            f"{shown_size(free)} free; make room there, or set ONWARD_HOME to a directory on a larger disk"
        )


def _place(file: RemoteFile, cache: Path) -> Path:
    return cache / file.key / PurePosixPath(file.name).name


def _is_complete(file: RemoteFile, cache: Path) -> bool:
    place = _place(file, cache)
    # without a version an older copy may differ, though it has the same size
    return bool(file.version) and place.is_file() and place.stat().st_size == file.size


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# -- progress


class _Bar:
    """Show how far a download is: one line that is overwritten on a terminal, else a log line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self._label = printable(label)
        self._total = max(total, 1)
        self._terminal = sys.stderr.isatty()
        # not the one of flows/shown/terminal.py, which lets nothing move the cursor
        self._stream: TextIO = getattr(sys.stderr, "unescaped", sys.stderr)
        self._shown_at = self._started_at = time.monotonic()
        self._done = self._came = 0
        self._lock = threading.Lock()  # several files are downloaded at a time
        self._is_shown = False

    def add(self, size: int, *, came: bool = True) -> None:
        """Count bytes; those that a file has already, or loses again, did not come now."""
        with self._lock:
            self._done += size
            self._came += size * came
            now = time.monotonic()
            if now - self._shown_at < (0.2 if self._terminal else LOG_PERIOD_S):
                return
            self._shown_at = now
            share = min(self._done / self._total, 1.0)
            speed = self._came / (now - self._started_at)
            line = f"{share:4.0%} of {shown_size(self._total)}, {shown_size(speed)}/s, {self._label}"
            if self._terminal:
                print(f"\r\033[K[{'#' * int(30 * share):<30}] {line}", end="", file=self._stream, flush=True)
                self._is_shown = True
            else:
                log.info("downloading: %s", line.strip())

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_shown:
            print("\r\033[K", end="", file=self._stream, flush=True)
