"""The record of a process that refused, and the errors that records name."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.trainer import errors
from onward.trainer.errors import OnwardError, Refused, RuntimeUnavailable
from onward.trainer.run.directory import refusal_in
from onward.trainer.run.records import Record
from onward.trainer.run.reserved import reserve, write_reserved

log = logging.getLogger(__name__)


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
    return found(problems) if issubclass(found, Refused) else found(where + "\n".join(problems))


@contextlib.contextmanager
def exit_with_refusal(folder: Path) -> Iterator[None]:
    """Write an OnwardError to `folder` as a Refusal record, and end the process with the error's exit status.

    A full disk counts as one; the space for the record is taken at the start.
    """
    reserved = folder / ".refused.reserved"
    reserve(reserved)
    try:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RuntimeUnavailable(
                f"no room to write the exported file in {folder}: {error.strerror}; make room and export again"
            ) from error
    except OnwardError as error:
        problems = error.problems if isinstance(error, Refused) else (str(error),)
        write_reserved(refusal_in(folder), Refusal(kind=type(error).__name__, problems=problems), reserved)
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    finally:
        reserved.unlink(missing_ok=True)
