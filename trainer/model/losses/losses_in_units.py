"""Compare labels and outputs in standardised units: `loss.standardise_label`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.trainer.config.losses import LabelUnits

LEAST = -0.999
"""From here down log(1 + x) goes on as a straight line, so that an output has a gradient wherever it is."""


def label_axis(units: LabelUnits, shape: Sequence[int]) -> int:
    """Return the axis whose elements have units of their own, the last one if all have the same.

    shape: of labels or of an output, the rows being axis 0.
    """
    if len(units.center) > 1:
        for axis in range(1, len(shape)):
            if shape[axis] == len(units.center):
                return axis
    return len(shape) - 1


def standardised(values: Tensor, units: LabelUnits, *, axis: int) -> Tensor:
    """Return (values - center) / scale, of log(1 + values) with `log`: the shape and type of `values`.

    axis: of the elements, see `label_axis`.
    """
    if units.log:
        # the tangent of log(1 + x) at LEAST, so that value and slope go on without a jump
        line = math.log1p(LEAST) + (values - LEAST) / (1 + LEAST)
        values = torch.where(values > LEAST, torch.log1p(values.clamp(min=LEAST)), line)
    center, scale = _constants(values, units, axis)
    return (values - center) / scale


def unstandardised(values: Tensor, units: LabelUnits, *, axis: int) -> Tensor:
    """Return what `standardised` turns into these values, in their shape."""
    center, scale = _constants(values, units, axis)
    summed = values * scale + center
    return torch.expm1(summed) if units.log else summed


def _constants(values: Tensor, units: LabelUnits, axis: int) -> tuple[Tensor | float, Tensor | float]:
    if len(units.center) == 1:
        return units.center[0], units.scale[0]
    lengths = [1] * values.ndim
    lengths[axis] = len(units.center)
    numbers = (torch.tensor(unit, dtype=values.dtype, device=values.device) for unit in (units.center, units.scale))
    center, scale = (tensor.reshape(lengths) for tensor in numbers)
    return center, scale
