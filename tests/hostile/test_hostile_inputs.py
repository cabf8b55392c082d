"""Hostile inputs are refused in a sentence: no traceback, no hang, no file outside, less than 1 GB of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward.flows.run_state.runs import run_directory_of
from onward.trainer.errors import ConfigError
from tests.hostile import sandbox
from tests.hostile.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def _try(*arguments: str, timeout_s: float) -> str:
    """Try cases in a process without threads, of which forks are made; return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hostile", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return ended.stdout + ended.stderr[-3000:]


@pytest.mark.timeout(1500)  # each case has limits of its own, which do not depend on what else the machine does
@pytest.mark.slow
def test_no_family_of_hostile_inputs_gives_a_traceback_hangs_or_takes_a_gigabyte() -> None:
    printed = _try("--cases", "2", timeout_s=1400)
    assert f"{2 * len(FAMILIES)} cases, 0 failed" in printed, printed


@pytest.mark.parametrize(
    ("program", "ended_by"),
    [("import time; time.sleep(600)", 9), ("import time\nwhile time.process_time() < 1.5: pass", 0)],
)
def test_a_case_that_waits_is_ended_and_one_that_computes_is_not(
    program: str, ended_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WAIT_S", 1.0)
    child = os.posix_spawn(sys.executable, [sys.executable, "-ISc", program], os.environ)
    waited, status, _ = sandbox._wait(child)
    assert (status, waited > 1.0) == (ended_by, ended_by != 0)


@pytest.mark.slow
@pytest.mark.timeout(7300)
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_hostile_inputs_are_refused_or_read(family: str) -> None:
    number = -(-10_000 // len(FAMILIES))
    printed = _try(family, "--cases", str(number), timeout_s=7200)
    assert f"{number} cases, 0 failed" in printed, printed


@pytest.mark.parametrize("name", ["/etc", "../other", "a/../../b", "..", ".", "a/b"])
def test_the_parameter_resume_of_a_flow_run_names_no_other_directory(name: str) -> None:
    with pytest.raises(ConfigError, match="must be the name of a directory"):
        run_directory_of("an-id", {"resume": name})
    assert run_directory_of("an-id", {"resume": "0de13422"}).root.name == "0de13422"
