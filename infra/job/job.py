"""Job: run a Python module on N ranks by a launcher, watch it, stop it, and leave no process of it behind.

    flow process --+-- guard        waits for the end of the flow process, then ends the job (job_guard.py)
                   +-- launcher     in a session of its own; every process below it has TAG in its environment
                         +-- rank 0, rank 1, ...

The exit status of a launcher proves nothing (that of mpirun is 0 when a remote node fails), so the caller reads success
from a file. This module guarantees the rest: a job without heartbeat is detected, a stopped job can save a checkpoint
first, and after the job no process of it is left on this host, whichever process was killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from onward.infra.job import forks, job_guard, slurm_jobs
from onward.infra.job.child_program import signalled_with_parent
from onward.infra.job.host_beats import SILENT_S, HostBeats
from onward.infra.job.hosts import read_hostfile
from onward.infra.job.job_guard import TAG, Guard, is_suspended, kill_job, members, temporary_directory
from onward.infra.job.launcher import Environment, Launcher, LaunchError, Ranks
from onward.infra.job.mpirun import Mpirun
from onward.infra.job.process_identity import boot_id
from onward.infra.job.ray_launcher import Ray
from onward.infra.job.srun import Srun
from onward.infra.job.stopped_ranks import StoppedRanks
from onward.infra.job.temporary_folders import make, remove

LAUNCHERS: Mapping[str, Launcher] = MappingProxyType({"mpirun": Mpirun(), "slurm": Srun(), "ray": Ray()})
"""`launch.launcher` -> what it names."""

POLL_S = 0.1
SUSPENDED_S = 2.0
"""Time after which a launcher that was suspended is continued."""
STOP = "stop-requested"
"""A file in the temporary directory of a job, which asks the job to stop."""
SAVE = "save-requested"
"""A file there, which asks the ranks to save and exit; the job then ends by itself, as one that was preempted."""


LAST_S = 30.0
"""Time that the flow has to end after its ranks, before the end of the scheduler's job in which it runs."""
FREE_S = job_guard.GRACE_S + 5.0
"""Longest time until the ranks of a killed flow have ended, which may still be saving."""
Reason: TypeAlias = Literal["exited", "stopped", "silent", "start_timeout", "host_lost", "out_of_time"]
"""Why a job has ended. `stopped`: this process asked for it; ranks that stop without that were signalled by somebody
else. `host_lost`: a host gave no sign of life. `out_of_time`: the job of Slurm, in which it runs, is about to end."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    returncode: int | None
    """Exit status of the launcher, for the log only: 0 does not mean success. None = it could not be killed."""
    reason: Reason
    elapsed_s: float
    detected_ms: int
    """When the launcher ended, or a limit passed: milliseconds since 1970."""
    stopped_ranks: Mapping[int, str] = field(default_factory=dict)
    """Ranks of this host that a signal had stopped when the job ended -> a clause about each."""
    lost_hosts: Mapping[str, str] = field(default_factory=dict)
    """Hosts for whose loss the job was ended, with what ssh said."""


@dataclass(frozen=True)
class RunningJob:
    """A job with a running process on this host, as `job.json` in its run directory describes it."""

    tag: str
    boot: str
    argv: list[str]
    started_at: str
    starter: int = 0
    """The process that runs `Job.run`; 0 in a record of an earlier version."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks with their launcher, files and time limits."""

    ranks: Ranks
    launcher: Launcher
    run_dir: Path
    """Identifies the job for `stop_running` and `running_job`; contains its job.json."""
    log: Path
    """The file for the output of the launcher and the ranks."""
    heartbeat: Path | None = None
    """The file that rank 0 writes while the job makes progress; None = start_timeout_s limits the whole job."""
    start_timeout_s: float = 180.0
    silence_timeout_s: float = 120.0
    """Longest time between two changes of the heartbeat file, unless the file says it: {"silence_s": 1802.0}."""
    grace_s: float = 20.0
    """Time that the ranks get to save and exit when the job is stopped, beside two of their steps."""
    cwd: Path | None = None
    """Working directory of the ranks; None = `run_dir`, where no module of the user can hide one of Onward's."""

    def arguments(self, environment: Environment) -> list[str]:
        """Return the command line of the launcher. environment: of this process. Raises LaunchError."""
        # the fork server is on this host
        elsewhere = self.launcher.uses_other_hosts(self.ranks.hostfile, environment)
        python = [sys.executable] if elsewhere else forks.python()
        return self.launcher.arguments(self.ranks, python, environment)

    def run(self) -> Outcome:
        """Run the job and return when no process of it is left. Call from the main thread.

        An exception that a signal handler raises here (Ctrl-C, Prefect's cancellation) stops the job, gives it
        `grace_s` to save, and is passed on. Raises LaunchError.
        """
        # two jobs of one run directory would write the same checkpoints
        wait_until_free(self.run_dir)
        argv = self.arguments(os.environ)
        # the tag is in the environment of each process of the job, by which all of them are found and killed
        tag = uuid.uuid4().hex
        started_at = time.monotonic()
        guard = Guard(tag, min(self.grace_s, job_guard.GRACE_S))
        with contextlib.closing(guard), self.log.open("ab") as log:
            folder = make(lambda: _new_temporary_directory(tag))
            launcher = subprocess.Popen(
                # should the guard be killed, too: the launcher passes SIGUSR1 on, and the ranks save and exit
                signalled_with_parent(argv, signal.SIGUSR1),
                env={**self.launcher.environment(self.ranks, os.environ, folder), TAG: tag},
                cwd=self.cwd or self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal goes to the flow process alone, which then stops the job in order
                start_new_session=True,
            )
            stopped = StoppedRanks(launcher.pid, self.launcher.rank_variable)
            beats = HostBeats(list(read_hostfile(Path(self.ranks.hostfile))) if self.ranks.hostfile else [])
            try:
                # inside of the try: a disk that takes no record ends the job again
                job = RunningJob(tag, boot_id(), argv, time.strftime("%Y-%m-%dT%H:%M:%S%z"), os.getpid())
                partial = self.run_dir / ".job.json.partial"
                partial.write_text(json.dumps(asdict(job), indent=2))
                # complete or absent, because another process may read it at any time
                partial.replace(self.run_dir / "job.json")
                with beats.watched():
                    reason, detected_ms = self._watch(launcher, folder, guard, stopped, beats)
            except BaseException:
                _stop(launcher, self.stop_limit_s())
                raise
            finally:
                launcher.poll()  # reads the status of a launcher that has ended by itself, before `kill_job` kills it
                # also after an orderly end, because a rank may leave processes behind
                kill_job(tag)
                # a process in a hung system call cannot be killed
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(5.0)
                remove(folder)
        lost = beats.lost() if reason == "host_lost" else {}
        elapsed_s = time.monotonic() - started_at
        return Outcome(launcher.returncode, reason, elapsed_s, detected_ms, stopped.describe(), lost)

    def stop_limit_s(self) -> float:
        """Return how long the ranks get to save: `grace_s`, and two of the steps that the heartbeat file tells of."""
        return self.grace_s + 2.0 * _said(self.heartbeat, "step_s", 0.0)

    def _watch(
        self,
        launcher: subprocess.Popen[bytes],
        folder: Path,
        guard: Guard,
        stopped: StoppedRanks,
        beats: HostBeats,
    ) -> tuple[Reason, int]:
        """Wait for the end of the launcher, the file STOP, a lost host, a missing heartbeat or the end of the time.

        In all of these but the first it then stops the job.

        Returns which of them, and when: milliseconds since 1970. folder: the temporary directory of the job.
        """
        stop = folder / STOP
        save = folder / SAVE
        # the file may be that of an earlier job, so only a change after this counts
        last_beat = _last_beat(self.heartbeat)
        beat_at = time.monotonic()
        started = False
        silence_s = self.silence_timeout_s
        ran_at = time.monotonic()
        ends_at = slurm_jobs.ends_at()
        while launcher.poll() is None:
            time.sleep(POLL_S)
            if ends_at < math.inf and time.time() > ends_at - self.stop_limit_s() - LAST_S:
                ends_at = slurm_jobs.ends_at()  # somebody may have raised the limit
                if time.time() > ends_at - self.stop_limit_s() - LAST_S:
                    return "out_of_time", _stop(launcher, self.stop_limit_s())
            # before the other looks: a request to stop counts also if the job falls silent at the same time
            if stop.exists():
                return "stopped", _stop(launcher, self.stop_limit_s())
            if save.exists():
                save.unlink()
                launcher.send_signal(signal.SIGUSR1)
            # the guard ends the job if this process does not come here for a while
            guard.renew()
            if not is_suspended(launcher.pid):
                ran_at = time.monotonic()
            elif time.monotonic() - ran_at > SUSPENDED_S:
                # the ranks go on, but neither their output nor their end would be noticed
                launcher.send_signal(signal.SIGCONT)
            if (beat := _last_beat(self.heartbeat)) != last_beat:
                last_beat = beat
                beat_at = time.monotonic()
                started = True
                # the ranks say themselves how long a compilation or an evaluation may take
                silence_s = _said(self.heartbeat, "silence_s", silence_s)
            stopped.look()
            # between two long steps no file changes
            if beats.lost():
                if time.monotonic() - beat_at > max(SILENT_S, 2.0 * _said(self.heartbeat, "step_s", 0.0)):
                    return "host_lost", _stop(launcher, 0)
                beats.watch_again()
            if time.monotonic() - beat_at > (silence_s if started else self.start_timeout_s):
                # a job that hangs cannot save
                return "silent" if started else "start_timeout", _stop(launcher, 0)
        return "stopped" if stop.exists() else "exited", now_ms()


