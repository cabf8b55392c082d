"""Read what a sweep is to try: `section.key=VALUES`.

optimizer.learning_rate=1e-4,3e-4,1e-3    three values, each a TOML value; several such settings make a grid
model.freeze=["a", "b"],[]                two values: a comma inside brackets or quotes belongs to the value
optimizer.learning_rate=log(1e-5, 1e-2)   a range; also uniform(0, 0.1) and int(1, 8)
train.num_steps=100                       one value: an override, the same for all trials
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from onward.trainer.config.loading import Override
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.setting_paths import values_at
from onward.trainer.errors import ConfigError
from onward.trainer.run.recorded.sweep_records import Range

KINDS = ("log", "uniform", "int")
CLOSING = {"[": "]", "{": "}", "(": ")"}

THE_SAME_FOR_ALL: Mapping[str, str] = {
    "name": "the trials are named after the sweep, NAME-1, NAME-2, ...",
    "launch": "[launch] says where and how ranks are started, and not what they compute",
    "monitor": "[monitor] says where results are recorded, and those of all trials are compared",
    "export": "only the best trial is exported, after all others have ended",
    "metrics": "trials are compared by one metric",
    "checkpoint.best_metric": "it is the metric by which trials are compared",
    "data.evaluation_source": "trials are compared on the same rows",
    "data.evaluation_rows": "trials are compared on the same rows",
    "data.evaluation_fraction": "trials are compared on the same rows",
    "data.split": "trials are compared on the same rows",
    "data.test_source": "trials are compared on the same rows",
}
"""Section or setting -> why it cannot differ between the trials of a sweep."""


@dataclass
class Space:
    """What a sweep is to try, as it was given."""

    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Setting -> its values."""
    ranges: dict[str, Range] = field(default_factory=dict)
    fixed: list[Override] = field(default_factory=list)
    """Overrides that are the same for all trials."""


def read_space(given: Mapping[str, Any] | Iterable[str]) -> Space:
    """Return what is to be tried: of lines `section.key=VALUES`, or of a mapping from settings to values or ranges.

    Raises ConfigError with everything that is wrong with it; whether the values are valid is checked with the
    configuration.
    """
    space = Space()
    problems = list[str]()
    seen = set[str]()
    for word in given.items() if isinstance(given, Mapping) else given:
        try:
            key, value = _key_and_text(word) if isinstance(word, str) else word
            if key in seen:
                raise ConfigError(f"{key} is given twice; give all of its values in one place, {key}=A,B")
            # a second line would silently replace the values of the first one
            seen.add(key)
            if isinstance(given, Mapping):
                _add_python(space, key, value)
            else:
                _add_text(space, key, value)
        except ConfigError as error:
            problems += error.problems
    # one value for each setting is a single run, for which `onward run` is the command
    if not (problems or space.choices or space.ranges):
        problems.append(
            "nothing to try: give at least one setting several values, such as "
            "optimizer.learning_rate=1e-4,3e-4,1e-3, or a range, such as optimizer.learning_rate=log(1e-5, 1e-2)"
        )
    if problems:
        raise ConfigError(problems)
    return space


def cannot_vary(settings: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return why some of the settings `keys` cannot differ between trials, whose other ones are `settings`."""
    problems = []
    best_metric = setting(settings, "checkpoint.best_metric") or CheckpointConfig().best_metric
    for key in keys:
        section = key.partition(".")[0]
        if why := THE_SAME_FOR_ALL.get(key) or THE_SAME_FOR_ALL.get(section):
            problems.append(f"{key} must be the same for all trials: {why}")
        # without a source of its own the evaluation data is split off the training data, and differs with it
        elif key in ("data.source", "data.sources") and not setting(settings, "data.evaluation_source"):
            problems.append(
                f"{key} can only differ between trials with data.evaluation_source, so that all are "
                "evaluated on the same rows"
            )
        elif _changes_metric(settings, key, best_metric):
            problems.append(
                f"{key} changes what {best_metric} means, so it cannot be the metric by which trials "
                "are compared; set checkpoint.best_metric to another one, such as evaluation/accuracy"
            )
    return problems


def _changes_metric(settings: Mapping[str, Any], key: str, metric: str) -> bool:
    """Return whether a setting changes what is measured as the metric."""
    section = key.partition(".")[0]
    if section == "teacher":
        # the teacher's loss is a part of the metric, and its settings are factors in it
        return metric.endswith("distillation") or (
            metric.endswith("loss") and setting(settings, "model.loss") == "teacher"
        )
    return (section == "loss" or key == "model.loss") and metric.endswith("loss")


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return one of nested settings, None if it is not given."""
    return next(iter(values_at(settings, key.split("."))), None)


def _key_and_text(word: str) -> tuple[str, str]:
    key, equals, text = word.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"{word!r} is not section.key=VALUES, such as optimizer.learning_rate=1e-4,3e-4")
    return key.strip(), text.strip()


