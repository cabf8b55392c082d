"""Srun: the launcher of Slurm, which starts ranks on the hosts of the allocation that this process runs in.

    flow, in the batch script or in a session of salloc
      +-- srun --> slurmctld --> slurmd on each host --> slurmstepd --> ranks

Where Slurm has PMIx, MPI finds the ranks (trainer/distributed/mpi_world.py); else they find each other by Slurm's own
variables (env_world.py). Ranks are children of slurmstepd, and not of srun: signals of scancel, of the time limit and
of preemption reach them directly, at the same time as the batch script.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from onward.infra.job import launcher
from onward.infra.job.launcher import LauncherEnding, LaunchError, Ranks, with_settings

SETTINGS: Mapping[str, str] = {
    **launcher.SETTINGS,
    # Tensors are sent by gloo or NCCL; without these, MPI probes libfabric for a second at every start.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic",
}
"""Environment of the ranks, unless the user has set it."""

LIST_S = 10.0
"""Longest time for the answer to `srun --mpi=list`."""


class Srun:
    """Starts ranks as a step of the job of Slurm that this process runs in."""

    name = "srun"
    rank_variable = "SLURM_PROCID"

    def program(self) -> Path:
        """Return the srun in PATH. Raises LaunchError without one."""
        if (found := shutil.which("srun")) is None:
            raise LaunchError("there is no srun in PATH; load Slurm's commands, or set launch.launcher = 'mpirun'")
        return Path(found)

    def problems(self, ranks: Ranks, environment: Mapping[str, str]) -> list[str]:
        """Return that there is no srun, no allocation, or too small a one."""
        try:
            self.program()
        except LaunchError as error:
            return [str(error)]
        if "SLURM_JOB_ID" not in environment:
            return [
                "launch.launcher is 'slurm', but this process is in no job of Slurm (SLURM_JOB_ID is not set); send "
                "it by `onward submit CONFIG --on slurm`, or set launch.launcher = 'auto'"
            ]
        return []

    def uses_other_hosts(self, hostfile: str, environment: Mapping[str, str]) -> bool:
        """Return True: also a rank of this host is started by its slurmd."""
        return True

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Mapping[str, str]) -> list[str]:
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
            f"--mpi={'pmix' if has_pmix(program) else 'none'}",
        ]
        return [str(program), *options, *python, "-m", *ranks.module]

    def environment(self, ranks: Ranks, users: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment of srun and of the ranks."""
        # a site may set NONE, and without the tag of the job no process of it would be found
        return {**with_settings(users, SETTINGS), "SLURM_EXPORT_ENV": "ALL"}

    def read_ending(self, output: str, returncode: int | None = None) -> LauncherEnding:
        """Return what srun says about the end of a job."""
        return LauncherEnding(self.name)


def has_pmix(program: Path) -> bool:
    """Return whether this Slurm starts ranks of MPI through PMIx."""
    try:
        listed = subprocess.run([program, "--mpi=list"], capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "pmix" in f"{listed.stdout} {listed.stderr}".split()
