"""Launcher: the program on this host that starts the ranks of a job, as the job sees it (job.py).

    Job -- arguments, environment -------------> launcher -- starts --> ranks, on this host and on others
        -- SIGUSR1: save and exit; SIGTERM ----> launcher -- signals -> ranks
        <- output, exit status: read_ending ---- launcher

An implementation is one file beside this one, such as mpirun.py, and one line in LAUNCHERS of job.py. What the launcher
prints is parsed in its own file.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from onward.infra.job.job_guard import TAG

Environment: TypeAlias = Mapping[str, str]
"""Environment variables: name -> value."""
SETTINGS: Environment = {
    # The output of a crashing rank reaches the log.
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # GPU memory is not lost to gaps between tensors of changing sizes. torch reads it when it first uses a GPU.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Tensors are sent by gloo or NCCL; without these, Open MPI probes libfabric for a second at every start.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic",
}
"""Environment of the ranks under any launcher."""


CARRIED = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "MPI4PY_",
    "OMP_",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "ONWARD_SHARD_CACHE_GB",
    TAG,
)
"""Prefixes of the variables that are sent to ranks on other hosts; no other variable leaves this host."""


class LaunchError(Exception):
    """A job cannot be started: its launcher is missing, or a job of the same run directory is still running."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What a launcher starts: `python -m MODULE` on `num_ranks` ranks."""

    num_ranks: int
    module: tuple[str, ...] = ()
    """The module and its arguments."""
    hostfile: str = ""
    """The hosts of the ranks; "" = the launcher decides, as a rule this host."""
    networks: tuple[str, ...] = ()
    """The networks by which these hosts reach each other, such as "10.0.0.0/24"; () = the launcher decides."""
    device: str = "cpu"
    """As `launch.device`, for a launcher that reserves GPUs; so are the next two."""
    ranks_per_gpu: int = 1
    threads: int = 0


@dataclass(frozen=True)
class RankEnding:
    """How a rank ended."""

    rank: int
    host: str
    """Empty where the launcher does not say it."""
    signal: str
    """Name of the signal that killed it, such as "SIGABRT"; empty if it exited by itself."""
    status: int
    """Its exit status; 128 + the signal's number for a signal."""


@dataclass(frozen=True)
class LauncherEnding:
    """What a launcher says about the end of a job."""

    launcher: str
    """Its name."""
    first_rank: RankEnding | None = None
    """The rank that ended first."""
    signal: str = ""
    """The signal that ended the launcher itself, or several that it may have been; empty if none did."""
    lost_host: str | None = None
    """The host that it cannot reach, or has lost; "" if it does not say which."""


class Launcher(Protocol):
    """A process that starts all ranks of a job and ends when they have ended.

    SIGUSR1 is passed on to the ranks, which save and exit; at SIGTERM it ends them. Its exit status may be 0 when a
    remote host has failed: success is read from a file.
    """

    name: str
    """As messages call it."""
    rank_variable: str
    """The environment variable with the number of a rank; RANK_VARIABLES of trainer/distributed/launched.py has it."""

    def problems(self, ranks: Ranks, environment: Environment) -> list[str]:
        """Return why it could not start these ranks from here, a sentence each. Nothing is started."""

    def uses_other_hosts(self, hostfile: str, environment: Environment) -> bool:
        """Return whether it may start ranks on other hosts than this one."""

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Environment) -> list[str]:
        """Return the command line. Raises LaunchError without the program.

        python: the words that run Python. environment: of this process.
        """

    def environment(self, ranks: Ranks, users: Environment, folder: Path) -> dict[str, str]:
        """Return its environment, which reaches the ranks of this host; variables that the user has set stay.

        folder: an empty directory of this host for its files and those of the ranks, which is removed after the job.
        """

    def read_ending(self, output: str, returncode: int | None = None) -> LauncherEnding:
        """Return what it says about the end of a job. output: the end of its output and that of the ranks."""


def with_settings(users: Environment, settings: Environment) -> dict[str, str]:
    """Return the user's environment variables and, where the user has set none, those of `settings`."""
    # the former name of PYTORCH_ALLOC_CONF, which a variable of ours would hide
    hidden = "PYTORCH_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in users else ""
    return {**{name: value for name, value in settings.items() if name != hidden}, **users}


def ended_by_signal(returncode: int | None) -> str:
    """Return the signal that ended a launcher, by its exit status as `subprocess` has it; "" if none did."""
    return signal_name(-returncode) if returncode is not None and returncode < 0 else ""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
