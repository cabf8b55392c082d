"""The records of an examination of the machine."""

from __future__ import annotations

from typing import Literal

from onward.trainer.run.records import Record

Level = Literal["ok", "note", "problem"]
"""`problem`: a run fails, or may damage something. `note`: a run works, but something is unusual or is missing that
only some runs need."""


class Finding(Record):
    """What one check has found."""

    check: str
    """The subject, such as "MPI"."""
    level: Level
    what: str
    """What was found, with the numbers."""
    fix: str = ""
    """What to do; "" if nothing is to be done."""

    @classmethod
    def ok(cls, check: str, what: str) -> Finding:
        return cls(check=check, level="ok", what=what)

    @classmethod
    def note(cls, check: str, what: str, fix: str) -> Finding:
        return cls(check=check, level="note", what=what, fix=fix)

    @classmethod
    def problem(cls, check: str, what: str, fix: str) -> Finding:
        return cls(check=check, level="problem", what=what, fix=fix)


class MachineReport(Record):
    """What an examination of the machine has found."""

    host: str
    home: str
    """Onward's home directory."""
    examined_at: str
    """ISO 8601, UTC."""
    elapsed_s: float
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Return the findings that prevent runs."""
        return tuple(each for each in self.findings if each.level == "problem")


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
