"""The soak driver: a seeded plan, an account that says what is not right, refusals, and real soaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir
from tests.soak.account import Command, Fault, Result, make_account, times
from tests.soak.driver import ends_early, run_soak
from tests.soak.file_faults import flip_bit
from tests.soak.plan import make_plan, seconds
from tests.soak.refused_commands import second_resume
from tests.soak.scene import NoTarget, Scene
from tests.soak.soak import Soak
from tests.support.workshop import Workshop

FAULT = {"number": 1, "target": "", "round": 1, "command": 1, "at": 0.0, "attempt": 1, "step": 7}
RIGHT = Result(run_id="run", weights="a", model="b", step=10, points=100)
FAST = (
    "launch.rehearsal='off'",
    "launch.heartbeat_timeout_s=15",
    "train.log_period=5",
)


def test_the_same_seed_gives_the_same_plan_and_every_kind_comes_before_one_comes_again() -> None:
    plan = make_plan(["a", "b", "c"], faults=8, mtbf_s=10, seed=7)
    assert plan == make_plan(["a", "b", "c"], faults=8, mtbf_s=10, seed=7)
    assert plan != make_plan(["a", "b", "c"], faults=8, mtbf_s=10, seed=8)
    assert [fault.number for fault in plan] == list(range(1, 9))
    assert {fault.kind for fault in plan[:3]} == {fault.kind for fault in plan[3:6]} == {"a", "b", "c"}
    assert all(0 < fault.wait_s <= 40 for fault in plan)


def test_the_pauses_have_the_mean_that_was_asked_for() -> None:
    plan = make_plan(["a"], faults=4000, mtbf_s=20, seed=0)
    assert 18 < sum(fault.wait_s for fault in plan) / len(plan) < 20.5  # the longest ones are cut off


@pytest.mark.parametrize(
    ("text", "found"), [("20s", 20.0), ("500ms", 0.5), ("5m", 300.0), ("1.5h", 5400.0), ("3", 3.0)]
)
def test_a_time_has_a_unit(text: str, found: float) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "0s", "-1s", "20 seconds", "nan", "1e9s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time: give a number above 0 and its unit, such as 500ms"):
        seconds(text)


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    flip_bit(path, 0.5)
    content = path.read_bytes()
    assert (len(content), sum(byte.bit_count() for byte in content), content[500].bit_count()) == (1000, 1, 1)


def test_a_run_that_was_done_before_a_command_could_refuse_it_is_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soak of 28 November ended without an account, since a run was done just before its second `onward resume`."""
    ended = subprocess.CompletedProcess(
        [], 0, stdout="", stderr="onward: config-15 is finished, and nothing was started"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    scene = Scene(tmp_path, "tag", run=RunDir(tmp_path / "runs" / "one"))
    with pytest.raises(ConfigError, match="ended with status 0, not 2"):
        second_resume(scene, 0.5)
    scene.run_dir.exported.parent.mkdir(parents=True)
    scene.run_dir.exported.write_text("{}")
    with pytest.raises(NoTarget, match="the run was done"):
        second_resume(scene, 0.5)


def account(fault: dict[str, Any], **more: Any) -> tuple[str, ...]:
    """What is not right about one fault."""
    found = Fault.model_validate(FAULT | {"ended": "attempt", "said": "rank_lost", "recovered_s": 1.0} | fault)
    rounds, commands = more.get("rounds", [RIGHT]), more.get("commands", [])
    made = {"config": "c", "seed": 0, "mtbf_s": 1.0, "undisturbed": RIGHT, "faults": [found]}
    return make_account(**made, rounds=rounds, commands=commands).problems


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"kind": "rank-kill", "said": "hang"}, "the class said is hang, not rank_lost"),
        ({"kind": "rank-kill", "said": ""}, "the class said is none, not rank_lost"),
        ({"kind": "rank-kill", "ended": "flow"}, "it ended the command, and another attempt should have followed"),
        ({"kind": "rank-kill", "ended": "nothing"}, "it ended nothing, and should have ended the attempt"),
        ({"kind": "rank-kill", "recovered_s": None}, "the run made no step after it"),
        ({"kind": "rank-kill", "orphans": ("7 python",)}, "1 processes were left after 15 s: 7 python"),
        ({"kind": "rank-pause", "said": "hang"}, "it ended the attempt, and nothing should have ended (hang)"),
    ],
)
def test_the_account_names_what_is_not_right_about_a_fault(fault: dict[str, Any], problem: str) -> None:
    assert account(fault) == (f"fault 1 ({fault['kind']}): {problem}",)


def test_the_account_of_a_soak_in_which_all_is_right_has_no_problem_and_a_confusion_matrix() -> None:
    assert account({"kind": "rank-kill"}) == ()
    late = {"kind": "rank-kill", "ended": "nothing", "said": "done", "too_late": True}
    assert account(late) == (), "it hit an attempt that was done"
    spent = {"kind": "rank-kill", "ended": "flow", "spent": True}
    assert account(spent) == (), "it was the third fault without a new checkpoint, and launch.retries is 2"


