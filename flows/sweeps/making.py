"""Make a sweep: check the configurations of all of its trials, then write what is to be tried."""

from __future__ import annotations

import datetime
import importlib.util
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from onward.flows.sweeps.choice import combination
from onward.flows.sweeps.settings import Space, cannot_vary, setting
from onward.tasks.checks.registered_models import store_of, with_registered
from onward.trainer.config.layers import Source
from onward.trainer.config.loading import Check, Override, layered, load_config, settings_of
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.config.setting_paths import PATHS, replaced, values_at
from onward.trainer.data.reading.fetching import MODELS
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.extras import how_to_install
from onward.trainer.run.names import take_name
from onward.trainer.run.recorded.sweep_records import Sweep, SweepDir, describe_settings
from onward.trainer.run.records import write_record

MAX_TRIALS = 1000
MAX_NAME = 90
"""Characters of a sweep's name; those of its trials end with their number."""
MAX_NAMED = 3
"""Combinations that a message names."""


def make_sweep(
    source: Source,
    overrides: Sequence[Override],
    space: Space,
    *,
    profile: str = "",
    trials: int = 0,
    prune: bool = False,
    seed: int = 0,
    check: Check = lambda sections: (),
) -> SweepDir:
    """Check the configurations of all trials, then write `sweep.json` into a new directory and return it.

    Raises ConfigError with everything that is wrong in any of them; of a search space its bounds are checked.
    """
    found = layered(source, [*overrides, *space.fixed], profile=profile)
    settings = found.settings
    problems = found.problems
    choices = {key: tuple(_anchored(key, value) for value in values) for key, values in space.choices.items()}
    tried = Space(choices, ranges := space.ranges)
    problems += cannot_vary(settings, (*choices, *ranges))
    if prune and "train.evaluation_period" not in choices and setting(settings, "train.evaluation_period") == 0:
        problems.append(
            "--prune compares evaluations while trials are trained, and train.evaluation_period is 0; set it, such as "
            "train.evaluation_period=100"
        )
    number = math.prod(map(len, choices.values()))
    num_trials = trials if ranges else number
    if ranges and trials < 1:
        which = " and ".join(ranges)
        problems.append(f"{which}: a range has no last value; say how many trials to make, such as --trials 20")
    elif not ranges and trials:
        problems.append(
            f"--trials {trials}: these settings have {number} combinations, and all of them are tried; leave --trials "
            "out, or give a range such as log(1e-5, 1e-2)"
        )
    elif num_trials > MAX_TRIALS:
        problems.append(f"{num_trials} trials are more than {MAX_TRIALS}; try fewer values, or a range with --trials")
    else:
        problems += _all_problems(settings, tried, check)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    if (ranges or prune) and importlib.util.find_spec("optuna") is None:
        what = "--prune" if not ranges else "a range of values"
        raise RuntimeUnavailable(f"{what} needs optuna, which is not installed here: {how_to_install('sweep')}")
    first = load_config(settings, _corner(tried).items())
    pin = partial(_pinned, monitor=first.monitor)
    for key in MODELS:
        settings = replaced(settings, key.split("."), pin)
        choices |= {key: tuple(map(pin, choices[key]))} if key in choices else {}
    sweep_id = str(uuid.uuid4())
    sweep = Sweep(
        sweep_id=sweep_id,
        name=take_name(first.name[:MAX_NAME], sweep_id),
        config_name=first.name[:MAX_NAME],
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        settings=settings,
        choices=choices,
        ranges=ranges,
        num_trials=num_trials,
        seed=seed,
        prune=prune,
        metric=first.checkpoint.best_metric,
        greatest=first.checkpoint.greatest_is_best,
        experiment=first.monitor.experiment,
        tracking_uri=store_of(first.monitor),
    )
    folder = SweepDir.of(sweep.sweep_id)
    (folder.root / "trials").mkdir(parents=True)
    write_record(folder.sweep, sweep)
    return folder


def _anchored(key: str, value: Any) -> Any:
    """Return a value as trials use it: a path is relative to the working directory, also when the sweep is resumed."""
    return values_at(settings_of({}, [(key, value)])[0], key.split("."))[0] if key in PATHS else value


def _pinned(path: Any, monitor: MonitorConfig) -> Any:
    """Return `models:/NAME/VERSION` in place of an alias, which may move while the sweep runs; else the path."""
    if not str(path).startswith("models:/"):
        return path
    copies = with_registered({"model": {"path": path}, "monitor": monitor})
    assert copies is not None
    return "models:/" + copies.copies[0].key.partition(" ")[0]


# -- what is wrong with the configurations


def _all_problems(settings: Mapping[str, Any], space: Space, check: Check) -> list[str]:
    """Return what is wrong with any configuration, each problem once, with the settings that cause it."""
    causes: dict[str, list[dict[str, Any]]] = {}
    # a problem that all combinations share is not the fault of a value, and is named without one
    tried = [*_combinations(space)]
    for values in tried:
        try:
            load_config(settings, values.items(), check=check)
        except ConfigError as error:
            for problem in error.problems:
                causes.setdefault(problem, []).append(values)
    return [
        problem if len(found) == len(tried) else f"with {_named(found, tried)}: {problem}"
        for problem, found in causes.items()
    ]


def _named(found: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]]) -> str:
    """Name combinations by the settings that have one value in all of them, if possible by one that no other has."""
    others = [settings for settings in tried if settings not in found]
    common = {}
    own = {}
    for key, value in found[0].items():
        if all(settings[key] == value for settings in found):
            common[key] = value
            if all(settings[key] != value for settings in others):
                own[key] = value
    if common:
        return describe_settings(own or common)
    few = " or ".join(describe_settings(each) for each in found[:MAX_NAMED])
    return few + (f" or {len(found) - MAX_NAMED} others" if len(found) > MAX_NAMED else "")


def _combinations(space: Space) -> Iterable[dict[str, Any]]:
    """Yield what is checked: every combination of a grid; of a search space each value and each bound by itself."""
    if not space.ranges:
        for number in range(1, math.prod(map(len, space.choices.values())) + 1):
            yield combination(space.choices, number)
        return
    corner = _corner(space)
    yield corner
    for key, values in space.choices.items():
        # one setting at a time: all combinations of a search space would be far too many
        yield from ({**corner, key: value} for value in values[1:])
    for key, bounds in space.ranges.items():
        yield {**corner, key: _number(bounds.kind, bounds.high)}


def _corner(space: Space) -> dict[str, Any]:
    first = {key: values[0] for key, values in space.choices.items()}
    return first | {key: _number(bounds.kind, bounds.low) for key, bounds in space.ranges.items()}


def _number(kind: str, value: float) -> float | int:
    return int(value) if kind == "int" else value
