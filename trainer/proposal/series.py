"""Propose windows over the rows of a time series, where a vector input has no column and the rows have times.

input past [?, 28], output next [?, 7]       table: date, temperature       [data.table.window] length 28, horizon 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onward.trainer.proposal.draft import INPUTS, Draft

if TYPE_CHECKING:
    from onward.trainer.data.schema.columns import Array
    from onward.trainer.data.schema.signature import TensorInfo
    from onward.trainer.proposal.source_summary import Facts
    from onward.trainer.proposal.targets import Target

TIMES = ("time", "date", "datetime", "timestamp", "ds", "day", "hour", "month", "week", "year", "period")
"""Names of columns that are taken for times where their values increase."""
MOST_SERIES = 1000


def propose_windows(draft: Draft, facts: Facts, inputs: Sequence[TensorInfo], found: Sequence[Target]) -> bool:
    """Propose [data.table.window] and return whether it was; the columns of the data are windows then.

    An input of floats [?, L] or [?, L, C] that no column feeds has the length, the output the horizon. The rows must
    have times that increase: in all rows, or in those of each series.
    """
    if draft.is_given("data.table") or draft.is_given("data.inputs") or len(found) != 1:
        return False
    if any(column.shape for column in facts.schema.values()):
        return False  # vectors as they are, not rows of a series
    without_column = [info for info in inputs if info.name not in facts.schema]
    waiting = [info for info in without_column if f"{INPUTS}.{info.name}" not in draft.entries]
    series = [info for info in waiting if _is_series(info, len(facts.numbers))]
    output = found[0].info.sample_shape
    if len(series) != 1 or output is None or len(output) != 1:
        return False
    horizon = output[0]
    order = None if horizon is None else next(_orders(facts), None)
    if order is None:
        return False
    time, by = order
    length = (series[0].sample_shape or (0,))[0]
    reason = f"{series[0].name} takes {length} numbers, and {time} increases from row to row"
    if by:
        reason += f" of each {by}"
    draft.set("data.table.window.length", length, f"{reason}: rows of a past")
    draft.set("data.table.window.horizon", horizon, f"output {found[0].info.name} has as many: rows of the future")
    draft.set("data.table.window.time", time, "")
    if by:
        draft.set("data.table.window.by", by, "the series of a row")
    return True


def _is_series(info: TensorInfo, numbers: int) -> bool:
    """Return whether an input takes a past, [B, L] or [B, L, C]. As many numbers as columns are those of one row."""
    shape = info.sample_shape or ()
    if "float" not in info.dtype or len(shape) not in (1, 2) or None in shape:
        return False
    if len(shape) == 1:
        return (shape[0] or 0) > numbers
    return 1 <= (shape[1] or 0) <= numbers


def _orders(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (column of times that increase, column that names the series or "")."""
    named = [name for name in facts.values if name.lower() in TIMES]
    times = {name: values for name in named if (values := _times(facts, name)) is not None}
    # one series in the whole table is preferred: several are looked for where no times increase in all rows
    for name, values in times.items():
        if (np.diff(values) > 0).all():
            yield name, ""
    single_values = {*facts.texts, *facts.numbers}
    groups = [name for name in facts.schema if name in single_values]
    for name, values in times.items():
        for by in groups:
            series = facts.values.get(by)
            # rows whose cell is missing are left out of the values, which then are not side by side with the times
            if by == name or series is None or len(series) != len(values):
                continue
            if _increases_in_each(values, series):
                yield name, by


def _times(facts: Facts, name: str) -> Array | None:
    """Return the times of all rows as numbers [rows]; None if some are missing, or are no times."""
    values = np.asarray(facts.values[name])
    if len(values) != facts.num_rows or len(values) < 2:
        return None
    if values.dtype.kind in "biuf":
        return values
    import pandas as pd  # imported here: most tables have no times

    try:
        return np.asarray(pd.to_datetime(pd.Series(values), utc=True, format="ISO8601").astype("int64"))
    except (ValueError, TypeError):
        return None


def _increases_in_each(times: Array, series: object) -> bool:
    """Return whether times [rows] increase within each series; series: the name of it in each row, [rows]."""
    names, members = np.unique(np.asarray(series), return_inverse=True)
    # a series of one row increases whatever it holds, so there are at least two rows for each on average
    if not 1 < len(names) <= min(MOST_SERIES, len(times) // 2):
        return False
    return all((np.diff(times[members == number]) > 0).all() for number in range(len(names)))
