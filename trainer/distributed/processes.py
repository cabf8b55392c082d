"""How this process becomes one rank of a job: MPI, process group, mesh, and how it leaves.

A rank's life: `StopSignal()` and `install_excepthook()`, then `connect()`, work, `disconnect()`. MPI starts the
world and tells who is where; torch.distributed carries the tensors. MPI calls have no time-outs, so there are
none after `connect()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import mpi4py
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from onward.trainer.config.sections import ParallelConfig
from onward.trainer.errors import Fenced, Refused, RuntimeUnavailable, Stopped
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RankError, RankReport, write_record

if TYPE_CHECKING:
    from mpi4py import MPI

AXES = ("pipeline", "data", "tensor")
"""The axes of the mesh, outermost first: neighbours in rank are neighbours in `tensor`."""

RANK_VARIABLES = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers say which rank a process is: Open MPI 5 and `srun --mpi=pmix`, Open MPI 4, MPICH, Slurm."""

PEER_DELAY_S = 2.0
"""How long a rank that only lost a peer waits before it leaves: the first to leave has mpirun kill the others,
and the rank with the root cause must get to write it down."""

_PEER_LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|nccl(Remote|System)Error"
    "|Timed out (waiting|after)|has timed out|[Ww]ait timeout|(Socket|Application) [Tt]imeout|operation timeout"
)


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


@dataclass(frozen=True)
class ParallelDims:
    """How the ranks divide the work: one size for each axis of the mesh."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: int = 0
    """Neighbouring replicas that divide weights or states among them; 0 = all."""

    @staticmethod
    def of(config: ParallelConfig) -> ParallelDims:
        """As configured."""
        return ParallelDims(config.data, config.tensor, config.pipeline, config.shard)

    @property
    def world_size(self) -> int:
        """Ranks this division needs."""
        return self.data * self.tensor * self.pipeline

    def check(self, world_size: int) -> None:
        """Raises RuntimeUnavailable, with all four numbers, unless the division fits the world."""
        if self.world_size != world_size:
            raise RuntimeUnavailable(
                f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline} needs "
                f"{self.world_size} ranks, but mpirun started {world_size}; change [parallel] or launch.num_ranks"
            )

    def coordinate(self, rank: int) -> Coordinate:
        """Where a rank is in the mesh; tensor is fastest, so that it stays inside a host."""
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinate(pipeline, data, tensor)


class Coordinate(NamedTuple):
    """A rank's place in the mesh."""

    pipeline: int
    data: int
    tensor: int


# -- joining and leaving the world


def connect(*, expected_world_size: int, timeout_s: float, device: str = "auto", threads: int = 0) -> MPIContext:
    """Join the job. Collective: the first call of every rank; a process started alone is a world of 1.

    `timeout_s` bounds every later wait for another rank; `threads` of 0 are the host's cores over its ranks.
    Raises RuntimeUnavailable when MPI is missing, the world has another size, or a rank finds no GPU.
    """
    if launched_rank() is not None:
        die_with_parent()
    world = _init_mpi().COMM_WORLD
    if world.size != expected_world_size:
        raise RuntimeUnavailable(_wrong_world(world.size, expected_world_size))
    local_rank, local_size = _place(world)
    chosen = _choose_device(world, device, local_rank=local_rank, local_size=local_size)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_size))

    timeout = datetime.timedelta(seconds=timeout_s)
    store = _open_store(world, single_host=local_size == world.size, timeout=timeout)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    return MPIContext(world.rank, world.size, local_rank, local_size, socket.gethostname(), chosen)


def disconnect() -> None:
    """Leave the job in good order. Collective: a rank that leaves without it makes mpirun end all others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def launched_rank() -> int | None:
    """The rank the launcher gave this process; None when it was started alone. Needs no MPI."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL: orphans would go on training.

    A launcher that was already dead before this call is noticed by MPI_Init, which cannot reach it.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(70)


