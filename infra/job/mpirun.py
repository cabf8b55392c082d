"""MpiJob: run a Python module on N ranks under mpirun, watch it, stop it, and leave no process of it behind.

    flow process --+-- guard        waits for the end of the flow process, then ends the job (job_guard.py)
                   +-- mpirun       in a session of its own; every process below it has TAG in its environment
                         +-- rank 0, rank 1, ...

The exit status of mpirun proves nothing (it is 0 when a remote node fails), so the caller reads success from a file.
This module guarantees the rest: a job without heartbeat is detected, a stopped job can save a checkpoint first, and
after the job no process of it is left on this host, whichever process was killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onward.infra.job import forks, job_guard
from onward.infra.job.job_guard import TAG, Guard, is_suspended, kill_job, members, temporary_directory
from onward.infra.job.parent_death import signalled_with_parent
from onward.infra.job.stopped_ranks import StoppedRanks
from onward.infra.job.temporary_folders import make, remove

POLL_S = 0.1
SUSPENDED_S = 2.0
"""Time after which an mpirun that was suspended is continued."""

SETTINGS: Mapping[str, str] = {
    # In a container the user is usually root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Tensors are sent by gloo or NCCL; without these, MPI probes libfabric for a second at every start.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic",
    # A broken network connection is detected after 5 + 3 x 2 s, and not after 8 minutes.
    "PRTE_MCA_oob_tcp_keepalive_time": "5",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    "PRTE_MCA_plm_ssh_args": "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2",
    # The output of a crashing rank reaches the log.
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # GPU memory is not lost to gaps between tensors of changing sizes. torch reads it when it first uses a GPU.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment of mpirun (Open MPI 5). Variables that the user has set take precedence."""

ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
"""Variables of schedulers, whose hosts mpirun takes where there is no hostfile."""

CARRIED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MPI4PY_", "OMP_", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", TAG)
"""Prefixes of the variables that are sent to ranks on other hosts; no other variable leaves this host."""


