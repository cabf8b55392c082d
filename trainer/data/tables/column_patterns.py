"""Replace glob patterns of columns in `data.inputs` and `data.label` by the columns that they match.

    columns of the file        id f1 f2 ... f10 age paid
    inputs.features            ["age", "f*", "!f2"]      ->  age f1 f3 ... f10      in the order of the patterns, and of
    data.label                 "paid"                        each pattern in the order of the file's columns

A name that is a column's is that column, also if it holds `*`, `?`, `[` or `!`. The saved configuration of a run has
the columns, so that what was trained can be read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from onward.trainer.config.section import as_tuple
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.errors import ConfigError

Names = str | tuple[str, ...]


def expanded(data: DataConfig, columns: Sequence[str], labels: Iterable[str] = ()) -> DataConfig:
    """Return the section with columns in place of patterns; columns: those of the data, in its order. labels: columns
    of labels besides `data.label`."""
    problems: list[str] = []
    label = _expanded("data.label", data.label, columns, problems)
    inputs = {name: _expanded(f"data.inputs.{name}", given, columns, problems) for name, given in data.inputs.items()}
    for name, found in inputs.items():
        by_pattern = set(as_tuple(found)) - set(as_tuple(data.inputs[name]))
        if taken := sorted(by_pattern & {*as_tuple(label), *labels}):
            problems.append(
                f"data.inputs.{name} {_shown(data.inputs[name])} matches {', '.join(taken)}, the label; leave it out: "
                f"add {'!' + taken[0]!r}"
            )
    if problems:
        raise ConfigError(problems)
    return data.model_copy(update={"inputs": inputs, "label": label})


def matching(patterns: Iterable[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that match, in the order of the patterns and of the columns, each once.

    `!` before a pattern leaves out what it matches, wherever it stands. A name that is no pattern and no column is
    returned as it is.
    """
    found: list[str] = []
    left_out: set[str] = set()
    for pattern in patterns:
        if pattern in columns or not is_pattern(pattern):
            found.append(pattern)
        elif pattern.startswith("!"):
            left_out |= set(_matches(pattern[1:], columns))
        else:
            found += _matches(pattern, columns)
    return tuple(name for name in dict.fromkeys(found) if name not in left_out)


def unmatched(patterns: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Return the patterns that match no column."""
    # a column may have a name that begins with "!"
    others = [pattern for pattern in patterns if pattern not in columns]
    return [pattern for pattern in others if not _matches(pattern.removeprefix("!"), columns)]


def _expanded(setting: str, given: Names, columns: Sequence[str], problems: list[str]) -> Names:
    names = as_tuple(given)
    if not any(is_pattern(name) and name not in columns for name in names):
        return given
    if wrong := [name for name in unmatched(names, columns) if is_pattern(name)]:
        problems.append(f"{setting} {_shown(wrong)} matches no column; there is {', '.join(columns)}")
        return given
    if all(name.startswith("!") and name not in columns for name in names):
        problems.append(f"{setting} {_shown(given)} only leaves columns out; begin with '*'")
        return given
    if not (found := matching(names, columns)):
        problems.append(f"{setting} {_shown(given)} leaves every column out")
        return given
    return found


def _matches(pattern: str, columns: Sequence[str]) -> list[str]:
    # a name with brackets does not match itself as a pattern
    matches = {pattern, *(name for name in columns if fnmatchcase(name, pattern))}
    return [name for name in columns if name in matches]


def is_pattern(name: str) -> bool:
    return bool(set(name) & set("*?[")) or name.startswith("!")


def _shown(names: Names | Sequence[str]) -> str:
    return repr(names) if isinstance(names, str) else str(list(names))
