"""Records that are written when the disk is full, on a file system without room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.run_ending import RunEnding, begin, end, ending_of
from onward.trainer.run.outcomes.storage import broken_storage
from onward.trainer.run.records import RankError, read_record
from tests.support.full_disk import fill, may_mount, on_a_small_disk


def run_out_of_room(folder: Path) -> None:
    """A rank: it writes more than there is room for. Its output goes to the full disk, too."""
    from onward.trainer.distributed.failures import install_excepthook

    run = RunDir(folder / "run")
    install_excepthook(run, attempt=1, step=lambda: 12)
    exit_process, shown = os._exit, os.dup(1)

    def check_and_exit(status: int) -> None:
        error = read_record(run.rank_error(1, 0), RankError)
        assert error.cause.startswith("StorageUnavailable: No space left on device: the disk of"), error.cause
        assert "has 0 bytes free; make room (`onward gc` lists what may go), then `onward resume`, or" in error.cause
        assert (error.step, "test_reserved.py" in error.traceback) == (12, True)
        os.write(shown, f"status {status}".encode())
        exit_process(0)

    os._exit = check_and_exit  # type: ignore[assignment]
    log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT)
    fill(folder)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (folder / "more").write_bytes(bytes(1 << 20))


def end_on_a_full_disk(folder: Path) -> None:
    """A flow: it records why it failed when there is no room at all."""
    run = RunDir(folder / "run")
    begin(run)
    assert ending_of(run) is None
    assert broken_storage(folder) is None
    fill(folder)
    assert broken_storage(folder) is not None
    end(run, RunEnding(status="failed", problems=("why " * 10_000,)))
    ending = ending_of(run)
    assert ending is not None
    assert len(ending.problems[0]) == 40_000


@pytest.mark.parametrize(
    ("role", "said"), [(run_out_of_room, "status 78"), (end_on_a_full_disk, "")], ids=["rank", "flow"]
)
def test_an_error_is_recorded_on_a_disk_without_a_free_byte(role: object, said: str, tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    ended = on_a_small_disk(role, tmp_path)  # type: ignore[arg-type]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout == said


def test_the_reserved_space_becomes_the_record_and_that_of_ranks_is_given_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    end(run, RunEnding(status="completed"))  # without space of its own, like any other record
    begin(run)
    assert not run.flow_ending.exists()
    run.reserved_for(2, 1).parent.mkdir(parents=True)
    run.reserved_for(2, 1).touch()
    end(run, RunEnding(status="cancelled", exit_status=143))
    assert ending_of(run) == RunEnding(status="cancelled", exit_status=143)
    assert not run.reserved.exists()
    assert not run.reserved_for(2, 1).exists()
