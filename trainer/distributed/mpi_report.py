"""Start MPI alone, without torch, and report it.

mpirun -n 2 python -m onward.trainer.distributed.mpi_report FOLDER
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.records import Record


class MpiReport(Record):
    """What one rank has seen of MPI."""

    rank: int
    size: int
    host: str
    pid: int
    library: str
    """Name and version of the MPI library that mpi4py has loaded."""
    mpi4py: str
    total: int
    """The sum of all rank numbers from 1, by MPI's all-reduce."""


def main(folder: Path) -> None:
    """Write `mpi-RANK.PID.json` in `folder`. Collective: every rank."""
    import mpi4py
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    report = MpiReport(
        rank=world.rank,
        size=world.size,
        host=socket.gethostname(),
        pid=os.getpid(),
        library=MPI.Get_library_version().splitlines()[0].strip("\0 ").partition(",")[0],
        mpi4py=mpi4py.__version__,
        total=world.allreduce(world.rank + 1),
    )
    # with the process: ranks that do not know of each other are all rank 0
    write_durably(folder / f"mpi-{report.rank}.{report.host}.{report.pid}.json", report.model_dump_json().encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
