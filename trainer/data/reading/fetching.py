"""Bring the files that a configuration names by URL to this machine, before anything else reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.urls import is_registered, redacted, url_of
from onward.trainer.data.formats.finished_shards import MANIFEST, ORIGIN, ShardOrigin, shard_head
from onward.trainer.errors import ConfigError, DataError, Refused, UnsupportedModel
from onward.trainer.onnx_graph.files.index import locations
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.home import download_cache
from onward.trainer.run.records import read_record, write_record
from onward.trainer.run.remote.download_cleaning import mark_used
from onward.trainer.run.remote.local_copies import LocalCopies, LocalCopy, urls_in
from onward.trainer.run.remote.remote_files import download, joined_directory, key_of
from onward.trainer.run.remote.stores import RemoteFile, file_beside, list_files

DIRECTORIES = ("data.", "checkpoint.load")
"""Settings, or the beginnings of their names, that may name several files."""


MODELS = ("model.path", "teacher.path")
"""The settings that name an ONNX file, which may have external data beside it."""


def fetch(sections: RunConfig | Mapping[str, Any], known: LocalCopies | None = None) -> tuple[LocalCopies, list[str]]:
    """Return local copies of everything that the sections name by URL, and a sentence for each that cannot be had.

    Where nothing is named by URL, nothing is asked for. known: the copies that a run began with. Of those that are
    still there nothing is asked for, and of the others the store must have the same version.
    """
    before = {copy.url: copy for copy in known.copies} if known else {}
    # of files of another machine: they are in the run directory, and whoever reads them finds them there or not
    copies: dict[str, LocalCopy] = {value: copy for value, copy in before.items() if not url_of(value)}
    problems = []
    for setting, url in urls_in(sections):
        try:
            if url not in copies:
                copies[url] = _kept(before[url]) if url in before else _fetched(setting, url)
        except Refused as error:
            problems += [f"{setting}: {problem}" for problem in error.problems]
    return LocalCopies(copies=tuple(copies.values())), problems


def local_model(location: Path) -> Path:
    """Return a model's path, or the path of a local copy with its external data. Raises the errors of `download`."""
    url = url_of(location)
    return _model(url).path if url else location


def local_file(location: Path) -> Path:
    """Return a file's path, or the path of a local copy. Raises the errors of `download`."""
    url = url_of(location)
    return _fetched("", url).path if url else location


def restore_copies(run: RunDir) -> None:
    """Fetch again what was deleted of the copies that a run began with. Raises ConfigError if that is impossible."""
    if run.remote.exists():
        for copy in read_record(run.remote, LocalCopies).copies:
            if url_of(copy.url):
                _kept(copy)


def _kept(copy: LocalCopy) -> LocalCopy:
    if copy.path.exists():
        mark_used(download_cache(), copy.path)
        return copy
    if is_registered(copy.url):
        raise ConfigError(f"the local copy {copy.path} of {copy.url} is gone; `onward resume` downloads it again")
    is_model = copy.path.suffix == ".onnx"
    found = _model(copy.url) if is_model else _several(copy.url)
    # other content would train on other data than the steps before
    if found.key != copy.key:
        raise ConfigError(
            f"{redacted(copy.url)} changed since the run began, and its local copy {copy.path} is gone; put the former "
            "version back, or start a new run"
        )
    return found


def _fetched(setting: str, url: str) -> LocalCopy:
    if is_registered(url):
        raise ConfigError(
            f"{url} names a model of MLflow, and only model.path may, and teacher.path; `onward run` downloads it"
        )
    if setting in MODELS:
        return _model(url)
    copy = _several(url)
    if copy.path.is_dir() and not setting.startswith(DIRECTORIES):
        raise DataError(f"{redacted(url)} is a directory; name a file")
    return copy


def _several(url: str) -> LocalCopy:
    """Fetch a file, the files below a directory, or those that match a glob."""
    files = list_files(url)
    if shards := _shards(url, files):
        return shards
    fetched = download(files, download_cache(), redacted(url))
    key = key_of([file for file, _ in fetched])
    # a directory with one file is still a directory
    is_one = len(fetched) == 1 and url.partition("?")[0].endswith("/" + fetched[0][0].name)
    path = fetched[0][1] if is_one else joined_directory(fetched, download_cache(), _name(url), links=True)
    return _copy(url, path, key, files)


def _shards(url: str, files: list[RemoteFile]) -> LocalCopy | None:
    """Return the local copy of finished shards, of which only the manifest comes here; None for other files."""
    found = [file for file in files if file.name == MANIFEST]
    if not found:
        return None
    [(file, path)] = download(found, download_cache(), redacted(url))
    head = shard_head(path)
    if head is None:
        return None
    # it comes from the server, and must not lead out of the cache
    if not re.fullmatch(r"\w+", head.key, re.ASCII):
        raise DataError(f"the manifest at {redacted(url)} has the key {head.key[:40]!a}, which is none of shards")
    # a run knows its data by the name of the directory
    place = download_cache() / file.key / head.key
    write_record(place / ORIGIN, ShardOrigin(url=file.url.removesuffix(f"/{MANIFEST}")))
    write_durably(place / MANIFEST, path.read_bytes())
    return _copy(url, place, file.key, [file])


def _model(url: str) -> LocalCopy:
    """Fetch an ONNX file with its external data, which it expects beside it: weights.bin beside model.onnx."""
    found = list_files(url, exact=True)
    if len(found) != 1 or not url.partition("?")[0].endswith("/" + found[0].name):
        raise DataError(f"{redacted(url)} is a directory; name a file")
    [(file, path)] = download(found, download_cache(), redacted(url))
    try:
        names = locations(read_model(path))
    except UnsupportedModel:
        names = []  # not an ONNX file: whoever reads it reports that
    if not names:
        return _copy(url, path, file.key, [file])
    files = [file, *(file_beside(url, name) for name in names)]
    place = download_cache() / key_of(files) / _name(url)
    # without a version the server does not say whether a file has changed: it is fetched again
    if not (place.is_dir() and all(each.version for each in files)):
        fetched = download(files, download_cache(), redacted(url))
        files = [each for each, _ in fetched]
        # no links: onnx refuses external data behind a link
        place = joined_directory(fetched, download_cache(), _name(url), links=False)
    return _copy(url, place / file.name, key_of(files), files)


def _copy(url: str, path: Path, key: str, files: list[RemoteFile]) -> LocalCopy:
    mark_used(download_cache(), path)
    return LocalCopy(url=url, path=path, key=key, bytes=sum(file.size for file in files))


def _name(url: str) -> str:
    """Return the last part of a URL without wildcards, as the name of a directory."""
    # "?" is a wildcard here, but would begin the query of a URL and end its path
    path = urlsplit(url.replace("?", "*")).path
    literal = [part for part in path.split("/") if not set("*[") & set(part)]
    return next((part for part in reversed(literal) if part), "files")
