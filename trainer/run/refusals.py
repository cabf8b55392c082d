"""The record of a process that refused, and the errors that records name."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.trainer import errors
from onward.trainer.errors import OnwardError, Refused
from onward.trainer.run.records import Record
from onward.trainer.run.reserved import reserve, write_reserved
from onward.trainer.run.storage import storage_error

log = logging.getLogger(__name__)


class Refusal(Record):
    """Why a process refused: its error, in place of the record that it would have written."""

    kind: str
    """The name of its class in trainer/errors.py."""
    problems: tuple[str, ...]


def refusal_in(folder: Path) -> Path:
    """Return the path of the record that takes the place of all other files when a process refused."""
    return folder / "refused.json"


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

    So does an error of a disk. The space for the record is taken at the start; where even that fails, nothing but the
    exit status is left.
    """
    reserved = folder / ".refused.reserved"
    try:
        try:
            reserve(reserved)
            yield
        except Exception as error:
            if (storage := storage_error(error, folder)) and storage is not error:
                raise storage from error
            raise
    except OnwardError as error:
        problems = error.problems if isinstance(error, Refused) else (str(error),)
        with contextlib.suppress(OSError):  # who waits for this process then looks at the disk
            write_reserved(refusal_in(folder), Refusal(kind=type(error).__name__, problems=problems), reserved)
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    finally:
        with contextlib.suppress(OSError):
            reserved.unlink(missing_ok=True)