def test_the_account_compares_weights_file_and_points_with_the_undisturbed_run() -> None:
    other = {"weights": "x", "model": "y", "points_lost": 2, "points_doubled": 3}
    assert account({"kind": "rank-kill"}, rounds=[RIGHT, RIGHT.model_copy(update=other)]) == (
        "run 2: the weights of step 10 are not those of the undisturbed run's step 10",
        "run 2: the exported file is not that of the undisturbed run",
        "run 2: 2 points lost and 3 doubled in MLflow, of 100",
    )


def test_the_account_names_tracebacks_and_states_that_are_not_true() -> None:
    known = {"number": 1, "words": ("run", "c"), "status": 0, "began": 0.0, "ended": 1.0, "log": "l"}
    command = Command.model_validate(known | {"tracebacks": 2, "expected": ("COMPLETED",), "state": "RUNNING"})
    assert account({"kind": "rank-kill"}, commands=[command]) == (
        "command 1 (onward run, l): printed 2 tracebacks",
        "command 1 (onward run, l): Prefect shows RUNNING, not COMPLETED",
    )


def test_percentiles_are_of_the_values_that_there_are() -> None:
    found = times([3.0, None, 1.0, 2.0])
    assert found is not None
    assert (found.number, found.median, found.p95) == (3, 2.0, 3.0)
    assert times([None]) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_ends_the_injection_and_the_second_one_the_soak(number: int, tmp_path: Path) -> None:
    soak = Soak(Scene(tmp_path, "tag"), (), [])
    before = signal.getsignal(number)
    with ends_early(soak):
        os.kill(os.getpid(), number)
        assert soak.ends_early
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before


# -- a soak


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop.made(tmp_path)


def test_what_cannot_be_repeated_or_restored_is_refused_at_once_before_anything_is_written(workshop: Workshop) -> None:
    used = workshop.root / "used"
    used.mkdir()
    (used / "file").touch()
    (workshop.root / "hosts").write_text("h0 slots=2\n")
    changes = ["checkpoint.period=0", "stop.max_hours=1", f"launch.hostfile='{workshop.root / 'hosts'}'"]
    with pytest.raises(ConfigError) as refused:
        run_soak(str(workshop.root / "config.toml"), changes, used, mtbf_s=1.0)
    for expected in (
        "launch.hostfile: faults are injected on this host alone",
        "checkpoint.period is 0, so every fault would start the run again",
        "stop.max_hours ends a run by the clock",
        f"{used} is not empty: a soak damages files in its home, so it needs a new one",
    ):
        assert expected in str(refused.value)
    assert [path.name for path in used.iterdir()] == ["file"]


def test_kinds_that_do_not_exist_or_have_no_place_are_refused(workshop: Workshop) -> None:
    home = workshop.root / "own"
    with pytest.raises(ConfigError) as refused:
        run_soak(str(workshop.root / "config.toml"), (), home, mtbf_s=1.0, kinds=["rank-kill", "typo", "disk-full"])
    first, second = refused.value.problems
    assert first.startswith("there is no kind 'typo'; the kinds are rank-kill, rank-segv,")
    assert "disk-full fills the file system of" in second
    assert not list(home.iterdir())


def account_of(workshop: Workshop, *words: str) -> dict[str, Any]:
    """The account of a soak whose exit status is 0."""
    config = (str(workshop.root / "config.toml"), *FAST, "monitor.report=false", *words)
    command = [sys.executable, "-m", "tests.soak", *config, "--home", str(workshop.home)]
    ended = subprocess.run(command, env=workshop.environment, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stderr[-3000:]
    facts: dict[str, Any] = json.loads((workshop.home / "account.json").read_text())
    return facts


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(1800)
def test_the_process_that_computes_is_held_and_limited(workshop: Workshop) -> None:
    facts = account_of(workshop, "train.num_steps=6000", "--kinds", "rank-hang,files-limited", "--mtbf", "1s")
    assert facts["problems"] == []
    assert facts["confusion"] == {"hang": {"hang": 1}, "storage": {"storage": 1}}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(1800)
def test_a_killed_rank_a_stopped_flow_and_a_killed_exporter_are_accounted_for(workshop: Workshop) -> None:
    facts = account_of(workshop, "--kinds", "rank-kill,flow-term,exporter-kill", "--mtbf", "1s", "--seed", "7")
    assert facts["problems"] == []
    found = {fault["kind"]: fault for fault in facts["faults"]}
    assert {kind: fault["ended"] for kind, fault in found.items()} == {
        "rank-kill": "attempt",
        "flow-term": "flow",
        "exporter-kill": "flow",
    }
    assert facts["confusion"] == {"rank_lost": {"rank_lost": 1}}
    assert all(result["model"] == facts["undisturbed"]["model"] for result in facts["rounds"])
    assert not workshop.processes()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(1800)
def test_the_measured_layouts_are_run_and_shown_as_tables(tmp_path: Path) -> None:
    options = ("--layouts", "one rank", "--faults", "1", "--kinds", "rank-kill", "--home", str(tmp_path))
    command = [sys.executable, "-m", "tests.soak", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "| one rank | 1 of 1 | 1 of 1 |" in ended.stdout
