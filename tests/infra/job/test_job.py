"""Jobs are watched, stopped and killed: real mpirun, real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from onward.infra.job import job_guard, slurm_jobs
from onward.infra.job.job import LAST_S, LAUNCHERS, Job, Outcome, running_job, stop_running
from onward.infra.job.job_guard import temporary_directory
from onward.infra.job.launcher import Ranks
from onward.infra.job.mpirun import Mpirun
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.distributed.launched import RANK_VARIABLES

ROOT = Path(__file__).resolve().parents[3]


def job(folder: Path, program: str, **limits: Any) -> Job:
    """Two ranks of a program from rank_programs.py."""
    return Job(
        ranks=Ranks(module=("tests.support.rank_programs", program, str(folder)), num_ranks=2),
        launcher=Mpirun(),
        run_dir=folder,
        log=folder / "train.log",
        heartbeat=folder / "heartbeat",
        cwd=ROOT,
        **limits,
    )


def processes(folder: Path) -> list[psutil.Process]:
    """Return mpirun and the ranks of a test, found by the folder on their command line and not by the tag."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]


def leader(folder: Path) -> psutil.Process:
    """The mpirun of a test."""
    return next(p for p in processes(folder) if os.getsid(p.pid) == p.pid)


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait until the condition is true; return its value. The limit is for processes that start on a busy machine."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)
    return value


def both_up(folder: Path) -> bool:
    return (folder / "up-0").exists() and (folder / "up-1").exists()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Future[Outcome]]]:
    """Starts a job in a thread and waits until both ranks run. No process of it may be left afterwards."""
    before = psutil.Process().children()
    with ThreadPoolExecutor() as threads:

        def start(program: str, **limits: Any) -> Future[Outcome]:
            running = threads.submit(job(tmp_path, program, **{"grace_s": 3.0, **limits}).run)
            until(lambda: both_up(tmp_path) or running.done())
            return running

        yield start
        stop_running(tmp_path)
    assert processes(tmp_path) == []
    assert psutil.Process().children() == before  # the guard has ended too


def test_the_trainer_knows_the_variable_in_which_each_launcher_names_the_rank() -> None:
    assert {launcher.rank_variable for launcher in LAUNCHERS.values()} <= {*RANK_VARIABLES}


def test_each_launcher_has_a_setting_and_each_setting_a_launcher() -> None:
    assert set(get_args(LaunchConfig.model_fields["launcher"].annotation)) == {"auto", *LAUNCHERS}


# -- how it ends


@pytest.mark.mpi
def test_the_output_of_a_finished_job_is_in_the_log(started: Callable[..., Future[Outcome]], tmp_path: Path) -> None:
    outcome = started("ends").result(10)
    assert (outcome.returncode, outcome.reason) == (0, "exited")
    assert sorted((tmp_path / "train.log").read_text().splitlines()) == ["rank 0 was here", "rank 1 was here"]


@pytest.mark.mpi
def test_a_killed_rank_ends_the_other_ranks(started: Callable[..., Future[Outcome]]) -> None:
    outcome = started("dies").result(10)
    assert outcome.reason == "exited"
    assert outcome.returncode == 128 + signal.SIGKILL


@pytest.mark.mpi
def test_a_stopped_job_saves_and_exits(started: Callable[..., Future[Outcome]], tmp_path: Path) -> None:
    running = started("behaved")
    assert running_job(tmp_path) is not None
    assert stop_running(tmp_path)
    outcome = running.result(10)
    assert (outcome.returncode, outcome.reason) == (75, "stopped")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert running_job(tmp_path) is None
    assert not stop_running(tmp_path)


