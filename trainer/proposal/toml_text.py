"""Write a draft as a TOML file of at most 40 lines: each setting with its reason, each question with its choices."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onward.trainer.config.open_questions import OPEN
from onward.trainer.config.setting_paths import BUNDLED_SOURCES, toml_key
from onward.trainer.config.urls import url_of
from onward.trainer.proposal.draft import GIVEN, INPUTS, Draft, Entry, parts_of

MOST_LINES = 40
WIDTH = 120
TABLES = (
    "",
    "model",
    "data",
    "data.image",
    "data.text",
    "data.table",
    "data.audio",
    "loss",
    "train",
    "optimizer",
    "schedule",
)
"""In this order; others come behind them."""
PATHS = ("model.path", "data.source", "data.evaluation_source", "data.test_source", "data.text.tokenizer")


def as_text(draft: Draft, target: Path, title: str, urls: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the content of the file `target`; title: what its first line says. urls: local copy -> its URL."""
    tables: dict[str, list[str]] = {}
    for key, entry in draft.entries.items():
        # the inputs come together, as one inline table
        if key.startswith(f"{INPUTS}."):
            continue
        *outer, name = parts_of(key)
        shown = Entry(_relative(key, entry.value, target, urls), entry.reason, entry.choices)
        if shown.value == {}:  # a table without settings, such as [data.image]
            tables[key] = [*_comment(shown.reason), *tables.get(key, [])]
        else:
            tables.setdefault(".".join(outer), []).extend(_lines(name, shown))
    if inputs := {
        key.removeprefix(f"{INPUTS}."): entry for key, entry in draft.entries.items() if key.startswith(f"{INPUTS}.")
    }:
        tables.setdefault("data", []).extend(_input_lines(inputs))
    order = [*(name for name in TABLES if name in tables), *sorted(tables.keys() - {*TABLES})]
    # the sort is stable, so that loss.0, loss.1, ... keep their order at the position of "loss"
    order.sort(key=lambda name: TABLES.index(_section(name)) if _section(name) in TABLES else len(TABLES))
    lines = [line for text in (title, *draft.notes) for line in _comment(text)]
    for name in order:
        lines += ["", *_heading(name), *tables[name]]
    return "\n".join(_shortened(lines)) + "\n"


def _heading(table: str) -> list[str]:
    """Return the line above the settings of a table; none above those of the whole file."""
    if not table:
        return []
    return ["[[loss]]"] if table.startswith("loss.") else [f"[{table}]"]


def _section(table: str) -> str:
    return "loss" if table.startswith("loss.") else table


def _lines(name: str, entry: Entry) -> Iterator[str]:
    if entry.is_open:
        yield from _comment(f"{entry.reason}{shown_choices(entry)}")
        yield f'{toml_key(name)} = "{OPEN}"'
        return
    yield from _with_reason(f"{toml_key(name)} = {as_toml(entry.value)}", entry.reason)


def _input_lines(inputs: Mapping[str, Entry]) -> Iterator[str]:
    """Yield data.inputs as one inline table."""
    for entry in inputs.values():
        if entry.is_open:
            yield from _comment(f"{entry.reason}{shown_choices(entry)}")
    pairs = ", ".join(f"{toml_key(name)} = {as_toml(entry.value)}" for name, entry in inputs.items())
    reasons = dict.fromkeys(entry.reason for entry in inputs.values() if not entry.is_open)
    yield from _with_reason(f"inputs = {{ {pairs} }}", "; ".join(reasons))


def shown_choices(entry: Entry) -> str:
    """Return the choices of a question behind its words."""
    choices = [f"{as_toml(value)}{f' ({meaning})' if meaning else ''}" for value, meaning in entry.choices.items()]
    return f": {' or '.join(choices)}" if choices else ""


def _with_reason(line: str, reason: str) -> Iterator[str]:
    if reason and len(line) + len(reason) + 4 <= WIDTH:
        yield f"{line}  # {reason}"
        return
    yield from _comment(reason)
    yield line


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _shortened(lines: list[str]) -> list[str]:
    """Return at most MOST_LINES lines: without blank lines, and then without the comments on settings' own lines."""
    if len(lines) > MOST_LINES:
        lines = [line for line in lines if line]
    # from the end, because the settings that matter most come first; line 0 is the title
    for at in range(len(lines) - 1, 0, -1):
        # the comment of a question has its choices, without which it could not be answered
        is_question = f'"{OPEN}"' in "".join(lines[at + 1 : at + 4])
        if len(lines) > MOST_LINES and lines[at].startswith("#") and not is_question:
            del lines[at]
    return lines


def _relative(key: str, value: Any, target: Path, urls: Mapping[str, str]) -> Any:
    """Return a path relative to the folder of the file, unless it is elsewhere; of a local copy its URL."""
    is_path = key in PATHS and isinstance(value, str | Path)
    if not is_path or value in (OPEN, *BUNDLED_SOURCES) or url_of(str(value)):
        return value
    for local, url in urls.items():
        if str(value) == local or str(value).startswith(f"{local}/"):
            return f"{url}{str(value).removeprefix(local)}"
    path = os.path.normpath(Path(value).expanduser().absolute())
    near = os.path.relpath(path, target.absolute().parent)
    # two folders up or more is elsewhere: the two are hardly moved together
    return path if near.startswith("../..") else near


def as_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(str(key))} = {as_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def reasons(draft: Draft) -> Iterable[tuple[str, str, str]]:
    """Yield (setting, its value, the reason) of what was guessed."""
    for key, entry in draft.entries.items():
        if entry.reason and entry.reason != GIVEN and not entry.is_open:
            yield key, as_toml(entry.value), entry.reason
