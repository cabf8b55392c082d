"""What a process knows of the launcher that started it: its rank, and when the launcher ends. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import signal

RANK_VARIABLES = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
"""Where launchers say which rank a process is: Open MPI 5 and `srun --mpi=pmix`, Open MPI 4, MPICH, torchrun, Slurm."""
JOB_TAG = "ONWARD_RUN_TAG"
"""Set in the environment of each process of a job that a flow has started."""


def launched_rank() -> int | None:
    """Return the rank that the launcher has set in the environment; None without a launcher. Needs no MPI."""
    for name in RANK_VARIABLES:
        # RANK alone may be anybody's variable
        if name in os.environ and (name != "RANK" or "WORLD_SIZE" in os.environ):
            return int(os.environ[name])
    return None


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even by SIGKILL: otherwise it would go on training.

    A launcher that was already dead before this call is noticed here if process 1 has adopted this process, which is
    never the parent in a job of a flow, and else by MPI_Init, which cannot reach it.
    """
    parent = os.getppid()
    if not killed_with(parent) or (parent == 1 and JOB_TAG in os.environ):
        os._exit(70)


def killed_with(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends; return False if that has ended already."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # the parent may have ended before the call, and then no signal comes
    return os.getppid() == parent
