"""Promise: each exit status of docs/reference/errors.md is that of a whole command, with its class and its attempts.

The ranks are started as a run of a user starts them. Status 75 is in test_cancelled_in_prefect.py, 130 and 143 in
test_every_phase.py, 78, which ranks alone have, in test_endings_of_real_ranks.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.run_ending import ending_of
from tests.support.workshop import Workshop, until

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(1200), pytest.mark.usefixtures("only_servers")]

SHORT = (
    *("train.num_steps=40", "train.evaluation_period=20", "checkpoint.period=10", "parallel.data=1", "export.alias="),
    *("launch.rehearsal='off'", "launch.retries=1"),
)
STEP_25 = "^event scalars 25$"
PREFLIGHT = r"^open .*/preflight/\S*rank-00000"


@dataclass(frozen=True)
class Case:
    """What somebody types, and how it ends."""

    name: str
    status: int
    kind: str = ""
    """The class that `status` shows."""
    attempts: tuple[str, ...] = ()
    """The class of each attempt."""
    said: str = ""
    words: tuple[str, ...] = ()
    phase: str = ""
    """Where a rank raises `error`: see tests/support/at_a_phase."""
    error: str = ""
    slow: bool = True

    def __str__(self) -> str:
        return self.name


ERRORS = "onward.trainer.errors"
CASES = (
    Case("done", 0, attempts=("done",)),
    Case(
        *("a rank finds a bad row", 2, "data_error", ("data_error",), "row 7 has no label"),
        phase=STEP_25,
        error=f"{ERRORS}:DataError row 7 has no label",
    ),
    Case(
        *("two ranks find a bad row", 2, "data_error", ("data_error",), "row 7 has no label"),
        words=("parallel.data=2",),
        phase=STEP_25,
        error=f"{ERRORS}:DataError row 7 has no label",
    ),
    Case(
        *("a rank of the preflight fails", 3, "machine", (), "ValueError: the network is odd"),
        phase=PREFLIGHT,
        error="builtins:ValueError the network is odd",
    ),
    Case("the file differs", 5, "export_refused", ("done",), "export.tolerance", words=("export.tolerance=1e-30",)),
    Case(
        *("diverged", 6, "non_finite", ("non_finite",), "lower the learning rate"),
        words=("optimizer.learning_rate=1e38",),
    ),
    Case(
        *("two ranks diverged", 6, "non_finite", ("non_finite",), "lower the learning rate"),
        words=("optimizer.learning_rate=1e38", "parallel.data=2"),
    ),
    Case(
        *("out of memory", 7, "out_of_memory", ("out_of_memory", "out_of_memory"), "train.gradient_accumulation_steps"),
        phase=STEP_25,
        error="builtins:MemoryError Unable to allocate 9 GiB",
    ),
    Case(
        *("a label beyond the classes on a GPU", 8, "data_error", ("data_error",), "index out of range"),
        phase=STEP_25,
        error="builtins:RuntimeError CUDA error: device-side assert triggered",
    ),
    Case(
        *("an error in each attempt", 70, "unknown", ("unknown", "unknown"), "ValueError: of a rank"),
        phase=STEP_25,
        error="builtins:ValueError of a rank",
    ),
    Case(
        *("replicas differ", 70, "rank_lost", ("rank_lost", "rank_lost"), "ReplicasDiffer: weight w"),
        phase=STEP_25,
        error=f"{ERRORS}:ReplicasDiffer weight w",
    ),
    Case(
        *("another attempt has taken over", 72, "fenced", ("stopped",), "attempt 2 has begun"),
        phase=STEP_25,
        error=f"{ERRORS}:Fenced attempt 2 has begun",
    ),
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("statuses"))
    with workshop.server():
        yield workshop
    workshop.close()


def typed(workshop: Workshop, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run a command; return its exit status, its JSON object and what the terminal shows."""
    process = workshop.start(*words)
    out, shown = process.communicate(timeout=600)
    until(lambda: not workshop.processes(), limit_s=60)
    return process.returncode, json.loads(out), shown


def directory_of(shown: str) -> RunDir:
    """The run that a command has begun, as the terminal names it."""
    found = re.search(r"^onward: run \S+ in (.*)$", shown, re.MULTILINE)
    assert found, shown
    return RunDir(Path(found[1]))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in CASES]
)
def test_a_run_ends_with_the_status_the_class_and_the_attempts_of_what_happened(
    case: Case, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.error:
        path = [str(Path(__file__).parents[1] / "support" / "at_a_phase"), os.environ.get("PYTHONPATH", "")]
        settings = {"phase": case.phase, "action": f"raise {case.error}", "once": "", "home": str(workshop.home)}
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("ONWARD_TEST_PHASE", json.dumps(settings))
    status, answer, shown = typed(workshop, "run", str(workshop.root / "config.toml"), *SHORT, *case.words)
    run = directory_of(shown)
    assert status == case.status, shown
    assert answer.get("exit_code", 0) == case.status
    assert case.said in "; ".join(answer.get("problems", [])), answer
    assert "Traceback" not in shown.partition("The end of")[0], "but for the end of a log"
    assert tuple(ending.kind for ending in endings(run)) == case.attempts
    record = ending_of(run)
    assert record is not None
    assert record.exit_status == case.status
    status_of_run = workshop.onward("status", run.root.name)
    assert status_of_run["kind"] == case.kind
    assert status_of_run["state"] == ("failed" if case.status else "exported")
    assert case.said in status_of_run["error"]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_at_once(workshop: Workshop) -> None:
    _, _, shown = typed(workshop, "run", str(workshop.root / "config.toml"), *SHORT)
    run = directory_of(shown)
    run.result(1).unlink()
    run.train.unlink()
    shutil.rmtree(run.export)
    for weights in run.checkpoints.glob("step-*/*.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    status, answer, shown = typed(workshop, "resume", run.root.name)
    assert (status, answer["exit_code"]) == (4, 4), shown
    assert "Traceback" not in shown, shown
    assert [ending.kind for ending in endings(run)] == ["done", "user_error"]
    assert workshop.onward("status", run.root.name)["state"] == "failed"


@pytest.mark.parametrize(
    ("setting", "status"),
    [("optimizer.learning_rat=1", 2), pytest.param("launch.device='cuda'", 3, marks=pytest.mark.slow)],
)
def test_a_configuration_that_cannot_work_begins_no_run(setting: str, status: int, workshop: Workshop) -> None:
    ended, answer, shown = typed(workshop, "run", str(workshop.root / "config.toml"), setting)
    assert (ended, answer["exit_code"]) == (status, status)
    assert setting.partition("=")[0] in shown
    assert "onward: run " not in shown
