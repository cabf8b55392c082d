"""Loading: defaults, then TOML files, then `section.key=value` lines, validated together."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onward.trainer.bounds import CONFIG_BYTES, CONFIG_DEPTH, CONFIG_ENTRIES
from onward.trainer.config.layers import Layered, Source, depth_of, is_auto, parsed, plain, read_layers
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.open_questions import open_questions
from onward.trainer.config.rules import Sections, check_cross_section_rules
from onward.trainer.config.run_config import SECTIONS, RunConfig, name_of_model
from onward.trainer.config.section import Section
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.config.setting_paths import anchor
from onward.trainer.config.unknown_settings import explained, unknown_sections
from onward.trainer.errors import ConfigError, shown

Check = Callable[[Sections], Iterable[str]]
"""Returns further problems of the sections that could be read, such as a model file that does not exist."""


Override = str | tuple[str, Any]
"""One changed setting: a line `section.key=value` whose value is TOML, or (key, value), where the key names a setting
("train.num_steps") or a section, whose settings are then a mapping ("train": {"num_steps": 10})."""


def load_config(
    source: Source,
    overrides: Iterable[Override] = (),
    *,
    profile: str = "",
    check: Check = lambda sections: (),
) -> RunConfig:
    """Read TOML files (or take settings that were read already), apply the overrides, validate everything.

    Several files, their bases and a profile are laid over each other (layers.py). Paths in a file become absolute
    against the file's directory, all others against the working directory. Raises ConfigError with every problem
    found, those of `check` included; while a setting is "?" (open_questions.py), with every such setting.
    """
    found = layered(source, overrides, profile=profile)
    if not isinstance(source, RunConfig) and (questions := open_questions(found.settings, found.texts)):
        raise ConfigError([*found.problems, *questions])
    return build_config(found.settings, found.problems, check=check)


def settings_of(source: Source, overrides: Iterable[Override] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of `load_config` before they are validated, with absolute paths; and what is wrong with the
    overrides. Raises ConfigError when the file cannot be read."""
    found = layered(source, overrides)
    return found.settings, found.problems


def layered(source: Source, overrides: Iterable[Override] = (), *, profile: str = "") -> Layered:
    """Return the settings of all layers before they are validated, with what is wrong with the overrides."""
    found = read_layers(source, profile)
    # collected, so that one run of the command reports every mistake of file and overrides
    for override in overrides:
        try:
            for key, value in settings_in(override):
                found.set(key, "override", _override(found.settings, key, value))
        except ConfigError as error:
            found.problems += error.problems
    return found


def build_config(
    raw: Mapping[str, Any], problems: Iterable[str] = (), *, check: Check = lambda sections: ()
) -> RunConfig:
    """Validate a nested mapping of settings; raises ConfigError with `problems` and everything wrong that is found
    here."""
    found = list(problems)
    found += unknown_sections(raw, RunConfig)
    read: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        value = raw.get(name, {})
        if name == "parallel" and is_auto(value):
            value = {"sizes": "auto"}
        if isinstance(value, section):
            read[name] = value
        elif not isinstance(value, Mapping):
            found.append(f"[{name}] must be a table, not {shown(repr(value))}")
        else:
            try:
                read[name] = section.model_validate(dict(value))
            except ValidationError as error:
                found += explained(error, name, section, RunConfig)
    for name in ENTRIES:
        read |= _read_entries(name, raw.get(name, ()), found)
    config = None
    # RunConfig checks the rules by itself once all sections are valid; else those rules run whose sections could be
    # read
    if read.keys() == {*SECTIONS, *ENTRIES}:
        try:
            name = raw.get("name", name_of_model(str(read["model"].path)))
            config = RunConfig(name=name, **read)  # checks the rules, too
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


ENTRIES: Mapping[str, type[Section]] = {"loss": LossConfig, "metrics": MetricConfig}
"""What a configuration has several of; one may be given without a list."""


def _read_entries(name: str, given: Any, problems: list[str]) -> dict[str, tuple[Any, ...]]:
    """Return {name: entries}, or {} after adding to `problems` what is wrong with them."""
    entries = given if isinstance(given, list | tuple) else (given,)
    kind = ENTRIES[name]
    read = []
    before = len(problems)
    if len(entries) > CONFIG_ENTRIES.most:
        problems.append(f"{name}: {CONFIG_ENTRIES.exceeded(len(entries))}")
        return {}
    for place, entry in enumerate(entries):
        # the place is named only where it tells entries apart
        where = name if len(entries) == 1 or isinstance(entry, str) else f"{name}.{place}"
        # a bare word is short for a table with this name
        value = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(value, kind):
            read.append(value)
        elif not isinstance(value, Mapping):
            is_loss = name == "loss"
            wanted = "[loss] must be a table, or several [[loss]]" if is_loss else "metrics must be names or tables"
            problems.append(f"{wanted}, not {shown(repr(entry))}")
        else:
            try:
                read.append(kind.model_validate(dict(value)))
            except ValidationError as error:
                problems += explained(error, where, kind, RunConfig)
    return {name: tuple(read)} if len(problems) == before else {}


def settings_in(override: Override) -> Iterable[tuple[str, Any]]:
    """Yield (section.key, value) of every setting that an override changes."""
    if isinstance(override, str):
        key, equals, text = override.partition("=")
        if len(override) > CONFIG_BYTES.most:
            raise ConfigError(f"override {shown(override)} has {CONFIG_BYTES.exceeded(len(override))}")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"override {shown(repr(override))} is not section.key=value")
        try:
            value = parsed(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a bare word is a string: model.loss=mse
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, thousands of brackets
            raise ConfigError(f"override {shown(key.strip())}: its value cannot be read: {error}") from None
        key = key.strip()
        is_section = False
    else:
        key = override[0]
        value = plain(override[1])
        # a whole section is laid over the former one setting by setting
        is_section = isinstance(value, dict) and "." not in key
    if (depth := key.count(".") + 1 + depth_of(value)) > CONFIG_DEPTH.most:
        raise ConfigError(f"override {shown(key)} has {CONFIG_DEPTH.exceeded(depth)}")
    yield from ((f"{key}.{name}", item) for name, item in value.items()) if is_section else [(key, value)]


def _override(raw: dict[str, Any], key: str, value: Any) -> Any:
    """Replace a setting; return its former value."""
    parts = key.split(".")
    if parts[0] == "loss" and isinstance(raw.get("loss"), list) and len(parts) > 1:  # [[loss]]
        parts = _of_one_table(raw[parts[0]], parts)
    if parts[0] == "loss" and parts[-1] == "file":
        # below the number of its table it would not be found
        of_loss = {"loss": {"file": value}}
        anchor(of_loss, Path.cwd())
        value = of_loss["loss"]["file"]
    # the value inside of its tables, as a file has it: paths are found by their keys
    patch: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        patch = {part: patch}
    # paths on the command line are relative to the working directory, those in the file to the file
    anchor(patch, Path.cwd())
    target: Any = raw
    for part in parts[:-1]:
        patch = patch[part]
        if isinstance(target, list):  # one of [[loss]]
            target = target[int(part)]
            continue
        if part == "parallel" and is_auto(target.get(part)):
            target[part] = {"sizes": "auto"}
        if target.get(part) is None:
            target[part] = {}  # absent, or a table that a configuration was saved without
        target = target[part]
        if not isinstance(target, dict) and target is not raw.get("loss"):
            raise ConfigError(f"override {key}: {part} is not a table")
    former = target.get(parts[-1])
    target[parts[-1]] = patch[parts[-1]]
    return former


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
