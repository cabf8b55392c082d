"""Files in a directory or an object store: each is complete or absent, whatever ends the process that writes it.

An object store shows an object when all of it has arrived. In a directory a file gets its name by a rename. Errors are
those of `stores.explained`, of a directory too: DataError for what is absent or may not be used, RuntimeUnavailable for
a store that does not answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onward.trainer.config.urls import PACKAGES, redacted, url_of
from onward.trainer.errors import DataError, OnwardError, RuntimeUnavailable
from onward.trainer.run.durable_files import durable_file, fsync, sha256, write_durably
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.remote.remote_files import checksums, download_to
from onward.trainer.run.remote.stores import RemoteFile, explained, open_store, status_of, upload

PART_BYTES = 16 << 20
"""Of an object that is sent in parts. fsspec would hold ten parts of 50 MB in memory."""
PARTS_AT_A_TIME = 4


def open_place(location: str) -> Bucket | Folder:
    """Return the store that a URL or a path names."""
    url = url_of(location)
    return Bucket(url) if url else Folder(Path(location))


class Folder:
    """A directory; it appears with its first file."""

    def __init__(self, root: Path) -> None:
        self.shown = str(root)
        self._root = root

    def names(self, below: str = "") -> dict[str, int]:
        """Return the complete files below a directory with their sizes; {} where there is none."""
        with self._explained():
            found = {path: path.stat().st_size for path in (self._root / below).rglob("*") if path.is_file()}
        shown = {path.relative_to(self._root).as_posix(): size for path, size in found.items()}
        # those are still being written, or a killed process has left them
        return {name: size for name, size in shown.items() if not name.endswith(".partial")}

    def folders(self) -> list[str]:
        """Return the names of the directories in it; none where it is not there yet."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self._root.iterdir() if path.is_dir())
        return []

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        with self._explained():
            return (self._root / name).is_file()

    def is_same(self, name: str, source: Path, digest: str) -> bool:
        """Return whether a file has the content of a local one, of this SHA-256."""
        with self._explained():
            path = self._root / name
            return path.is_file() and sha256(path) == digest

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._explained():
            return (self._root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, or replace it."""
        with self._explained():
            write_durably(self._root / name, content)

    def create(self, name: str, content: bytes) -> None:
        """Write a small file unless there is one of that name. The caller reads which it is."""
        path = self._root / name
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.write_bytes(content)
                fsync(new)
                # a link to an existing name fails, while a rename would replace that file
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(new)
                fsync(path.parent)
            finally:
                new.unlink(missing_ok=True)

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to the store."""
        with self._explained(), durable_file(self._root / name) as partial:
            shutil.copyfile(source, partial)

    def get(self, name: str, size: int, target: Path) -> None:
        """Copy a file of this size from the store to a local path."""
        with self._explained():
            shutil.copyfile(self._root / name, target)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files, and directories that are empty then."""
        with self._explained():
            for name in names:
                path = self._root / name
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it holds other files
                    path.parent.rmdir()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"there is no {error.filename or self._root}") from error
        except OSError as error:
            why = f"{error.filename or self._root} cannot be used: {error.strerror or error}"
            raise (storage_error(error, self._root) or RuntimeUnavailable(why)) from error


class Bucket:
    """The objects of an object store whose names begin with that of a URL."""

    def __init__(self, url: str) -> None:
        self.shown = redacted(url)
        self._url = url
        # gcsfs and adlfs choose parts of a bearable size themselves
        of_s3 = PACKAGES[urlsplit(url).scheme] == "s3fs"
        self._parts = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_A_TIME} if of_s3 else {}

    def names(self, below: str = "") -> dict[str, int]:
        """Return the objects below a name with their sizes; {} where there is none."""
        found: dict[str, Any] = {}
        with self._opened(below) as (store, path), contextlib.suppress(FileNotFoundError):
            found = store.find(path, detail=True)
            # fsspec drops a slash at the end
            root = path.removesuffix(below.rstrip("/")).rstrip("/") + "/"
        return {name[len(root) :]: int(info["size"]) for name, info in found.items() if info["type"] == "file"}

    def folders(self) -> list[str]:
        """Return what follows the URL in the names of objects, up to a slash; nothing where there is no object."""
        found: list[dict[str, Any]] = []
        with self._opened("") as (store, path), contextlib.suppress(FileNotFoundError):
            found = store.ls(path, detail=True)
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")

    def has(self, name: str) -> bool:
        """Return whether there is an object of that name."""
        with self._opened(name) as (store, path):
            return bool(store.exists(path))

    def is_same(self, name: str, source: Path, digest: str) -> bool:
        """Return whether an object has the size of a local file, of this SHA-256, and what the store knows fits, too.

        The store has compared what arrived with checksums of the sender, so a size says that it is complete; an MD5 of
        the content is compared where there is one.
        """
        with self._opened(name) as (store, path):
            try:
                info = store.info(path)
            except FileNotFoundError:
                return False
        known = {
            tag for tag in (str(info.get("ETag", "")).strip('"'), *md5_of(info)) if re.fullmatch("[0-9a-f]{32}", tag)
        }
        if info["size"] != source.stat().st_size:
            return False
        if not known:
            return True
        with source.open("rb") as content:
            return hashlib.file_digest(content, "md5").hexdigest() in known

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""
        with self._opened(name) as (store, path):
            return bytes(store.cat_file(path))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it."""
        with self._opened(name, "written") as (store, path):
            store.pipe_file(path, content)

    def create(self, name: str, content: bytes) -> None:
        """Write a small object unless there is one of that name. The caller reads which it is."""
        with self._opened(name, "written") as (store, path):
            if store.exists(path):  # for a store that knows no condition and would replace it
                return
            try:
                store.pipe_file(path, content, mode="create")
            except Exception as error:
                # somebody else was faster, and the caller sees whose content is there
                if not _exists_already(error):
                    raise

    def put(self, name: str, source: Path) -> None:
        """Send a local file, and compare its size in the store."""
        upload(source, f"{self._url}/{name}", self._parts)

    def get(self, name: str, size: int, target: Path) -> None:
        """Download an object of this size to a local path; what an interrupted download left there is kept."""
        download_to(RemoteFile(f"{self._url}/{name}", name, size, {}), target)

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            with self._opened(name, "written") as (store, path), contextlib.suppress(FileNotFoundError):
                store.rm_file(path)

    @contextlib.contextmanager
    def _opened(self, name: str, done: str = "read") -> Iterator[tuple[Any, str]]:
        url = f"{self._url}/{name}".rstrip("/")
        with explained(url, done):
            yield open_store(url)


def md5_of(info: Mapping[str, Any]) -> Iterator[str]:
    """Yield the MD5 of an object, in hexadecimal, where the store says it."""
    version = {key: str(info[key]) for key in ("md5Hash", "content_md5") if info.get(key)}
    yield from (digest for kind, digest in checksums(version) if kind == "md5")


def _exists_already(error: BaseException) -> bool:
    """Return whether a conditional write was refused because the object exists, or is being written by another."""
    causes = [error, *filter(None, (error.__cause__, error.__context__))]
    refused = any(status_of(each) in (409, 412) for each in causes)
    return refused or any(isinstance(each, FileExistsError) for each in causes)


AWAY: tuple[type[OnwardError], ...] = (DataError, RuntimeUnavailable)
"""What a store raises that does not answer, or that refuses: credentials may be renewed, a bucket may come back."""
