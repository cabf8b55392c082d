"""The folders of which the files of a data source may be: its own, and those that `data.files_from` names.

    /data/train.csv     image             read from
                        img/1.png         /data/img/1.png
                        ../home/a.png     refused: outside of /data
                        /mnt/b.png        refused, unless data.files_from = "/mnt"
                        img/link.png      where the link leads to decides

A table from a stranger could else bring any file of the user's into the training, and an unpacked folder by its links.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.trainer.config.urls import url_of
from onward.trainer.errors import DataError, first_lines, shown
from onward.trainer.run.home import download_cache

if TYPE_CHECKING:
    from onward.trainer.config.sections.data import DataConfig


class AllowedFiles:
    """Which files may be read. It remembers where folders lead, so that it is made anew for each use."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(dict.fromkeys(os.path.realpath(folder) for folder in folders))
        self._known: dict[str, str] = {}
        cache = os.path.realpath(download_cache())
        self._downloaded = [folder for folder in self._folders if _is_below(folder, cache)]

    def refusal(self, path: Path) -> str:
        """Return where a file is that must not be read, and what to do; "" if it may be read."""
        folder, name = os.path.split(path)
        # following all links of a path takes a system call for each of its parts: a folder is followed once, its files
        # are only looked at
        if folder not in self._known:
            self._known[folder] = os.path.realpath(folder)
        real = f"{self._known[folder].rstrip(os.sep)}{os.sep}{name}"
        # the links to files in a downloaded folder are Onward's own: a store has none
        is_own = name not in ("", ".", "..") and any(_is_below(real, each) for each in self._downloaded)
        if not is_own and (name in ("", ".", "..") or Path(real).is_symlink()):
            real = os.path.realpath(real)
        # real paths on either side, so that no link leads out
        if any(_is_below(real, each) for each in self._folders):
            return ""
        inside = ", ".join(self._folders)
        return f"{shown(real)}, which is outside of {inside}; put the file there, or name its folder in data.files_from"

    def refusal_of_cell(self, folder: Path, name: str) -> str:
        """Return what `refusal` does of the file that a cell of a table in `folder` names."""
        if url_of(name):
            return f"{shown(name)}, a URL: cells name files of this machine; name URLs in data.source"
        try:
            return self.refusal(folder / name)
        except (OSError, ValueError):  # longer than a name may be, with a null character, no Unicode
            return f"{shown(name)}, which is no path of a file"


def allowed_files(source: str, data: DataConfig) -> AllowedFiles:
    """Return which files may be read for a source of `data`."""
    folder = folder_of(source)
    masks = [data.image.masks_of(folder)] if data.image and data.image.mask_folder else []
    return AllowedFiles([folder, *masks, *map(Path, data.files_from)])


def folder_of(source: str) -> Path:
    """Return the folder that a source is: the directory, that of the file, or of a pattern the part before its `*`."""
    path = Path(source)
    if path.is_dir():
        return path
    # a file may have these characters in its name, too
    if path.is_file():
        return path.parent
    return next(parent for parent in path.parents if not set("*?[") & set(str(parent)))


def content_of(cell: Any) -> Any:
    """Return the content or the path of a cell, which may be `{bytes, path}`, as the datasets library has it.

    The content counts before the path, which may be one of another machine.
    """
    return cell.get("bytes") or cell.get("path") if isinstance(cell, dict) else cell


def named_path(cell: Any) -> str:
    """Return the path that a cell of encoded content is, or has as `{bytes, path}`; "" if it has the content itself."""
    given = content_of(cell)
    return given if isinstance(given, str) else ""


def refuse_outside(source: str, files: Iterable[tuple[str, Path]], data: DataConfig) -> None:
    """Raise DataError if some of the files (name, path) of a folder or a pattern are links that lead out of it."""
    allowed = allowed_files(source, data)
    wrong = [f"{shown(name)} leads to {why}" for name, path in files if (why := allowed.refusal(path))]
    if wrong:
        raise DataError(f"{source}: {problem}" for problem in first_lines(wrong))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
