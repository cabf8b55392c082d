"""The local copies of what a configuration names by URL, and the configuration with their paths in place of the URLs.

config.json keeps the URLs; the record beside it, remote.json, says where the copies are. So ranks read local files, and
a run that is resumed reads the bytes that it began with. Of a run from a store (stored_run.py) the record also
says where the copies are of the local files that another machine had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from onward.trainer.config.setting_paths import PATHS, replaced, values_at
from onward.trainer.config.urls import url_of
from onward.trainer.run.records import Record

WRITTEN = ("checkpoint.store", "export.path")
"""Settings that name what a run writes."""


class LocalCopy(Record):
    """Where the copy of a file, or of several, is."""

    url: str
    """Or the value of a setting that names a file of another machine."""
    path: Path
    """The file; the directory with the files of a directory or a glob."""
    key: str
    """Digest of the names, sizes and versions of the files in the store."""
    bytes: int


class LocalCopies(Record):
    """The local copies of everything that a configuration names by URL."""

    copies: tuple[LocalCopy, ...] = ()


S = TypeVar("S", bound=BaseModel | Mapping[str, Any])


def with_copies(sections: S, copies: LocalCopies) -> S:
    """Return a configuration, or its sections, with the paths of local copies in place of URLs."""
    paths = {copy.url: copy.path for copy in copies.copies}

    def change(value: Any) -> Any:
        path = paths.get(url_of(value) or str(value)) if isinstance(value, str | Path) else None
        # a Path stays a Path, and a str a str, as the setting wants it
        return value if path is None else type(value)(path)

    if paths:
        for key in PATHS:
            sections = sections if key in WRITTEN else replaced(sections, key.split("."), change)
    return sections


def urls_in(sections: BaseModel | Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (setting, URL) for each URL that is read."""
    for key in PATHS:
        if key not in WRITTEN:
            yield from ((key, url) for value in values_at(sections, key.split(".")) if (url := url_of(str(value))))
