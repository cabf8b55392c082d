"""Find the settings of a configuration that nobody has decided yet: those whose value is "?".

    # the column to predict: "price" or "cost"                 the choices
    label = "?"                                                the open question: refused until it has a value

`onward init` writes them where two answers fit the model and the data. In a list "?" is a value as any other, such as a
pattern of columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

OPEN = "?"
"""The value of a setting that is not decided."""
_HEAD = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_OPEN_KEY = re.compile(r"""([\w."'-]+)\s*=\s*(?:"\?"|'\?')""")
_OUTER_KEY = re.compile(r"""\s*([\w."'-]+)\s*=\s*\{""")


def open_questions(settings: Mapping[str, Any], texts: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return a sentence for each setting that is "?"; [] if there is none.

    settings: those to look at, nested. texts: the TOML files that they were read from, by name, of which later ones
    win; the comments above a setting have its choices.
    """
    places = {
        # a profile's settings are merged into the tables that they replace
        re.sub(r"^profiles\.[^.]+\.", "", key): (file, line, choices)
        for file, text in texts.items()
        for key, line, choices in _lines_of(text)
    }
    found = []
    for key in _open(settings):
        file, line, choices = places.get(key, ("", 0, ""))
        where = f"{file}, line {line}: " if line else ""
        what = f"decide: {choices}" if choices else "give it a value"
        found.append(f'{where}{key} is open ("?"); {what}')
    return found


def _open(settings: Any, key: str = "") -> Iterator[str]:
    """Yield the key of each open setting, in order, such as `loss.1.label`."""
    if settings == OPEN:
        yield key
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _open(value, f"{key}.{name}".lstrip("."))
    elif isinstance(settings, list | tuple):
        for place, value in enumerate(settings):
            if isinstance(value, Mapping):  # an entry, such as one of [[loss]]
                yield from _open(value, f"{key}.{place}")


def _lines_of(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (key, line number from 1, the comment above) of each setting that is open in a TOML file."""
    table = ""
    comment = list[str]()
    entries = Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        if head := _HEAD.match(line):
            table = head[2]
            if head[1] == "[[":
                entries[head[2]] += 1
                table = f"{head[2]}.{entries[head[2]] - 1}"
        outer = _OUTER_KEY.match(line)
        for each in _OPEN_KEY.finditer(line):
            inside = [outer[1]] if outer and outer.end() <= each.start() else []
            # table, key of an inline table, key
            parts = ".".join(filter(None, (table, *inside, each[1])))
            yield re.sub(r"""["'\s]""", "", parts), number, " ".join(comment)
        # a comment belongs to the line below it
        comment = []
