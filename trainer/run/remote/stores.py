"""List, read and write the files of object stores and web servers with fsspec, and explain their errors.

The texts of those libraries' errors may hold signed URLs; what is raised here holds none.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from onward.trainer.config.urls import EXTRAS, PACKAGES, credentials_hint, redacted
from onward.trainer.errors import DataError, RuntimeUnavailable
from onward.trainer.extras import how_to_install
from onward.trainer.run.home import download_cache
from onward.trainer.run.outcomes.storage import storage_error

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
"""Longest time until a web server answers, and between two pieces of its answer."""
VERSION_FIELDS = (
    *("ETag", "etag", "generation", "VersionId", "md5Hash", "crc32c", "Content-MD5", "content_md5", "Digest"),
    *("blob_id", "lfs"),
)
"""What stores say of the content of a file, under fsspec's names."""
TIME_FIELDS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")
"""What tells versions apart in a store that says nothing of the content."""


@dataclass(frozen=True)
class RemoteFile:
    """One version of a file in a store."""

    url: str
    name: str
    """Relative to the directory or glob that was listed."""
    size: int
    version: Mapping[str, str]
    """What the store says of this version; {} if it says nothing, so that a change cannot be noticed."""
    restarts: bool = False
    """Whether the server has announced that it sends whole files only."""

    @property
    def key(self) -> str:
        """Return the name of this version in the cache."""
        return digest([self.url, self.size, dict(self.version)])


def list_files(url: str, *, exact: bool = False) -> list[RemoteFile]:
    """Return the files that a URL names: one, those below a directory, or those that match a glob; sorted by name.

    exact: it names one file, also if the name has characters of a glob. Asks the store anew each time. Raises DataError
    when there is none or it may not be read, RuntimeUnavailable when the library is missing or the store does not
    answer.
    """
    with explained(url):
        store, path = open_store(url)
        is_web = urlsplit(url).scheme in ("http", "https")
        if is_web:
            found = {path: store.info(path)}
        elif set("*?[") & set(path) and not exact:
            found = {name: info for name, info in store.glob(path, detail=True).items() if info["type"] == "file"}
        else:
            info = store.info(path)
            found = {path: info} if info["type"] == "file" else store.find(path, detail=True)
        # names are kept below the fixed part, so that two directories with equal file names do not collide
        base = _base_of(path, one=path in found)
        root = url[: len(url) - len(path)] if url.endswith(path) else f"{urlsplit(url).scheme}://"
        names = list(found)
        # a hidden file is read only if it is named
        if path not in found:
            names = [name for name in names if "/." not in name[len(base) :]]
        if not names:
            raise DataError(f"{redacted(url)}: there is no file")
        files = [_remote_file(url, root, base, name, found[name], is_web=is_web) for name in names]
    return sorted(files, key=lambda file: file.name)


