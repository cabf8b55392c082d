"""Promise: a program ends as a fork as it ends by itself, and however it ends, nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onward.infra.job import forks
from onward.tasks.checks.subprocesses import start_module
from tests.support.fork_programs import ENDINGS, MODULE, SERVER
from tests.support.workshop import until

LIMIT_S = 60.0
SAID_IN_OTHER_WORDS = (
    "has a hook that raises",
    "has a hook that is interrupted",
    "has no hook",
    "has closed sys.stderr",
)
"""Where the interpreter says in words of its own that it could not report an error."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A fork server that imports no torch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forks, "SERVER", SERVER)
        with forks.fork_server():
            running = forks._server.get()
            assert running is not None
            yield running.process


def others_of(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What runs in the server's session beside it."""
    found = []
    for process in psutil.process_iter(["status"]):
        if process.pid != server.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
            try:
                if os.getsid(process.pid) == server.pid:
                    found.append(process)
            except ProcessLookupError:
                pass
    return found


def status_of(ending: str, folder: Path, log: Path) -> int:
    process = start_module(MODULE, "end", ending, folder=folder, log=log)
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()


def said(log: Path) -> list[str]:
    """What a program has printed, without where in the files of this process it came from."""
    lines = log.read_text().splitlines()
    return [line for line in lines if line and not line.startswith((" ", "Traceback", "Exception ignored in"))]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_a_fork_as_it_ends_by_itself(
    ending: str, server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    forked = status_of(ending, tmp_path, tmp_path / "forked.log")
    until(lambda: not others_of(server), limit_s=LIMIT_S)
    with monkeypatch.context() as patched:
        patched.setattr(forks, "python", lambda: [sys.executable])
        by_itself = status_of(ending, tmp_path, tmp_path / "log")
    assert forked == by_itself
    if ending in SAID_IN_OTHER_WORDS:
        assert "of the program" in (tmp_path / "forked.log").read_text()
    else:
        assert said(tmp_path / "forked.log") == said(tmp_path / "log")
    assert server.poll() is None


@pytest.mark.parametrize(
    "ending",
    [
        *("raises", "raises what has no text", "raises MemoryError", "raises KeyboardInterrupt", "raises in a thread"),
        *("exits with a text", "has a hook that raises", "has closed stderr"),
    ],
)
def test_a_program_that_cannot_say_how_it_ended_ends_all_the_same(
    ending: str, server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    full = Path("/dev/full")  # each byte that is written to it meets a full disk
    forked = status_of(ending, tmp_path, full)
    until(lambda: not others_of(server), limit_s=LIMIT_S)
    with monkeypatch.context() as patched:
        patched.setattr(forks, "python", lambda: [sys.executable])
        assert forked == status_of(ending, tmp_path, full)
