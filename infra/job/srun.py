"""Srun: the launcher of Slurm, which starts ranks on the hosts of the allocation that this process runs in.

    flow, in the batch script or in a session of salloc
      +-- srun --> slurmctld --> slurmd on each host --> slurmstepd --> ranks

Of the ranks that end with an error srun prints how, one line for those of a host that end alike; the first line is that
of the rank that failed, as the others are ended after it:

    srun: error: h1: task 1: Exited with exit code 70
    srun: error: h2: tasks 2-3: Aborted (core dumped)

Where Slurm has PMIx, MPI finds the ranks (trainer/distributed/mpi_world.py); else they find each other by Slurm's own
variables (env_world.py). Ranks are children of slurmstepd, and not of srun: signals of scancel, of the time limit and
of preemption reach them directly, at the same time as the batch script.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from onward.infra.job import launcher
from onward.infra.job.launcher import (
    Environment,
    LauncherEnding,
    LaunchError,
    RankEnding,
    Ranks,
    ended_by_signal,
    signal_name,
    with_settings,
)
from onward.infra.job.slurm_jobs import allocation

_ENDED = re.compile(
    r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(.+?))(?: \(core dumped\))?$", re.M
)
_LOST_HOST = re.compile(
    r"Node failure on (\S+)|failed on node (\S+): |Nodes? (\S+) (?:is|are) still not ready|DUE TO NODE FAILURE"
)
"""What srun and slurmstepd print when a host or its slurmd is gone."""
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
LIST_S = 10.0
"""Longest time for the answer of srun to a question."""


class Srun:
    """Starts ranks as a step of the job of Slurm that this process runs in."""

    name = "srun"
    rank_variable = "SLURM_PROCID"

    def program(self) -> Path:
        """Return the srun in PATH. Raises LaunchError without one."""
        if (found := shutil.which("srun")) is None:
            raise LaunchError("there is no srun in PATH; load Slurm's commands, or set launch.launcher = 'mpirun'")
        return Path(found)

    def problems(self, ranks: Ranks, environment: Environment) -> list[str]:
        """Return that there is no srun, no allocation, or too small a one."""
        try:
            self.program()
        except LaunchError as error:
            return [str(error)]
        if not (job := allocation(environment)):
            return [
                "launch.launcher is 'slurm', but this process is in no job of Slurm (SLURM_JOB_ID is not set); send "
                "it by `onward submit CONFIG --on slurm`, or set launch.launcher = 'auto'"
            ]
        cpus = num_cpus(environment)
        if 0 < cpus < ranks.num_ranks:
            return [
                f"job {job} of Slurm has {cpus} CPU{'s' * (cpus > 1)}, but the job needs {ranks.num_ranks} ranks; ask "
                f"sbatch for --ntasks={ranks.num_ranks}, or let mpirun start several ranks on a CPU: launch.launcher = "
                "'mpirun'"
            ]
        return []

    def uses_other_hosts(self, hostfile: str, environment: Environment) -> bool:
        """Return True: also a rank of this host is started by its slurmd."""
        return True

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Environment) -> list[str]:
        """Return the command line. Raises LaunchError without srun."""
        program = self.program()
        options = [
            f"--ntasks={ranks.num_ranks}",
            # a rank that fails ends the others, which would wait for it
            "--kill-on-bad-exit=1",
            # no binding to cores: `threads_of_rank` divides those of the host
            "--cpu-bind=none",
            # also within a session of `srun --pty`, whose step has all of the allocation
            "--overlap",
            f"--mpi={'pmix' if _takes_pmix(program) else 'none'}",
        ]
        return [str(program), *options, *python, "-m", *ranks.module]

    def environment(self, ranks: Ranks, users: Environment, folder: Path) -> dict[str, str]:
        """Return the environment of srun and of the ranks."""
        # a site may set NONE, and without the tag of the job no process of it would be found
        variables = {**with_settings(users, launcher.SETTINGS), "SLURM_EXPORT_ENV": "ALL"}
        # srun does not read what sbatch was asked for, and a rank would have one CPU
        if cpus := users.get("SLURM_CPUS_PER_TASK"):
            # several ranks may share the CPUs of what sbatch calls one task
            each = max(1, min(int(cpus), num_cpus(users) // ranks.num_ranks or int(cpus)))
            variables.setdefault("SRUN_CPUS_PER_TASK", str(each))
        return variables

    def read_ending(self, output: str, returncode: int | None = None) -> LauncherEnding:
        """Return what srun says about the end of a job."""
        ended_by = ended_by_signal(returncode)
        # srun catches SIGTERM, and so its own status is not that of a signal
        if not ended_by and "srun: forcing job termination" in output:
            ended_by = "SIGTERM"
        lost_host = None
        if lost := _LOST_HOST.search(output):
            # one of the messages names no host, and a host is lost all the same
            lost_host = next(filter(None, lost.groups()), "")
        return LauncherEnding(self.name, _first_rank(output), ended_by, lost_host)


def _first_rank(output: str) -> RankEnding | None:
    if (found := _ENDED.search(output)) is None:
        return None
    host, rank, status, described = found.groups()
    if status:
        return RankEnding(int(rank), host, "", int(status))
    # of a step that has used up its memory Slurm does not name the signal
    number = int(_SIGNALS.get(described, signal.SIGKILL))
    return RankEnding(int(rank), host, signal_name(number), 128 + number)


def _takes_pmix(program: Path) -> bool:
    """Return whether Slurm and this Python environment start ranks of MPI through PMIx."""
    # without mpi4py no rank would ask PMIx, and Slurm's own variables are enough
    if find_spec("mpi4py") is None:
        return False
    # versions of Slurm print the list on different ones of the two
    if "pmix" not in _said([program, "--mpi=list"]).split():
        return False
    # Debian's Slurm lists a plugin whose library is in a package that it does not need
    return "Invalid MPI type" not in _said([program, "--mpi=pmix", "--test-only", "true"])


def _said(words: Sequence[str | Path]) -> str:
    """Return what a command prints; "" if it gives no answer in time."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{done.stdout} {done.stderr}"


def num_cpus(environment: Environment) -> int:
    """Return how many CPUs the job of Slurm has on all of its hosts; 0 where that is not known."""
    # such as "4(x2),8": so many CPUs on each of two hosts, and on a third one
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return sum(int(each) * int(hosts or 1) for each, hosts in found)
