"""Commands on a disk that takes no file: one sentence and exit status 3, and nothing is begun.

Disks that break in the middle of a run are in test_every_phase.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.full_disk import fill, fill_inodes, make_read_only, may_mount, on_a_small_disk
from tests.support.workshop import Workshop


def refused(home: Path, sentence: str) -> None:
    workshop = Workshop(home.parent)
    ended = subprocess.run(
        [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml")],
        env=workshop.environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout == ""
    _, heading, problem, to_do = ended.stderr.splitlines()
    assert heading == "onward run: the machine cannot run it: MPI, servers, devices, memory or disk"
    assert problem.startswith(f"  - {sentence}")
    assert problem.endswith("then `onward resume`, or the command again")
    assert to_do.startswith("To do: correct what is listed, such as a full disk")
    assert not (home / "runs").exists()


def on_a_full_home(home: Path) -> None:
    fill(home)
    refused(home, f"No space left on device: the disk of {home} has 0 bytes free; make room")


def on_a_home_without_inodes(home: Path) -> None:
    fill_inodes(home)
    refused(home, f"No space left on device: the disk of {home} has ")


def on_a_read_only_home(home: Path) -> None:
    make_read_only(home)
    refused(home, f"Read-only file system: the disk of {home} is mounted read-only; mount it for writing")


@pytest.mark.parametrize("role", [on_a_full_home, on_a_home_without_inodes, on_a_read_only_home])
def test_a_run_on_a_disk_that_takes_no_file_is_refused_with_one_sentence(
    role: Callable[[Path], None], tmp_path: Path
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    workshop = Workshop.made(tmp_path)
    workshop.home.mkdir(mode=0o700)
    ended = on_a_small_disk(role, workshop.home, size="8m,nr_inodes=100")
    assert ended.returncode == 0, ended.stderr[-3000:]


def on_a_full_directory_for_temporary_files(folder: Path) -> None:
    fill(folder)
    home = folder.parent / "home"
    home.mkdir(mode=0o700)
    refused(home, f"No space left on device: the disk of {folder} has 0 bytes free; make room")


@pytest.mark.slow
def test_a_run_without_room_for_temporary_files_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    Workshop.made(tmp_path)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    ended = on_a_small_disk(on_a_full_directory_for_temporary_files, place, size="8m,nr_inodes=100")
    assert ended.returncode == 0, ended.stderr[-3000:]
