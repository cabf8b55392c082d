"""Whether an exported file is served: the record of its comparison with the served one (records.py has the others)."""

from __future__ import annotations

import math
from typing import Literal

from onward.trainer.run.record_base import Record


class Comparison(Record):
    """The exported file beside the served one: both evaluated on the same rows, under onnxruntime."""

    version: str = ""
    """The version of the served file in the model registry."""
    metric: str
    """The metric that decides."""
    served: dict[str, float] = {}
    """All metrics of the served file."""
    new: dict[str, float] = {}
    """All metrics of the exported file."""
    gain: float = math.nan
    """How much better the exported file is, in the unit of the metric; negative if it is worse."""
    interval: tuple[float, float] | None = None
    """The interval of the gain that `export.promote_if.confidence` asks for; None if it asks for none."""
    differences: tuple[str, ...] = ()
    """How its inputs and outputs differ from those of the served file."""
    refused: str = ""
    """Why the served file could not be evaluated on these rows; else empty."""


class Promotion(Record):
    """Whether the exported file took the place of the served one, and why."""

    alias: str
    status: Literal["served", "candidate", "waiting"]
    """`served`: the alias names the new version. `waiting`: it is good enough, and somebody has to agree."""
    reason: str
    comparison: Comparison | None = None
    """None if nothing was compared."""
