"""Find the units in which a loss compares a label with an output: `loss.standardise_label`.

    labels 3500 4200 4900      standard      center 4200, scale 571.5      the loss compares -1.22 0 1.22

They are fitted on all training rows once, in fp64, and kept in the manifest of the shards, so that every rank, every
resumed attempt and the export read the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onward.trainer.config.losses import LabelUnits, LossConfig
from onward.trainer.data.schema.columns import BYTES, Array
from onward.trainer.data.schema.fitted import Fitted, LabelledRows
from onward.trainer.data.tables.column_statistics import ColumnStatistics
from onward.trainer.errors import ConfigError, DataError

ROWS_AT_ONCE = 65536
LEAST_DEVIATION = 0.1
MOST_DEVIATION = 10.0
"""Standard deviations of labels with which usual learning rates and initial weights get along."""


def standardised_columns(losses: Sequence[LossConfig]) -> dict[str, str]:
    """Return column of labels -> how it is standardised, of the losses whose units are still to be found."""
    columns: dict[str, str] = {}
    for loss in losses:
        if _awaits_units(loss):
            columns |= dict.fromkeys(loss.columns, str(loss.standardise_label))
    return columns


def _awaits_units(loss: LossConfig) -> bool:
    """Return whether the labels are standardised by numbers that the data has yet to give."""
    return isinstance(loss.standardise_label, str) and loss.standardise_label != "none"


def units_of_column(rows: LabelledRows, name: str, kind: str) -> LabelUnits:
    """Return the units of one column over all rows: a number for each element of a vector, else one for all elements.

    kind: `loss.standardise_label`. Raises ConfigError for a column that holds no numbers, or rows of varying length,
    and DataError for labels that have no logarithm.
    """
    column = rows.columns[name]
    if not column.holds_numbers or column.dtype == BYTES or column.variable:
        raise ConfigError(
            f"loss.standardise_label takes labels that are numbers, and column {name!r} is {column.kind}; remove it"
        )
    statistics = ColumnStatistics(log1p=kind == "log", keeps_values=kind == "robust")
    # images and the like have one unit for all of their numbers
    width = column.shape[0] if len(column.shape) == 1 else 1
    for first in range(0, rows.num_rows, ROWS_AT_ONCE):
        values = rows.read(np.arange(first, min(first + ROWS_AT_ONCE, rows.num_rows)))[name]
        labels = np.asarray(values, np.float64).reshape(-1, width)
        if kind == "log" and labels.size and labels.min() < 0:
            raise DataError(
                f"loss.standardise_label 'log' takes labels from 0 on, and column {name!r} has {labels.min():g}; use "
                "'standard' or 'robust'"
            )
        statistics.add(labels)
    center, scale = statistics.scale("robust" if kind == "robust" else "standard", None)
    # as the exported file stores them, so that the loss and the file agree on the last bit
    stored = [tuple(np.float32(each).astype(float).tolist()) for each in (center, scale)]
    return LabelUnits(center=stored[0], scale=stored[1], log=kind == "log")


def are_far(labels: Array) -> bool:
    """Return whether numbers are so far from 0 and 1 that a loss should compare them in other units: any shape."""
    known = labels[np.isfinite(labels)].astype(np.float64)
    if known.size < 2:
        return False
    mean = abs(float(known.mean()))
    deviation = float(known.std())
    # a mean far from 0, or a spread far from 1, takes an untrained output many steps to reach
    return deviation > 0 and (mean > 3 * deviation or not LEAST_DEVIATION <= deviation <= MOST_DEVIATION)


def with_label_units(losses: Sequence[LossConfig], rows: LabelledRows) -> tuple[LossConfig, ...]:
    """Return the losses with numbers in place of "standard", "robust" and "log"; the others as they are.

    rows: the training data, or its first rows where only the arithmetic is tried. Reads the labels of all rows unless
    their units are known. Raises the errors of `units_of_column`.
    """
    return tuple(
        loss.model_copy(update={"standardise_label": _units(loss, rows)}) if _awaits_units(loss) else loss
        for loss in losses
    )


def _units(loss: LossConfig, rows: LabelledRows) -> LabelUnits:
    kind = str(loss.standardise_label)
    found = list[LabelUnits]()
    for name in loss.columns:
        known = rows.fitted[name].label_units.get(kind) if name in rows.fitted else None
        found.append(known or units_of_column(rows, name, kind))
    if len(found) > 1 and any(rows.columns[name].shape for name in loss.columns):
        raise ConfigError(
            f"loss.standardise_label takes columns of single numbers or one column of vectors as labels, not "
            f"{', '.join(loss.columns)}; give each its own [[loss]]"
        )
    # stacked columns are a vector: one number for each, in their order
    center = tuple(value for each in found for value in each.center)
    scale = tuple(value for each in found for value in each.scale)
    return LabelUnits(center=center, scale=scale, log=kind == "log")


def describe_label_units(losses: Sequence[LossConfig], fitted: Mapping[str, Fitted]) -> str:
    """Return in which units losses compare their labels, in one line; "" if in their own."""
    said = []
    for name, kind in standardised_columns(losses).items():
        units = fitted[name].label_units.get(kind) if name in fitted else None
        if units is not None:
            label = f"log(1 + {name})" if units.log else name
            more = f" and {len(units.center) - 1} more" if len(units.center) > 1 else ""
            said.append(f"the loss compares ({label} - {units.center[0]:.6g}) / {units.scale[0]:.6g}{more} ({kind})")
    return "; ".join(said)
