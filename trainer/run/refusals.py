"""The record of a process that refused, and the errors that records name."""

from __future__ import annotations

from collections.abc import Sequence

from onward.trainer import errors
from onward.trainer.errors import OnwardError
from onward.trainer.run.records import Record


class Refusal(Record):
    """Why a process refused: its error, in place of the record that it would have written."""

    kind: str
    """The name of its class in trainer/errors.py."""
    problems: tuple[str, ...]


def own_error(refusal: Refusal) -> OnwardError:
    """Return the error that another process recorded, to raise it in this one."""
    error = recorded_error(refusal.kind, refusal.problems)
    assert error is not None, f"{refusal.kind} is not a class of trainer/errors.py"
    return error


def recorded_error(kind: str, problems: Sequence[str], *, where: str = "") -> OnwardError | None:
    """Return an error of the class named `kind`; None if it is not one of Onward's. `where`: text, such as the rank
    that raised it, before the message of an error that has only one."""
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, OnwardError)):
        return None
    return found(problems) if issubclass(found, errors.Refused) else found(where + "\n".join(problems))
