"""A flow that is stopped, or left without room on its disk, at each of its phases, and what comes after it.

A flow that is killed is in test_killed_in_every_phase.py; here are the phases that no file announces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.ending import ending_of
from onward.trainer.run.names import name_of
from tests.support.full_disk import may_mount, on_a_small_disk
from tests.support.workshop import Workshop, until

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("only_servers")]

SHORT = (
    *("train.num_steps=40", "train.evaluation_period=20", "checkpoint.period=10", "parallel.data=1", "export.alias="),
    "launch.rehearsal='off'",
)
PHASES = {
    "created in Prefect": r"^phase start 0$",
    "announced": r"^open .*/flow\.log$",
    "rehearsal": r"^subprocess\.Popen .*rehearse",
    "configuration": r"^os\.rename .*/runs/[^/]+/config\.json$",
    "MLflow's run": r"^sqlite3\.connect .*mlflow\.db",
    "preflight": r"^open .*/preflight\.log$",
    "sharding": r"^open .*/home/shards/.*",
    "ranks": r"^open .*/attempts/001/train\.log$",
    "first step": r"^event start 0$",
    "first compile": r"^subprocess\.Popen .*[gc]\+\+ .*-shared",
    "step": r"^event scalars 1\d$",
    "save": r"^open .*/step-000000020\.partial-",
    "evaluation": r"^event evaluation 20$",
    "monitor": r"^os\.rename .*/cursor\.json$",
    "export": r"^open .*/export\.log$",
    "registration": r"^open .*/artifacts/.*\.onnx$",
}
"""Phase -> what a process does first in it."""
STATUS_ON_A_FULL_DISK = {
    **dict.fromkeys(("announced", "configuration", "MLflow's run", "preflight", "sharding", "ranks"), (3,)),
    # in the training it waits for room first
    **dict.fromkeys(("first step", "step", "save", "evaluation"), (4,)),
    "monitor": (4,),
    **dict.fromkeys(("export", "registration"), (3,)),
}
LONGER = ("train.num_steps=3000", "train.evaluation_period=1000", "checkpoint.period=100")
"""A training that lasts for some seconds: the monitor beside a shorter one reaches its phase after the end of it."""
OPEN = {"PENDING", "RUNNING", "CANCELLING", "SCHEDULED"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("phases"))
    with workshop.server():  # its own life is in tests/infra; here it would take half of the time
        yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> str:
    """The digest of the file that a run exports which is not disturbed."""
    return str(workshop.onward("run", str(workshop.root / "config.toml"), *SHORT)["sha256"])


def start_until(workshop: Workshop, phase: str, action: str, once: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run to whose flow something happens in a phase."""
    shutil.rmtree(workshop.home / "shards", ignore_errors=True)
    settings = {"phase": PHASES[phase], "action": action, "once": str(once), "home": str(workshop.home)}
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support" / "at_a_phase"), os.environ.get("PYTHONPATH", "")]
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SHORT, *more, "--json"],
        env={**workshop.environment, "PYTHONPATH": path, "ONWARD_TEST_PHASE": json.dumps(settings)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def go_on(workshop: Workshop, run: RunDir | None) -> dict[str, Any]:
    """The result of the command that the user then types: resume, or run if nothing was begun."""
    words = ("resume", run.root.name) if run else ("run", str(workshop.root / "config.toml"), *SHORT)
    return workshop.onward(*words)


def begun(workshop: Workshop, before: set[Path]) -> tuple[str, RunDir | None]:
    """The id of the run that was disturbed, and its directory if it can be resumed."""
    (root,) = set((workshop.home / "runs").iterdir()) - before
    return root.name, RunDir(root) if (root / "identity.json").exists() else None


def runs_of(workshop: Workshop) -> set[Path]:
    folder = workshop.home / "runs"
    return set(folder.iterdir()) if folder.exists() else set()


@pytest.mark.parametrize("phase", ["announced", "rehearsal", "evaluation", "registration"])
def test_after_the_flow_is_killed_the_next_command_shows_the_truth_and_ends_with_the_same_file(
    phase: str, workshop: Workshop, undisturbed: str, tmp_path: Path
) -> None:
    before = runs_of(workshop)
    rehearsal = ("launch.rehearsal='auto'",) if phase == "rehearsal" else ()
    process = start_until(workshop, phase, "SIGKILL", tmp_path / "reached", *rehearsal)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL
    until(lambda: not workshop.processes(), limit_s=60)
    name, run = begun(workshop, before)
    if run is not None:
        assert workshop.onward("status", name)["state"] in ("interrupted", "stopped", "trained", "exported")
    facts = go_on(workshop, run)
    assert facts["sha256"] == undisturbed
    states = workshop.prefect_states()
    assert states[name] == "CRASHED"
    assert not set(states.values()) & OPEN
    assert [each.info.status for each in workshop.mlflow_runs(RunDir(Path(facts["directory"])))] == ["FINISHED"]


@pytest.mark.parametrize(
    ("phase", "action", "status"),
    [
        *((phase, "SIGTERM", 143) for phase in ("announced", "sharding", "step", "save", "evaluation", "export")),
        ("created in Prefect", "SIGTERM", 143),
        ("first step", "SIGTERM", 143),
        ("registration", "SIGTERM", 143),
        ("save", "SIGINT", 130),
        ("export", "SIGINT", 130),
    ],
)
def test_a_flow_that_is_asked_to_stop_is_cancelled_and_goes_on_to_the_same_file(
    phase: str, action: str, status: int, workshop: Workshop, undisturbed: str, tmp_path: Path
) -> None:
    before = runs_of(workshop)
    process = start_until(workshop, phase, action, tmp_path / "reached")
    _, said = process.communicate(timeout=240)
    assert process.returncode == status, said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 25, said
    until(lambda: not workshop.processes(), limit_s=60)
    name, run = begun(workshop, before)
    assert workshop.prefect_states()[name] == "CANCELLED"
    if run is not None:
        assert [each.info.status for each in workshop.mlflow_runs(run)] == ["KILLED"]
        assert f"onward resume {name_of(run, 'config')}" in said
        assert workshop.onward("status", name)["state"] in ("stopped", "trained", "exported")
    assert go_on(workshop, run)["sha256"] == undisturbed


def run_on_a_full_disk(home: Path) -> None:
    """A run whose disk is full from a phase on; then room is made, and it goes on."""
    workshop, phase, expected = Workshop(home.parent), os.environ["PHASE"], os.environ["EXPECTED"]
    more = ("launch.storage_wait_s=3", *(LONGER if phase == "monitor" else ()))
    # a run may need its servers before it reaches the phase, so that it is begun with room
    process = start_until(workshop, phase, "fill", home.parent / f"reached {phase}", *more)
    _, said = process.communicate(timeout=240)
    assert process.returncode in STATUS_ON_A_FULL_DISK[phase], (process.returncode, said)
    assert "No space left on device" in said, said
    assert "make room" in said, said
    assert "Traceback" not in said, said
    assert len(said.splitlines()) < 25, said
    name, run = begun(workshop, set())
    if run is not None:
        ending = ending_of(run)
        assert ending is not None
        assert (ending.status, ending.exit_status) == ("failed", process.returncode)
        assert "No space left on device" in workshop.onward("status", name)["error"]
    (home / "ballast").unlink()
    facts = go_on(workshop, run)
    assert facts["sha256"] == expected
    states = workshop.prefect_states()
    assert states[name] in ("FAILED", "CRASHED")
    assert not set(states.values()) & OPEN


@pytest.mark.parametrize("phase", list(STATUS_ON_A_FULL_DISK))
def test_a_disk_that_is_full_is_one_sentence_and_with_room_the_run_ends_with_the_same_file(
    phase: str, workshop: Workshop, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    monkeypatch.setenv("PHASE", phase)
    if phase == "monitor":
        undisturbed = workshop.onward("run", str(workshop.root / "config.toml"), *SHORT, *LONGER)["sha256"]
    monkeypatch.setenv("EXPECTED", undisturbed)
    home = workshop.home  # in the other namespace a small disk lies over it
    ended = on_a_small_disk(run_on_a_full_disk, home, size="48m")
    assert ended.returncode == 0, ended.stderr[-4000:]


def run_without_inodes(home: Path) -> None:
    """A run whose disk takes no further file from its first step on; then room is made, and it goes on."""
    workshop = Workshop(home.parent)
    reached = home.parent / "no further file"
    process = start_until(workshop, "first step", "take inodes", reached, "launch.storage_wait_s=3", "launch.retries=0")
    _, said = process.communicate(timeout=240)
    assert process.returncode in (3, 4, 70), (process.returncode, said)
    assert "No space left on device" in said, said
    until(lambda: not workshop.processes(), limit_s=60)
    _, run = begun(workshop, set())
    assert run is not None
    assert ending_of(run) is not None, "its space was reserved"
    shutil.rmtree(home / "ballast")
    assert go_on(workshop, run)["sha256"] == os.environ["EXPECTED"]
    assert not set(workshop.prefect_states().values()) & OPEN


def test_a_disk_that_takes_no_further_file_ends_the_command_and_with_room_the_run_ends_with_the_same_file(
    workshop: Workshop, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    monkeypatch.setenv("EXPECTED", undisturbed)
    ended = on_a_small_disk(run_without_inodes, workshop.home, size="200m,nr_inodes=1200")
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_a_flow_that_is_asked_to_stop_while_its_graph_is_compiled_saves_after_the_first_step_and_goes_on(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))  # nothing is compiled yet
    more = ("graph.compile=true", "launch.stop_grace_s=200")
    before = runs_of(workshop)
    process = start_until(workshop, "first compile", "SIGTERM", tmp_path / "reached", *more)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 143, said
    name, run = begun(workshop, before)
    assert run is not None
    assert workshop.prefect_states()[name] == "CANCELLED"
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["KILLED"]
    described = workshop.onward("status", name)
    assert described["state"] == "stopped"
    assert run.checkpoint(described["step"]).is_dir()
    undisturbed = workshop.onward("run", str(workshop.root / "config.toml"), *SHORT, *more)
    assert go_on(workshop, run)["sha256"] == undisturbed["sha256"]