def now_ms() -> int:
    """Return the time of the clock: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


# -- jobs by run directory


def stop_running(run_dir: Path) -> bool:
    """Request that the job of `run_dir` in this process saves and stops; return False when there is none.

    Returns immediately and may be called from any thread; `Job.run` in the main thread then stops the job. The request
    is a file, because the flow that is asked and its tasks share no object: Prefect is between them.
    """
    return _request(run_dir, STOP)


def save_running(run_dir: Path, tag: str) -> bool:
    """Request, likewise, that the ranks of the job `tag` save and exit, after which another attempt may follow."""
    job = _read_job_record(run_dir)
    return job is not None and job.tag == tag and _request(run_dir, SAVE)


def _request(run_dir: Path, name: str) -> bool:
    job = _read_job_record(run_dir)
    # another process of this host has its own flow, which alone may stop its job
    if job is None or job.starter != os.getpid():
        return False
    try:
        (temporary_directory(job.tag) / name).touch()
    except OSError:  # the job has just ended, or the disk is full
        return False
    return True


def running_job(run_dir: Path, *, among: Collection[str] | None = None) -> RunningJob | None:
    """Return the job of a run directory if a process of it runs on this host, whichever process has started it.

    among: the tags of the jobs that run, for who asks about many runs; None = look for processes now.
    """
    job = _read_job_record(run_dir)
    if job is None:
        return None
    runs = members(job.tag) if among is None else job.tag in among
    return job if runs else None


def wait_until_free(run_dir: Path) -> None:
    """Wait until no process of an earlier job runs; ranks of a killed flow may still be saving. Raises LaunchError."""
    deadline = time.monotonic() + FREE_S
    while job := running_job(run_dir):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"a job of {run_dir} is still running, started at {job.started_at} (processes {members(job.tag)}); "
                "stop it first, or wait for its end"
            )
        time.sleep(POLL_S)


def _read_job_record(run_dir: Path) -> RunningJob | None:
    """Return the newest job of a run directory; None if it was started before this machine was."""
    try:
        job = RunningJob(**json.loads((run_dir / "job.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return job if job.boot == boot_id() else None


# -- ending processes


def _new_temporary_directory(tag: str) -> Path:
    folder = temporary_directory(tag)
    folder.mkdir()
    return folder


def _stop(launcher: subprocess.Popen[bytes], grace_s: float) -> int:
    """Send SIGUSR1 and wait `grace_s`, then SIGTERM and wait 3 s, until the launcher has ended; return when it began.

    It passes SIGUSR1 on to the ranks, which then save a checkpoint. After SIGTERM mpirun kills them within 0.5 s.
    The time is in milliseconds since 1970.
    """
    began_ms = now_ms()
    # SIGKILL is left to `kill_job`, which reaches the ranks as well
    for number, patience_s in ((signal.SIGUSR1, grace_s), (signal.SIGTERM, 3.0)):
        if patience_s and launcher.poll() is None:
            launcher.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(patience_s)
    return began_ms


def num_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this host since it started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


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
