"""The record of a process that refused, and Onward's error for what a record names or a library has raised."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.trainer import errors
from onward.trainer.errors import ConfigError, OnwardError, Refused, RuntimeUnavailable, shown
from onward.trainer.run.machine.this_machine import free_host_memory
from onward.trainer.run.outcomes.storage import storage_cause, storage_error
from onward.trainer.run.records import Record, read_record
from onward.trainer.run.reserved import reserve, write_reserved

log = logging.getLogger(__name__)


class Refusal(Record):
    """Why a process refused: its error, in place of the record that it would have written."""

    kind: str
    """The name of its class in trainer/errors.py."""
    problems: tuple[str, ...]


def refusal_in(folder: Path) -> Path:
    """Return the path of the record that takes the place of all other files when a process refused."""
    return folder / "refused.json"


def refusal_of(folder: Path) -> OnwardError | None:
    """Return the error with which a process has refused, to raise it in this one; None if it has not."""
    if not refusal_in(folder).exists():
        return None
    refusal = read_record(refusal_in(folder), Refusal)
    error = recorded_error(refusal.kind, refusal.problems)
    assert error is not None, f"{refusal.kind} is not a class of trainer/errors.py"
    return error


def recorded_error(kind: str, problems: Sequence[str], *, where: str = "") -> OnwardError | None:
    """Return an error of the class named `kind`; None if it is not one of Onward's. `where`: text, such as the rank
    that raised it, before the message of an error that has only one."""
    # the name comes from a file, so only classes of this module are made of it
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, OnwardError)):
        return None
    return found(problems) if issubclass(found, Refused) else found(where + "\n".join(problems))


def known_error(error: Exception, *places: Path) -> OnwardError | None:
    """Return Onward's error for one of a disk, a path or the memory, or itself; None if nothing explains it.

    places: see `storage_cause`.
    """
    # a full disk first: the other errors often follow from it
    if storage := storage_cause(error, *places):
        return storage
    if isinstance(error, OnwardError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"{shown(error.filename)} is longer than the path of a file may be")
    if isinstance(error, OSError) and error.filename is not None:
        # a path that the user gave, or one below ONWARD_HOME, cannot be read or written
        return RuntimeUnavailable(f"cannot use {shown(error.filename)}: {error.strerror}")
    if isinstance(error, MemoryError):
        free = free_host_memory() >> 20
        return RuntimeUnavailable(f"this command needs more memory than it can get; {free:,} MiB are free")
    return None


def unexpected(error: Exception, where: str) -> OnwardError:
    """Return the error for one that nothing explains. where: of its traceback."""
    text = f"unexpected {type(error).__name__}: {error}; the traceback is {where}"
    return OnwardError(f"{text}. This is an error of Onward's: report it")


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
        with contextlib.suppress(OSError):  # who waits for this process then looks at the disk
            write_reserved(refusal_in(folder), Refusal(kind=type(error).__name__, problems=error.problems), reserved)
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    finally:
        with contextlib.suppress(OSError):
            reserved.unlink(missing_ok=True)