def file_beside(url: str, name: str) -> RemoteFile:
    """Return the file `name` in the directory of the file at `url`. Raises the errors of `list_files`."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"{redacted(url)} names the file {name!r}, which is not below its own directory")
    # the query of a signed URL is that of one file
    [file] = list_files(url.partition("?")[0].rpartition("/")[0] + "/" + name)
    return replace(file, name=name)


def upload(source: Path, url: str, parts: Mapping[str, int] = MappingProxyType({})) -> None:
    """Write a local file to a URL, and check its size there. Raises RuntimeUnavailable or DataError.

    parts: how it is sent in parts, as fsspec's file system of the store takes it.
    """
    with explained(url, "written"):
        store, path = open_store(url)
        store.put_file(str(source), path, **parts)
        # fsspec could answer with the size of an older object that it has listed before
        store.invalidate_cache()
        # the size is asked for anew, because the answer to an upload does not prove that all of it arrived
        if (size := store.info(path)["size"]) != source.stat().st_size:
            raise RuntimeUnavailable(f"{redacted(url)} has {size} bytes after writing {source.stat().st_size}")


def refuse_unwritable(url: str) -> None:
    """Raise DataError or RuntimeUnavailable if files can certainly not be written to a URL: no bucket, or the web."""
    if urlsplit(url).scheme in ("http", "https"):
        raise DataError(f"{redacted(url)}: files cannot be written by http; name an object store or a path")
    with explained(url):
        store, path = open_store(url)
        bucket = path.partition("/")[0]
        if urlsplit(url).scheme != "hf" and not store.exists(bucket):
            raise DataError(f"{redacted(url)}: there is no bucket {bucket}, or it may not be read")


# -- stores and their errors


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    scheme = urlsplit(url).scheme
    package = PACKAGES[scheme]
    if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(package) is None:
        raise RuntimeUnavailable(
            f"{scheme}:// needs {package}, which is not installed: {how_to_install(EXTRAS[package])}"
        )
    import fsspec  # imported here: most runs have no remote files

    options: dict[str, Any] = {}
    if package == "aiohttp":
        from aiohttp import ClientTimeout

        # trust_env: read ~/.netrc and the proxy variables. By default aiohttp ends an answer after five minutes
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        options["client_kwargs"] = {"trust_env": True, "timeout": timeout}
    if package == "gcsfs":  # it logs each error with a traceback, whose text may hold what `explained` leaves out
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # a connection that was cut is reported by whoever used it, not also by the loop, with a traceback
    logging.getLogger("asyncio").addFilter(_is_no_cut_connection)
    store, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    store.invalidate_cache()
    return store, path


def _is_no_cut_connection(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith("aiohttp")


@contextlib.contextmanager
def explained(url: str, done: str = "read") -> Iterator[None]:
    """Convert the errors of fsspec's libraries, whose texts may hold signed URLs, to sentences without them.

    done: what could not be done, "read" or "written".
    """
    shown = redacted(url)
    try:
        yield
    except (DataError, RuntimeUnavailable):
        raise
    except Exception as error:
        # fsspec's libraries wrap errors in different ways; the status may be in any of them
        causes = [error, *filter(None, (error.__cause__, error.__context__))]
        status = next((found for each in causes if (found := status_of(each))), None)
        kinds = {kind.__name__ for each in causes for kind in type(each).__mro__}
        if status in (401, 403) or kinds & {"PermissionError", "NoCredentialsError", "ClientAuthenticationError"}:
            raise DataError(f"{shown} may not be {done}; credentials: {credentials_hint(url)}") from None
        if storage := storage_error(error, download_cache()):
            raise storage from None
        # aiohttp raises FileNotFoundError also where no connection was made
        is_absent = isinstance(error, FileNotFoundError) and status is None and "ClientConnectionError" not in kinds
        if status == 404 or is_absent:
            raise DataError(f"there is nothing at {shown} (or the store hides it without credentials)") from None
        reason = f"status {status}" if status else type(causes[-1]).__name__
        raise RuntimeUnavailable(
            f"{shown} cannot be {done}: {reason}; is the address right, and the store up?"
        ) from None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of aiohttp, httpx, botocore, gcsfs or Azure's library tells of."""
    answer = getattr(error, "response", None)  # of botocore a dictionary
    if isinstance(answer, dict):
        answer = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(answer, int):
        return answer
    # `code` last: aiohttp warns about it
    for holder, name in ((error, "status"), (error, "status_code"), (answer, "status_code"), (error, "code")):
        found = getattr(holder, name, None)
        if isinstance(found, int) and 400 <= found < 600:
            return found
    return None


# -- names and versions


def _remote_file(url: str, root: str, base: str, name: str, info: Mapping[str, Any], *, is_web: bool) -> RemoteFile:
    if info.get("size") is None:
        raise DataError(
            f"{redacted(url)}: the server does not say how long the file is, so that an end in the middle could not be "
            "noticed; download the file and give its path"
        )
    # digests before times: a file that is written again with the same content is the same version
    version = {key: _as_text(info[key]) for key in VERSION_FIELDS if info.get(key)}
    if not version:
        version = {key: str(info[key]) for key in TIME_FIELDS if info.get(key)}
    relative = PurePosixPath(name.partition("?")[0]).name if is_web else name[len(base) :].lstrip("/")
    # such a name would be written outside of the cache
    if ".." in relative.split("/"):
        raise DataError(f"{redacted(url)}: the name {relative!r} contains '..'")
    return RemoteFile(
        url=url if is_web or name == url[len(root) :] else root + name,
        name=relative,
        size=int(info["size"]),
        version=version,
        restarts=info.get("partial") is False,
    )


def _as_text(value: Any) -> str:
    """Return a version field as text: Hugging Face gives the SHA-256 of large files in a record."""
    digest = value.get("sha256") if isinstance(value, Mapping) else getattr(value, "sha256", None)
    return str(digest or value)


def _base_of(path: str, *, one: bool) -> str:
    """Return what precedes the relative names: of one file its directory, else the path up to the first wildcard."""
    if one:
        return path.rpartition("/")[0]
    parts = path.split("/")
    fixed = next((number for number, part in enumerate(parts) if set("*?[") & set(part)), len(parts))
    return "/".join(parts[:fixed])


def digest(value: Any) -> str:
    """Return a name made from any value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
