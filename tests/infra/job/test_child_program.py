"""A process ends with its parent from its first moment on: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from onward.infra.job.child_program import signalled_with_parent

PARENT = """
import signal, subprocess, sys
from onward.infra.job.child_program import signalled_with_parent
child = subprocess.Popen(signalled_with_parent(["sleep", "60"], signal.SIGKILL))
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert psutil.wait_procs([child], timeout=5)[1] == []


def test_a_child_whose_parent_has_ended_before_it_could_say_so_does_not_start(tmp_path: Path) -> None:
    words = signalled_with_parent([sys.executable, "-c", f"open({str(tmp_path / 'began')!r}, 'w')"], signal.SIGKILL)
    words[words.index(str(os.getpid()))] = "1"  # a parent that is not ours
    assert subprocess.run(words, check=False).returncode == 70
    assert not (tmp_path / "began").exists()


def test_output_exit_status_and_environment_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "7")
    program = "import os, sys; print(os.environ['GIVEN'], sys.argv[1:]); sys.exit(3)"
    started_at = time.monotonic()
    words = signalled_with_parent([sys.executable, "-c", program, "a b", "-c"], signal.SIGTERM)
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "7 ['a b', '-c']\n")
    assert time.monotonic() - started_at < 10
