"""Measure how far the outputs of two runtimes are apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]


def relative_difference(ours: Array, theirs: Array) -> tuple[float, str]:
    """Return (greatest |difference| / greatest |value|, a clause with both); NaN for a NaN, or for other shapes.

    ours, theirs: [...]. Equal values, infinite ones included, have no difference.
    """
    if ours.shape != theirs.shape:
        return float("nan"), f"shape {list(theirs.shape)} instead of {list(ours.shape)}"
    with np.errstate(invalid="ignore"):
        differences = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
    greatest = float(np.abs(ours[np.isfinite(ours)]).max(initial=0.0))
    difference = float(differences.max(initial=0.0))
    relative = difference / greatest if greatest else difference
    return relative, f"greatest difference {difference:.3g}, greatest value {greatest:.3g}"


def output_difference(ours: Any, theirs: Any) -> tuple[float, str]:
    """Return `relative_difference` of an output; of a sequence, that of its worst tensor."""
    if not isinstance(ours, list | tuple):
        array = ours.detach().numpy() if isinstance(ours, Tensor) else np.asarray(ours)
        return relative_difference(array.astype(np.float64), np.asarray(theirs).astype(np.float64))
    if len(ours) != len(theirs):
        return math.nan, f"{len(theirs)} tensors instead of {len(ours)}"
    found = [output_difference(*pair) for pair in zip(ours, theirs, strict=True)]
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0], default=(0.0, "no tensor"))
