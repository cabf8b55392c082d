"""Say how the optional libraries are installed: the extras of pyproject.toml, from the source that this installation
was made of. Onward is on no package index, so `pip install onward[...]` would install somebody else's package."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra, such as `pip install -e '/home/me/onward[mpi]'`, for a message."""
    here = Path(__file__).resolve().parents[1]
    if _is_source(here):  # an editable installation, or PYTHONPATH
        return f"pip install -e '{here}[{extra}]'"
    installed_from = _installed_from()
    if installed_from and _is_source(installed_from):
        return f"pip install '{installed_from}[{extra}]'"
    return f"pip install '.[{extra}]' in the directory of Onward's source, which has its pyproject.toml"


def _is_source(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "trainer").is_dir()


def _installed_from() -> Path | None:
    """Return the directory that pip has installed from (PEP 610), if it was one."""
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError):
        url = urlsplit(json.loads(metadata.distribution("onward").read_text("direct_url.json") or "{}")["url"])
        return Path(unquote(url.path)) if url.scheme == "file" else None
    return None