@pytest.mark.mpi
def test_a_job_is_asked_to_save_before_the_end_of_the_schedulers_job_unless_its_limit_was_raised(
    started: Callable[..., Future[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # at the start, when that is near, and then
    limits = iter([time.time() + LAST_S + 3.0, time.time() + LAST_S + 5.0])
    monkeypatch.setattr(slurm_jobs, "ends_at", lambda: next(limits, time.time()))
    outcome = started("behaved").result(30)
    assert (outcome.returncode, outcome.reason) == (75, "out_of_time")
    assert (tmp_path / "saved-0").exists()
    assert next(limits, None) is None


@pytest.mark.mpi
def test_a_job_that_does_not_stop_is_killed_after_its_grace_period(
    started: Callable[..., Future[Outcome]], tmp_path: Path
) -> None:
    running = started("deaf", grace_s=0.5)
    stop_running(tmp_path)
    asked_at = time.monotonic()
    assert running.result(15).reason == "stopped"
    assert time.monotonic() - asked_at > 0.5


@pytest.mark.mpi
def test_a_job_without_heartbeat_is_killed(started: Callable[..., Future[Outcome]]) -> None:
    running = started("stands_still", silence_timeout_s=0.5)
    assert running.result(15).reason == "silent"


@pytest.mark.mpi
def test_the_heartbeat_file_says_how_long_a_job_may_be_silent(started: Callable[..., Future[Outcome]]) -> None:
    running = started("compiles", silence_timeout_s=0.5)
    outcome = running.result(15)
    assert outcome.reason == "silent"
    assert outcome.elapsed_s > 2.0


@pytest.mark.mpi
def test_a_job_without_a_first_heartbeat_is_killed_after_the_start_timeout(
    started: Callable[..., Future[Outcome]],
) -> None:
    running = started("never_moves", start_timeout_s=1.5, silence_timeout_s=0.1)
    outcome = running.result(15)
    assert outcome.reason == "start_timeout"
    assert outcome.elapsed_s > 1.5


@pytest.mark.mpi
def test_after_mpirun_was_killed_no_process_and_no_file_is_left(
    started: Callable[..., Future[Outcome]], tmp_path: Path
) -> None:
    running = started("deaf")
    record = running_job(tmp_path)
    assert record is not None
    assert list(temporary_directory(record.tag).iterdir()) != []
    leader(tmp_path).kill()
    assert running.result(15).returncode == -signal.SIGKILL
    assert not temporary_directory(record.tag).exists()


@pytest.mark.mpi
def test_a_suspended_mpirun_is_killed(started: Callable[..., Future[Outcome]], tmp_path: Path) -> None:
    running = started("behaved", grace_s=0.3)
    leader(tmp_path).suspend()
    stop_running(tmp_path)
    assert running.result(15).returncode == -signal.SIGKILL


@pytest.mark.mpi
def test_an_exception_in_the_main_thread_lets_the_job_save_first(tmp_path: Path) -> None:
    """Prefect's cancellation and Ctrl-C raise an exception in a signal handler of the main thread."""

    class Cancelled(BaseException):
        pass

    def cancel(*_: object) -> None:
        raise Cancelled

    before = signal.signal(signal.SIGTERM, cancel)

    def cancel_when_up() -> None:
        until(lambda: both_up(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)

    canceller = threading.Thread(target=cancel_when_up, daemon=True)
    canceller.start()
    try:
        with pytest.raises(Cancelled):
            job(tmp_path, "behaved").run()
    finally:
        canceller.join()
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "saved-0").exists()
    assert processes(tmp_path) == []


@pytest.mark.mpi
@pytest.mark.parametrize(("program", "saves"), [("behaved", True), ("deaf", False)])
def test_after_the_flow_process_was_killed_the_job_ends_within_15_s(tmp_path: Path, program: str, saves: bool) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_programs", "supervise", str(tmp_path), program], cwd=ROOT
    )
    until(lambda: both_up(tmp_path))
    assert running_job(tmp_path) is not None
    supervisor.kill()
    supervisor.wait()
    until(lambda: not processes(tmp_path), 15)
    assert (tmp_path / "saved-0").exists() == saves
    assert running_job(tmp_path) is None


@pytest.mark.mpi
def test_after_the_guard_and_the_flow_process_were_killed_the_ranks_save_and_exit(tmp_path: Path) -> None:
    supervisor = psutil.Popen(
        [sys.executable, "-m", "tests.support.rank_programs", "supervise", str(tmp_path), "behaved"], cwd=ROOT
    )
    until(lambda: both_up(tmp_path))
    (guard,) = [each for each in supervisor.children() if job_guard.__file__ in each.cmdline()]
    guard.kill()
    supervisor.kill()
    supervisor.wait()
    until(lambda: not processes(tmp_path), 15)
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


# -- whichever process is killed

GUARDS = ("guard", "second guard", "third guard")


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process runs no more; a zombie does not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Supervised:
    """A flow, so to say, with a job of two ranks, and all its processes by what they are."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "tests.support.rank_programs", "supervise", str(folder), program]
        self.flow = psutil.Popen(words, cwd=ROOT)
        until(lambda: both_up(folder))
        record = running_job(folder)
        assert record is not None
        self.tag = record.tag

    def guards(self) -> list[psutil.Process]:
        """The first guard, those below it, and those below others that were killed."""
        found = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and self.tag in p.info["cmdline"]]
        return sorted((p for p in found if not has_ended(p)), key=lambda each: each.pid)

    def process(self, name: str) -> psutil.Process:
        if name == "flow":
            return self.flow
        if name.startswith("rank"):
            ranks = [p for p in processes(self.folder) if p.environ().get("PMIX_RANK") == name[-1]]
            return ranks[0]
        if name == "mpirun":
            return psutil.Process(next(pid for pid in job_guard.members(self.tag) if os.getsid(pid) == pid))

        def found() -> psutil.Process | None:
            above, guards = self.flow.pid, self.guards()
            for _ in GUARDS[: GUARDS.index(name) + 1]:
                below = [each for each in guards if each.ppid() == above]
                if not below:
                    return None
                above = below[-1].pid
            return below[-1]

        guard: psutil.Process = until(found)
        return guard

    def left(self) -> list[int]:
        """What has the job's tag in its environment or on its command line."""
        return [*job_guard.members(self.tag), *(guard.pid for guard in self.guards())]

    def kill(self, *names: str) -> None:
        """SIGKILL, or with "suspended" SIGSTOP, one after the other at once. Return when those killed have ended."""
        found = [(self.process(name.removeprefix("suspended ")), name) for name in names]
        for process, name in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # its end may follow from that of the first
                process.suspend() if name.startswith("suspended") else process.kill()
        for process, name in found:
            until(lambda process=process, name=name: name.startswith("suspended") or has_ended(process))


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[str], Supervised]]:
    made: list[Supervised] = []

    def start(program: str) -> Supervised:
        made.append(Supervised(tmp_path, program))
        return made[-1]

    yield start
    for each in made:
        each.kill("flow")
        each.flow.wait()
        until(lambda each=each: not each.left(), 30)


