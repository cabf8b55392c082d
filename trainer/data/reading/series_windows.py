"""Cut time series into windows: rows of a table in the order of time become samples of a past and a future.

    rows of one series     0 1 2 3 4 5 6 7 8 9         length 4, horizon 2, stride 2
    window 0               p p p p F F                 column NAME        the past, [length]
    window 1                   p p p p F F             column NAME_ahead  the future, [horizon]
    window 2                       p p p p F F

    split = "time"                      | cut          training: windows that end before the cut
                               0 1 . . | 2             evaluation: windows whose future is after it; their past may
                                                       reach back; windows whose future is on both sides are left out
    split = "series"       whole series are held out, chosen by a hash of their names

So no value that evaluation has to predict was seen in training. The rows of a source are in memory while it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from onward.trainer.config.sections.tables import WindowConfig
from onward.trainer.data.reading.held_out_rows import of_least_hashes
from onward.trainer.data.schema.columns import BLOCK_BYTES, Array, Block, numbers
from onward.trainer.errors import DataError

AHEAD = "_ahead"
"""Behind the name of a column: its values after the window."""


@dataclass(frozen=True)
class _Table:
    """All rows of a source, column by column, and where each was read."""

    file: str
    columns: Mapping[str, Array]
    where: Sequence[str]

    @property
    def num_rows(self) -> int:
        return len(self.where)


def source_columns(names: Sequence[str] | None, window: WindowConfig) -> list[str] | None:
    """Return the columns of the source that windows of these columns are made of; None for all."""
    if names is None:
        return None
    wanted = [name.removesuffix(AHEAD) for name in names]
    return list(dict.fromkeys([*names, *wanted, *filter(None, (window.by, window.time))]))


def windowed(
    blocks: Iterable[Block],
    window: WindowConfig,
    names: Sequence[str] | None,
    fraction: float | None,
    split: str = "random",
) -> Iterator[tuple[Block, Array]]:
    """Yield windows of the rows of one source, with bool [n]: which are held out for evaluation.

    names: the columns of windows to make, None for all columns of numbers. fraction: the share that is held out; None =
    nothing is. split: as `data.split`. Raises DataError for rows that cannot be read, or that are not in the order of
    time.
    """
    table = _read(blocks, window)
    series = _series(table, window)
    by_series = split == "series"
    held_series = _held_series(series, window, fraction) if by_series else set()
    cut = _cut(table, series, window, fraction) if not by_series else {}
    columns = {name: values for name, values in table.columns.items() if values.dtype.kind in "biuf"}
    made = list(columns)
    if names is not None:
        # the labels NAME_ahead are made of the column NAME
        asked = {*names, *(name.removesuffix(AHEAD) for name in names)}
        made = [name for name in columns if name in asked]
    span = window.length + window.horizon
    index = 0
    for name, rows in series.items():
        starts = np.arange(0, len(rows) - span + 1, window.stride)
        # position in the series of the first row that training must not see
        first_held = cut.get(name, len(rows))
        is_held = starts + window.length >= first_held
        # a window whose horizon begins before the first held row and ends behind it belongs to neither side
        kept = is_held | (starts + span <= first_held)
        starts = starts[kept]
        is_held = is_held[kept] if name not in held_series else np.ones(kept.sum(), bool)
        # views: windows that overlap are copied a block at a time
        views = {each: sliding_window_view(columns[each][rows], span) for each in made} if len(starts) else {}
        row_bytes = sum(view.shape[1] * view.itemsize for view in views.values())
        step = max(1, BLOCK_BYTES // max(row_bytes, 1))
        for first in range(0, len(starts), step):
            now = starts[first : first + step]
            cells: dict[str, Array] = {each: view[now][:, : window.length] for each, view in views.items()}
            cells |= {each + AHEAD: view[now][:, window.length :] for each, view in views.items()}
            places = np.arange(index, index + len(now))
            index += len(now)
            yield Block(table.file, places, cells, unit="window"), is_held[first : first + step]
    if not index:
        longest = max(map(len, series.values()), default=0)
        raise DataError(
            f"{table.file}: no series has the {span} rows of a window (length {window.length} + horizon "
            f"{window.horizon}); the longest of {len(series)} has {longest}"
        )


def _read(blocks: Iterable[Block], window: WindowConfig) -> _Table:
    parts: dict[str, list[Any]] = {}
    where: list[str] = []
    file = ""
    for block in blocks:
        if block.bad:  # a window without the row would join what is not neighbouring
            row, why = next(iter(block.bad.items()))
            raise DataError(f"{block.where(row)}: {why}; a time series needs each of its rows")
        file = file or block.file
        where += [block.where(row) for row in block.index.tolist()]
        for name, cells in block.cells.items():
            parts.setdefault(name, []).append(cells)
    columns = {}
    for name, cells in parts.items():
        columns[name] = _column(cells)
        if len(columns[name]) != len(where):
            raise DataError(f"{file}: column {name!r} is not in every file")
        texts: list[int] = []
        if columns[name].dtype == object:
            texts = [row for row, cell in enumerate(columns[name]) if isinstance(cell, str)]
        # a few texts are errors in a column of numbers; mostly texts are another column, such as the names of series
        if 0 < len(texts) < len(where) / 2:
            cell = columns[name][texts[0]]
            raise DataError(f"{where[texts[0]]}: {name} is {cell[:40]!r}, not a number; a time series needs each value")
    for key, name in (("by", window.by), ("time", window.time)):
        if name and name not in columns:
            raise DataError(f"data.table.window.{key} names {name!r}, which {file} does not have: {', '.join(columns)}")
    return _Table(file, columns, where)


def _column(parts: list[Any]) -> Array:
    """Return the cells of all blocks as one array [rows]: numbers with NaN for missing ones, or objects."""
    if all(isinstance(part, np.ndarray) for part in parts):
        found: Array | None = np.concatenate(parts)
    else:
        cells = [cell for part in parts for cell in part]
        found = numbers([np.nan if cell is None else cell for cell in cells])
    if found is not None and found.ndim == 1:
        return found
    column = np.empty(sum(map(len, parts)), object)
    # filled, because numpy would make further axes of cells that are lists
    column[:] = [cell for part in parts for cell in part]
    return column


def _series(table: _Table, window: WindowConfig) -> dict[str, Array]:
    """Return series -> its rows in the order of the file. Raises DataError where that is not the order of time."""
    if not window.by:
        series = {"": np.arange(table.num_rows)}
    else:
        series = {}
        for row, name in enumerate(table.columns[window.by].tolist()):
            # series may be interleaved in the file: each keeps its rows in their order
            series.setdefault(str(name), []).append(row)  # type: ignore[arg-type, attr-defined]
        series = {name: np.array(rows) for name, rows in series.items()}
    if window.time:
        times = _times(table, window.time)
        for name, rows in series.items():
            # also equal times: a row that is there twice would be two steps
            wrong = np.flatnonzero(np.diff(times[rows]) <= 0)
            if wrong.size:
                row = rows[wrong[0] + 1]
                of = f" of series {name!r}" if window.by else ""
                raise DataError(
                    f"{table.where[row]}: {window.time} {table.columns[window.time][row]} does not come after "
                    f"{table.columns[window.time][rows[wrong[0]]]}, the row{of} before it; sort the file, and remove "
                    "rows that are there twice"
                )
    return series


def _times(table: _Table, name: str) -> Array:
    """Return the times as numbers that can be compared."""
    times = table.columns[name]
    if times.dtype.kind in "biuf":
        return times.astype(np.float64) if times.dtype.kind == "f" else times.astype(np.int64)
    import pandas as pd

    try:
        return np.asarray(pd.to_datetime(pd.Series(times), utc=True, format="ISO8601").astype("int64"))
    except (ValueError, TypeError) as error:
        raise DataError(f"{table.file}: column {name!r} holds no times: {error}; write them as 2026-01-31") from error


def _held_series(series: Mapping[str, Array], window: WindowConfig, fraction: float | None) -> set[str]:
    if fraction is None:
        return set()
    if len(series) < 2:
        raise DataError(
            f"data.split is 'series', but there is {len(series)} series (by {window.by!r}); set "
            "data.table.window.by, or split = 'random'"
        )
    # at least one series on either side
    count = min(len(series) - 1, max(1, round(fraction * len(series))))
    return of_least_hashes(series, count)


def _cut(table: _Table, series: Mapping[str, Array], window: WindowConfig, fraction: float | None) -> dict[str, int]:
    """Return series -> position of its first row that is held out: one time for all, or the same share of each."""
    if fraction is None:
        return {}
    if not window.time:
        return {name: round((1 - fraction) * len(rows)) for name, rows in series.items()}
    times = _times(table, window.time)
    # one moment for all series, so that training sees nothing of the time that is held out
    moment = np.sort(times)[min(len(times) - 1, round((1 - fraction) * len(times)))]
    return {name: int(np.searchsorted(times[rows], moment)) for name, rows in series.items()}
