"""The configuration while it is proposed: settings with reasons, and questions where two answers remain.

    draft.set("model.loss", "mse", "column price holds numbers")
    draft.ask("data.label", "the column to predict", {"price": "", "cost": ""})      label = "?"

What is given on the command line is kept, whatever is proposed for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.trainer.config.loading import Override, settings_in
from onward.trainer.config.open_questions import OPEN

GIVEN = "given on the command line"
INPUTS = "data.inputs"


@dataclass(frozen=True)
class Entry:
    """A setting, or an open question."""

    value: Any
    """`OPEN` for a question."""
    reason: str
    choices: Mapping[Any, str] = field(default_factory=dict)
    """Of a question: value -> what it would mean. Empty where any value may be right."""

    @property
    def is_open(self) -> bool:
        """Whether it is a question."""
        return bool(self.value == OPEN)


class Draft:
    """Settings by their keys, in the order in which they were proposed."""

    def __init__(self, given: Iterable[Override] = ()) -> None:
        self.entries: dict[str, Entry] = {}
        """`section.key` -> its entry. The key of an input is "data.inputs." and its name, which may have points."""
        self.notes: list[str] = []
        """What is said about the file as a whole."""
        for override in given:
            for key, value in settings_in(override):
                self.entries[key] = Entry(value, GIVEN)
        self._given = frozenset(self.entries)

    def is_given(self, key: str) -> bool:
        """Return whether a setting, or a table that has it, was given on the command line."""
        return any(key == given or key.startswith(f"{given}.") for given in self._given)

    def set(self, key: str, value: Any, reason: str) -> None:
        """Propose a value; reason: why, for the comment."""
        if not self.is_given(key):
            self.entries[key] = Entry(value, reason)

    def ask(self, key: str, what: str, choices: Mapping[Any, str]) -> None:
        """Ask in the file. what: a few words; choices: value -> what it means."""
        if not self.is_given(key):
            self.entries[key] = Entry(OPEN, what, choices)

    def remove(self, key: str) -> None:
        """Take a proposal back."""
        if not self.is_given(key):
            self.entries.pop(key, None)

    def value(self, key: str, default: Any = None) -> Any:
        """Return a setting, `default` if there is none or it is open."""
        entry = self.entries.get(key)
        return default if entry is None or entry.is_open else entry.value

    @property
    def questions(self) -> dict[str, Entry]:
        """Return the settings that are open."""
        return {key: entry for key, entry in self.entries.items() if entry.is_open}

    def settings(self) -> dict[str, Any]:
        """Return all settings as nested mappings, an open one with the first of its choices, or left out."""
        settings: dict[str, Any] = {}
        losses: dict[int, dict[str, Any]] = {}
        for key, entry in self.entries.items():
            value = next(iter(entry.choices), None) if entry.is_open else copy.deepcopy(entry.value)
            # a question without choices
            if value is None:
                continue
            *tables, name = parts_of(key)
            # [[loss]] is an array of tables, by the position in their keys
            if tables[:1] == ["loss"] and len(tables) > 1 and tables[1].isdecimal():
                losses.setdefault(int(tables[1]), {})[name] = value
                continue
            table = settings
            for part in tables:
                table = table.setdefault(part, {})
            # a table that is proposed keeps those of its settings that were given before
            table[name] = {**value, **table.get(name, {})} if isinstance(value, Mapping) else value
        if losses:
            settings["loss"] = [losses[position] for position in sorted(losses)]
        return settings


def parts_of(key: str) -> list[str]:
    """Return the tables and the name in a key; the name of an input may have points."""
    if key.startswith(f"{INPUTS}."):
        return [*INPUTS.split("."), key.removeprefix(f"{INPUTS}.")]
    return key.split(".")
