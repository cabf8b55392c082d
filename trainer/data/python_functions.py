"""Load a function of a Python file that a setting names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onward.trainer.errors import ConfigError


def load_function(path: Path, name: str, setting: str) -> Callable[..., Any]:
    """Return a function of a Python file. Raises ConfigError if there is none, or the file cannot be imported."""
    spec = importlib.util.spec_from_file_location(f"onward_loss_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{setting} {path} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{setting} {path} has no function {name!r}")
    return function
