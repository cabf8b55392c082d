"""Draw from a seed which faults are injected, in which order, and after how long."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from onward.trainer.errors import ConfigError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
LONGEST = 4.0
"""The longest pause between two faults, in means: an exponential distribution has no greatest value."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault that is to come."""

    number: int
    """From 1."""
    kind: str
    wait_s: float
    """How long the run works undisturbed before it."""
    choice: float
    """From 0 to 1: which of several ranks, files or bits it hits."""


def make_plan(kinds: Sequence[str], *, faults: int, mtbf_s: float, seed: int) -> list[PlannedFault]:
    """Return `faults` faults: all kinds once in random order, then all again. Pauses are exponentially distributed."""
    drawn, order = random.Random(seed), list[str]()
    while len(order) < faults:
        order += drawn.sample(list(kinds), len(kinds))
    return [
        PlannedFault(number, kind, min(drawn.expovariate(1 / mtbf_s), LONGEST * mtbf_s), drawn.random())
        for number, kind in enumerate(order[:faults], start=1)
    ]


def seconds(text: str) -> float:
    """Return the seconds of "500ms", "20s", "5m" or "1h". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"{text!r} is no time: give a number above 0 and its unit, such as 500ms, 20s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2]]
