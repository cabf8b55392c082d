"""Loading: defaults, then a TOML file, then `section.key=value` lines, validated together."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onward.trainer.bounds import CONFIG_BYTES, CONFIG_DEPTH, NAME_LETTERS, read_bounded
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.open_questions import OPEN, open_questions
from onward.trainer.config.rules import Sections, check_cross_section_rules
from onward.trainer.config.run_config import SECTIONS, RunConfig
from onward.trainer.config.section import Section, plain_word
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.config.unknown_settings import explained, unknown
from onward.trainer.config.urls import url_of
from onward.trainer.errors import ConfigError

Check = Callable[[Sections], Iterable[str]]
"""Returns further problems of the sections that could be read, such as a model file that does not exist."""


Override = str | tuple[str, Any]
"""One changed setting: a line `section.key=value` whose value is TOML, or (key, value), where the key names a setting
("train.num_steps") or a section, whose settings are then a mapping ("train": {"num_steps": 10})."""


def load_config(
    source: RunConfig | Mapping[str, Any] | Path,
    overrides: Iterable[Override] = (),
    *,
    check: Check = lambda sections: (),
) -> RunConfig:
    """Read a TOML file (or take settings that were read already), apply the overrides, validate everything.

    Paths in the file become absolute against the file's directory, all others against the
    working directory. Raises ConfigError with every problem found, those of `check` included; while a setting is "?"
    (open_questions.py), with every such setting.
    """
    raw, problems = settings_of(source, overrides)
    if not isinstance(source, RunConfig):
        text = read_bounded(source, CONFIG_BYTES).decode() if isinstance(source, Path) else ""
        if questions := open_questions(raw, text, str(source) if text else ""):
            raise ConfigError([*problems, *questions])
    return build_config(raw, problems, check=check)


def settings_of(
    source: RunConfig | Mapping[str, Any] | Path, overrides: Iterable[Override] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of `load_config` before they are validated, with absolute paths; and what is wrong with the
    overrides. Raises ConfigError when the file cannot be read."""
    raw = _read_toml(source) if isinstance(source, Path) else _as_settings(source)
    layout = raw.get("parallel")
    if isinstance(layout, dict) and "horizontal" in layout and "tensor" not in layout:
        layout["tensor"] = layout.pop("horizontal")  # so that an override under either name replaces it
    # collected, so that one run of the command reports every mistake of file and overrides
    problems: list[str] = []
    for override in overrides:
        try:
            for key, value in settings_in(override):
                _override(raw, key, value)
        except ConfigError as error:
            problems += error.problems
    return raw, problems


_DEEP_KEY = re.compile(rf"(?<![\w.-])(?:[\"']?[\w-]++[\"']?\s*\.\s*){{{CONFIG_DEPTH.most},}}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_bounded(path, CONFIG_BYTES).decode()
        if _DEEP_KEY.search(text):  # of which tomllib keeps each beginning
            raise RecursionError
        raw: dict[str, Any] = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except ValueError as error:  # TOMLDecodeError, and Python's own of a number with thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} has more {CONFIG_DEPTH.what} than the limit of {CONFIG_DEPTH.most}") from None
    if (depth := _depth(raw)) > CONFIG_DEPTH.most:
        raise ConfigError(f"{path} has {CONFIG_DEPTH.exceeded(depth)}")
    _anchor(raw, path.resolve().parent)
    raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)[: NAME_LETTERS.most])
    return raw


def _depth(settings: Any) -> int:
    """Return how many tables and lists lie inside each other; level by level, because recursion has a limit, too."""
    depth, level = 0, [settings]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _as_settings(source: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration or a nested mapping as nested dictionaries of plain values, paths absolute."""
    sections = source.model_dump(mode="json") if isinstance(source, RunConfig) else _plain(source)
    _anchor(sections, Path.cwd())
    return dict(sections)


def _plain(value: Any) -> Any:
    """Copy nested mappings and sections to dictionaries, and paths to strings, as TOML has them."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def build_config(
    raw: Mapping[str, Any], problems: Iterable[str] = (), *, check: Check = lambda sections: ()
) -> RunConfig:
    """Validate a nested mapping of settings; raises ConfigError with `problems` and everything wrong that is found
    here."""
    found = list(problems)
    found += [
        unknown(key, RunConfig.model_fields, "section", RunConfig) for key in raw if key not in RunConfig.model_fields
    ]
    read: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        value = raw.get(name, {})
        if name == "parallel" and _is_auto(value):
            value = {"sizes": "auto"}
        if isinstance(value, section):
            read[name] = value
        elif not isinstance(value, Mapping):
            found.append(f"[{name}] must be a table, not {value!r}")
        else:
            try:
                read[name] = section.model_validate(dict(value))
            except ValidationError as error:
                found += explained(error, name, section, RunConfig)
    for name in ENTRIES:
        read |= _read_entries(name, raw.get(name, ()), found)
    config = None
    if read.keys() == {*SECTIONS, *ENTRIES}:
        try:
            config = RunConfig(**({"name": raw["name"]} if "name" in raw else {}), **read)  # checks the rules, too
        except ValidationError as error:
            found += explained(error, "", RunConfig, RunConfig)
            if any(finding["loc"] for finding in error.errors()):  # of the name: pydantic did not reach the rules
                found += check_cross_section_rules(read)
    else:
        found += check_cross_section_rules(read)
    found += check(read)
    if found or config is None:
        raise ConfigError(found)
    return config


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and plain_word(value) == "auto"


