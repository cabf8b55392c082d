"""The settings of a configuration as one table: `section.key` -> value, which differ from the defaults, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return `section.key` -> value, plain as in JSON; of a table in a section `data.image.size`, of one of several
    losses `loss.1.weight`."""
    flat = dict[str, Any]()
    for prefix, table, keys in _tables(config):
        plain = table.model_dump(mode="json", include=keys)
        flat |= {f"{prefix}{key}": plain[key] for key in plain}
    return flat


def nested_settings(flat: Mapping[str, Any]) -> Any:
    """Return the tables that `flat_settings` has made flat; of several tables a list."""
    found: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            found[name] = value
    found |= {name: nested_settings(table) for name, table in inner.items()}
    return [*found.values()] if inner and all(map(str.isdecimal, found)) else found


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings whose values differ from their defaults; those without a default are among them."""
    defaults = dict[str, Any]()
    for prefix, table, keys in _tables(config):
        optional = {key: field.default for key, field in type(table).model_fields.items() if not field.is_required()}
        plain = type(table).model_construct(**optional).model_dump(mode="json", include=keys & optional.keys())
        defaults |= {f"{prefix}{key}": plain[key] for key in plain}
    changed = {}
    for key, value in flat_settings(config).items():
        if key not in defaults or defaults[key] != value:
            changed[key] = value
    return changed


def _tables(table: Section, prefix: str = "") -> Iterator[tuple[str, Section, set[str]]]:
    """Yield (prefix, table, keys that are no tables) of a configuration, and the same of each table inside."""
    inner = dict[str, tuple[tuple[str, Section], ...]]()
    for key, value in table:
        if isinstance(value, Section):
            inner[key] = ((f"{prefix}{key}.", value),)
        elif key == "loss" and isinstance(value, tuple):
            numbered = [f"{prefix}{key}.{place}." for place in range(len(value))]
            inner[key] = tuple(zip(numbered if len(value) > 1 else [f"{prefix}{key}."], value, strict=False))
    yield prefix, table, {key for key, _ in table} - inner.keys()
    for name, each in (found for tables in inner.values() for found in tables):
        yield from _tables(each, name)


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
