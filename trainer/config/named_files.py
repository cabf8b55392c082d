"""Take apart what settings name: the path or URL of a file, a function in it, and whether the file is code.

    model.converters  ops.py              ->  ops.py       is code
    loss.file         my_loss.py:smooth   ->  my_loss.py   function smooth, is code
    loss.file         my_loss.onnx        ->  my_loss.onnx
    loss.file         x.py:f.onnx         ->  x.py         function f.onnx, is code (and refused: no such function)

Everybody asks here: who loads a file, who asks for permission (bundles, deployments), who records digests. What is not
known to be data is code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onward.trainer.config.setting_paths import BUNDLED_SOURCES, PATHS, values_at

DATA = frozenset(
    [
        *("model.path", "teacher.path", "data.text.tokenizer", "checkpoint.load"),
        *("data.source", "data.sources.source", "data.files_from", "data.evaluation_source", "data.test_source"),
        *("launch.hostfile", "checkpoint.store", "export.path"),
    ]
)
"""The settings whose files are read, or written, and never executed. Those of a setting that is not here are code."""


@dataclass(frozen=True)
class NamedFile:
    """A file that a setting names."""

    location: str
    """A path, a pattern, a URL, or the name of bundled data."""
    function: str = ""
    """The function of the file that the setting names; "" if it names none."""
    is_code: bool = True

    def at(self, location: str) -> str:
        """Return the value of the setting for another place of the file."""
        return f"{location}:{self.function}" if self.function else location


def named_file(setting: str, value: object) -> NamedFile:
    """Return what the value of a setting names."""
    return _READERS.get(setting, NamedFile)(str(value))


def named_files(settings: Any) -> Iterator[tuple[str, NamedFile]]:
    """Yield (setting, file) of everything that settings name, code and data."""
    for setting in PATHS:
        for value in values_at(settings, setting.split(".")):
            if str(value) and not (setting.startswith("data.") and str(value) in BUNDLED_SOURCES):
                yield setting, named_file(setting, value)


def _data(value: str) -> NamedFile:
    return NamedFile(value, is_code=False)


def _loss(value: str) -> NamedFile:
    folder, slash, name = value.rpartition("/")  # the colon of a URL is in front of its slashes
    name, colon, function = name.partition(":")
    is_onnx = name.endswith(".onnx") and not colon
    return NamedFile(f"{folder}{slash}{name}", function, is_code=not is_onnx)


_READERS: Mapping[str, Callable[[str], NamedFile]] = {"loss.file": _loss, **dict.fromkeys(DATA, _data)}
