"""Join and leave the job: this process becomes one rank.

A rank calls `failures.StopSignal()` and `failures.install_excepthook()`, then `connect()`, works, and calls
`disconnect()`.

    launcher --> World: rank, world size, which ranks share a host (mpi_world.py; env_world.py under torchrun)
             --> a store that connects all ranks (the same modules)
             --> torch.distributed process group over that store (gloo on CPUs, gloo and NCCL on GPUs; gloo alone on
                 GPUs that ranks share)

The launcher only starts the job; tensors are sent by torch.distributed, whose calls have time-outs.
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
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from onward.trainer.distributed import env_world
from onward.trainer.distributed.launched import die_with_parent, launched_rank
from onward.trainer.distributed.world import Place, World
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.machine.this_machine import core_limit, physical_cores


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
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    # ranks exchange numbers when they join: a checksum says whether two see the same GPUs
    visible = zlib.crc32(os.environ.get("CUDA_VISIBLE_DEVICES", "").encode())
    started = _started_by()
    world = started.join(expected_world_size=expected_world_size, num_gpus=num_gpus, visible=visible)
    chosen = _choose_device(world, device, ranks_per_gpu=ranks_per_gpu)
    place = world.place
    torch.set_num_threads(threads_of_rank(place.local_size, threads))
    timeout = datetime.timedelta(seconds=timeout_s)
    store = started.open_store(timeout, single_host=place.local_size == world.size)
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
    _started_by().leave()


def launcher_versions() -> dict[str, str]:
    """Return the versions of the libraries through which the ranks were started."""
    return _started_by().versions()


class _StartedBy(Protocol):
    def join(self, *, expected_world_size: int, num_gpus: int, visible: int) -> World: ...
    def open_store(self, timeout: datetime.timedelta, *, single_host: bool) -> Store: ...
    def leave(self) -> None: ...
    def versions(self) -> dict[str, str]: ...


def _started_by() -> _StartedBy:
    """Return how the ranks of this job find each other; under torchrun and its like mpi4py need not be installed."""
    if env_world.is_given():
        return env_world.EnvironmentWorld()
    from onward.trainer.distributed import mpi_world

    return mpi_world


# -- the device of a rank


def _choose_device(world: World, wanted: str, *, ranks_per_gpu: int) -> torch.device:
    """Return a GPU for each rank, or the CPU for all. Every rank decides, and fails, alike."""
    has_gpus = any(place.num_gpus for place in world.places)
    if wanted == "cpu" or (wanted == "auto" and not has_gpus):
        return torch.device("cpu")
    # every rank computes the GPUs of all, so that a lack of one is the same error everywhere
    return torch.device("cuda", assign_gpus(world.places, ranks_per_gpu=ranks_per_gpu)[world.rank])


def assign_gpus(places: Sequence[Place], *, ranks_per_gpu: int) -> list[int]:
    """Return the index of each rank's GPU among those that it sees. Raises RuntimeUnavailable if there are too few.

    a host of 2 GPUs, 1 rank per GPU      ranks 0 1      see GPUs 0,1 each            indices 0 1
    a host of 2 GPUs, 2 ranks per GPU     ranks 0 1 2 3  see GPUs 0,1 each            indices 0 0 1 1
    Slurm with --gpus-per-task=1          ranks 0 1      see one GPU, each another    indices 0 0
    """
    seen = Counter[tuple[int, int]]()
    indices = []
    problems = []
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
