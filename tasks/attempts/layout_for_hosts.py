"""Choose the layout of the next attempt for the hosts that are left: fewer replicas, or what `auto` finds for them.

all hosts, with slots for all ranks      the configured layout
one replica and more fit                 fewer replicas, each with more samples of the same batch
one replica does not fit                 data x tensor x pipeline of `parallel = "auto"`: a checkpoint loads in any
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from onward.infra.job.hosts import write_hostfile
from onward.tasks.attempts.retry_policy import adjustments
from onward.tasks.checks.rehearsing import NONE, Preparation
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable, UnsupportedModel
from onward.trainer.run.adjustments import Adjustments, fewer_replicas, with_adjustments
from onward.trainer.run.allowed_code import AllowedCode
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import read_record, record_if_written, write_record
from onward.trainer.run.remote.local_copies import LocalCopies

log = logging.getLogger(__name__)

MOST_PLANS = 3
"""Numbers of ranks for which a layout is looked for, each in a process that opens the model."""
WITHOUT_LAYOUT = {
    **{"sizes": "auto", "data": 1, "tensor": 1, "pipeline": 1, "schedule": "1f1b", "stages_per_rank": 1},
    **{"cuts": (), "units": 0, "shard": 0, "sequence_parallel": False},
}
"""[parallel] as `auto` takes it."""


def use_hosts(run: RunDir, hosts: Mapping[str, int], *, lost: str) -> None:
    """Choose the layout of the next attempt, for hosts with so many slots.

    lost: which hosts do not answer, in words; "" if all do. Raises RuntimeUnavailable where no layout fits, or where
    `launch.on_host_lost` allows no other one.
    """
    config = read_config(run, "given")
    parallel = config.parallel
    changes = adjustments(run)
    slots = sum(hosts.values())
    if not lost and slots >= config.world_size:
        if changes.data:
            log.warning("all %d hosts answer again: the layout is the configured one", len(hosts))
            write_record(run.adjusted, changes.with_configured_layout())
        return
    lost = lost or f"{config.launch.hostfile} has {slots} slots, and the run has {config.world_size} ranks"
    hostfile = run.root / "hosts-left"
    found = None
    if config.launch.on_host_lost == "fewer" and slots:
        write_hostfile(hostfile, hosts)
        found = fewer_replicas(config, changes, ranks=slots, hostfile=str(hostfile))
        found = found or _other_layout(run, changes, slots, hostfile)
    if found is None:
        raise RuntimeUnavailable(
            f"{lost}; the {slots} slots that are left take no layout of this run: it needs "
            f"{parallel.tensor * parallel.pipeline} ranks for one replica, and replicas that divide a batch of "
            f"{config.train.global_batch_size}"
        )
    write_record(run.adjusted, found)
    now = with_adjustments(config, found)
    layout = _described(parallel, now.parallel, now.train)
    log.warning("%s; going on with %s on %s (launch.on_host_lost)", lost, layout, ", ".join(hosts))


def _other_layout(run: RunDir, changes: Adjustments, slots: int, hostfile: Path) -> Adjustments | None:
    """Return changes for the layout that `auto` chooses for as many ranks as possible; None if it finds none."""
    config = read_config(run, "given")
    copies = record_if_written(run.remote, LocalCopies) or NONE
    code = read_record(run.code, AllowedCode).files if run.code.exists() else None
    for ranks in range(slots, max(0, slots - MOST_PLANS), -1):
        log.warning("one replica does not fit on the hosts that are left; looking for a layout of %d ranks", ranks)
        launch = config.launch.model_copy(update={"num_ranks": ranks, "hostfile": str(hostfile)})
        parallel = config.parallel.model_copy(update=WITHOUT_LAYOUT)
        planned = config.model_copy(update={"launch": launch, "parallel": parallel})
        # ConfigError, ValueError: nothing fits, or the rules refuse it
        with contextlib.suppress(ConfigError, UnsupportedModel, ValueError):
            plan = Preparation(planned, copies, run.quantized, code).plan()
            layout = {
                "data": plan.parallel.data,
                "parallel": plan.parallel,
                "recompute": plan.recompute,
                # `with_adjustments` divides it by the same number
                "micro_batch": plan.micro_batch_size * changes.micro_batch_divisor,
                "hostfile": str(hostfile),
            }
            found = changes.model_copy(update=layout)
            # for its checks alone: a layout that the rules refuse is passed over
            with_adjustments(config, found)
            return found
    return None


def _described(was: ParallelConfig, now: ParallelConfig, train: TrainConfig) -> str:
    """Return in words what has changed of a layout. train: as it is now."""
    if (was.tensor, was.pipeline) == (now.tensor, now.pipeline):
        layout = f"{now.data} of {was.data} replicas"
    else:
        layout = now.layout
    steps = train.gradient_accumulation_steps
    samples = train.global_batch_size // (now.data * steps)
    micro_batches = f"{steps} micro-batches of " if steps > 1 else ""
    return f"{layout}, each with {micro_batches}{samples} samples in a step"
