"""Propose windows over the rows of a time series, where a vector input has no column and the rows have times.

input past [?, 28], output next [?, 7]       table: date, temperature       [data.table.window] length 28, horizon 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onward.trainer.data.schema.columns import TEXT, Array
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.proposal.draft import INPUTS, Draft
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
    names = facts.numbers
    waiting = [
        info for info in inputs if info.name not in facts.schema and f"{INPUTS}.{info.name}" not in draft.entries
    ]
    series = [info for info in waiting if _is_series(info, len(names))]
    output = found[0].info.sample_shape
    if len(series) != 1 or output is None or len(output) != 1 or output[0] is None:
        return False
    when = next(_orders(facts), None)
    if when is None:
        return False
    time, by = when
    length = (series[0].sample_shape or (0,))[0]
    horizon = output[0]
    reason = f"{series[0].name} takes {length} numbers, and {time} increases from row to row"
    draft.set("data.table.window.length", length, f"{reason}{f' of each {by}' if by else ''}: rows of a past")
    draft.set("data.table.window.horizon", horizon, f"output {found[0].info.name} has as many: rows of the future")
    draft.set("data.table.window.time", time, "")
    if by:
        draft.set("data.table.window.by", by, "the series of a row")
    return True


def _is_series(info: TensorInfo, numbers: int) -> bool:
    """Return whether an input takes a past. As many numbers as there are columns are those of one row."""
    shape = info.sample_shape
    if "float" not in info.dtype or shape is None or len(shape) not in (1, 2) or None in shape:
        return False
    return (shape[0] or 0) > numbers if len(shape) == 1 else 1 <= (shape[1] or 0) <= numbers


def _orders(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (column of times that increase, column that names the series or "")."""
    named = [name for name in facts.schema if name.lower() in TIMES and name in facts.values]
    times = {name: values for name in named if (values := _times(facts, name)) is not None}
    for name, values in times.items():
        if (np.diff(values) > 0).all():
            yield name, ""
    groups = [name for name, column in facts.schema.items() if column.dtype == TEXT or name in facts.numbers]
    for name, values in times.items():
        for by in groups:
            texts = facts.values.get(by)
            if by != name and texts is not None and len(texts) == len(values) and _increases_in_each(values, texts):
                yield name, by


def _times(facts: Facts, name: str) -> Array | None:
    """Return the times of all rows as integers; None if some are missing, or are no times."""
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
    names, places = np.unique(np.asarray(series), return_inverse=True)
    if not 1 < len(names) <= min(MOST_SERIES, len(times) // 2):
        return False
    return all((np.diff(times[places == at]) > 0).all() for at in range(len(names)))
