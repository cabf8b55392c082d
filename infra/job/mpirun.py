"""Mpirun: the launcher of Open MPI 5, on this host or over ssh on those of a hostfile, and what it prints.

A rank that is killed by a signal writes no error record: SIGKILL ends it at once, and abort(), which NCCL's watchdog
calls, skips every exception hook. mpirun names the first process that ended and how, in one of two sentences:

    prterun noticed that process rank 1 with PID 6074 on node h0 exited on signal 6 (Aborted).
    ... The first process to do so was:   Process name: [prterun-h0-6106@1,1]   Exit code:    1
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from onward.infra.job import launcher
from onward.infra.job.job_guard import TAG
from onward.infra.job.launcher import (
    CARRIED,
    Environment,
    LauncherEnding,
    LaunchError,
    RankEnding,
    Ranks,
    ended_by_signal,
    signal_name,
    with_settings,
)

SETTINGS: Environment = {
    **launcher.SETTINGS,
    # In a container the user is usually root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # A broken network connection is detected after 5 + 3 x 2 s, and not after 8 minutes.
    "PRTE_MCA_oob_tcp_keepalive_time": "5",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    "PRTE_MCA_plm_ssh_args": "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2",
}
"""Environment of mpirun (Open MPI 5)."""

ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
"""Variables of schedulers, whose hosts mpirun takes where there is no hostfile."""

NETWORKS = ("OMPI_MCA_btl_tcp", "PRTE_MCA_prte")
"""The beginnings of the variables that say which networks the ranks, and mpirun with its daemons, use."""

_BY_SIGNAL = re.compile(
    r"noticed\s+that\s+process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"
)
_BY_STATUS = re.compile(r"Process\s+name:\s+\[\S+,(\d+)\]\s+Exit\s+code:\s+(\d+)")
_LOST_HOST = re.compile(
    r"lost communication with a remote daemon|unable to reliably start one or more daemons|ssh: connect to host|"
    r"daemon has unexpectedly failed|daemon failed to report back|unable to establish a communication connection|"
    r"Connection closed by \S+ port \d+"
)
"""What mpirun and ssh print when a host, its network or its daemon is gone."""
_HOST_NAME = re.compile(r"Remote (?:host|daemon)\s*:\s+(?:\[\S+\] on node )?(?P<host>\S+)")
"""Where mpirun names that host."""


class Mpirun:
    """Starts ranks by mpirun of Open MPI 5."""

    name = "mpirun"
    rank_variable = "PMIX_RANK"

    def program(self) -> Path:
        """Return the mpirun of this Python environment, else the one in PATH. Raises LaunchError without one."""
        own = Path(sys.prefix) / "bin" / "mpirun"
        # mpi4py of this environment is built for its own library
        program = own if own.exists() else shutil.which("mpirun")
        if program is None:
            raise LaunchError(
                f"no MPI: there is no mpirun, neither {own} nor in PATH; install Open MPI, which Onward's extra "
                "`mpi` contains, or load the MPI module of this machine"
            )
        return Path(program).absolute()

    def problems(self, ranks: Ranks, environment: Environment) -> list[str]:
        """Return that there is no mpirun, if so."""
        try:
            self.program()
        except LaunchError as error:
            return [str(error)]
        return []

    def uses_other_hosts(self, hostfile: str, environment: Environment) -> bool:
        """Return whether a hostfile or a scheduler names hosts."""
        return bool(hostfile) or any(name in environment for name in ALLOCATIONS)

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Environment) -> list[str]:
        """Return the command line. Raises LaunchError without mpirun."""
        # oversubscribe: a machine with fewer cores than ranks is slow, and no error
        hosts = ["--hostfile", ranks.hostfile] if ranks.hostfile else ["--map-by", ":OVERSUBSCRIBE"]
        # A login over ssh starts with an empty environment.
        names = sorted({*environment_of_ranks(environment), TAG}) if ranks.hostfile else []
        exports = []
        for name in names:
            if name.startswith(CARRIED):
                exports += ["-x", name]
        started = [*hosts, *exports, *python, "-m", *ranks.module]
        # no binding to cores: the threads of a rank would share the one of its slot
        return [str(self.program()), "-n", str(ranks.num_ranks), "--bind-to", "none", *started]

    def environment(self, ranks: Ranks, users: Environment, folder: Path) -> dict[str, str]:
        """Return the environment of mpirun. folder: for its files, if all ranks run on this host."""
        variables = environment_of_ranks(users)
        if not self.uses_other_hosts(ranks.hostfile, users) and "OMPI_MCA_btl" not in users:
            # ranks of one host share memory; each would listen on every network interface for ranks that do not exist
            variables["OMPI_MCA_btl"] += ",tcp"
        # else MPI also tries networks that no other host reaches, such as docker0 with one address on all hosts
        for kind in NETWORKS:
            is_users = f"{kind}_if_include" in users or f"{kind}_if_exclude" in users
            if ranks.networks and not is_users:
                variables[f"{kind}_if_include"] = ",".join(ranks.networks)
        if not ranks.hostfile:  # other hosts do not have the folder
            # Open MPI leaves files behind when it is killed
            variables |= {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(folder)}
        return variables

    def read_ending(self, output: str, returncode: int | None = None) -> LauncherEnding:
        """Return what mpirun says about the end of a job."""
        lost_host = None
        if _LOST_HOST.search(output):
            # ssh says that it cannot connect, and not always to which host
            named = _HOST_NAME.search(output)
            lost_host = named["host"] if named else ""
        first_rank = _first_rank(output)
        ended_by = ended_by_signal(returncode)
        # Asked to end, it ends its ranks and says nothing; of a rank that ended by itself it always names the status.
        if returncode == 1 and first_rank is None and "\n-----" not in f"\n{output}":
            ended_by = "SIGTERM, SIGINT or SIGHUP"
        return LauncherEnding(self.name, first_rank, ended_by, lost_host)


def _first_rank(output: str) -> RankEnding | None:
    # a signal before a status: the ranks that lost the connection end with a status
    if by_signal := _BY_SIGNAL.search(output):
        number = int(by_signal[3])
        return RankEnding(int(by_signal[1]), by_signal[2], signal_name(number), 128 + number)
    if by_status := _BY_STATUS.search(output):
        return RankEnding(int(by_status[1]), "", "", int(by_status[2]))
    return None


def environment_of_ranks(users: Environment) -> dict[str, str]:
    """Return the user's environment variables and, where the user has set none, those of SETTINGS."""
    return with_settings(users, SETTINGS)


def remote_shell(environment: Environment) -> list[str]:
    """Return the words with which mpirun reaches another host, before the host: ssh and its options."""
    # several agents are separated by colons, and mpirun takes the first that it finds
    agent = environment.get("PRTE_MCA_plm_ssh_agent", "ssh").split(":")[0]
    return [*shlex.split(agent), *shlex.split(environment["PRTE_MCA_plm_ssh_args"])]
