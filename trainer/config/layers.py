"""Settings in layers: files with the files that they begin with, a profile, overrides. Later layers win.

    run.toml:  base = "common.toml"                     common.toml
               [train] num_epochs = 3                   run.toml            over it, setting by setting
               [profiles.long.train] num_epochs = 90    more.toml           a second file, as in `run.toml more.toml`
                                                        [profiles.long]     of each file, with `--profile long`
                                                        train.seed=7        overrides

Tables are merged; every other value, lists and [[tables]] included, is replaced as a whole. A file that is reached
twice counts once, where it is reached first. Paths are relative to the file that names them.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.trainer.bounds import CONFIG_BYTES, CONFIG_DEPTH, NAME_LETTERS, read_bounded
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, plain_word
from onward.trainer.config.setting_paths import anchor, expanded
from onward.trainer.errors import ConfigError

Source = RunConfig | Mapping[str, Any] | Path | Sequence[Mapping[str, Any] | Path]
"""What a configuration is read from: settings, a TOML file, or several of both, of which later ones win."""

BASE = "base"
PROFILES = "profiles"
"""The two keys of a file that are no settings: the files that it begins with, and its profiles."""


@dataclass
class Layered:
    """Nested settings, and where each of them came from."""

    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """`section.key` -> the file and its table, the profile, or the override that has set it last."""
    texts: dict[str, str] = field(default_factory=dict)
    """File -> its text."""
    problems: list[str] = field(default_factory=list)

    def merge(self, later: Mapping[str, Any], where: str, *, table: str = "") -> None:
        """Lay settings over these. where: what `origins` says of them; table: the table of that file they are in."""
        _merge(self.settings, later, self.origins, where=where, table=table, key="")

    def set(self, key: str, where: str, former: Any) -> None:
        """Note that `section.key` was set. former: the value that it had."""
        _forget(self.origins, key, former)
        self.origins[key] = where


@dataclass(frozen=True)
class _Layer:
    """One file or mapping: its own settings, and those of its profiles."""

    where: str
    settings: dict[str, Any]
    profiles: dict[str, dict[str, Any]]
    text: str = ""


def read_layers(source: Source, profile: str = "") -> Layered:
    """Return the settings of files and mappings, laid over each other, with absolute paths.

    Raises ConfigError for a file that cannot be read, a file that is its own base, and an unknown profile.
    """
    sources = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    layers: dict[Any, _Layer] = {}
    for each in sources:
        for key, layer in _layers_of(each, ()):
            # the first place of a file that is reached twice is kept
            layers.setdefault(key, layer)
    found = Layered(texts={layer.where: layer.text for layer in layers.values() if layer.text})
    for layer in layers.values():
        found.merge(layer.settings, layer.where)
    # a profile lies over all files, also over those behind the one that has it
    chosen = [(layer, layer.profiles[profile]) for layer in layers.values() if profile in layer.profiles]
    if profile and not chosen:
        raise ConfigError(_unknown_profile(profile, layers.values()))
    for layer, settings in chosen:
        found.merge(settings, layer.where, table=f"{PROFILES}.{profile}")
    first = sources[0] if sources else {}
    # a run is named after its first file
    if isinstance(first, Path) and "name" not in found.settings:
        found.settings["name"] = name_of_file(first)
        found.origins["name"] = "name of the file"
    return found


def name_of_file(path: Path) -> str:
    """Return the name of a configuration in a file that says none, in letters that a directory may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)[: NAME_LETTERS.most]


def _unknown_profile(profile: str, layers: Iterable[_Layer]) -> str:
    known = list(dict.fromkeys(name for layer in layers for name in layer.profiles))
    near = difflib.get_close_matches(profile, known, n=1)
    there_is = f"there is {', '.join(known)}" if known else f"there is none; a profile is a table [{PROFILES}.NAME]"
    return f"unknown profile {profile}; {f'did you mean {near[0]}? ' if near else ''}{there_is}"


