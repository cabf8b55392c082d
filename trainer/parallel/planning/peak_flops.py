"""The peak rate of a job's devices, which MFU is relative to: of GPUs by their data sheets, of CPUs by a measurement.

A CPU has no peak that its name tells: it depends on instructions, clock and what else the machine does. So all ranks
multiply matrices at once for a moment, with the threads and in the type of the training, and so share the cores as they
do in training. The products are not those of the model, and no random number is drawn.
"""

from __future__ import annotations

import logging
import math
import time

import torch
import torch.distributed as dist

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.model.precision import COMPUTE
from onward.trainer.parallel.planning.device_model import peak_flops_per_s

log = logging.getLogger(__name__)

SIDE = 768
"""Of the square matrices: large enough for the full rate of a core, and a product takes some 10 ms."""
MEASURED_S = 0.1


def peak_of_ranks(compute: str, ranks_per_gpu: int, mpi: MPIContext) -> float | None:
    """Return the peak of all ranks together in FLOP/s; None if that of one is not known. Collective: every rank.

    compute: `precision.compute`, resolved. Ranks that share a GPU share its peak.
    """
    own = math.nan
    if mpi.device.type == "cuda":
        name = torch.cuda.get_device_properties(mpi.device).name
        if (rate := peak_flops_per_s(name, compute)) is None:
            log.warning(
                "the peak of %s is not known (parallel/planning/device_model.py has a table): MFU is not shown", name
            )
        else:
            own = rate / ranks_per_gpu
    else:
        _sum(0.0, mpi)  # all ranks begin at the same time
        own = measure_cpu(COMPUTE.get(compute, torch.float32))
    total = _sum(own, mpi)
    return None if math.isnan(total) else total


def measure_cpu(dtype: torch.dtype) -> float:
    """Return how many FLOP/s this process reaches with matrix products in a type, with its threads, now."""
    a, b = (torch.full((SIDE, SIDE), 0.5, dtype=dtype) for _ in range(2))
    result = torch.mm(a, b)  # what is prepared in the first call does not count
    count = 0
    started_at = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_at) < MEASURED_S or not count:
        torch.mm(a, b, out=result)
        count += 1
    return 2 * SIDE**3 * count / elapsed_s


def _sum(number: float, mpi: MPIContext) -> float:
    total = torch.tensor(number, dtype=torch.float64)
    if mpi.world_size > 1:
        dist.all_reduce(total)
    return float(total)
