"""Join and leave the MPI job: this process becomes one rank.

A rank calls `failures.StopSignal()` and `failures.install_excepthook()`, then `connect()`, works, and calls
`disconnect()`.

    mpirun --> MPI_Init: rank, world size, which ranks share a host
           --> rank 0 opens a TCPStore and broadcasts its address over MPI
           --> torch.distributed process group over that store (gloo on CPUs, gloo and NCCL on GPUs; gloo alone on
               GPUs that ranks share)

MPI only starts the job; tensors are sent by torch.distributed, whose calls have time-outs. MPI calls have none, so
there are none after `connect()`, except for parallel.transport = 'mpi', which polls.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import mpi4py
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from onward.trainer.distributed.launched import die_with_parent, launched_rank
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.extras import how_to_install
from onward.trainer.run.this_machine import core_limit, physical_cores

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class MPIContext:
    """Which rank this is, and where it computes. Made once by `connect` and passed on."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among those of this host."""
    local_size: int
    """Ranks on this host."""
    host: str
    device: torch.device


# -- joining and leaving the world


def connect(
    *, expected_world_size: int, timeout_s: float, device: str = "auto", threads: int = 0, ranks_per_gpu: int = 1
) -> MPIContext:
    """Join the job. Collective: the first call of every rank; a process started alone is a world of 1.

    `timeout_s` bounds every later wait for another rank; `threads`: see `threads_of_rank`;
    `ranks_per_gpu` above 1 sends GPU tensors by gloo in place of NCCL. Raises RuntimeUnavailable when MPI is missing,
    the world has another size, or a rank finds no GPU.
    """
    if launched_rank() is not None:
        die_with_parent()
    world = _init_mpi().COMM_WORLD
    if world.size != expected_world_size:
        raise RuntimeUnavailable(_wrong_world(world.size, expected_world_size))
    place = _place(world)
    chosen = _choose_device(world, device, place, ranks_per_gpu=ranks_per_gpu)
    torch.set_num_threads(threads_of_rank(place.local_size, threads))

    timeout = datetime.timedelta(seconds=timeout_s)
    store = _open_store(world, single_host=place.local_size == world.size, timeout=timeout)
    nccl = chosen.type == "cuda" and ranks_per_gpu == 1
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # or init_device_mesh would set the device by the rank in the world
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if nccl:
        # NCCL executes the operations of several communicators in the order in which this process has started them.
        # Without this, two that are started in one order on all ranks may still wait for each other on the GPU.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",  # gloo is for both
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=chosen if nccl else None,
    )
    return MPIContext(world.rank, world.size, place.local_rank, place.local_size, socket.gethostname(), chosen)