def _init_mpi() -> ModuleType:
    """MPI without mpi4py's exit hook: MPI_Finalize at exit would make a failed rank wait for the others."""
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    # Open MPI: a thread that waits for gradients leaves its core to the backward pass instead of spinning on it
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeUnavailable(
            f"mpi4py found no MPI library ({str(error).splitlines()[0]}); install one (`pip install onward[mpi]`) "
            "or point MPI4PY_LIBMPI at the machine's libmpi.so"
        ) from error
    if not MPI.Is_initialized():
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


def _place(world: MPI.Comm) -> tuple[int, int]:
    """Rank and number of ranks on this host: those that can share memory."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return host.rank, host.size
    finally:
        host.Free()


def _choose_device(world: MPI.Comm, wanted: str, *, local_rank: int, local_size: int) -> torch.device:
    """One GPU per rank, or the CPU for all: every rank decides, and fails, alike."""
    if wanted == "cpu":
        return torch.device("cpu")
    found = np.array([local_rank, local_size, torch.cuda.device_count()], dtype=np.int64)
    table = np.empty((world.size, 3), dtype=np.int64)
    world.Allgather(found, table)
    if wanted == "auto" and not table[:, 2].any():
        return torch.device("cpu")
    problems = [
        f"no GPU for rank {rank}: it is local rank {local} of {size} on its host, which has {count} GPUs; "
        "start at most one rank per GPU, or set launch.device = 'cpu'"
        for rank, (local, size, count) in enumerate(table.tolist())
        if local >= count
    ]
    if problems:
        raise RuntimeUnavailable(problems)
    return torch.device("cuda", local_rank)


# -- how ranks find each other


def _open_store(world: MPI.Comm, *, single_host: bool, timeout: datetime.timedelta) -> Store:
    """The meeting point: rank 0 listens on a free port and broadcasts its address, as five numbers."""
    other = _other_host(world)
    address = "127.0.0.1" if single_host else _own_address_towards(other) if world.rank == 0 else ""
    where = np.zeros(5, dtype=np.int64)
    store: Store | None = None
    if world.rank == 0:
        store = TCPStore(address, 0, world.size, is_master=True, wait_for_workers=False, timeout=timeout)
        where[:] = [*socket.inet_aton(address), store.port]
    world.Bcast(where)
    address = ".".join(map(str, where[:4]))
    _use_interface("lo" if single_host else _interface_of(_own_address_towards(address)))
    return store or TCPStore(address, int(where[4]), world.size, is_master=False, timeout=timeout)


def _other_host(world: MPI.Comm) -> str:
    """Name of the first host that is not rank 0's; rank 0's own when there is no other."""
    mine = socket.gethostname().encode()[:255].ljust(256, b"\0")
    names = np.empty((world.size, 256), dtype=np.uint8)
    world.Allgather(np.frombuffer(mine, dtype=np.uint8), names)
    hosts = [name.tobytes().rstrip(b"\0").decode() for name in names]
    return next((host for host in hosts if host != hosts[0]), hosts[0])


def _own_address_towards(host: str) -> str:
    """This host's IPv4 address on the route to another: asking the kernel sends no packet.

    Not the address of the own name, which many machines resolve to 127.0.1.1.
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


