"""`onward doctor` without a model: each check with the thing broken, and one examination of the real machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from onward.flows import api, cli
from onward.flows.commands import inspection
from onward.flows.machine import file_system, mpi, network, packages, resources
from onward.flows.machine.examine import CHECKS, examine
from onward.flows.machine.machine_findings import Finding, MachineReport
from onward.infra.servers.service_state import directory
from onward.trainer.errors import ConfigError
from onward.trainer.run.machine.this_machine import core_limit, free_host_memory, memory_limit
from tests.support.full_disk import fill, may_mount, on_a_small_disk
from tests.support.ranks import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "CXX", "CC", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    return tmp_path / "home"


def worst(found: Iterable[Finding], level: str = "problem") -> list[str]:
    """Return what the findings of a level say, with what to do."""
    return [f"{each.check}: {each.what} -> {each.fix}" for each in found if each.level == level]


# -- the real machine


@pytest.mark.mpi
def test_this_machine_can_run_onward(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    with pytest.raises(SystemExit) as end:
        cli.app(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("problems") == sum(each["level"] == "problem" for each in printed["findings"])
    report = MachineReport.model_validate(printed)
    found = {each.check: each for each in report.findings}
    assert end.value.code == (3 if report.problems else 0)
    for check in ("MPI", "ranks", "home", "file system", "cores", "loopback", "servers", "Prefect", "MLflow"):
        assert found[check].level == "ok", found[check]
    assert found["MPI"].what.startswith(f"{sys.prefix}/bin/mpirun (Open MPI ")
    assert "2 ranks" in found["MPI"].what
    assert found["ranks"].what.startswith("2 ranks connected by gloo")
    assert "works: fsync of files and directories, flock, hard links" in found["file system"].what
    assert found["home"].what == f"{home} is for its owner alone (mode 0700)"
    assert not home.exists(), "it was made for the examination alone"


@pytest.mark.mpi
@pytest.mark.slow
def test_the_hosts_of_a_hostfile_are_started_and_asked(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    found = examine(str(tmp_path / "hosts"), checks={}).findings
    assert {each.check: each.level for each in found} == {"MPI": "ok", "ranks": "ok", "hosts": "ok"}


# -- MPI


def broken_mpirun(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let an mpirun of this shell program be the only one."""
    path = folder / "bin" / "mpirun"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(folder))


def test_without_mpirun_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = worst(mpi.mpi())
    assert problem.startswith("MPI: no MPI: there is no mpirun, neither ")
    assert "[mpi]" in problem.partition("->")[2]


def test_an_mpirun_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_mpirun(tmp_path, monkeypatch, "echo 'There are not enough slots available' >&2; exit 7")
    (problem,) = worst(mpi.mpi())
    assert "did not start 2 ranks: mpirun ended with 7. Its last lines:\n  | There are not enough slots" in problem


@pytest.mark.mpi
def test_ranks_that_do_not_find_each_other_have_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as an mpirun of MPICH does with an mpi4py for Open MPI: each process is a world of its own
    program = """
        [ "$1" = --version ] && { echo "mpirun (Another MPI) 9.1"; exit; }
        while [ "${1##*/}" != python ] && [ "${1##*/python3}" = "$1" ]; do shift; done
        "$@" & "$@" & wait"""
    broken_mpirun(tmp_path, monkeypatch, program)
    (problem,) = worst(mpi.mpi())
    assert "Another MPI 9.1, but mpi4py" in problem
    assert "2 processes each see a world of 1" in problem
    assert "let MPI4PY_LIBMPI name the libmpi.so of this mpirun" in problem


# -- disks


def unwritable(folder: Path) -> None:
    os.environ["ONWARD_HOME"] = str(folder / "home")
    (folder / "home").mkdir(mode=0o700)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for each in (*file_system.home_directory(), *file_system.file_system()):
        print(f"{each.level} {each.check}: {each.what}")


def full(folder: Path) -> None:
    os.environ["ONWARD_HOME"] = str(folder)
    fill(folder)
    for each in (*file_system.disk_space(), *file_system.file_system()):
        print(f"{each.level} {each.check}: {each.what}")


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system in a namespace of its own")
@pytest.mark.slow
def test_a_home_that_cannot_be_written_and_a_full_disk_are_problems(tmp_path: Path) -> None:
    said = on_a_small_disk(unwritable, tmp_path).stdout.splitlines()
    assert said[0] == f"problem home: no right to write to {tmp_path}/home (mode 0700)"
    assert said[1] == f"problem file system: no directory can be made in {tmp_path}/home: Read-only file system"
    said = on_a_small_disk(full, tmp_path).stdout.splitlines()
    assert said[0].startswith(f"problem disk of the home: 0.0 GiB of 0.0 GiB are free at {tmp_path}")
    assert any(line.startswith("problem file system") and "No space left on device" in line for line in said)


