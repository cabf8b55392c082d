"""Directories in TMPDIR: those of killed processes are removed, and never one that somebody uses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.infra.job import forks
from onward.infra.job.job_guard import TAG
from onward.infra.job.temporary_folders import LOCK, abandoned, make, owned_folder, remove, remove_abandoned
from tests.support import fork_programs
from tests.support.workshop import until

OWNS = """
import sys, time
from onward.infra.job.temporary_folders import owned_folder
with owned_folder("onward-rehearse-") as folder:
    (folder / "below").mkdir()
    (folder / "below" / "file").write_text("x" * 1000)
    print(folder.parent, flush=True)
    time.sleep(600)
"""
SERVES = """
import time
from onward.infra.job import forks
forks.SERVER = {server!r}
with forks.fork_server():
    server = forks._server.get()
    print(server.path.parent, server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, with a path so short that the kernel takes it for the socket of a fork server."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)
        tempfile.tempdir = None


@contextlib.contextmanager
def owner(program: str = OWNS) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that owns a directory, and the words that it has printed."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_directory_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(temporary: Path) -> None:
    with owner() as (living, kept), owner() as (killed, left), owned_folder("onward-plan-") as own:
        assert abandoned() == remove_abandoned() == []
        killed.kill()
        killed.wait()
        assert abandoned() == [Path(left[0])]
        assert Path(left[0]).exists(), "asking removes nothing"
        assert remove_abandoned() == [Path(left[0])]
        assert not Path(left[0]).exists()
        assert (Path(kept[0]) / "files" / "below" / "file").exists()
        assert own.exists()
        assert list(own.iterdir()) == [], "an empty directory: the lock is not in it"
        assert living.poll() is None
    assert remove_abandoned() == [Path(kept[0])]
    assert list(temporary.iterdir()) == []


def test_what_is_not_known_to_be_abandoned_stays(temporary: Path) -> None:
    def dead(name: str) -> Path:
        folder = make(lambda: _made(temporary / name))
        (folder / "file").touch()
        descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir() if _leads_to(each, folder / LOCK)]
        os.close(descriptors[0])  # as the kernel does when a process ends
        return folder

    without_lock = temporary / "onward-forks-old"
    without_lock.mkdir()
    (temporary / "onward-rehearse-link").symlink_to(dead("elsewhere"))
    linked = temporary / "onward-plan-linked"
    linked.mkdir()
    (linked / LOCK).symlink_to(temporary / "elsewhere" / LOCK)
    dead("another-prefix")
    gone = dead("onward-plan-gone")
    tag = uuid.uuid4().hex
    job = dead(f"onward-{tag}")
    if os.getuid() == 0:
        os.chown(dead("onward-plan-foreign"), 12345, -1)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, TAG: tag}) as member:
        before = {path.name for path in temporary.iterdir()}
        assert remove_abandoned() == [gone]
        assert {path.name for path in temporary.iterdir()} == before - {gone.name}
        member.kill()
    assert remove_abandoned() == [job], "no process of the job is left"


def test_a_directory_whose_owner_was_killed_before_it_had_a_lock_is_removed(temporary: Path) -> None:
    folder = temporary / "onward-plan-empty"
    folder.mkdir()
    assert remove_abandoned() == []
    os.utime(folder, (1, 1))
    assert remove_abandoned() == [folder]
    assert not folder.exists()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _leads_to(link: Path, target: Path) -> bool:
    with contextlib.suppress(OSError):
        return link.readlink() == target
    return False


def test_a_directory_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(temporary: Path) -> None:
    tries = iter([temporary / "gone", temporary / "stays"])

    def created() -> Path:
        folder = next(tries)
        if folder.name == "stays":
            folder.mkdir()
        return folder

    assert make(created) == temporary / "stays"
    remove(temporary / "stays")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("order", ["flow first", "server first"])
def test_the_fork_servers_directory_is_kept_until_both_were_killed_and_removed_by_the_next_start(
    temporary: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(SERVES.format(server=fork_programs.SERVER)) as (flow, (folder, server)):
        os.kill(int(server), signal.SIGSTOP)  # it would remove its directory itself, after its forks
        assert remove_abandoned() == []
        if order == "flow first":
            flow.kill()
            flow.wait()
            assert remove_abandoned() == [], "its forks may still be saving"
        os.kill(int(server), signal.SIGKILL)
        if order == "server first":
            until(lambda: flow.poll() is None and (Path(folder) / LOCK).exists(), limit_s=10)
            assert remove_abandoned() == []
            flow.kill()
            flow.wait()
        until(lambda: abandoned() == [Path(folder)], limit_s=30)
    monkeypatch.setattr(forks, "SERVER", fork_programs.SERVER)
    with forks.fork_server():
        assert not Path(folder).exists()
    assert list(temporary.iterdir()) == []
