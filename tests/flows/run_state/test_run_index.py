"""The index behind the list of runs: it is quick, and never wrong, whatever becomes of a run or of the index itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.flows import cli
from onward.flows.run_state import run_index
from onward.flows.run_state.run_index import listed_runs
from onward.flows.run_state.runs import all_runs, find_run, locked
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.run_ending import RunEnding, begin, end
from tests.flows.test_cli import make_run, onward
from tests.flows.test_run_commands import HOLDS
from tests.support.workshop import until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    return tmp_path


def settled(run: RunDir) -> RunDir:
    """Let the last changes of a run be some time ago, as those of most runs."""
    for path in (*run.root.rglob("*"), run.root):
        os.utime(path, (time.time() - 3600,) * 2)
    return run


def failed_run(home: Path, run_id: str, name: str, **identity: str) -> RunDir:
    """A run whose flow has recorded how it ended, some time ago."""
    run = make_run(home, run_id, name, **identity)
    end(run, RunEnding(status="failed", error="OSError", problems=("a disk failed",)))
    return settled(run)


def states() -> dict[str, str]:
    return {name: status["state"] for name, status in listed_runs()}


def indexed(home: Path) -> set[str]:
    _, _, content = (home / "runs.index").read_bytes().partition(b"\n")
    return set(json.loads(content))


def test_a_run_that_does_not_run_is_described_once(home: Path) -> None:
    runs = [failed_run(home, f"aaaa-{number}", f"mlp-{number}") for number in range(3)]
    assert len(listed_runs()) == 3
    program = (
        "import sys, onward.flows.run_state.run_index as i; print(len(i.listed_runs()), 'pydantic' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "3 False\n", "the index has all, so that nothing was described"
    assert [run.root for run in all_runs()] == [run.root for run in runs]


def test_a_run_that_runs_is_not_in_the_index_and_one_that_ended_is_shown_as_it_ended(home: Path) -> None:
    run = failed_run(home, "aaaa-1", "mlp-1", config_name="mlp")
    assert states() == {"aaaa-1": "failed"}
    assert indexed(home) == {"aaaa-1"}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run.root)])
    try:
        until(lambda: states() == {"aaaa-1": "running"}, limit_s=60)
        assert indexed(home) == set()
        until(lambda: not run.flow_ending.exists() and run.reserved.exists(), limit_s=60)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert states() == {"aaaa-1": "stopped"}
    settled(run)
    assert states() == {"aaaa-1": "stopped"}
    assert indexed(home) == {"aaaa-1"}
    begin(run)  # a resume deletes the record, and the directory has another time
    settled(run)
    assert states() == {"aaaa-1": "interrupted"}
    assert indexed(home) == set(), "why its flow was killed is looked at each time"


def test_a_run_that_was_deleted_moved_or_replaced_is_shown_as_it_is(home: Path, tmp_path: Path) -> None:
    for number in range(3):
        settled(make_run(home, f"aaaa-{number}", f"mlp-{number}", config_name="mlp"))
    assert len(listed_runs()) == 3
    shutil.rmtree(home / "runs" / "aaaa-0")
    (home / "runs" / "aaaa-1").rename(home / "runs" / "bbbb-1")
    copy = home / "runs" / "cccc-2"
    shutil.copytree(home / "runs" / "aaaa-2", copy)  # with the same times
    end(RunDir(copy), RunEnding(status="failed", error="OSError", problems=("a disk failed",)))
    settled(RunDir(copy))
    shutil.rmtree(home / "runs" / "aaaa-2")
    copy.rename(home / "runs" / "aaaa-2")
    assert states() == {"aaaa-2": "failed", "bbbb-1": "interrupted"}
    assert find_run("bbbb-1").root == home / "runs" / "bbbb-1"
    assert {status["directory"] for _, status in listed_runs()} == {str(home / "runs" / name) for name in states()}


def test_an_index_of_another_home_counts_nothing(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed_run(home, "aaaa-1", "mlp-1")
    assert listed_runs()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("runs", "runs.index"):
        (home / name).rename(moved / name)
    monkeypatch.setenv("ONWARD_HOME", str(moved))
    assert listed_runs()[0][1]["directory"] == str(moved / "runs" / "aaaa-1")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "garbage", "directory"])
def test_a_damaged_index_is_made_again(home: Path, damage: str) -> None:
    failed_run(home, "aaaa-1", "mlp-1")
    before = listed_runs()
    path = home / "runs.index"
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":  # then every command describes the runs
        path.mkdir()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b"", "garbage": b"\0" * 99}[damage])
    assert listed_runs() == before
    if damage != "directory":
        assert path.read_bytes() == content
    assert not list(home.glob("*.partial"))


@pytest.mark.slow
def test_processes_that_write_the_index_at_once_leave_a_whole_one(home: Path) -> None:
    for number in range(20):
        failed_run(home, f"aaaa-{number:02d}", f"mlp-{number}")
    program = "from pathlib import Path; import onward.flows.run_state.run_index as i\nfor _ in range(20):\n"
    program += f" Path({str(home / 'runs.index')!r}).unlink(missing_ok=True); assert len(i.listed_runs()) == 20"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(200) for process in processes] == [0, 0, 0]
    assert len(listed_runs()) == 20
    assert indexed(home) == {f"aaaa-{number:02d}" for number in range(20)}


def test_a_change_that_is_just_now_is_not_kept(home: Path) -> None:
    run = make_run(home, "aaaa-1", "mlp-1")
    assert states() == {"aaaa-1": "interrupted"}
    assert not (home / "runs.index").exists() or indexed(home) == set()
    with locked(run):
        assert states() == {"aaaa-1": "running"}


def test_the_newest_twenty_are_listed_unless_all_are_asked_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        make_run(home, f"aaaa-{number:02d}", f"mlp-{number}", f"2026-01-{number + 1:02d}", config_name="mlp")
    facts = json.loads(onward(capsys, "runs", "--json"))
    assert ([each["name"] for each in facts["runs"]], facts["total"]) == ([f"mlp-{n}" for n in range(29, 9, -1)], 30)
    assert len(json.loads(onward(capsys, "runs", "--json", "--all"))["runs"]) == 30
    assert len(json.loads(onward(capsys, "runs", "--json", "--last", "25"))["runs"]) == 25
    cli.app(["runs"], standalone_mode=False)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 21
    assert shown.err == "onward: the newest 20 of 30; --all shows all\n"


def test_an_entry_has_the_fields_that_a_status_has(home: Path) -> None:
    """A version that adds one raises FORMAT, so that no older entry is read."""
    settled(make_run(home, "aaaa-1", "mlp-1"))
    ((_, status),) = listed_runs()
    assert (run_index.FORMAT, len(status)) == (2, 31), "raise FORMAT with the number of fields"
