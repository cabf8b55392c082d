"""What failures cost a run, and how often it should save a checkpoint.

With C seconds in which the training waits for a checkpoint, M seconds between failures, R to start again, and W more
seconds until a checkpoint that is written beside the training is complete, a period of T seconds loses about the share

    C / T + (T / 2 + W + R) / M

of the time: checkpoints, and the work since the last one. The best T is about sqrt(2 C M) (Young, A First Order
Approximation to the Optimum Checkpoint Interval, 1974); the correction for C that is not small against M is that of
Daly, A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps, 2006, equation 37.
"""

from __future__ import annotations

import math

from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.parallel.planning.cluster import Cluster
from onward.trainer.run.records import Needs, Record

STORAGE_BYTES_PER_S = 1e9
"""At which checkpoints are written if nothing is said: one NFS server, or one disk."""
COPY_BYTES_PER_S = 10e9
"""Of one rank, from the device into the memory of its host: PCIe 4.0 with 16 lanes, less what pageable memory costs."""
RESTART_S = 60.0
"""From a failure to the next step, without reading the checkpoint: noticing it, starting ranks, importing, loading."""


class CheckpointTimes(Record):
    """How long a checkpoint takes, and what failures cost with one period and another."""

    storage_bytes_per_s: float
    storage_given: bool
    """False: it is a guess."""
    write_s: float
    """Until a checkpoint is complete."""
    wait_s: float
    """In which the training waits for it."""
    failures_every_s: float = 0.0
    """Mean time between failures; 0 = not given, and the fields below are 0."""
    restart_s: float = 0.0
    best_period_s: float = 0.0
    best_loss: float = 0.0
    """The share of the time that is lost with the best period."""
    period_s: float = 0.0
    """The shorter period of the configuration, by steps or by minutes; 0 = it saves the last step only, or by steps
    alone, whose time is not known."""
    loss: float = 0.0
    """The share that is lost with it."""


def checkpoint_times(
    saving: CheckpointConfig, cluster: Cluster, needs: Needs, *, ranks: int, copied: int, step_s: float
) -> CheckpointTimes:
    """Return what checkpoints take and failures cost. copied: bytes of all ranks that are copied and then written
    beside the training; 0 = the training waits."""
    rate = cluster.storage_bytes_per_s or STORAGE_BYTES_PER_S
    write_s = needs.checkpoint_bytes / rate
    wait_s = min(write_s, copied / ranks / COPY_BYTES_PER_S) if copied else write_s
    found = CheckpointTimes(
        storage_bytes_per_s=rate, storage_given=bool(cluster.storage_bytes_per_s), write_s=write_s, wait_s=wait_s
    )
    failures_s = cluster.failures_every_s
    if not failures_s:
        return found
    restart_s = RESTART_S + write_s
    # one checkpoint is written at a time
    best_s = max(best_period(wait_s, failures_s), write_s)
    later_s = write_s - wait_s + restart_s
    # the training saves when either is due; 0 = not set, or the time of a step is not known
    given = (saving.period * step_s, 60 * saving.minutes)
    period_s = min((each for each in given if each > 0), default=0.0)
    return found.model_copy(
        update={
            "failures_every_s": failures_s,
            "restart_s": restart_s,
            "best_period_s": best_s,
            "best_loss": lost_share(best_s, wait_s, later_s, failures_s),
            "period_s": period_s,
            "loss": lost_share(period_s, wait_s, later_s, failures_s),
        }
    )


def best_period(wait_s: float, failures_s: float) -> float:
    """Return Daly's estimate of the best time between checkpoints."""
    if wait_s >= 2 * failures_s:
        return failures_s
    share = wait_s / (2 * failures_s)
    return math.sqrt(2 * wait_s * failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - wait_s


def lost_share(period_s: float, wait_s: float, later_s: float, failures_s: float) -> float:
    """Return the share of the time that is lost, at most all of it; later_s: W + R, as above."""
    return min(1.0, wait_s / period_s + (period_s / 2 + later_s) / failures_s) if period_s else 1.0
