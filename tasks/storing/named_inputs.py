"""The files beside the data that a configuration names on this machine: another one can resume the run with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.config.named_files import named_file
from onward.trainer.config.setting_paths import PATHS, values_at
from onward.trainer.config.urls import is_registered, url_of
from onward.trainer.data.schema.signature import model_files
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.remote.local_copies import WRITTEN


@dataclass(frozen=True)
class NamedInput:
    """What one setting names."""

    setting: str
    """The value of the setting, as config.json has it."""
    location: str
    """The path in it."""
    name: str
    """The last part of the path on this machine."""
    files: dict[str, Path]
    """Name relative to the directory that the path is in -> the file, of a directory all in it."""


def named_inputs(run: RunDir) -> Iterator[NamedInput]:
    """Yield what settings name: the model, losses, converters, a tokenizer, a teacher, a checkpoint to start from.

    Not data, which may be larger than a store should get, and not what has a URL: both are read again where they are.
    """
    given, local = read_config(run, "given"), read_config(run, "local")
    for key in PATHS:
        if key in WRITTEN or _names_data(key):
            continue
        both = zip(values_at(given, key.split(".")), values_at(local, key.split(".")), strict=True)
        for value, here in both:
            location = named_file(key, value).location
            url = url_of(location)
            # a version of a registered model may be gone, or its alias may have moved
            if location and (not url or is_registered(url)):
                path = Path(named_file(key, here).location)
                yield NamedInput(str(value), location, path.name, _files(path))


def _names_data(key: str) -> bool:
    """Return whether a setting names data; a tokenizer belongs to the model."""
    return key.startswith("data.") and key != "data.text.tokenizer"


def data_of_this_machine(run: RunDir, *, is_here: bool = True) -> list[tuple[str, str]]:
    """Return (setting, path or glob) of files that [data] names on one machine, of which the store gets none.

    is_here: of those that are on this machine; else of those that are not.
    """
    config = read_config(run, "given")
    named = []
    for key in filter(_names_data, PATHS):
        # names of bundled data are no paths, and URLs are none of this machine
        values = map(str, values_at(config, key.split(".")))
        named += [(key, value) for value in values if Path(value).is_absolute()]
    return [(key, path) for key, path in named if _is_here(path) is is_here]


def _is_here(path: str) -> bool:
    return Path(path).exists() or any(Path("/").glob(path.lstrip("/")))


def _files(path: Path) -> dict[str, Path]:
    # one that is gone is noticed by whoever reads it
    files = model_files(path) if path.suffix == ".onnx" and path.exists() else [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path.parent).as_posix(): file for file in files}
