"""Throughput: what training costs since the last line of the log, as scalars of its next line.

    samples_per_s, tokens_per_s       samples of the updates; tokens without padding, where the data is text
    step_s, data_wait                 time of an update; share of it in which ranks waited for samples, their mean
    tflops                            model FLOPs of the updates / time / 1e12, of all ranks together (flops.py)
    mfu                               tflops / peak of all ranks: model FLOPs utilisation (peak_flops.py)
    memory_bytes                      of the rank with most: peak of its process, or of what torch allocated on its GPU;
                                      looked at once a second

MFU: Chowdhery et al. 2022, PaLM, appendix B (https://arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.observing.step_clock import StepClock
from onward.trainer.parallel.planning.sample_flops import SampleFlops

log = logging.getLogger(__name__)

MEMORY_PERIOD_S = 1.0
"""Longest time between two looks at the memory, which cost a message between the ranks."""


class Work(NamedTuple):
    """What a rank, or all of them together, have done in a step."""

    flops: float
    num_tokens: float
    """Without padding."""
    memory_is_due: float
    """Whether the ranks look at their memory after this step: 1 on a rank that wants it."""


class Throughput:
    """Adds up the work of updates, and divides it by the time that the clock counts as steps.

    flops: None if they cannot be counted. peak_flops_per_s: of all ranks; None if it is not known. counts: whether this
    rank counts its micro-batches, as one rank of each replica does. is_text: whether the data has tokens.
    """

    def __init__(
        self,
        flops: SampleFlops | None,
        peak_flops_per_s: float | None,
        mpi: MPIContext,
        clock: StepClock,
        *,
        counts: bool,
        is_text: bool,
        step: int,
    ) -> None:
        self._flops = flops
        self._peak = peak_flops_per_s
        self._mpi = mpi
        self._clock = clock
        self._counts = counts
        self._is_text = is_text
        self._memory = 0.0
        self._memory_at = -math.inf
        self.begin(step)

    def begin(self, step: int) -> None:
        """Begin anew after a step."""
        self._clock.mark()
        self._since_s = self._clock.in_steps_s
        self._waited_s = self._clock.seconds["data_wait"]
        self._step = step
        self._samples = self._done = self._tokens = 0.0

    def work_of(self, batches: Sequence[Batch]) -> Work:
        """Return the work of this rank's micro-batches, and whether memory is due, to be summed over all ranks.

        By the clock of rank 0, as all ranks must decide alike.
        """
        # a sum over the ranks is above zero if rank 0 says so
        due = float(self._mpi.rank == 0 and time.monotonic() - self._memory_at >= MEMORY_PERIOD_S)
        # another rank of the replica counts the same micro-batches
        if not self._counts:
            return Work(0.0, 0.0, due)
        num_tokens = sum(batch.num_tokens for batch in batches)
        return Work(self._flops.of(batches) if self._flops else 0.0, float(num_tokens), due)

    def add(self, num_samples: int, work: Work) -> None:
        """Add the work of one update, of all ranks, and look at the memory if it is due.

        Collective: every rank of the world, with the same numbers.
        """
        self._samples += num_samples
        self._done += work.flops
        self._tokens += work.num_tokens
        if work.memory_is_due:
            self._memory = self._greatest(peak_memory(self._mpi.device))
            self._memory_at = time.monotonic()

    def values(self, step: int) -> dict[str, float]:
        """Return the scalars of the line of a step."""
        self._clock.mark()
        elapsed_s = self._clock.in_steps_s - self._since_s
        found = {
            "samples_per_s": self._samples / elapsed_s,
            "data_wait": (self._clock.seconds["data_wait"] - self._waited_s) / elapsed_s,
            "step_s": elapsed_s / (step - self._step),
        }
        if self._is_text:
            found["tokens_per_s"] = self._tokens / elapsed_s
        if self._flops:
            found["tflops"] = self._done / elapsed_s / 1e12
            found |= self._share_of_peak(self._done / elapsed_s)
        return found | {"memory_bytes": self._memory}

    def _share_of_peak(self, flops_per_s: float) -> dict[str, float]:
        """Return {"mfu": ...}: NaN for the first share above 1, whose peak was measured beside other work, then {}."""
        if not self._peak:
            return {}
        mfu = flops_per_s / self._peak
        if mfu <= 1:
            return {"mfu": mfu}
        if self._mpi.rank == 0:
            log.warning(
                "the training computes %.0f %% of the peak of %.3g TFLOP/s that was measured at its start, beside "
                "other work on this machine: MFU is not shown any more in this attempt, and was too high before",
                *(100 * mfu, self._peak / 1e12),
            )
        self._peak = None
        return {"mfu": math.nan}

    def _greatest(self, number: float) -> float:
        """Return the greatest number of all ranks."""
        if self._mpi.world_size == 1:
            return number
        most = torch.tensor(number, dtype=torch.float64)  # on the host: a device is not waited for
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far: allocated by torch on a GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage: its peak is at first that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