def test_a_home_that_others_may_enter_is_noted_and_a_file_is_no_home(home: Path) -> None:
    assert [each.level for each in file_system.home_directory()] == ["ok"]  # it will be made
    home.mkdir()
    home.chmod(0o755)
    assert "others can enter" in worst(file_system.home_directory(), "note")[0].replace("other users", "others")
    assert worst(file_system.home_directory(), "note")[0].endswith(f"-> chmod 700 {home}")
    home.rmdir()
    home.write_text("")
    assert worst(file_system.home_directory())[0].startswith(f"home: {home} is no directory")


def no(code: int) -> Callable[..., None]:
    def fails(*arguments: object, **others: object) -> None:
        raise OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize(
    ("target", "name", "replacement", "sentence"),
    [
        (fcntl, "flock", no(errno.ENOLCK), "no flock in {0}: No locks available"),
        (fcntl, "flock", lambda file, how: None, "two processes would get the same lock"),
        (os, "link", no(errno.EPERM), "no hard links in {0}: Operation not permitted"),
        (os, "fsync", no(errno.EIO), "no fsync of files and directories in {0}: Input/output"),
    ],
    ids=["no locks", "locks for all", "no links", "no fsync"],
)
def test_a_feature_that_does_not_work_is_named_with_what_needs_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, replacement: Any, sentence: str
) -> None:
    home.mkdir()
    monkeypatch.setattr(target, name, replacement)
    (problem,) = worst(file_system.file_system())
    assert sentence.format(home) in problem
    assert list(home.iterdir()) == [], "something was left"


# -- limits


def test_a_low_limit_of_open_files_is_a_problem() -> None:
    def lowered() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))

    program = "from onward.flows.machine.resources import open_files as f; print(next(iter(f())).model_dump_json())"
    said = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=lowered, check=True, capture_output=True, text=True
    )
    found = Finding.model_validate_json(said.stdout)
    assert (found.level, found.what) == ("problem", "a process may have 100 open files")
    assert found.fix.startswith("`ulimit -n 4096` before `onward`")


def test_the_limits_of_a_container_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (core_limit(tmp_path), memory_limit(tmp_path)) == (None, None)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (core_limit(tmp_path), memory_limit(tmp_path)) == (None, None)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert (core_limit(tmp_path), memory_limit(tmp_path)) == (0.5, 1 << 30)
    monkeypatch.setattr(resources, "core_limit", lambda: 0.5)
    monkeypatch.setattr(resources, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(resources, "free_host_memory", lambda: 1 << 29)
    (few,) = worst(resources.cores(), "note")
    assert "but the container gets the time of 0.5 -> leave launch.threads_per_rank at 0, which counts on it" in few
    (little,) = worst(resources.memory())
    assert "0.5 GiB of 1.0 GiB are free; the container's limit is 1.0 GiB" in little


def test_files_in_memory_count_as_free_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert free_host_memory(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 700000\nactive_file 100000\n")
    assert free_host_memory(tmp_path) == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) > 800_000


def test_little_shared_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "SHARED", tmp_path / "absent")
    assert "--shm-size=1g" in worst(resources.shared_memory(), "note")[0]
    monkeypatch.setattr(resources, "SHARED", tmp_path)
    monkeypatch.setattr(resources, "LITTLE_SHARED", 1 << 60)
    assert "MiB are free" in worst(resources.shared_memory(), "note")[0]


def test_gpus_that_torch_cannot_use_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "most_gpus", lambda: (0, "the installed torch is built for CPUs only"))
    monkeypatch.setattr(resources.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "seems to have GPUs, but torch finds none" in worst(resources.gpus(), "note")[0]
    monkeypatch.setattr(resources, "most_gpus", lambda: (2, "there are 2 /dev/nvidia*"))
    assert [(each.level, each.what[:20]) for each in resources.gpus()] == [("ok", "torch may use 2 GPUs")]


def test_a_missing_compiler_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "missing_compiler", lambda: "graph.compile needs a C++ compiler; install one")
    (note,) = worst(resources.compiler(), "note")
    assert note == "C++ compiler: graph.compile needs a C++ compiler -> install one"


# -- network and servers


def test_servers_that_are_named_and_do_not_answer_are_problems(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    prefect, mlflow = worst(network.servers())
    assert prefect.startswith("Prefect: the configured Prefect server http://127.0.0.1:1/api does not answer")
    assert "-> start it, or unset PREFECT_API_URL" in prefect
    assert mlflow.startswith("MLflow: the MLflow server http://127.0.0.1:2 does not answer")
    assert not home.exists(), "something was made"


def test_a_server_of_onward_that_does_not_answer_is_a_problem(home: Path) -> None:
    folder = directory(home)
    assert worst(network.servers()) == []
    with (folder / "mlflow.supervisor").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its supervisor holds it
        (problem,) = worst(network.servers())
    assert problem.startswith("servers: mlflow was started and does not answer")


def test_a_proxy_in_the_way_and_a_name_without_address_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "a-host-that-does-not-exist.invalid")
    name, proxy = worst(network.loopback(), "note")
    assert "has no address" in name
    assert proxy.endswith("-> export NO_PROXY=127.0.0.1,localhost")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert len(worst(network.loopback(), "note")) == 1


