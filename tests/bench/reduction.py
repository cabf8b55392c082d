"""Time to sum a bucket of gradients over the replicas of one host, by each route.

    python -m tests.bench.reduction [--sizes-kib 64 256 1024 4096 16384] [--rounds 15]

The routes take turns on the same ranks, so that the ratios hold on a busy machine; the median of each is shown, and
how many times faster than gloo's all-reduce it is. Compression costs arithmetic, which is not regained where ranks
share memory: it is for networks. Exits with 1 unless MPI is the faster one for buckets as the reducer packs them, and
larger ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.replicas.channels import open_channel
from onward.trainer.parallel.replicas.reducer import BUCKET_BYTES
from onward.trainer.parallel.replicas.transport import Direct, Summed
from tests.support.ranks import run_ranks

SIZES_KIB = (64, 256, 1024, 4096, 16384)
ROUTES = ("gloo", "gloo fp16", "gloo bf16", "mpi", "mpi fp16", "mpi bf16")
ROUNDS = 15
WARM_UP = 2
"""Rounds that do not count."""


def times(mpi: MPIContext, sizes_kib: list[int], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of one bucket, from sending to having it: for each route, one median for each size."""
    everyone = [list(range(mpi.world_size))]
    carriers = {}
    for route in ROUTES:
        by, _, compression = route.partition(" ")
        channel = open_channel("mpi" if by == "mpi" else "torch", everyone, timeout_s=30)
        assert channel is not None
        if route == "gloo":
            carriers[route] = Direct(dist.group.WORLD)
        else:
            carriers[route] = Summed(channel, compression=compression or "none", device=mpi.device, timeout_s=30)
    found: dict[str, list[float]] = {route: [] for route in ROUTES}
    for size in sizes_kib:
        flat = torch.ones(size * 256)
        taken: dict[str, list[float]] = {route: [] for route in ROUTES}
        for _ in range(rounds):
            for route, carrier in carriers.items():
                dist.barrier()
                started = time.perf_counter()
                carrier.start(flat.fill_(1.0), [flat.numel()])()
                taken[route].append((time.perf_counter() - started) * 1e3)
        for route in ROUTES:
            found[route].append(statistics.median(taken[route][WARM_UP:]))
    for carrier in carriers.values():
        carrier.close()
    return found


def main() -> int:
    """Print a table for 2 and for 4 ranks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-kib", nargs="+", type=int, default=list(SIZES_KIB))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"more than the {WARM_UP} that do not count")
    options = parser.parse_args()
    faster, (_, most) = True, BUCKET_BYTES["gloo"]
    for num_ranks in (2, 4):
        found = run_ranks(num_ranks, "tests.bench.reduction:times", options.sizes_kib, options.rounds, timeout_s=240)[0]
        print(f"\n{num_ranks} ranks; milliseconds, and times faster than gloo")
        print(f"{'KiB':>6} " + "".join(f"{route:>17}" for route in ROUTES))
        for place, size in enumerate(options.sizes_kib):
            base = found["gloo"][place]
            cells = (f"{found[route][place]:>9.2f} ({base / found[route][place]:>4.1f})" for route in ROUTES)
            print(f"{size:>6} " + "".join(f"{cell:>17}" for cell in cells), flush=True)
            faster &= size * 1024 < most or found["mpi"][place] < base
    print(f"from {most >> 10} KiB on, MPI is {'faster' if faster else 'NOT faster'}")
    return 0 if faster else 1


if __name__ == "__main__":
    sys.exit(main())
