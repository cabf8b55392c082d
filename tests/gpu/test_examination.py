"""The examination itself: limits, interruptions, damaged results, the page, and a rehearsal of every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as examination
from tests.gpu import device, environment, report, results, step
from tests.gpu.results import ROOT, WHOLE_STEP
from tests.gpu.steps import STEPS, Step

IDENTITY = {"rehearsal": False, "commit": "abc", "device": "a GPU", "versions": {"torch": "2.13.0"}}
Lines = Callable[[], dict[tuple[str, str], results.Line]]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Results of their own for this test; the fixture is a function that reads them."""
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr(results, "RESULTS", path)
    monkeypatch.setattr(results, "identity", lambda: IDENTITY)
    monkeypatch.setenv("ONWARD_GPU_RESULTS", str(path))
    monkeypatch.setenv(results.IDENTITY, json.dumps(IDENTITY))
    monkeypatch.setenv(results.STEP, "by hand")
    return lambda: results.newest(results.read(path)[0])


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name of a step -> the program that runs in its place, for the test to fill."""
    found: dict[str, str] = {}
    opening = "from tests.gpu import results\n"
    monkeypatch.setattr(examination, "_command", lambda each: [sys.executable, "-c", opening + found[each.name]])
    return found


ENDS = "results.record(results.WHOLE_STEP, passed=1)"


def run(*names: str, limit_s: float = 30.0, total_s: float = 60.0) -> int:
    steps = [Step(name, "test_nothing", "nothing", limit_s=limit_s) for name in names]
    return examination.run_steps(steps, total_limit_s=total_s)


# -- steps


def test_a_step_that_hangs_is_killed_with_all_its_processes_and_keeps_what_it_had(lines: Lines, programs: dict) -> None:
    programs["hangs"] = (
        "import subprocess, time\n"
        "results.record('before')\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('pid', left.pid, flush=True)\n"
        "time.sleep(600)"
    )
    programs["next"] = f"results.record('after'); {ENDS}"
    assert run("hangs", "next", limit_s=2.0) == 1
    found = lines()
    assert found["hangs", "before"]["status"] == "passed"
    whole = found["hangs", WHOLE_STEP]
    assert whole["status"] == "failed"
    assert "killed after 2 s; its last words: pid" in whole["reason"]
    assert found["next", "after"]["status"] == "passed"
    pid = int(whole["reason"].split()[-1])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists(), "a process outside of the step's group was left"


def test_an_examination_that_is_asked_to_end_ends_its_step_first(
    lines: Lines, programs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    programs["long"] = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "os.kill(os.getppid(), 15)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(examination, "STEPS", (Step("long", "test_nothing", "nothing"),))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            examination.main([])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_killed_step_that_prints_rubbish_fails_alone(lines: Lines, programs: dict) -> None:
    programs["dies"] = (
        "import os, sys; os.write(1, bytes(range(256)) * 40); results.record('one'); os.kill(os.getpid(), 9)"
    )
    programs["next"] = f"results.record('after'); {ENDS}"
    assert run("dies", "next") == 1
    assert "it ended with status -9" in lines()["dies", WHOLE_STEP]["reason"]
    assert lines()["next", "after"]["status"] == "passed"


def test_a_second_run_continues_after_what_is_finished(lines: Lines, programs: dict, tmp_path: Path) -> None:
    programs["first"] = f"results.record('one'); {ENDS}"
    made = "results.attempt('one', dict)"
    programs["second"] = f"import os; {made}; os.kill(os.getpid(), 9)"
    assert run("first", "second") == 1
    programs["first"] = "raise SystemExit('a finished step is run again')"
    programs["second"] = f"{made}; results.attempt('two', dict); {ENDS}"
    assert run("first", "second") == 0
    assert lines()["second", WHOLE_STEP]["status"] == "passed"
    written = [line["check"] for line in results.read()[0] if line["step"] == "second"]
    assert written == ["one", WHOLE_STEP, "two", WHOLE_STEP]  # one was not made again


def test_again_makes_finished_checks_anew(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    results.record("one")
    assert results.is_finished("one")
    monkeypatch.setenv(results.AGAIN, str(time.time() + 1))
    assert not results.is_finished("one")


@pytest.mark.parametrize("changed", [{"commit": "def"}, {"device": "another"}, {"versions": {}}, {"rehearsal": True}])
def test_a_check_is_finished_for_its_commit_device_and_versions_alone(
    changed: dict[str, Any], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.record("one")
    monkeypatch.setattr(results, "identity", lambda: IDENTITY | changed)
    assert not results.is_finished("one")


def test_a_failed_check_makes_the_exit_status_1_and_ends_no_other(lines: Lines, programs: dict) -> None:
    programs["fails"] = f"results.attempt('bad', lambda: {{'x': 1 / 0}}); results.attempt('good', dict); {ENDS}"
    assert run("fails") == 1
    assert lines()["fails", "bad"]["reason"] == "ZeroDivisionError: division by zero"
    assert lines()["fails", "good"]["status"] == "passed"
    assert run("fails") == 1  # what has failed and ended is not run again, and has failed still


def test_a_step_that_has_lost_the_device_is_started_again_for_the_checks_that_are_left(
    lines: Lines, programs: dict[str, str]
) -> None:
    programs["loses"] = (
        "def check():\n    raise RuntimeError('CUDA error: device-side assert triggered')\n"
        f"results.attempt('one', dict); results.attempt('two', check); results.attempt('three', dict); {ENDS}"
    )
    programs["always"] = "results.leave_a_lost_device('CUDA error: unknown error')"
    assert run("loses", "always") == 1
    written = [(line["check"], line["status"]) for line in results.read()[0] if line["step"] == "loses"]
    assert written == [("one", "passed"), ("two", "failed"), ("three", "passed"), (WHOLE_STEP, "passed")]
    assert "it ended with status 75" in lines()["always", WHOLE_STEP]["reason"]


def test_steps_that_do_not_fit_into_the_whole_time_are_not_started(lines: Lines, programs: dict) -> None:
    programs["long"] = f"import time; time.sleep(2); {ENDS}"
    assert run("long", "late", total_s=3.0) == 1
    assert ("late", WHOLE_STEP) not in lines()


# -- lines


def test_a_damaged_last_line_costs_that_line_alone(lines: Lines) -> None:
    results.record("one")
    with results.RESULTS.open("ab") as file:
        file.write(b'{"step": "by hand", "check": "tw')
    results.record("three", loss=float("nan"), sizes=(1, 2), path=Path("x"))
    found, damaged = results.read()
    assert ([line["check"] for line in found], damaged) == (["one", "three"], 1)
    assert found[1]["values"] == {"loss": "nan", "sizes": [1, 2], "path": "x"}


def test_lines_that_are_no_results_are_counted_and_left_out(lines: Lines) -> None:
    results.RESULTS.write_bytes(b'[1]\n{"step": "x"}\n\xff\xfe\n\n')
    assert results.read() == ([], 3)


def test_the_reason_why_a_check_cannot_be_made_is_recorded(lines: Lines) -> None:
    def check() -> dict[str, object]:
        raise results.Skip("this Python has no package prefect")

    assert results.attempt("with prefect", check)
    line = lines()["by hand", "with prefect"]
    assert (line["status"], line["reason"]) == ("skipped", "this Python has no package prefect")


# -- one step in its process


def test_a_step_without_a_package_that_it_needs_is_skipped_with_the_reason(lines: Lines) -> None:
    assert step.run(Step("lacks", "test_nothing", "nothing", needs=("no_such_package",))) == 0
    line = lines()["lacks", WHOLE_STEP]
    assert (line["status"], line["reason"]) == ("skipped", "this Python has no package no_such_package")


def test_each_test_of_a_step_is_one_check(lines: Lines, tmp_path: Path) -> None:
    suite = tmp_path / "tests" / "gpu" / "test_some.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_is_right(record_property): record_property('loss', 0.5)\n"
        "@pytest.mark.parametrize('n', [1])\ndef test_is_wrong(n): assert n == 2, 'one is not two'\n"
        "def test_cannot_be_made(): pytest.skip('no CUDA graphs on a CPU')\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise ValueError('the end')\n"
        "def test_breaks_afterwards(broken): pass\n"
    )
    program = (
        "import sys, pathlib; from tests.gpu import results, step; from tests.gpu.steps import Step\n"
        f"results.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(step.run(Step('some', 'test_some', '')))"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    search = os.pathsep.join([str(ROOT / ".package"), str(ROOT)])
    for _ in range(2):  # the second time there is nothing left to do
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": search},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 1, ended.stdout + ended.stderr
    found = {check: (line["status"], line["reason"].splitlines()[:1]) for (_, check), line in lines().items()}
    assert found == {
        "is right": ("passed", []),
        "is wrong [1]": ("failed", ["AssertionError: one is not two"]),
        "cannot be made": ("skipped", ["no CUDA graphs on a CPU"]),
        "breaks afterwards": ("failed", ["ValueError: the end"]),
        WHOLE_STEP: ("passed", []),
    }
    assert lines()["some", "is right"]["values"] == {"loss": 0.5}
    assert len(results.read()[0]) == 4 + 2


# -- the machine


def test_without_a_gpu_it_says_so_and_ends_with_status_3(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device() -> results.Line:
        raise RuntimeError(device.REASON or "torch finds no GPU")

    assert device.available() == torch.cuda.is_available()
    monkeypatch.setattr(results, "identity", no_device)
    assert examination.main([]) == 3
    assert "nothing was examined: torch " in capsys.readouterr().out
    assert lines() == {}


def test_wheels_are_installed_without_a_network_beside_the_machines_packages(tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "carried-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", "HERE = True\n")
        archive.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        archive.writestr(
            "carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("carried-1.0.dist-info/RECORD", "")
    python = environment.install(wheel.parent, tmp_path / "venv")
    program = "import carried, importlib.util; assert importlib.util.find_spec('torch')"
    subprocess.run([python, "-c", program], check=True)


@pytest.mark.parametrize("names", [[], ["broken-1.0-py3-none-any.whl"]])
def test_a_folder_of_wheels_that_cannot_be_installed_is_an_error(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"no wheel")
    with pytest.raises(SystemExit, match=r"(?s)failed:.*'broken'" if names else "has no wheel"):
        environment.install(tmp_path, tmp_path / "venv")


# -- the page


def test_the_page_is_what_the_kept_results_say() -> None:
    wanted = report.page(results.read(report.KEPT)[0])
    assert report.PAGE.read_text(encoding="utf-8") == wanted, "out of date: run `python -m tests.gpu.report`"


def test_without_a_device_the_page_says_so_and_a_rehearsal_gives_it_no_figure(lines: Lines, tmp_path: Path) -> None:
    rehearsed = {
        "step": "operators",
        "check": "speed",
        "status": "passed",
        "reason": "",
        "seconds": 1.0,
        "at": "2026-11-22",
    }
    rehearsed |= IDENTITY | {"rehearsal": True, "values": {"tokens_per_s": 123456}}
    results.RESULTS.write_text(json.dumps(rehearsed) + "\n")
    kept = tmp_path / "kept.jsonl"
    page = report.page(report.gather([results.RESULTS], kept))
    assert not kept.exists()
    assert "No GPU was available" in page
    assert "123" not in page
    assert report.page([rehearsed]) == page


def test_the_page_has_every_check_of_a_device_once_with_its_figures(lines: Lines, tmp_path: Path) -> None:
    results.record("GPT-2, bf16", tokens_per_s=123456.7, mfu=0.51234)
    results.record("is | wrong", status="failed", reason="3 of 4\ndiffer")
    results.record("GPT-2, bf16", tokens_per_s=200000.0, mfu=0.6)
    kept = tmp_path / "kept.jsonl"
    for _ in range(2):
        page = report.page(report.gather([results.RESULTS], kept))
    assert len(kept.read_text().splitlines()) == 2
    assert "No GPU was available" not in page
    assert "| check | tokens per s | mfu |\n|---|---|---|\n| GPT-2, bf16 | 200,000 | 0.6 |" in page
    assert "| is \\| wrong | failed: 3 of 4 differ |" in page
    assert "1 passed, 1 failed, 0 skipped" in page
    assert "## a GPU, commit abc" in page
    assert "torch 2.13.0" in page


def test_the_page_is_written_by_a_python_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = sys.modules['numpy'] = None\n"
        "from tests.gpu import report; assert report.page([])"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


# -- the rehearsal


@pytest.mark.mpi
@pytest.mark.timeout(900)  # about a minute on two idle cores
@pytest.mark.slow
def test_the_whole_examination_runs_in_a_rehearsal_and_every_step_yields_its_checks(tmp_path: Path) -> None:
    from tests.support import rank_server

    path = tmp_path / "results.jsonl"
    mode = {"ONWARD_GPU_REHEARSAL": "1", "ONWARD_GPU_RESULTS": str(path), rank_server.SHARED: rank_server.command()[-1]}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, env=os.environ | mode, capture_output=True, text=True
    )
    found, damaged = results.read(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert damaged == 0
    assert all(line["rehearsal"] and line["device"] == "CPU (rehearsal)" for line in found)
    latest = results.newest(found)
    for each in STEPS:
        assert latest[each.name, WHOLE_STEP]["status"] == "passed", each.name
        assert [check for name, check in latest if name == each.name and check != WHOLE_STEP], each.name