# -- packages


DECLARED = ["torch<3,>=2.11", "onnx>=1.21", 'prefect>=3.8; extra == "flow"', 'optuna>=4.5; extra == "sweep"']


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"torch": "2.13.0+cpu", "onnx": "1.21", "prefect": "3.8", "optuna": "5"}, []),
        ({"torch": "3.0.0", "onnx": "1.21"}, ["problem torch 3.0.0 is installed, and Onward needs <3,>=2.11"]),
        ({"torch": "2.12"}, ["problem not installed: onnx"]),
        (
            {"torch": "2.12", "onnx": "1.22", "prefect": "3.7.9", "optuna": "4.4"},
            [
                "problem prefect 3.7.9 is installed, and Onward needs >=3.8",
                "note optuna 4.4 is installed, and Onward needs >=4.5",
            ],
        ),
    ],
)
def test_versions_are_compared_with_their_ranges(installed: dict[str, str], found: list[str]) -> None:
    result = list(packages.compared(DECLARED, ">=3.11", installed.get))
    assert [f"{each.level} {each.what}" for each in result if each.level != "ok"] == found
    old = next(iter(packages.compared([], ">=4", installed.get)))
    assert (old.level, old.what.endswith("and Onward needs >=4")) == ("problem", True)


@pytest.mark.slow
def test_a_package_newer_than_the_newest_that_was_tried_is_allowed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.99.1", "onnx": "1.23.9"}
    note, ok = packages.compared(DECLARED, "", installed.get)
    newest = packages.NEWEST_TRIED["torch"]
    assert (note.level, note.what) == ("note", f"torch 2.99.1 is newer than {newest}, the newest that was tried")
    assert (note.fix, ok.level) == (f"if something fails, pip install 'torch=={newest}.*'", "ok")
    # of a newer torch, the parts that are gone are named
    monkeypatch.setattr(packages.sys, "executable", str(shutil.which("echo")))
    _, gone, _ = packages.compared(DECLARED, "", installed.get)
    assert (gone.level, gone.what) == ("problem", "torch 2.99.1 is without -m onward.trainer.torch_parts")
    monkeypatch.setattr(packages.sys, "executable", str(shutil.which("false")))
    _, gone, _ = packages.compared(DECLARED, "", installed.get)
    assert gone.what == "torch 2.99.1 cannot be imported: no output"


def test_the_newest_versions_that_were_tried_are_those_that_the_tests_run_on() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, tried in packages.NEWEST_TRIED.items():
        here, newest = Version(pinned[name]).release[:2], Version(tried).release[:2]
        # the newest torch has no wheel for CPUs: the slow tests run on it
        assert here == newest or (name == "torch" and here < newest), name


def test_torchvision_of_another_torch_is_a_problem() -> None:
    installed = {"torch": "2.0.0", "torchvision": "0.26"}
    (problem,) = worst(packages.compared([], "", installed.get))
    assert "torchvision 0.26 was built for torch ==" in problem
    assert "but torch is 2.0.0" in problem


# -- bounds


def test_a_check_that_hangs_or_fails_is_a_problem_and_the_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flows.machine.examine.mpi", lambda hostfile: ())
    never = threading.Event()

    def hangs() -> list[Finding]:
        never.wait()
        return []

    def fails() -> list[Finding]:
        raise ZeroDivisionError("by 0")

    checks = {"hangs": hangs, "fails": fails, "cores": CHECKS["cores"]}
    found = {each.check: each for each in examine(checks=checks, limit_s=0.5).findings}
    never.set()
    assert found["hangs"].what.startswith("no answer in ")
    assert found["fails"].what == "the check failed: ZeroDivisionError: by 0"
    assert found["cores"].level in ("ok", "note")


# -- the command


def test_what_is_no_examination_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no hostfile"):
        api.examine(tmp_path / "absent")
    with pytest.raises(ConfigError, match="there is no hostfile"):
        inspection.doctor(Path(f"launch.hostfile={tmp_path}/absent"))
    with pytest.raises(ConfigError, match="give only --hostfile"):
        inspection.doctor(Path("launch.hostfile=x"), "train.seed=1")
    with pytest.raises(ConfigError, match="--hostfile is for the examination of a machine"):
        inspection.doctor(tmp_path / "m.onnx", hostfile="hosts")


def test_problems_are_printed_with_what_to_do_and_give_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding(check="MPI", level="problem", what="it failed:\n  | no slots", fix="mend it")
    report = MachineReport(host="h", home="/h", examined_at="2026-01-01", elapsed_s=1.0, findings=(finding,))
    monkeypatch.setattr(api, "examine", lambda hostfile: report)
    with pytest.raises(SystemExit) as end:
        cli.app(["doctor"])
    assert end.value.code == 3
    shown = capsys.readouterr().out
    assert shown.startswith("problem MPI: it failed:\n          | no slots\n        -> mend it\n")
    assert shown.endswith("h: 1 problem and 0 notes, found in 1.0 s\n")