def _layers_of(source: RunConfig | Mapping[str, Any] | Path, within: tuple[Path, ...]) -> Iterator[tuple[Any, _Layer]]:
    """Yield (what identifies it, layer) of the files that a file begins with, and last of the file itself.

    within: the files that have led to it.
    """
    if not isinstance(source, Path):
        where = "given configuration" if isinstance(source, RunConfig) else "given settings"
        raw = plain(source)
        folder = Path.cwd()
        text = ""
        identity = object()
    else:
        where = str(source)
        folder = source.resolve().parent
        identity = source.resolve()
        if identity in within:
            chain = [*within[within.index(identity) :], identity]
            raise ConfigError(
                f"a file is its own base: {' -> '.join(each.name for each in chain)}; remove one `{BASE}`"
            )
        raw, text = _read_toml(source)
        within = (*within, identity)
    # bases come before the file, which lies over them
    for base in _bases(raw.pop(BASE, ()), where):
        beside = source.parent if isinstance(source, Path) else Path()
        yield from _layers_of(Path(os.path.normpath(beside / expanded(base))), within)
    profiles = raw.pop(PROFILES, {})
    if not isinstance(profiles, dict) or not all(isinstance(each, dict) for each in profiles.values()):
        raise ConfigError(f"{where}: [{PROFILES}] has a table for each profile, such as [{PROFILES}.fast.train]")
    if nested := [f"{PROFILES}.{name}" for name, each in profiles.items() if {BASE, PROFILES} & each.keys()]:
        raise ConfigError(f"{where}: {' and '.join(nested)}: a profile has settings only, no {BASE} and no {PROFILES}")
    for each in (raw, *profiles.values()):
        anchor(each, folder)
    yield identity, _Layer(where, raw, profiles, text)


def _bases(given: Any, where: str) -> list[str]:
    bases: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(each, str) and each for each in bases):
        raise ConfigError(f"{where}: {BASE} names a file, or a list of files, not {given!r}")
    return bases


def _merge(
    into: dict[str, Any], later: Mapping[str, Any], origins: dict[str, str], *, where: str, table: str, key: str
) -> None:
    for name, value in later.items():
        full = f"{key}{name}"
        if full == "parallel":
            value = {"sizes": value} if is_auto(value) and isinstance(value, str) else value
            # "auto" is short for a table: a table that is laid over it keeps what it does not set
            if is_auto(into.get(name)):
                into[name] = {"sizes": "auto"}
        # "auto" replaces the sizes that were set, as a table would not
        whole = not isinstance(value, dict) or (full == "parallel" and is_auto(later[name]))
        if whole or not isinstance(into.get(name), dict):
            _forget(origins, full, into.get(name))
            into[name] = {} if isinstance(value, dict) else value
        if isinstance(value, dict):
            inside = f"{table}.{name}".lstrip(".")
            _merge(into[name], value, origins, where=where, table=inside, key=f"{full}.")
        else:
            origins[full] = f"{where} [{table}]" if table else where


def _forget(origins: dict[str, str], key: str, former: Any) -> None:
    """Remove the origin of a setting, and of those inside its former value."""
    origins.pop(key, None)
    if isinstance(former, dict):
        for name, value in former.items():
            _forget(origins, f"{key}.{name}", value)


def is_auto(value: Any) -> bool:
    """Return whether it is the word "auto", in place of the table [parallel]."""
    return isinstance(value, str) and plain_word(value) == "auto"


def plain(value: Any) -> Any:
    """Copy nested mappings and sections to dictionaries, and paths to strings, as TOML has them."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# -- one file


_DEEP_KEY = re.compile(rf"(?<![\w.-])(?:[\"']?[\w-]++[\"']?\s*\.\s*){{{CONFIG_DEPTH.most},}}")


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of a TOML file, and its text."""
    try:
        text = read_bounded(path, CONFIG_BYTES).decode()
        raw = parsed(text)
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, Python's own of a number of thousands of digits
        how = "" if path.suffix == ".toml" else "; `onward init MODEL.onnx DATA` writes a configuration"
        raise ConfigError(f"{path} is not TOML: {error}{how}") from None
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if (depth := depth_of(raw)) > CONFIG_DEPTH.most:
        raise ConfigError(f"{path} has {CONFIG_DEPTH.exceeded(depth)}")
    return raw, text


def parsed(text: str) -> dict[str, Any]:
    """Return the content of TOML. Raises ValueError where it is none, RecursionError where it is too deep."""
    too_deep = RecursionError(f"it has more {CONFIG_DEPTH.what} than the limit of {CONFIG_DEPTH.most}")
    if _DEEP_KEY.search(text):  # of which tomllib keeps each beginning
        raise too_deep
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise too_deep from None


def depth_of(settings: Any) -> int:
    """Return how many tables and lists lie inside each other; level by level, because recursion has a limit, too."""
    depth = 0
    level = [settings]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        contents = [each.values() if isinstance(each, dict) else each for each in level]
        level = [inner for content in contents for inner in content]
    return depth
