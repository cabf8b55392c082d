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
from onward.trainer.run.names import name_of
from onward.trainer.run.outcomes.run_ending import ending_of
from tests.support.full_disk import may_break, may_mount, mend, mount, on_a_small_disk
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
    "export process": r"^open .*/export/\.refused\.reserved$",
    "registration": r"^open .*/artifacts/.*\.onnx$",
}
"""Phase -> what a process does first in it."""
ON_A_FULL_DISK = (
    *("announced", "configuration", "MLflow's run", "preflight", "sharding", "ranks"),
    *("first step", "step", "save", "evaluation", "monitor", "export", "export process", "registration"),
)
"""Phases in which the disk of the home becomes full."""
BROKEN = {
    "without inodes in training": ("inodes", "", "step"),
    "without inodes in the export": ("inodes", "", "export process"),
    "read-only in training": ("read-only", "", "step"),
    "read-only in the export": ("read-only", "", "export process"),
    "a device that fails in training": ("EIO", "", "step"),
    "full under Prefect's database": ("fill", "prefect", "announced"),
    "full under Prefect's database in training": ("fill", "prefect", "step"),
    "full under MLflow's database": ("fill", "mlflow", "step"),
    "full under temporary files": ("fill", "tmp", "ranks"),
}
"""What is wrong -> what is done to the disk of which directory of the home ("" = the home) in which phase."""
BEFORE_THE_RUN = ("rehearsal", "MLflow's run")
"""Phases that may begin before the run has a directory, beside the start of the servers."""
BEGINS = {
    "fill": "No space left on device: the disk of ",
    "inodes": "No space left on device: the disk of ",
    "read-only": "Read-only file system: the disk of ",
    "EIO": "Input/output error: the disk of ",
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


def start_until(
    workshop: Workshop,
    phase: str,
    action: str,
    once: Path,
    *more: str,
    disk: Path | None = None,
    retry_delay_s: float = 0.0,
) -> subprocess.Popen[str]:
    """Start a run to whose flow, or to a disk (default: that of the home), something happens in a phase.

    retry_delay_s: the pause before a retry; 0 = as always.
    """
    shutil.rmtree(workshop.home / "shards", ignore_errors=True)
    settings = {"phase": PHASES[phase], "action": action, "once": str(once), "home": str(disk or workshop.home)}
    settings |= {"retry_delay_s": retry_delay_s}
    support = Path(__file__).parents[1] / "support" / "at_a_phase"
    path = os.pathsep.join([str(support), str(support.parents[2]), os.environ.get("PYTHONPATH", "")])
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
    """The id of the run that was disturbed, "" if none had begun, and its directory if it can be resumed."""
    new = runs_of(workshop) - before
    if not new:
        return "", None
    (root,) = new
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
    assert states[name] == "CRASHED" if name else phase in BEFORE_THE_RUN
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
    action, where = os.environ["ACTION"], os.environ["WHERE"]
    more = LONGER if phase == "monitor" else ()
    disk = home / where
    if where:
        disk.mkdir()
        mount(disk, "32m")
    if where == "tmp":
        os.environ["TMPDIR"] = str(disk)
    # a run may need its servers before it reaches the phase, so that it is begun with room
    reached = home.parent / f"reached {phase}"
    reached.unlink(missing_ok=True)  # by an earlier run
    process = start_until(workshop, phase, action, reached, *more, disk=disk)
    out, said = process.communicate(timeout=600)
    assert reached.exists(), said
    if process.returncode == 0 and (where, phase) == ("prefect", "step"):
        # its database had taken room enough for the few lines that were still to be written
        assert json.loads(out)["sha256"] == expected
        return
    assert process.returncode == 3, (process.returncode, said)
    heading, problem, to_do = said.splitlines()[-3:]
    assert heading.startswith("onward run: the machine cannot run it"), said
    assert problem.removeprefix("  - ").startswith(BEGINS[action]), said
    assert str(disk) in problem, said
    assert to_do.startswith("To do: "), said
    assert "Traceback" not in said, said
    assert len(said.splitlines()) < 25, said
    name, run = begun(workshop, set())
    if run is not None and action in ("fill", "inodes"):  # nothing can be written to the others
        ending = ending_of(run)
        assert ending is not None
        assert (ending.status, ending.exit_status) == ("failed", 3)
        status = workshop.onward("status", name)
        assert "No space left on device" in status["error"], status
    mend(disk, action)
    facts = go_on(workshop, run)
    assert facts["sha256"] == expected
    states = workshop.prefect_states()
    assert states[name] in ("FAILED", "CRASHED") if name else phase in BEFORE_THE_RUN
    assert not set(states.values()) & OPEN


def on_a_disk(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    home = workshop.home  # in the other namespace a small disk lies over it
    size, breaks = "64m,nr_inodes=3000", settings["ACTION"] == "EIO"
    ended = on_a_small_disk(run_on_a_full_disk, home, size=size, breaks=breaks)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.parametrize("phase", ON_A_FULL_DISK)
def test_a_disk_that_is_full_is_one_sentence_and_with_room_the_run_ends_with_the_same_file(
    phase: str, workshop: Workshop, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs a namespace")
    if phase == "monitor":
        undisturbed = workshop.onward("run", str(workshop.root / "config.toml"), *SHORT, *LONGER)["sha256"]
    on_a_disk(workshop, monkeypatch, PHASE=phase, EXPECTED=undisturbed, ACTION="fill", WHERE="")


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_disk_that_takes_no_file_is_called_what_it_is_and_when_it_does_the_run_ends_with_the_same_file(
    what: str, workshop: Workshop, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    action, where, phase = BROKEN[what]
    if not may_mount() or (action == "EIO" and not may_break()):
        pytest.skip("a small disk of its own needs a namespace, one that fails root and a loop device")
    on_a_disk(workshop, monkeypatch, PHASE=phase, EXPECTED=undisturbed, ACTION=action, WHERE=where)


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
