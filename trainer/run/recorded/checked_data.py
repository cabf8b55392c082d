"""What `onward verify` has found of the data of a run."""

from __future__ import annotations

from onward.trainer.run.record_base import Record


class CheckedData(Record):
    """Shards, or the source that they were made of, read again."""

    name: str
    result: str
    """In a few words."""
    problems: tuple[str, ...] = ()
