"""What a process of its own tries before a run: to run converters, and to find the cuts in the imported graph."""

from __future__ import annotations

from pathlib import Path

from onward.trainer.run.records import Record


class ToImport(Record):
    """What is to be tried."""

    converters: tuple[Path, ...] = ()
    cuts: bool = False
    """Whether the cuts of the configuration beside this record are looked for."""


class TriedImport(Record):
    """What does not work."""

    problems: tuple[str, ...] = ()
