"""Execute the Python files that settings name, with the content that was permitted and no other.

    deployment's record, or the first reading of a run --> code.json: path -> SHA-256 --> every process of the run
                                                                                              |
                                    file --read once--> bytes --compared with the digest--> compiled, executed

A process of a run that has a code.json executes no other file. What such a file imports or reads is not in the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onward.trainer.bounds import CODE_BYTES, read_bounded
from onward.trainer.config.named_files import named_files
from onward.trainer.errors import ConfigError
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import Record, read_record

if TYPE_CHECKING:
    from onward.trainer.run.directory import RunDir

SHOWN = 12
"""Digits of a digest that messages have."""


class AllowedCode(Record):
    """The Python files that the processes of a run may execute."""

    files: Mapping[str, str]
    """Path -> SHA-256."""


_allowed: Mapping[str, str] | None = None
"""What this process may execute; None = whatever its user names."""


def code_digests(settings: Any) -> dict[str, str]:
    """Return path -> SHA-256 of each Python file that settings name, as far as there is one."""
    paths = dict.fromkeys(file.location for _, file in named_files(settings) if file.is_code)
    return {path: sha256(Path(path)) for path in paths if Path(path).is_file()}


def allow_code_of(run: RunDir) -> None:
    """Let this process execute the files in the run's code.json alone, if there is one. Raises RecordError."""
    global _allowed
    if run.code.exists():
        _allowed = read_record(run.code, AllowedCode).files


def execute(path: Path, setting: str, name: str) -> ModuleType:
    """Execute a Python file as the module `name`, and return it.

    Raises ConfigError for a file that is not the one that was permitted, ImportError or OSError for one that is no
    Python file or cannot be read, and whatever the file raises.
    """
    if path.suffix != ".py":
        raise ImportError("it is not a Python file; its name must end with .py")
    # read once: between a check and a second reading the file could be replaced
    content = read_bounded(path, CODE_BYTES)
    _refuse_other(path, setting, hashlib.sha256(content).hexdigest())
    module = ModuleType(name)
    module.__file__ = str(path)
    # the bytes that were compared: an import would read the file once more
    exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def load_function(path: Path, name: str, setting: str) -> Callable[..., Any]:
    """Return a function of a Python file. Raises ConfigError if there is none, or the file cannot be executed."""
    try:
        module = execute(path, setting, f"onward_loss_{path.stem}")
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{setting} {path} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{setting} {path} has no function {name!r}")
    return function


def _refuse_other(path: Path, setting: str, digest: str) -> None:
    """Raise ConfigError unless this process may execute these bytes."""
    # None: a program of the user, such as a notebook, which may execute what it names
    if _allowed is None or _allowed.get(str(path)) == digest:
        return
    if permitted := _allowed.get(str(path)):
        raise ConfigError(changed_code(setting, path, permitted, digest))
    raise ConfigError(
        f"{setting}: {path} is Python that nobody has permitted; permitted are: {', '.join(_allowed) or 'none'}"
    )


def changed_code(setting: str, path: Path | str, permitted: str, digest: str) -> str:
    """Return that a file is not the one that was permitted, and what to do."""
    return (
        f"{setting}: {path} changed after it was permitted (SHA-256 {permitted[:SHOWN]}, now {digest[:SHOWN]}), and is "
        "not executed; put the file back, or look at it and start a new run (of a deployment: deploy it again)"
    )