class LaunchError(Exception):
    """A job cannot be started: there is no mpirun, or a job of the same run directory is still running."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    returncode: int | None
    """Exit status of mpirun, for the log only: 0 does not mean success. None = mpirun could not be killed."""
    reason: Literal["exited", "stopped", "silent", "start_timeout"]
    """`stopped`: this process asked for it; ranks that stop without that were signalled by somebody else."""
    elapsed_s: float
    detected_ms: int
    """When mpirun ended, or a limit passed: milliseconds since 1970."""
    stopped_ranks: Mapping[int, str] = field(default_factory=dict)
    """Ranks of this host that a signal had stopped when the job ended -> a clause about each."""


@dataclass(frozen=True)
class RunningJob:
    """A job with a running process on this host, as `job.json` in its run directory describes it."""

    tag: str
    boot: str
    argv: list[str]
    started_at: str


@dataclass(frozen=True, kw_only=True)
class MpiJob:
    """`python -m MODULE` on `num_ranks` ranks, with its time limits."""

    module: tuple[str, ...]
    """The module and its arguments."""
    num_ranks: int
    run_dir: Path
    """Identifies the job for `stop_running` and `running_job`; contains its job.json."""
    log: Path
    """The file for the output of mpirun and the ranks."""
    heartbeat: Path | None = None
    """The file that rank 0 writes while the job makes progress; None = start_timeout_s limits the whole job."""
    start_timeout_s: float = 180.0
    silence_timeout_s: float = 120.0
    """Longest time between two changes of the heartbeat file, unless the file says it: {"silence_s": 1802.0}."""
    grace_s: float = 20.0
    """Time that the ranks get to save and exit when the job is stopped, beside two of their steps."""
    hostfile: str = ""
    cwd: Path | None = None
    """Working directory of the ranks; None = `run_dir`, where no module of the user can hide one of Onward's."""

    def argv(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the command line. Raises LaunchError without mpirun."""
        hosts = ["--hostfile", self.hostfile] if self.hostfile else ["--map-by", ":OVERSUBSCRIBE"]
        # A login over ssh starts with an empty environment.
        names = sorted({*environment_of_ranks(environment), TAG}) if self.hostfile else []
        exports = [word for name in names if name.startswith(CARRIED) for word in ("-x", name)]
        # a fork server is on this host, and another one may be a scheduler's choice
        here = not self.hostfile and not any(name in environment for name in ALLOCATIONS)
        ranks = [*(forks.python() if here else [sys.executable]), "-m", *self.module]
        return [str(find_mpirun()), "-n", str(self.num_ranks), "--bind-to", "none", *hosts, *exports, *ranks]

    def run(self) -> Outcome:
        """Run the job and return when no process of it is left. Call from the main thread.

        An exception that a signal handler raises here (Ctrl-C, Prefect's cancellation) stops the job, gives it
        `grace_s` to save, and is passed on. Raises LaunchError.
        """
        # two jobs of one run directory would write the same checkpoints
        wait_until_free(self.run_dir)
        argv, tag, started_at = self.argv(), uuid.uuid4().hex, time.monotonic()
        environment = environment_of_mpirun(os.environ, one_host=not self.hostfile)
        stop = threading.Event()
        guard = Guard(tag, min(self.grace_s, job_guard.GRACE_S))
        with contextlib.closing(guard), self.log.open("ab") as log:
            mpirun = subprocess.Popen(
                # should the guard be killed, too: mpirun passes SIGUSR1 on, and the ranks save and exit
                signalled_with_parent(argv, signal.SIGUSR1),
                env={**environment, **self._temporary_directory(tag), TAG: tag},
                cwd=self.cwd or self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal goes to the flow process alone, which then stops the job in order
                start_new_session=True,
            )
            _running[self.run_dir] = stop
            ranks = StoppedRanks(mpirun.pid)
            try:
                _write_job_record(self.run_dir, tag, argv)
                reason, detected_ms = self._watch(mpirun, stop, guard, ranks)
            except BaseException:
                _stop(mpirun, self.stop_limit_s())
                raise
            finally:
                del _running[self.run_dir]
                _kill_rest(mpirun, tag)
                remove(temporary_directory(tag))
        return Outcome(mpirun.returncode, reason, time.monotonic() - started_at, detected_ms, ranks.describe())

    def stop_limit_s(self) -> float:
        """Return how long the ranks get to save: `grace_s`, and two of the steps that the heartbeat file tells of."""
        return self.grace_s + 2.0 * _said(self.heartbeat, "step_s", 0.0)

    def _temporary_directory(self, tag: str) -> dict[str, str]:
        """Create the job's own temporary directory, because Open MPI leaves files behind when it is killed.

        Not with a hostfile: the other hosts do not have this directory. Returns environment variables.
        """
        if self.hostfile:
            return {}

        def created() -> Path:
            temporary_directory(tag).mkdir()
            return temporary_directory(tag)

        folder = str(make(created))
        return {"TMPDIR": folder, "OMPI_MCA_btl_sm_backing_directory": folder}

    def _watch(
        self, mpirun: subprocess.Popen[bytes], stop: threading.Event, guard: Guard, ranks: StoppedRanks
    ) -> tuple[Literal["exited", "stopped", "silent", "start_timeout"], int]:
        """Wait for the end of mpirun, a stop request or a missing heartbeat; stop the job in the last two cases.

        Returns which of them, and when: milliseconds since 1970.
        """
        last_beat, beat_at, started = _last_beat(self.heartbeat), time.monotonic(), False
        silence_s, ran_at = self.silence_timeout_s, time.monotonic()
        while mpirun.poll() is None:
            if stop.wait(POLL_S):
                noticed_ms = now_ms()
                _stop(mpirun, self.stop_limit_s())
                return "stopped", noticed_ms
            guard.renew()
            if not is_suspended(mpirun.pid):
                ran_at = time.monotonic()
            elif time.monotonic() - ran_at > SUSPENDED_S:
                # the ranks go on, but neither their output nor their end would be noticed
                mpirun.send_signal(signal.SIGCONT)
            if (beat := _last_beat(self.heartbeat)) != last_beat:
                last_beat, beat_at, started = beat, time.monotonic(), True
                silence_s = _said(self.heartbeat, "silence_s", silence_s)
            ranks.look()
            if time.monotonic() - beat_at > (silence_s if started else self.start_timeout_s):
                noticed_ms = now_ms()
                _stop(mpirun, 0)  # a job that hangs cannot save
                return "silent" if started else "start_timeout", noticed_ms
        return "stopped" if stop.is_set() else "exited", now_ms()


def now_ms() -> int:
    """Return the time of the clock: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def environment_of_ranks(users: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment variables and, where the user has set none, those of SETTINGS."""
    # the former name of PYTORCH_ALLOC_CONF, which a variable of ours would hide
    settings = {
        name: value
        for name, value in SETTINGS.items()
        if name != "PYTORCH_ALLOC_CONF" or "PYTORCH_CUDA_ALLOC_CONF" not in users
    }
    return {**settings, **users}


def environment_of_mpirun(users: Mapping[str, str], *, one_host: bool) -> dict[str, str]:
    """Return the environment of mpirun. one_host: whether no hostfile names others; a scheduler may still have some."""
    found = environment_of_ranks(users)
    if one_host and "OMPI_MCA_btl" not in users and not any(name in users for name in ALLOCATIONS):
        # ranks of one host share memory; each would listen on every network interface for ranks that do not exist
        found["OMPI_MCA_btl"] += ",tcp"
    return found


def find_mpirun() -> Path:
    """Return the mpirun of this Python environment, else the one in PATH. Raises LaunchError without one."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    found = own if own.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"no MPI: there is no mpirun, neither {own} nor in PATH; install Open MPI, which Onward's extra "
            "`mpi` contains, or load the MPI module of this machine"
        )
    return Path(found).absolute()


# -- jobs by run directory

_running: dict[Path, threading.Event] = {}


def stop_running(run_dir: Path) -> bool:
    """Request that the job of `run_dir` in this process saves and stops; return False when there is none.

    Returns immediately and may be called from any thread; `MpiJob.run` in the main thread then stops the job.
    """
    stop = _running.get(run_dir)
    if stop is not None:
        stop.set()
    return stop is not None


def running_job(run_dir: Path, *, among: Collection[str] | None = None) -> RunningJob | None:
    """Return the job of a run directory if a process of it runs on this host, whichever process has started it.

    among: the tags of the jobs that run, for who asks about many runs; None = look for processes now.
    """
    try:
        job = RunningJob(**json.loads((run_dir / "job.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if job.boot != boot_id():
        return None
    return job if (members(job.tag) if among is None else job.tag in among) else None


def wait_until_free(run_dir: Path, limit_s: float = job_guard.GRACE_S + 5.0) -> None:
    """Wait until no process of an earlier job runs; ranks of a killed flow may still be saving. Raises LaunchError."""
    deadline = time.monotonic() + limit_s
    while (job := running_job(run_dir)) is not None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"a job of {run_dir} is still running, started at {job.started_at} (processes {members(job.tag)}); "
                "stop it first, or wait for its end"
            )
        time.sleep(POLL_S)


def _write_job_record(run_dir: Path, tag: str, argv: list[str]) -> None:
    job = {"tag": tag, "boot": boot_id(), "argv": argv, "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    partial = run_dir / ".job.json.partial"
    partial.write_text(json.dumps(job, indent=2))
    # complete or absent, because another process may read it at any time
    partial.replace(run_dir / "job.json")


@functools.cache
def boot_id() -> str:
    """Return an id that is new at every start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- ending processes


def _stop(mpirun: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGUSR1 and wait `grace_s`, then SIGTERM and wait 3 s, until mpirun has ended.

    mpirun passes SIGUSR1 on to the ranks, which then save a checkpoint. After SIGTERM it kills them within 0.5 s.
    """
    for number, patience_s in ((signal.SIGUSR1, grace_s), (signal.SIGTERM, 3.0)):
        if patience_s and mpirun.poll() is None:
            mpirun.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpirun.wait(patience_s)


def _kill_rest(mpirun: subprocess.Popen[bytes], tag: str) -> None:
    """Kill all processes of the job that are left."""
    mpirun.poll()  # reads the exit status of an mpirun that has ended by itself, before `kill_job` could kill it
    kill_job(tag)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a hung system call cannot be killed
        mpirun.wait(5.0)


def _last_beat(heartbeat: Path | None) -> int:
    """Return the heartbeat file's time stamp. Only its changes are used, because the clocks of hosts differ."""
    try:
        return heartbeat.stat().st_mtime_ns if heartbeat else 0
    except FileNotFoundError:
        return 0


def _said(heartbeat: Path | None, name: str, otherwise: float) -> float:
    """Return a number of seconds that the heartbeat file has, such as `silence_s`; `otherwise` if it has none."""
    try:
        return float(json.loads(heartbeat.read_text())[name]) if heartbeat else otherwise
    except (OSError, ValueError, TypeError, KeyError):
        return otherwise  # the file is empty, or is being written just now
