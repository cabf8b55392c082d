"""The settings of a configuration as one table: `section.key` -> value, which differ from the defaults, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return `section.key` -> value, plain as in JSON; of a table in a section `data.image.size`, of one of several
    losses `loss.1.weight`."""
    return {key.lstrip("."): value for key, value in _settings_of(config, "").items()}


def _settings_of(section: Section, name: str) -> dict[str, Any]:
    plain, flat = section.model_dump(mode="json"), dict[str, Any]()
    for key, value in section:
        if isinstance(value, Section):
            flat |= _settings_of(value, f"{name}.{key}")
        elif key == "loss" and isinstance(value, tuple):
            for place, entry in enumerate(value):
                flat |= _settings_of(entry, f"{name}.{key}" if len(value) == 1 else f"{name}.{key}.{place}")
        else:
            flat[f"{name}.{key}"] = plain[key]
    return flat


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings whose values differ from their defaults; those without a default are among them."""
    defaults = {key.lstrip("."): value for key, value in _defaults_of(config, "").items()}
    return {key: value for key, value in flat_settings(config).items() if key not in defaults or defaults[key] != value}


def _defaults_of(section: Section, name: str) -> dict[str, Any]:
    """Return `section.key` -> default, of the tables that `section` has."""
    flat = dict[str, Any]()
    fields = type(section).model_fields
    optional = {key: each.default for key, each in fields.items() if not each.is_required()}
    plain = type(section).model_construct(**optional).model_dump(mode="json", include=set(optional))
    for key, value in section:
        if isinstance(value, Section):
            flat |= _defaults_of(value, f"{name}.{key}")
        elif key == "loss" and isinstance(value, tuple):
            for place, entry in enumerate(value):
                flat |= _defaults_of(entry, f"{name}.{key}" if len(value) == 1 else f"{name}.{key}.{place}")
        elif key in plain:
            flat[f"{name}.{key}"] = plain[key]
    return flat


def origins_of(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return where the value of each setting came from. given: what layers.py has noted, by `section.key`."""
    changed = changed_settings(config)
    return {key: _origin(key, given, is_default=key not in changed) for key in flat_settings(config)}


def _origin(key: str, given: Mapping[str, str], *, is_default: bool) -> str:
    parts = key.split(".")
    # a list is noted as a whole, and a table setting by setting
    for length in range(len(parts), 0, -1):
        if (outer := ".".join(parts[:length])) in given:
            return given[outer]
    if inside := list(dict.fromkeys(where for name, where in given.items() if name.startswith(f"{key}."))):
        return " and ".join(inside)
    return "default" if is_default else "follows from other settings"