def threads_of_rank(local_size: int, threads: int = 0) -> int:
    """Return the threads in which one of `local_size` ranks of this host computes. threads: as configured, 0 = chosen.

    Chosen are the cores that this process may use over the ranks: without hyperthreads, which add no arithmetic, and no
    more than the time that its container gets, since threads beyond it would be stopped while others wait for them.
    """
    cores = min(physical_cores(), core_limit() or math.inf)
    return threads or max(1, int(cores) // local_size)


def disconnect() -> None:
    """Leave the job. Collective: if a rank exits without this call, mpirun ends all others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


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


class Place(NamedTuple):
    """Where a rank runs, and which GPUs it sees."""

    local_rank: int
    """Its number among the ranks of its host, which can share memory."""
    local_size: int
    host: int
    """The first rank of its host."""
    num_gpus: int = 0
    """GPUs that the process sees: all of the host, or those that a launcher such as Slurm has given to it."""
    visible: int = 0
    """A checksum of CUDA_VISIBLE_DEVICES."""


def _place(world: MPI.Comm) -> Place:
    """Return this rank's place, without its GPUs. Collective: every rank."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        first = np.array([world.rank], dtype=np.int64)
        host.Bcast(first)
        return Place(host.rank, host.size, int(first[0]))
    finally:
        host.Free()


def _choose_device(world: MPI.Comm, wanted: str, place: Place, *, ranks_per_gpu: int) -> torch.device:
    """Return a GPU for each rank, or the CPU for all. Collective: every rank decides, and fails, alike."""
    if wanted == "cpu":
        return torch.device("cpu")
    visible = zlib.crc32(os.environ.get("CUDA_VISIBLE_DEVICES", "").encode())
    found = np.array([*place[:3], torch.cuda.device_count(), visible], dtype=np.int64)
    table = np.empty((world.size, len(found)), dtype=np.int64)
    world.Allgather(found, table)
    places = [Place(*row) for row in table.tolist()]
    if wanted == "auto" and not any(each.num_gpus for each in places):
        return torch.device("cpu")
    return torch.device("cuda", assign_gpus(places, ranks_per_gpu=ranks_per_gpu)[world.rank])


def assign_gpus(places: Sequence[Place], *, ranks_per_gpu: int) -> list[int]:
    """Return the index of each rank's GPU among those that it sees. Raises RuntimeUnavailable if there are too few.

    a host of 2 GPUs, 1 rank per GPU      ranks 0 1      see GPUs 0,1 each            indices 0 1
    a host of 2 GPUs, 2 ranks per GPU     ranks 0 1 2 3  see GPUs 0,1 each            indices 0 0 1 1
    Slurm with --gpus-per-task=1          ranks 0 1      see one GPU, each another    indices 0 0
    """
    seen = Counter[tuple[int, int]]()
    indices, problems = [], []
    for rank, place in enumerate(places):
        # ranks of one host that see the same GPUs divide them
        index = seen[place.host, place.visible] // ranks_per_gpu
        seen[place.host, place.visible] += 1
        indices.append(index)
        if index >= place.num_gpus:
            problems.append(
                f"no GPU for rank {rank}: it is local rank {place.local_rank} of {place.local_size} on its host, which "
                f"has {place.num_gpus} GPUs; start at most {ranks_per_gpu} "
                f"{'rank' if ranks_per_gpu == 1 else 'ranks'} per GPU, raise launch.ranks_per_gpu (slow), or set "
                "launch.device = 'cpu'"
            )
    if problems:
        raise RuntimeUnavailable(problems)
    return indices


# -- how ranks find each other


def _open_store(world: MPI.Comm, *, single_host: bool, timeout: datetime.timedelta) -> Store:
    """Open the TCPStore: rank 0 listens on a free port and broadcasts its address as five numbers over MPI.

    The store asks nobody for a password, so it listens on the one address that the ranks use: on loopback, if all are
    on one host.
    """
    other = _other_host(world)
    # on one host the loopback address works without any network
    address = "127.0.0.1" if single_host else _own_address_towards(other) if world.rank == 0 else ""
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
    _use_interface("lo" if single_host else _interface_of(_own_address_towards(address)))
    return store or TCPStore(address, int(where[4]), world.size, is_master=False, timeout=timeout)


def _other_host(world: MPI.Comm) -> str:
    """Return the name of the first host that is not rank 0's; rank 0's own when there is no other."""
    mine = socket.gethostname().encode()[:255].ljust(256, b"\0")
    names = np.empty((world.size, 256), dtype=np.uint8)
    world.Allgather(np.frombuffer(mine, dtype=np.uint8), names)
    hosts = [name.tobytes().rstrip(b"\0").decode() for name in names]
    return next((host for host in hosts if host != hosts[0]), hosts[0])


def _own_address_towards(host: str) -> str:
    """Return this host's IPv4 address on the route to another host. Sends no packet.

    The address of the host's own name would not do: many machines resolve it to 127.0.1.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise RuntimeUnavailable(f"{socket.gethostname()} has no route to {host}: {error}") from error
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    owners = (name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == address)
    return next(owners, "lo")


def _use_interface(name: str) -> None:
    """Bind gloo and NCCL to one interface, unless the user chose: a docker bridge has the same address on all hosts."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
