"""Compute means, standard deviations, ranges and quantiles of columns over blocks of rows, in fp64.

Mean and squared deviations of blocks are combined as Chan, Golub and LeVeque (1983) do, which cancels nothing even
where the mean is far larger than the deviation:

    block a: n, mean, M2     block b: n, mean, M2      M2 = sum of (x - mean)^2
              \\                /
        M2 = M2a + M2b + (mean_b - mean_a)^2 n_a n_b / (n_a + n_b)

Quantiles need all values; they are kept in a temporary file.
"""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from onward.trainer.data.schema.columns import Array


@dataclass
class Moments:
    """Number, mean and squared deviations of each of k columns."""

    count: Array
    mean: Array
    squares: Array

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Return the moments of values [n, k], in which NaN is no value."""
        there = ~np.isnan(values)
        count = there.sum(axis=0).astype(float)
        mean = np.where(there, values, 0.0).sum(axis=0) / np.maximum(count, 1)
        # a second pass over the difference, because the sum of large values is rounded
        mean = mean + np.where(there, values - mean, 0.0).sum(axis=0) / np.maximum(count, 1)
        return cls(count, mean, np.where(there, (values - mean) ** 2, 0.0).sum(axis=0))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        # NaN is no value, so that each column has a count of its own
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        # a side without values has no say in the mean
        mean = np.where(self.count > 0, self.mean + apart * share, other.mean)
        squares = self.squares + other.squares + apart**2 * self.count * share
        return Moments(count, mean, squares)


@dataclass(eq=False)
class ColumnStatistics:
    """What is known of k columns of the training rows, block by block. `log1p`: scales are those of log(1 + x)."""

    log1p: bool
    keeps_values: bool
    """Whether quantiles are asked for."""
    plain: Moments | None = None
    changed: Moments | None = None
    """Of log(1 + x); the same as `plain` without."""
    least: Array = field(default_factory=lambda: np.empty(0))
    most: Array = field(default_factory=lambda: np.empty(0))
    rows: int = 0
    _file: IO[bytes] | None = None

    def add(self, values: Array) -> None:
        """Add rows: float64 [n, k], NaN where one is missing."""
        if not len(values):
            return
        changed = np.log1p(values) if self.log1p else values
        moments = Moments.of(values), Moments.of(changed)
        # infinity is neutral for the minimum: a column without values yet has none
        low = np.where(np.isnan(changed), np.inf, changed).min(axis=0)
        high = np.where(np.isnan(changed), -np.inf, changed).max(axis=0)
        if self.plain is None or self.changed is None:
            (self.plain, self.changed), self.least, self.most = moments, low, high
        else:
            self.plain = self.plain + moments[0]
            self.changed = self.changed + moments[1]
            self.least, self.most = np.minimum(self.least, low), np.maximum(self.most, high)
        self.rows += len(values)
        if self.keeps_values:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
                weakref.finalize(self, self._file.close)
            # quantiles take all values, which may be more than the memory holds
            self._file.write(np.ascontiguousarray(values).tobytes())

    @property
    def missing(self) -> int:
        """Return the number of missing values over all columns."""
        return 0 if self.plain is None else int((self.rows - self.plain.count).sum())

    def median(self) -> Array:
        """Return the median of each column: [k]."""
        return np.array([np.median(values[~np.isnan(values)]) for values in self._columns()])

    def scale(self, kind: str, fill: Array | None) -> tuple[Array, Array]:
        """Return (center, scale) [k] of a kind of scaling, of the values in which `fill` [k] replaces missing ones."""
        assert self.plain is not None
        assert self.changed is not None
        filled = None if fill is None else (np.log1p(fill) if self.log1p else fill)
        number = self.rows - self.plain.count
        if kind == "standard":
            moments = self.changed
            if filled is not None:
                # missing values become the fill, and so count for mean and deviation as so many equal values
                moments = moments + Moments(number, filled, np.zeros_like(filled))
            center = moments.mean
            scale = np.sqrt(moments.squares / np.maximum(moments.count, 1))
        elif kind == "min_max":
            center = self.least
            most = self.most
            if filled is not None:
                # a fill that no row takes does not widen the range
                center = np.where(number > 0, np.minimum(center, filled), center)
                most = np.where(number > 0, np.maximum(most, filled), most)
            scale = most - center
        else:
            quarters = np.array([np.percentile(each, [25, 50, 75]) for each in self._filled_columns(fill)])
            center = quarters[:, 1]
            scale = quarters[:, 2] - quarters[:, 0]
        # a constant column becomes 0, as in scikit-learn, whatever rounding has left of its deviation
        is_constant = scale <= 10 * np.finfo(float).eps * np.maximum(np.abs(self.least), np.abs(self.most))
        return center, np.where(is_constant, 1.0, scale)

    def _filled_columns(self, fill: Array | None) -> list[Array]:
        columns = self._columns()
        if fill is not None:
            columns = [np.where(np.isnan(each), value, each) for each, value in zip(columns, fill, strict=True)]
        columns = [each[~np.isnan(each)] for each in columns]
        return [np.log1p(each) for each in columns] if self.log1p else columns

    def _columns(self) -> list[Array]:
        assert self._file is not None
        self._file.flush()
        stored = np.memmap(self._file, np.float64, "r").reshape(self.rows, -1)
        return [np.array(stored[:, place]) for place in range(stored.shape[1])]
