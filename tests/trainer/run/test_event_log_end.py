"""The end of the event log, for which the tasks beside the training wait, also where no file can say so."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from tests.support.full_disk import may_mount, on_a_small_disk


def close_without_room(folder: Path) -> None:
    run = RunDir(folder / "run")
    run.root.mkdir()
    run.open_log()
    with contextlib.suppress(OSError):
        for number in range(100):
            (folder / str(number)).touch()
    assert not run.wait_for_end()
    run.close_log()
    assert not run.closed.exists(), "there is no inode for it"
    assert run.wait_for_end()
    (folder / "1").unlink()
    run.open_log()
    assert not run.wait_for_end(), "a resume opens it again"
    run.close_log()
    assert run.closed.exists()


def test_a_log_is_closed_for_its_own_process_where_the_disk_takes_no_further_file(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    ended = on_a_small_disk(close_without_room, tmp_path, size="1m,nr_inodes=20")
    assert ended.returncode == 0, ended.stderr
