"""Promise: a program runs as a fork as it runs by itself, and no fork outlives what has started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onward.infra.job import forks, job_guard
from onward.infra.job.child_program import python_of
from onward.infra.job.job import Job
from onward.infra.job.job_guard import members
from onward.infra.job.launcher import Ranks
from onward.infra.job.mpirun import Mpirun
from onward.tasks.checks.subprocesses import how_it_ended, run_module, start_module
from onward.trainer import fork_server
from tests.support import fork_programs
from tests.support.fork_programs import MODULE
from tests.support.ranks import ROOT


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A fork server that imports no torch. It has ended afterwards."""
    monkeypatch.setattr(forks, "SERVER", fork_programs.SERVER)
    with forks.fork_server():
        running = forks._server.get()
        assert running is not None
        yield running.process
    assert running.process.poll() is not None
    assert not running.path.parent.exists()


@pytest.fixture
def waiting(server: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The client of a fork that waits, and the process id of the fork. Both have ended afterwards."""
    client = start_module(MODULE, "wait", str(tmp_path / "up"), folder=tmp_path, log=tmp_path / "log")
    until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())
    pid = int((tmp_path / "up").read_text())
    assert pid != client.pid
    yield client, pid
    client.kill()
    client.wait()
    until(lambda: not is_alive(pid))


# -- as by itself


@pytest.mark.parametrize("forked", [True, False])
def test_a_fork_has_the_words_environment_directory_output_and_status_of_its_client(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "SERVER", fork_programs.SERVER)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with forks.fork_server() if forked else contextlib.nullcontext():
        monkeypatch.setenv("SAID", "after the server has begun")
        ending = run_module(MODULE, "say", "3", "b c", folder=tmp_path, log=tmp_path / "log")
    said, error = (tmp_path / "log").read_text().splitlines()
    facts = {"words": ["3", "b c"], "env": "after the server has begun", "cwd": str(tmp_path), "name": "__main__"}
    facts["tmp"] = str(tmp_path)
    assert json.loads(said).items() >= facts.items()
    assert error == "and an error"
    assert ending.startswith("ended with status 3")


def test_the_processes_of_a_job_are_found_with_their_forks_by_its_tag(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job_guard.TAG, tag := uuid.uuid4().hex)
    client = start_module(MODULE, "wait", str(tmp_path / "up"), folder=tmp_path, log=tmp_path / "log")
    pid = int(until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text()))
    assert set(members(tag)) == {client.pid, pid}
    job_guard.kill_job(tag)
    assert not is_alive(pid)
    client.wait()


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "LD_PRELOAD", "SAID"])
def test_a_program_that_needs_other_libraries_than_the_server_is_no_fork(
    name: str, server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    client = start_module(MODULE, "say", "0", folder=tmp_path, log=tmp_path / "log")
    assert client.wait() == 0
    said = json.loads((tmp_path / "log").read_text().splitlines()[-2])
    assert (said["pid"] == client.pid) == (name != "SAID")


@pytest.mark.mpi
def test_the_ranks_of_mpirun_are_forks() -> None:
    with forks.fork_server():
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        words = [str(Mpirun().program()), "-n", "1", *forks.python(), "-m", MODULE, "say", "0"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=True)
        running = forks._server.get()
        assert running is not None
        assert json.loads(done.stdout)["session"] == running.process.pid


def test_a_job_of_other_hosts_or_of_a_scheduler_is_not_forked(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def argv(hostfile: str = "", **environment: str) -> list[str]:
        ranks = Ranks(module=("onward.trainer",), num_ranks=2, hostfile=hostfile)
        return Job(ranks=ranks, launcher=Mpirun(), run_dir=tmp_path, log=tmp_path / "log").arguments(environment)

    assert argv()[-10:] == [*forks.python(), "-m", "onward.trainer"]
    assert argv("/etc/hosts.mpi")[-3:] == [sys.executable, "-m", "onward.trainer"]
    assert argv(SLURM_JOB_ID="7")[-3:] == [sys.executable, "-m", "onward.trainer"]


# -- signals and ends


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (proc_pid_status(5), SigCgt)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


def test_a_client_passes_signals_on(waiting: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    client, pid = waiting
    # the fork may be up before its client has been told, and until then signals are the client's own
    until(lambda: catches(client.pid, signal.SIGUSR1))
    client.send_signal(signal.SIGUSR1)
    until((tmp_path / "up.asked").exists)
    client.terminate()
    assert client.wait() == -signal.SIGTERM
    until(lambda: not is_alive(pid))


def test_a_killed_client_ends_its_fork(waiting: tuple[subprocess.Popen[bytes], int]) -> None:
    client, pid = waiting
    client.kill()
    until(lambda: not is_alive(pid))


def test_a_killed_fork_ends_its_client_by_the_same_signal(waiting: tuple[subprocess.Popen[bytes], int]) -> None:
    client, pid = waiting
    os.kill(pid, signal.SIGKILL)
    assert client.wait() == -signal.SIGKILL


def test_a_fork_is_stopped_while_its_client_is(waiting: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    client, pid = waiting
    client.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    client.send_signal(signal.SIGCONT)
    until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED)
    before = (tmp_path / "up.tick").read_text()
    until(lambda: (tmp_path / "up.tick").read_text() not in ("", before))


def test_a_killed_server_ends_its_forks_and_the_next_program_runs_by_itself(
    server: subprocess.Popen[bytes], waiting: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    client, pid = waiting
    server.kill()
    assert how_it_ended(client, tmp_path / "log").startswith("ended with signal 9")
    until(lambda: not is_alive(pid))
    server.wait()
    assert forks.python() == [sys.executable]
    assert run_module(MODULE, "say", "0", folder=tmp_path, log=tmp_path / "log") == ""


def test_a_client_whose_server_has_gone_runs_the_program_itself(tmp_path: Path) -> None:
    words = python_of(str(tmp_path / "absent"))
    done = subprocess.run([*words, "-m", MODULE, "say", "4"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 4
    assert json.loads(done.stdout)["name"] == "__main__"


@pytest.mark.parametrize("killed", ["parent", "server and parent"])
def test_nothing_is_left_when_the_parent_is_killed(killed: str, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-m", MODULE, "parent", str(tmp_path / "up")])
    pid = int(until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text()))
    server = int((tmp_path / "up.server").read_text())
    if killed != "parent":
        os.kill(server, signal.SIGKILL)
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(pid))
    until(lambda: not is_alive(server))


def test_a_server_in_which_a_package_has_started_a_thread_forks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = iter([{"python"}, {"python", "jemalloc_bg_thd", "of a package"}])
    monkeypatch.setattr(fork_server, "_threads", lambda: next(names))
    with pytest.raises(SystemExit, match=r"has started a thread .*'of a package'"):
        fork_server.main(-1, -1, "/absent")


def test_where_no_folder_can_be_made_programs_run_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks.tempfile, "tempdir", str(tmp_path / "absent"))
    with forks.fork_server():
        assert forks.python() == [sys.executable]
        assert run_module(MODULE, "say", "0", folder=tmp_path, log=tmp_path / "log") == ""


def test_an_error_inside_does_not_follow_from_the_folder_that_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks.tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(KeyError) as raised, forks.fork_server():
        raise KeyError
    assert raised.value.__context__ is None


def test_a_path_that_is_too_long_for_a_socket_starts_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(forks.tempfile, "tempdir", str(deep))
    with forks.fork_server():
        assert forks.python() == [sys.executable]