def _add_text(space: Space, key: str, text: str) -> None:
    # split first, because a value may contain commas of its own
    pieces = split(key, text)
    if "" in pieces and len(pieces) > 1:
        raise ConfigError(f"{key}={text}: a value between two commas is empty; an empty string is ''")
    ranges = [_range(key, piece) for piece in pieces]
    if len(pieces) == 1:
        if ranges[0]:
            space.ranges[key] = ranges[0]
        else:
            space.fixed.append(f"{key}={text}")
    # a setting is drawn from one range, or tried at each of several values
    elif any(ranges):
        raise ConfigError(f"{key}={text}: give one range, or several values, but not both")
    else:
        space.choices[key] = _different(key, [_value(piece) for piece in pieces])


def _add_python(space: Space, key: str, value: Any) -> None:
    if isinstance(value, str) and (found := _range(key, value)):
        space.ranges[key] = found
    elif isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: {value!r} is one value; give a list of values to try, or a range such as 'log(1e-5, 1e-2)'. What "
            "is the same for all trials is an override, the third argument"
        )
    else:
        space.choices[key] = _different(key, list(value))


def split(key: str, text: str) -> list[str]:
    """Return the values in a text that commas separate; those inside brackets and quotes belong to a value."""
    pieces = []
    start = 0
    open_ones = list[str]()
    quote = ""
    escaped = False
    for place, character in enumerate(text):
        if quote:
            # a backslash escapes the next character, also another backslash; 'literal' strings have no escapes
            if character == quote and not escaped:
                quote = ""
            escaped = quote == '"' and character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in CLOSING:
            open_ones.append(CLOSING[character])
        # only the innermost bracket can be closed; another closing one is an ordinary character
        elif open_ones and character == open_ones[-1]:
            open_ones.pop()
        elif character == "," and not open_ones:
            pieces.append(text[start:place].strip())
            start = place + 1
    if quote or open_ones:
        raise ConfigError(f"{key}={text}: the closing {quote or open_ones[-1]} is missing")
    return [*pieces, text[start:].strip()]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string: optimizer.name=adamw,lamb


def _different(key: str, values: list[Any]) -> tuple[Any, ...]:
    if len(values) < 2:
        raise ConfigError(f"{key} has {len(values)} values to try; give two or more, or give it as an override")
    # values may be lists, which no set can hold
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ConfigError(f"{key}: the value {value!r} is given twice, and its trial would be repeated")
    return tuple(values)


def _range(key: str, text: str) -> Range | None:
    """Return the range that a text such as `log(1e-5, 1e-2)` names; None if it is none. Raises ConfigError."""
    found = re.fullmatch(r"([A-Za-z_]\w*)\s*\((.*)\)", text)
    if not found:
        return None
    where = f"{key}={text}"
    kind = found[1]
    if kind not in KINDS:
        raise ConfigError(f"{where}: there is no range {kind}; there are log(a, b), uniform(a, b) and int(a, b)")
    try:
        low, high = (float(each) for each in found[2].split(","))
    except ValueError:
        raise ConfigError(f"{where}: {kind} needs two numbers, the least and the greatest value") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{where}: the bounds must be finite, and the first one less than the second")
    if kind == "log" and low <= 0:
        raise ConfigError(
            f"{where}: a logarithmic range lies above 0; for values around 0 use uniform({low:g}, {high:g})"
        )
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{where}: the bounds of whole numbers are whole numbers")
    return Range(kind=cast(Any, kind), low=low, high=high)
