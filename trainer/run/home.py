"""Where Onward's home is. Importing this module loads nothing but the standard library and the errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onward.trainer.errors import ConfigError


def onward_home() -> Path:
    """Return the directory of runs, caches and local servers: ONWARD_HOME, else ~/.onward.

    Raises ConfigError for an address, of which a path would be a directory such as `./s3:`.
    """
    home = os.environ.get("ONWARD_HOME") or "~/.onward"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", home):
        raise ConfigError(
            f"ONWARD_HOME={home}: the home must be a directory, because its locks and databases need a file system; "
            "name one, which hosts may share"
        )
    return Path(home).expanduser().resolve()


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def download_cache() -> Path:
    """Return the directory of local copies of remote files; it may be deleted while no run uses it."""
    return onward_home() / "downloads"


def streamed_files() -> Path:
    """Return the directory of the shard files of servers (data/storage/shard_cache.py)."""
    return onward_home() / "streamed"
