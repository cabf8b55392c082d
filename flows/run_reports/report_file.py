"""ReportFile: where a report was written."""

from __future__ import annotations

from pathlib import Path

from onward.trainer.run.records import Record


class ReportFile(Record):
    """A report that was written."""

    path: Path
    runs: tuple[str, ...]
    """The ids of the runs that it shows."""
    bytes: int
    left_out: tuple[str, ...]
    """What could not be read of the runs, and why."""