def make_mesh(mpi: MPIContext, dims: ParallelDims, *, timeout_s: float) -> DeviceMesh:
    """The ranks as a grid with the axes `AXES`: `mesh.get_group("pipeline" | "data" | "tensor")`.

    The data axis is one of (replicate, shard) as well: `shard` is the neighbouring replicas that divide weights or
    states, `replicate` those that hold the same share. Collective: every rank.
    """
    dims.check(mpi.world_size)
    shard = dims.shard or dims.data
    shape = (dims.pipeline, dims.data // shard, shard, dims.tensor)
    mesh = init_device_mesh(mpi.device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    replicas = mesh["replicate", "shard"]._flatten("data")
    timeout = datetime.timedelta(seconds=timeout_s)
    # the groups of an axis do not inherit the world's time-out: theirs is 30 minutes
    for group in (*mesh.get_all_groups(), replicas.get_group()):
        _set_pg_timeout(timeout, group)
    return mesh


def new_group(ranks: Sequence[int], *, timeout_s: float) -> ProcessGroup | None:
    """A further group of these ranks; None on the others. Collective: every rank of the world, in the same order."""
    group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
    return group if dist.get_rank() in ranks else None


# -- preflight


def run_preflight(run: RunDir) -> None:
    """What `python -m onward.trainer preflight RUN_DIR` does: connect, check, leave `preflight/rank-00000.json`.

    Collective: every rank. An error is left as RankError of attempt 0.
    """
    install_excepthook(run, attempt=0)
    config = read_config(run)
    launch = config.launch
    mpi = connect(
        expected_world_size=config.world_size,
        timeout_s=launch.collective_timeout_s,
        device=launch.device,
        threads=launch.threads_per_rank,
    )
    report = preflight(mpi, config.world_size)
    write_record(run.root / "preflight" / f"rank-{mpi.rank:05d}.json", report)
    disconnect()


def preflight(mpi: MPIContext, expected_world_size: int) -> RankReport:
    """What this rank finds, and one sum over all ranks on its device. Collective: every rank."""
    total = torch.tensor([mpi.rank + 1.0], dtype=torch.float64, device=mpi.device)
    dist.all_reduce(total)
    from mpi4py import MPI

    return RankReport(
        rank=mpi.rank,
        world_size=mpi.world_size,
        expected_world_size=expected_world_size,
        host=mpi.host,
        pid=os.getpid(),
        device=str(mpi.device),
        versions={
            "torch": torch.__version__,
            "mpi4py": mpi4py.__version__,
            "MPI": MPI.Get_library_version().splitlines()[0].strip("\0 "),
            "Python": platform.python_version(),
        },
        memory_bytes=free_memory(mpi.device),
        all_reduce=float(total),
        all_reduce_expected=expected_world_size * (expected_world_size + 1) / 2,
    )


def free_memory(device: torch.device) -> int:
    """Bytes this process could still take on its device: for the CPU, of the host and of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [psutil.virtual_memory().available]
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            free.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return max(0, min(free))


# -- being stopped, and failing


class StopSignal:
    """Remembers that this rank was asked to stop (SIGUSR1, SIGTERM), so that all can stop at the same step."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def install_excepthook(run: RunDir, *, attempt: int, step: Callable[[], int] = lambda: 0) -> None:
    """From here on an uncaught exception, in any thread, is left in `run.rank_error` and ends the process.

    The exit status (78 refused, 72 fenced, 75 stopped, 70 anything else) makes mpirun end the other ranks.
    """

    def leave(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        error = error or kind()
        text = "".join(traceback.format_exception(kind, error, trace))
        secondary = lost_a_peer(error)
        try:
            record = RankError(
                attempt=attempt,
                rank=launched_rank() or 0,
                host=socket.gethostname(),
                step=step(),
                cause=f"{kind.__name__}: {error}",
                traceback=text,
                at_ms=time.time_ns() // 1_000_000,
                secondary=secondary,
            )
            write_record(run.rank_error(attempt, record.rank), record)
            sys.stderr.write(f"rank {record.rank}: {text}")
            if secondary:
                time.sleep(PEER_DELAY_S)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(_exit_status(error))

    sys.excepthook = leave
    threading.excepthook = lambda failed: leave(failed.exc_type, failed.exc_value, failed.exc_traceback)


def lost_a_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone or silent."""
    return isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None


def _exit_status(error: BaseException) -> int:
    if isinstance(error, Refused):
        return 78
    return error.exit_code if isinstance(error, Fenced | Stopped) else 70
