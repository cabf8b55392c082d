"""Check the machine before training: every rank connects, sums a number over all ranks and reports what it found."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from onward.trainer.distributed.exchange import gather_bytes
from onward.trainer.distributed.failures import install_excepthook
from onward.trainer.distributed.mesh import backend_of
from onward.trainer.distributed.processes import MPIContext, connect, disconnect, launcher_versions
from onward.trainer.distributed.world import address_in_use
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.machine.host_report import SOURCE, source_digest
from onward.trainer.run.machine.this_machine import free_host_memory
from onward.trainer.run.records import RankReport


def run_preflight(run: RunDir) -> None:
    """Connect, check the machine and write `preflight/rank-00000.json` (`python -m onward.trainer preflight RUN_DIR`).

    Collective: every rank. An error is written as RankError of attempt 0.
    """
    install_excepthook(run, attempt=0)
    config = read_config(run)
    launch = config.launch
    mpi = connect(
        expected_world_size=config.world_size,
        timeout_s=launch.collective_timeout_s,
        device=launch.device,
        threads=launch.threads_per_rank,
        ranks_per_gpu=launch.ranks_per_gpu,
    )
    report = preflight(mpi, config.world_size)
    # rank 0 writes all: a host may have a home of its own
    for rank, content in enumerate(gather_bytes(mpi, report.model_dump_json(indent=2).encode())):
        if mpi.rank == 0:
            write_durably(run.root / "preflight" / f"rank-{rank:05d}.json", content)
    disconnect()
    # the space for an error record is not needed any more
    run.reserved_for(0, mpi.rank).unlink(missing_ok=True)


def preflight(mpi: MPIContext, expected_world_size: int) -> RankReport:
    """Return what this rank measures, with one sum over all ranks on its device. Collective: every rank."""
    total = torch.tensor([mpi.rank + 1.0], dtype=torch.float64, device=mpi.device)
    # 1 + 2 + ... + n: a rank that is missing or counted twice changes the sum
    dist.all_reduce(total)
    world = dist.group.WORLD
    assert world is not None
    on_gpu = mpi.device.type == "cuda"
    versions = {"torch": torch.__version__, **launcher_versions(), "Python": platform.python_version()}
    versions[SOURCE] = source_digest()
    if on_gpu:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl))}
    return RankReport(
        rank=mpi.rank,
        world_size=mpi.world_size,
        expected_world_size=expected_world_size,
        host=mpi.host,
        address=address_in_use(),
        pid=os.getpid(),
        device=str(mpi.device),
        gpu=torch.cuda.get_device_name(mpi.device) if on_gpu else "",
        backend=backend_of(world, mpi.device),
        versions=versions,
        memory_bytes=free_memory(mpi.device),
        all_reduce=float(total),
        all_reduce_expected=expected_world_size * (expected_world_size + 1) / 2,
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device: for the CPU, the least of those of the host and its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()
