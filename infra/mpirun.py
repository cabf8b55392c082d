"""MpiJob: from a module to run on N ranks to a supervised process tree, and to its certain end.

The exit status of mpirun proves nothing (it is 0 when a remote node dies), so success is for the caller to
read from a file. What this module does promise: while a job runs its silence is noticed, a stop lets it save
first, and once it is over no process of it is left on this host, whichever process was killed by whom.

    supervisor (the flow) --+-- guard        outlives the supervisor, then stops the job and sweeps
                            +-- mpirun       its own session; every process below carries the tag
                                  +-- rank 0, rank 1, ...

Run as a program this file is the guard; so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

POLL_S = 0.1
GUARD_GRACE_S = 10.0
"""Longest time a job may save after its supervisor has died."""

SETTINGS: Mapping[str, str] = {
    # root is the usual user of a container
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # tensors travel through gloo or NCCL; probing libfabric would cost a second at every start
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic",
    # a cut link is found after 5 + 3 x 2 s instead of 8 minutes
    "PRTE_MCA_oob_tcp_keepalive_time": "5",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    "PRTE_MCA_plm_ssh_args": "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2",
    # last words reach the log
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""Environment of mpirun, for Open MPI 5; what the user has set is stronger."""

TAG = "ONWARD_RUN_TAG"
CARRIED = ("NCCL_", "GLOO_", "TORCH_", "MPI4PY_", "OMP_", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", TAG)
"""Variables (by how they begin) that ranks on other hosts get; nothing else leaves this host."""


class LaunchError(Exception):
    """A job cannot be started: there is no mpirun, or its run directory has a living job."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    returncode: int | None
    """Of mpirun, for the log alone: it does not tell success from failure. None = it could not even be killed."""
    reason: Literal["exited", "stopped", "silent", "start_timeout"]
    elapsed_s: float


@dataclass(frozen=True)
class RunningJob:
    """A job some process of which is alive on this host, as `job.json` in its run directory describes it."""

    tag: str
    boot: str
    argv: list[str]
    started_at: str


@dataclass(frozen=True, kw_only=True)
class MpiJob:
    """`python -m module...` on `num_ranks` ranks, with the limits it is held to."""

    module: tuple[str, ...]
    """The module and its arguments."""
    num_ranks: int
    run_dir: Path
    """Names the job for `stop_running` and `running_job`, and holds its job.json."""
    log: Path
    """Gets everything the ranks and mpirun print."""
    heartbeat: Path | None = None
    """The file that moves as long as the job does; None = the start time-out bounds the whole job."""
    start_timeout_s: float = 180.0
    silence_timeout_s: float = 120.0
    grace_s: float = 20.0
    """Time to save and leave when asked to stop."""
    hostfile: str = ""
    cwd: Path | None = None
    """Where the ranks start; None = `run_dir`, where no module of the user's can hide one of ours."""

    def argv(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """The command line. Raises LaunchError without a mpirun."""
        hosts = ["--hostfile", self.hostfile] if self.hostfile else ["--map-by", ":OVERSUBSCRIBE"]
        names = sorted({*environment, *SETTINGS, TAG}) if self.hostfile else []  # ssh logins start with nothing
        exports = [word for name in names if name.startswith(CARRIED) for word in ("-x", name)]
        ranks = [sys.executable, "-m", *self.module]
        return [str(find_mpirun()), "-n", str(self.num_ranks), "--bind-to", "none", *hosts, *exports, *ranks]

    def run(self) -> Outcome:
        """Start the job, watch over it, and return when nothing of it is left. Call from the main thread.

        An exception that a signal raises here (Ctrl-C, Prefect's cancellation) stops the job, which gets
        its grace to save, and goes on. Raises LaunchError.
        """
        wait_until_free(self.run_dir)
        argv, tag, started_at = self.argv(), uuid.uuid4().hex, time.monotonic()
        stop = threading.Event()
        with _guard(tag, min(self.grace_s, GUARD_GRACE_S)), self.log.open("ab") as log:
            mpirun = subprocess.Popen(
                argv,
                env={**SETTINGS, **os.environ, **self._scratch(tag), TAG: tag},
                cwd=self.cwd or self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running[self.run_dir] = stop
            try:
                _record(self.run_dir, tag, argv)
                reason = self._watch(mpirun, stop)
            except BaseException:
                _stop(mpirun, self.grace_s)
                raise
            finally:
                del _running[self.run_dir]
                _end(mpirun, tag)
        return Outcome(mpirun.returncode, reason, time.monotonic() - started_at)

    def _scratch(self, tag: str) -> dict[str, str]:
        """Makes the job's own temporary directory: Open MPI leaves files behind when it is killed.

        Not with other hosts, which would be sent the name of a directory they do not have.
        """
        if self.hostfile:
            return {}
        scratch(tag).mkdir()
        return {"TMPDIR": str(scratch(tag)), "OMPI_MCA_btl_sm_backing_directory": str(scratch(tag))}

    def _watch(
        self, mpirun: subprocess.Popen[bytes], stop: threading.Event
    ) -> Literal["exited", "stopped", "silent", "start_timeout"]:
        """Look at everything that can happen, ten times a second; end the job when it must."""
        last_beat, moved_at, started = _moved(self.heartbeat), time.monotonic(), False
        while mpirun.poll() is None:
            if stop.wait(POLL_S):
                _stop(mpirun, self.grace_s)
                return "stopped"
            if (beat := _moved(self.heartbeat)) != last_beat:
                last_beat, moved_at, started = beat, time.monotonic(), True
            if time.monotonic() - moved_at > (self.silence_timeout_s if started else self.start_timeout_s):
                _stop(mpirun, 0)  # it had its chance to move
                return "silent" if started else "start_timeout"
        return "exited"


def find_mpirun() -> Path:
    """The mpirun of this environment, else the machine's. Raises LaunchError."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    found = own if own.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"no MPI: there is no mpirun, neither {own} nor in PATH; install one (`pip install onward[mpi]`), "
            "or load the machine's MPI module"
        )
    return Path(found).absolute()


# -- jobs by run directory

_running: dict[Path, threading.Event] = {}


def stop_running(run_dir: Path) -> bool:
    """Ask the job that this process supervises for `run_dir` to save and leave; False when there is none.

    Returns at once, from any thread; the supervisor's ladder sees to the end.
    """
    stop = _running.get(run_dir)
    if stop is not None:
        stop.set()
    return stop is not None


def running_job(run_dir: Path) -> RunningJob | None:
    """The job of a run directory if any process of it lives on this host, whoever supervises it."""
    try:
        job = RunningJob(**json.loads((run_dir / "job.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return job if job.boot == boot_id() and _members(job.tag) else None


def wait_until_free(run_dir: Path, limit_s: float = GUARD_GRACE_S + 5.0) -> None:
    """Wait for the ranks of a supervisor that died: they may still be saving. Raises LaunchError if they stay."""
    deadline = time.monotonic() + limit_s
    while (job := running_job(run_dir)) is not None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{run_dir} has a living job, started at {job.started_at} (processes {_members(job.tag)}); "
                "stop that one first, or wait for its end"
            )
        time.sleep(POLL_S)


def _record(run_dir: Path, tag: str, argv: list[str]) -> None:
    job = {"tag": tag, "boot": boot_id(), "argv": argv, "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    partial = run_dir / ".job.json.partial"
    partial.write_text(json.dumps(job, indent=2))
    partial.replace(run_dir / "job.json")


def boot_id() -> str:
    """This boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- ending processes


def _stop(mpirun: subprocess.Popen[bytes], grace_s: float) -> None:
    """Down the ladder until mpirun is gone: SIGUSR1, which mpirun hands to the ranks, lets them save.

    SIGTERM does not: mpirun kills the ranks half a second after it.
    """
    for number, patience_s in ((signal.SIGUSR1, grace_s), (signal.SIGTERM, 3.0)):
        if patience_s and mpirun.poll() is None:
            mpirun.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpirun.wait(patience_s)


def _end(mpirun: subprocess.Popen[bytes], tag: str) -> None:
    """Whatever is left of the job, now."""
    mpirun.poll()  # sets the return code of a mpirun that has gone by itself
    sweep(tag)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a hung system call cannot be killed
        mpirun.wait(5.0)


def sweep(tag: str) -> None:
    """SIGKILL every process of the job on this host, wait, a bounded time, until they are gone; then its files."""
    _until_gone(tag, signal.SIGKILL, limit_s=5.0)
    shutil.rmtree(scratch(tag), ignore_errors=True)


def scratch(tag: str) -> Path:
    """Temporary files of the job."""
    return Path(tempfile.gettempdir()) / f"onward-{tag}"


def _until_gone(tag: str, number: int, *, limit_s: float, which: Callable[[int], bool] = lambda pid: True) -> None:
    deadline, told = time.monotonic() + limit_s, set[int]()
    while (members := set(_members(tag))) and time.monotonic() < deadline:
        for pid in filter(which, members - told):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= members
        time.sleep(0.02)


def _members(tag: str) -> list[int]:
    """Processes of the job on this host, by the tag in their environment; zombies have none left."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _moved(heartbeat: Path | None) -> int:
    """When the heartbeat last moved, by its own clock: only a change counts, clocks of hosts differ."""
    try:
        return heartbeat.stat().st_mtime_ns if heartbeat else 0
    except FileNotFoundError:
        return 0


# -- the guard


@contextlib.contextmanager
def _guard(tag: str, grace_s: float) -> Iterator[None]:
    """A process that ends the job should this one be killed: the pipe between them closes whatever happens."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, tag, str(grace_s)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(grace_s + 10.0)


def _be_guard(tag: str, grace_s: float) -> None:
    """Wait for the supervisor's end; if anything of the job outlives it, let it save, then kill it."""
    sys.stdin.buffer.read()
    _until_gone(tag, signal.SIGUSR1, limit_s=grace_s, which=_leads_session)  # mpirun alone
    sweep(tag)


if __name__ == "__main__":
    _be_guard(sys.argv[1], float(sys.argv[2]))
