"""Write torch's record of the allocations of a rank whose GPU memory runs out (`monitor.memory_snapshot`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.outcomes.ending_kinds import is_out_of_memory

log = logging.getLogger(__name__)

MOST_ALLOCATIONS = 100_000
"""Allocations that torch remembers, the newest ones."""


def snapshot_path(run: RunDir, attempt: int, rank: int) -> Path:
    """Return the path of the snapshot of a rank."""
    return run.memory / f"{attempt:03d}-rank-{rank:05d}.pickle"


@contextlib.contextmanager
def memory_snapshots(monitor: MonitorConfig, run: RunDir, mpi: MPIContext, *, attempt: int) -> Iterator[None]:
    """Write a snapshot if memory runs out inside a block, and add its path as a note to the error."""
    if monitor.memory_snapshot and mpi.device.type != "cuda" and mpi.rank == 0:
        log.warning(
            "monitor.memory_snapshot = true has no effect: it needs a GPU, and this run trains on the %s, whose "
            "allocations torch does not record",
            mpi.device.type.upper(),
        )
    if not monitor.memory_snapshot or mpi.device.type != "cuda":
        yield
        return
    # torch remembers allocations only from here on
    torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            # the error itself must reach its record, whatever happens here with no memory left
            with contextlib.suppress(Exception):
                path = snapshot_path(run, attempt, mpi.rank)
                with durable_file(path) as unfinished:
                    # only torch's page reads this pickle
                    torch.cuda.memory._dump_snapshot(str(unfinished))  # type: ignore[no-untyped-call]
                error.add_note(f"What was in the memory of the rank is in {path}")
        raise