@pytest.mark.mpi
def test_ranks_that_save_nothing_end_within_15_s_after_two_guards_and_the_flow_were_killed(
    supervised: Callable[[str], Supervised],
) -> None:
    job = supervised("deaf")
    job.kill("guard", "second guard", "flow")  # before any of them is replaced
    job.flow.wait()
    until(lambda: not job.left(), 15)


@pytest.mark.mpi
def test_a_killed_guard_is_replaced_and_a_suspended_mpirun_goes_on(
    supervised: Callable[[str], Supervised],
) -> None:
    job = supervised("behaved")
    for name in GUARDS:
        before = job.process(name)
        job.kill(name)
        assert job.process(name) != before
    job.kill("suspended mpirun")
    until(lambda: not job_guard.is_suspended(job.process("mpirun").pid))
    assert job.flow.poll() is None


PROCESSES = ("flow", *GUARDS, "mpirun", "suspended mpirun", "rank 0", "rank 1")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("program", "at_once"), [("deaf", True), ("deaf", False), ("behaved", False)])
@pytest.mark.parametrize("second", PROCESSES)
@pytest.mark.parametrize("first", PROCESSES)
def test_after_any_two_processes_of_a_job_were_killed_nothing_of_it_is_left_15_s_after_its_flow_ends(
    first: str, second: str, program: str, at_once: bool, supervised: Callable[[str], Supervised]
) -> None:
    if second.removeprefix("suspended ") == first.removeprefix("suspended ") and second != first:
        pytest.skip("a process that was killed cannot be suspended")
    job = supervised(program)
    # the same name twice: one process alone. At once: the flow has no time to replace what was killed.
    job.kill(*dict.fromkeys((first, second, *["flow"] * at_once)))
    if "flow" not in (first, second):
        until(lambda: job.flow.poll() is not None or any(each.ppid() == job.flow.pid for each in job.guards()))
        job.kill("flow")
    job.flow.wait()
    until(lambda: not job.left(), 15)
