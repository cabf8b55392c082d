"""Say how far the sharding of a source is, while it goes on: 1.2 of 4.0 GB, 31 %, 152 MB/s, 0:18 left.

The bytes are those of the source's files. How many of them are read is computed from the rows: Parquet and npz state
their number, for CSV and JSON Lines it is estimated from the first lines. Of other formats only the
rows are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading import sources

PERIOD_S = 1.0
"""Between two reports."""


def speed(size_bytes: float, elapsed_s: float) -> str:
    """Return how fast bytes were read, in MB/s; below 1 with a decimal, so that a slow disk has no speed of 0."""
    megabytes_per_s = size_bytes / 1e6 / max(elapsed_s, 1e-9)
    return f"{megabytes_per_s:,.{0 if megabytes_per_s >= 1 else 1}f} MB/s"


@dataclass(frozen=True)
class Sharded:
    """How much of the source is in shards."""

    rows: int
    elapsed_s: float
    total_bytes: int
    """Of the source."""
    total_rows: int
    """Of the source, about; 0 = not known."""

    @property
    def share(self) -> float:
        """Return the part that is done, 0 to 1; 0 as long as the number of rows is not known."""
        # an estimate may be too small
        return min(0.99, self.rows / self.total_rows) if self.total_rows else 0.0

    def __str__(self) -> str:
        if not self.total_rows:
            return f"{self.rows:,} rows, {self.rows / max(self.elapsed_s, 1e-9):,.0f} rows/s"
        unit, size = ("GB", 1e9) if self.total_bytes >= 1e9 else ("MB", 1e6)
        done = self.share * self.total_bytes
        left_s = round(self.elapsed_s * (1 - self.share) / self.share) if self.share else 0
        digits = 1 if unit == "GB" else 0
        return (
            f"{done / size:.{digits}f} of {self.total_bytes / size:.{digits}f} {unit}, {self.share:.0%}, "
            f"{speed(done, self.elapsed_s)}, {left_s // 60}:{left_s % 60:02d} left"
        )


Report = Callable[[Sharded], None]
"""Is called while shards are written, every second at most."""


class ShardingProgress:
    """Counts rows, and passes at most every PERIOD_S to `report` how far the sharding is."""

    def __init__(self, data: DataConfig, report: Report | None) -> None:
        self._report = report
        self._began_at = self._reported_at = time.monotonic()
        self.rows = self._total_bytes = self._total_rows = 0
        if report:
            files = [(source.data_format, path) for source in sources.all_sources(data) for _, path in source.files]
            self._total_bytes = sum(path.stat().st_size for _, path in files)
            rows = [data_format.count_rows(path) for data_format, path in files]
            # one file of unknown length makes the total unknown
            self._total_rows = sum(rows) if all(rows) else 0

    def add(self, rows: int) -> None:
        """Take note of rows that were read, those that are left out, too."""
        self.rows += rows
        now = time.monotonic()
        if self._report and now - self._reported_at >= PERIOD_S:
            self._reported_at = now
            self._report(Sharded(self.rows, now - self._began_at, self._total_bytes, self._total_rows))
