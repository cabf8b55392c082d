"""Join the world by MPI: the only module of the start of a rank that needs mpi4py.

    mpirun --> MPI_Init: rank, world size, which ranks share a host
           --> rank 0 opens a TCPStore and broadcasts its address over MPI

MPI calls have no time-outs, so there are none after `open_store`, except for parallel.transport = 'mpi', which polls.
"""

from __future__ import annotations

import datetime
import os
import socket
from types import ModuleType
from typing import TYPE_CHECKING

import mpi4py
import numpy as np
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from onward.trainer.distributed.launched import launched_rank
from onward.trainer.distributed.world import Place, World, own_address_towards, use_interface_of
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.extras import how_to_install

if TYPE_CHECKING:
    from mpi4py import MPI


def join(*, expected_world_size: int, num_gpus: int, visible: int) -> World:
    """Join the job. Collective: the first call of every rank. num_gpus, visible: as of `Place`.

    Raises RuntimeUnavailable when there is no MPI library or the world has another size.
    """
    world = _init_mpi().COMM_WORLD
    if world.size != expected_world_size:
        raise RuntimeUnavailable(_wrong_world(world.size, expected_world_size))
    return World(world.rank, _places(world, num_gpus, visible))


def open_store(timeout: datetime.timedelta, *, single_host: bool) -> Store:
    """Open the TCPStore: rank 0 listens on a free port and broadcasts its address as five numbers over MPI.

    Collective: every rank. The store asks nobody for a password, so it listens on the one address that the ranks use:
    on loopback, if all are on one host.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    other = _other_host(world)
    # on one host the loopback address works without any network
    address = "127.0.0.1" if single_host else own_address_towards(other) if world.rank == 0 else ""
    where = np.zeros(5, dtype=np.int64)
    store: Store | None = None
    if world.rank == 0:
        # by itself TCPStore listens on all interfaces, whatever its address
        listening = socket.create_server((address, 0))  # port 0: the kernel chooses a free one
        port = listening.getsockname()[1]
        store = TCPStore(
            address,
            port,
            world.size,
            is_master=True,
            timeout=timeout,
            # the others learn the port only after this call
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        where[:] = [*socket.inet_aton(address), port]
    world.Bcast(where)
    address = ".".join(map(str, where[:4]))
    use_interface_of(address if single_host else own_address_towards(address))
    return store or TCPStore(address, int(where[4]), world.size, is_master=False, timeout=timeout)


def leave() -> None:
    """Leave the job. Collective: if a rank exits without this call, mpirun ends all others."""
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def versions() -> dict[str, str]:
    """Return the versions of mpi4py and of the MPI library that it has loaded."""
    from mpi4py import MPI

    return {"mpi4py": mpi4py.__version__, "MPI": MPI.Get_library_version().splitlines()[0].strip("\0 ")}


def _init_mpi() -> ModuleType:
    """Initialise MPI without mpi4py's exit hook: MPI_Finalize at exit would make a failed rank wait for the others."""
    # both are set before the import of mpi4py.MPI, which reads them
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    # Open MPI: a thread that waits for gradients leaves its core to the backward pass instead of spinning on it
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeUnavailable(
            f"mpi4py found no MPI library ({str(error).splitlines()[0]}); install one "
            f"({how_to_install('mpi')}) or point MPI4PY_LIBMPI at the machine's libmpi.so"
        ) from error
    if not MPI.Is_initialized():
        # the highest level is asked for; `transport.open_channel` checks what this MPI grants
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _wrong_world(found: int, expected: int) -> str:
    launched = launched_rank()
    sentence = f"the job needs {expected} ranks, but MPI sees a world of {found}"
    if found == 1 and launched is not None:
        return (
            f"{sentence} in the process launched as rank {launched}: launcher and MPI library do not belong together; "
            "start the job with the mpirun of the library that mpi4py loads"
        )
    return f"{sentence}; start it with `mpirun -n {expected}` or change launch.num_ranks and [parallel]"


def _places(world: MPI.Comm, num_gpus: int, visible: int) -> tuple[Place, ...]:
    """Return the places of all ranks. Collective: every rank."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        # the first rank of the host names it: unlike a host name, it is a number and unique
        first = np.array([world.rank], dtype=np.int64)
        host.Bcast(first)
        own = np.array([host.rank, host.size, first[0], num_gpus, visible], dtype=np.int64)
    finally:
        host.Free()
    table = np.empty((world.size, len(own)), dtype=np.int64)
    world.Allgather(own, table)
    return tuple(Place(*row) for row in table.tolist())


def _other_host(world: MPI.Comm) -> str:
    """Return the name of the first host that is not rank 0's; rank 0's own when there is no other."""
    mine = socket.gethostname().encode()[:255].ljust(256, b"\0")
    names = np.empty((world.size, 256), dtype=np.uint8)
    world.Allgather(np.frombuffer(mine, dtype=np.uint8), names)
    hosts = [name.tobytes().rstrip(b"\0").decode() for name in names]
    # any other host will do: the route to it says which address of this host the others reach
    return next((host for host in hosts if host != hosts[0]), hosts[0])
