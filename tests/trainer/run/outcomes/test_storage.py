"""Errors of a disk are told from all others, on file systems that are full, without inodes, read-only or broken."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.trainer.errors import ConfigError, DataError, RuntimeUnavailable, StorageUnavailable, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.refusals import Refusal, exit_with_refusal
from onward.trainer.run.outcomes.storage import (
    broken_storage,
    says_storage,
    storage_cause,
    storage_error,
    storage_problem,
)
from onward.trainer.run.records import Record, read_record
from tests.support.full_disk import (
    fill,
    fill_inodes,
    make_read_only,
    may_break,
    may_mount,
    on_a_small_disk,
    shut_down,
)

TO_DO = "then `onward resume`, or the command again"


class Some(Record):
    """A record."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/dev/full"), "the disk of /dev/full has "),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded: the disk of {0} has "),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "the disk of /x is mounted read-only; mount it"),
        (OSError(errno.EIO, "Input/output error", "/x"), "the disk of /x reports an error of its device; repair"),
        (OSError(errno.ESTALE, "Stale file handle", "/x"), "the disk of /x was taken away by its server; mount"),
        (OSError(errno.ENOSPC, "No space left on device", "/from", None, "/dev/full"), "the disk of /dev/full has"),
        (RuntimeError("Error while serializing: No space left on device (os error 28)"), "the disk of {0} has"),
        (ValueError("(sqlite3.OperationalError) database or disk is full"), "the disk of {0} has"),
        (TrainingFailed("attempt 3: OSError: [Errno 28] No space left on device: '/dev/full'"), "of /dev/full has"),
        (RuntimeUnavailable("[Errno 28] No space left on device: '/a/b' -> '/dev/full'"), "the disk of /dev/full has"),
        (RuntimeUnavailable("rank 1: No space left on device: the disk of /dev/full has 1 byte"), "of /dev/full has"),
    ],
)
def test_an_error_of_a_disk_is_recognised_in_all_libraries_also_behind_another_error(
    error: Exception, said: str, tmp_path: Path
) -> None:
    outer = KeyError("a table")
    outer.__cause__ = error
    for each in (error, outer):
        found = storage_error(each, tmp_path)
        assert isinstance(found, StorageUnavailable)
        assert found.exit_code == 3
        (sentence,) = found.problems
        assert said.format(tmp_path) in sentence
        assert sentence.endswith(TO_DO)
    assert storage_error(found, tmp_path) is found
    assert says_storage(str(error))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied", "/root"),
        OSError(errno.EFBIG, "it holds 9 MB, more than the 4 MB of a configuration", "/x"),
        DataError("a.csv, line 3: 'No space left on device' is no number"),
        KeyError("a table"),
    ],
)
def test_another_error_is_left_as_it_is(error: Exception, tmp_path: Path) -> None:
    assert storage_error(error, tmp_path) is None
    assert storage_cause(error, tmp_path) is None


def test_an_error_that_was_raised_in_place_of_one_of_a_disk_is_left_as_it_is(tmp_path: Path) -> None:
    error, full = KeyError("a table"), OSError(errno.ENOSPC, "No space left on device")
    error.__context__ = full
    assert storage_error(error, tmp_path) is not None
    error.__suppress_context__ = True  # as `raise error from None` does
    assert storage_error(error, tmp_path) is None


def test_the_numbers_are_said(tmp_path: Path) -> None:
    found = storage_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "not" / "there", needed=1 << 60)
    assert " bytes free of the 1,152,921,504,606,846,976 that are needed; make room (`onward gc` " in str(found)
    assert "that are needed" in storage_problem(tmp_path, 1 << 60)
    assert storage_problem(tmp_path) == ""


def look(folder: Path, said: str) -> None:
    """What a process says that has another error, or none of its own, beside such a disk."""
    found = broken_storage(folder)
    assert found is not None
    assert str(found).startswith(said.format(folder)), found
    assert str(storage_cause(RuntimeError("status 500"), folder)) == f"{found} (it follows: RuntimeError)"
    failed = TrainingFailed("status 70\n| line 1")
    assert str(storage_cause(failed, folder)) == f"{found} (it follows: TrainingFailed: status 70)"
    assert storage_cause(ConfigError("no such key"), folder) is None
    assert said.partition(":")[0] in storage_problem(folder)
    with pytest.raises(SystemExit) as ended, exit_with_refusal(folder):
        (folder / "exported").write_bytes(bytes(1 << 20))
    assert ended.value.code == 3, "without room for a record, the exit status is what is left"


def without_room(folder: Path) -> None:
    fill(folder)
    look(folder, "No space left on device: the disk of {0} has 0 bytes free")


def without_inodes(folder: Path) -> None:
    fill_inodes(folder)
    found = os.statvfs(folder)
    free = f"{found.f_bavail * found.f_frsize:,} bytes free, and none of its {found.f_files:,} inodes"
    look(folder, f"No space left on device: the disk of {{0}} has {free}")


def read_only(folder: Path) -> None:
    make_read_only(folder)
    look(folder, "Read-only file system: the disk of {0} is mounted read-only")


def full_in_the_middle(folder: Path) -> None:
    """The space for the record was taken when there was some."""

    def export() -> None:
        fill(folder)
        (folder / "exported").write_bytes(bytes(1 << 20))

    with pytest.raises(SystemExit) as ended, exit_with_refusal(folder):
        export()
    assert ended.value.code == 3
    refusal = read_record(folder / "refused.json", Refusal)
    assert refusal.kind == "StorageUnavailable"
    assert refusal.problems[0].startswith(f"No space left on device: the disk of {folder}")


def closing_the_log(folder: Path) -> None:
    """Tasks beside the training wait for its end, which no file may be able to say."""
    run = RunDir(folder)
    run.open_log()
    assert not run.wait_for_end(0)
    make_read_only(folder)
    run.close_log()
    assert not run.closed.exists()
    assert run.wait_for_end(0)


@pytest.mark.parametrize("role", [without_room, without_inodes, read_only, full_in_the_middle, closing_the_log])
def test_a_disk_is_looked_at_where_nothing_else_says_what_is_wrong(
    role: Callable[[Path], None], tmp_path: Path
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    ended = on_a_small_disk(role, tmp_path, size="2m,nr_inodes=100")
    assert ended.returncode == 0, ended.stderr[-3000:]


def failing_device(folder: Path) -> None:
    shut_down(folder)
    look(folder, "Input/output error: the disk of {0} reports an error of its device")


def test_a_device_that_fails_is_not_called_full(tmp_path: Path) -> None:
    if not may_break():
        pytest.skip("a disk that fails needs a loop device, and root")
    ended = on_a_small_disk(failing_device, tmp_path, breaks=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
