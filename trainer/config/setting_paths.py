"""Which settings hold paths or URLs, and how nested settings are read and replaced by their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.trainer.config.open_questions import OPEN
from onward.trainer.config.section import Section
from onward.trainer.config.urls import url_of

PATHS = (
    "model.path",
    "model.converters",
    "teacher.path",
    "data.source",
    "data.sources.source",
    "data.files_from",
    "data.evaluation_source",
    "data.test_source",
    "data.text.tokenizer",
    "loss.file",
    "launch.hostfile",
    "checkpoint.load",
    "checkpoint.store",
    "export.path",
)
"""The settings that hold paths or URLs, also inside lists: what is anchored here, and fetched if it is a URL."""


def anchor(raw: dict[str, Any], base: Path) -> None:
    """Make the paths of a settings mapping absolute, in place."""

    def anchored(value: Any) -> Any:
        if not isinstance(value, str) or value in ("", OPEN):
            return value
        # a URL stays; an absolute path replaces `base`
        return url_of(value) or str(base / expanded(value))

    def anchored_source(value: Any) -> Any:
        return value if value in BUNDLED_SOURCES else anchored(value)

    for key in PATHS:
        raw |= replaced(raw, key.split("."), anchored_source if key.startswith("data.") else anchored)


def expanded(path: str) -> Path:
    """Return a path with the home directory in place of ~. Of an unknown user the path stays: it is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def toml_key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def values_at(settings: Any, keys: Sequence[str]) -> list[Any]:
    """Return the settings at `keys`: one, none, or several where there are lists."""
    found: list[Any] = []

    def collect(value: Any) -> Any:
        found.append(value)
        return value

    replaced(settings, keys, collect)
    return found


def replaced(settings: Any, keys: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Return nested settings with `change` applied to the setting at `keys`, to each element where that is a list."""
    if isinstance(settings, list | tuple):
        # the keys go on inside of each element
        return type(settings)(replaced(item, keys, change) for item in settings)
    if not keys:
        return change(settings)
    if isinstance(settings, Section):
        value = getattr(settings, keys[0], None)
        return settings if value is None else settings.model_copy(update={keys[0]: replaced(value, keys[1:], change)})
    if isinstance(settings, Mapping) and keys[0] in settings:
        return {**settings, keys[0]: replaced(settings[keys[0]], keys[1:], change)}
    return settings


BUNDLED_SOURCES = ("digits", "stdlib")
"""Data sources that every machine has: names, not paths."""