ENTRIES: Mapping[str, type[Section]] = {"loss": LossConfig, "metrics": MetricConfig}
"""What a configuration has several of; one may be given without a list."""


def _read_entries(name: str, given: Any, problems: list[str]) -> dict[str, tuple[Any, ...]]:
    """Return {name: entries}, or {} after adding to `problems` what is wrong with them."""
    entries = given if isinstance(given, list | tuple) else (given,)
    kind, read, before = ENTRIES[name], [], len(problems)
    for place, entry in enumerate(entries):
        where = name if len(entries) == 1 or isinstance(entry, str) else f"{name}.{place}"
        value = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(value, kind):
            read.append(value)
        elif not isinstance(value, Mapping):
            is_loss = name == "loss"
            wanted = "[loss] must be a table, or several [[loss]]" if is_loss else "metrics must be names or tables"
            problems.append(f"{wanted}, not {entry!r}")
        else:
            try:
                read.append(kind.model_validate(dict(value)))
            except ValidationError as error:
                problems += explained(error, where, kind, RunConfig)
    return {name: tuple(read)} if len(problems) == before else {}


PATHS = (
    "model.path",
    "model.converters",
    "teacher.path",
    "data.source",
    "data.sources.source",
    "data.evaluation_source",
    "data.test_source",
    "data.text.tokenizer",
    "loss.file",
    "launch.hostfile",
    "checkpoint.load",
    "export.path",
)
"""The settings that hold paths or URLs, also inside lists: what is anchored here, and fetched if it is a URL."""


def _anchor(raw: dict[str, Any], base: Path) -> None:
    """Make the paths of a settings mapping absolute, in place."""

    def anchored(value: Any) -> Any:
        if not isinstance(value, str) or value in ("", OPEN):
            return value
        return url_of(value) or str(base / _expanded(value))

    def anchored_source(value: Any) -> Any:
        return value if value in BUNDLED_SOURCES else anchored(value)

    for key in PATHS:
        raw |= replaced(raw, key.split("."), anchored_source if key.startswith("data.") else anchored)


def _expanded(path: str) -> Path:
    """Return a path with the home directory in place of ~. Of an unknown user the path stays: it is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


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


def settings_in(override: Override) -> Iterable[tuple[str, Any]]:
    """Yield (section.key, value) of every setting that an override changes."""
    if isinstance(override, str):
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"override {override!r} is not section.key=value")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a bare word is a string: model.loss=mse
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, thousands of brackets
            raise ConfigError(f"override {key.strip()}: its value cannot be read: {error}") from None
        yield key.strip(), value
    else:
        key, value = override[0], _plain(override[1])
        if isinstance(value, dict) and "." not in key:
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield key, value


def _override(raw: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    if parts == ["parallel", "horizontal"]:
        parts[-1] = "tensor"
    if parts[0] == "loss" and isinstance(raw.get("loss"), list) and len(parts) > 1:  # [[loss]]
        parts = _of_one_table(raw[parts[0]], parts)
    if parts[0] == "loss" and parts[-1] == "file" and value != OPEN:
        value = str(_expanded(str(value)).absolute())
    patch: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        patch = {part: patch}
    # paths on the command line are relative to the working directory, those in the file to the file
    _anchor(patch, Path.cwd())
    target: Any = raw
    for part in parts[:-1]:
        patch = patch[part]
        if isinstance(target, list):  # one of [[loss]]
            target = target[int(part)]
            continue
        if part == "parallel" and _is_auto(target.get(part)):
            target[part] = {"sizes": "auto"}
        if target.get(part) is None:
            target[part] = {}  # absent, or a table that a configuration was saved without
        target = target[part]
        if not isinstance(target, dict) and target is not raw.get("loss"):
            raise ConfigError(f"override {key}: {part} is not a table")
    target[parts[-1]] = patch[parts[-1]]


def _of_one_table(tables: list[Any], parts: list[str]) -> list[str]:
    """Return the key of a setting in one of several tables: `loss.0.weight`, also for the `loss.weight` of only one."""
    section, number, *rest = parts
    if rest and number.isdecimal() and int(number) < len(tables):
        return parts
    if len(tables) > 1:
        raise ConfigError(
            f"override {'.'.join(parts)}: there are {len(tables)} [[{section}]]; name one, such as "
            f"{section}.0.{rest[0] if rest else number}"
        )
    if not tables:
        tables.append({})
    return [section, "0", number, *rest]
