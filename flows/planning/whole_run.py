"""The plan of a whole run: its layout, steps, time and disk, and what differs from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from onward.flows.configuration import prefect_at_home
from onward.flows.planning.checkpoint_period import CheckpointTimes, checkpoint_times
from onward.flows.planning.time_needed import TimeNeeded, key_of_run, known_pace, number_of_steps, time_needed
from onward.tasks.checks.disk_space import most_checkpoints, shares, space_problems
from onward.tasks.checks.registered_models import store_of
from onward.tasks.checks.rehearsing import Preparation
from onward.trainer.config.flat_settings import changed_settings
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.storage.row_counts import RowCount, count_rows
from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster
from onward.trainer.parallel.planning.plan_record import Plan, with_plan
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.home import nearest_existing
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.records import Needs, Record, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies
from onward.trainer.run.timing.step_timing import calibration_file


class DiskShare(Record):
    """Something that the run writes."""

    what: str
    place: str
    """The directory, or one above it that exists."""
    bytes: int


class DiskNeeded(Record):
    """What a run writes at most at a time."""

    checkpoint_bytes: int
    checkpoints: int
    """How many are on the disk at most: the newest (checkpoint.keep_newest), the best, and the one being written."""
    model_bytes: int
    """The exported file with its external data."""
    shares: tuple[DiskShare, ...]
    total_bytes: int
    problems: tuple[str, ...] = ()
    """File systems without room for it."""


class RunPlan(Plan):
    """A layout, and what the whole run takes."""

    rows: RowCount
    num_steps: int | None
    """Weight updates; None = not known before the data is sharded."""
    num_samples: int | None
    """Samples of the whole run, counted with repetition; None = not known."""
    epochs: float | None
    """Passes over the training rows; None = not known."""
    time: TimeNeeded
    disk: DiskNeeded
    copy_bytes: int
    """Host memory of all ranks for the copy of a checkpoint that is written beside the training; 0 = the training waits
    while it is written."""
    checkpoint_times: CheckpointTimes
    """How long a checkpoint takes, and what failures cost."""
    changed: Mapping[str, Any]
    """The settings that differ from their defaults."""
    origins: Mapping[str, str] = {}
    """Where each of those came from."""


def plan_run(
    config: RunConfig,
    copies: LocalCopies,
    *,
    measured_steps: int = 0,
    origins: Mapping[str, str],
    cluster: Cluster = THIS_MACHINE,
    progress: TextIO | None = None,
) -> RunPlan:
    """Return the plan of a run. measured_steps: train so many steps first, and keep their pace; 0 = do not.

    cluster: what is planned for. progress: where lines are written that say how far `auto` is; None = nowhere.
    Raises ConfigError or UnsupportedModel when there is no such layout, and the errors of `measure`.
    """
    local = completed(with_copies(config, copies))
    layout = Preparation(config, copies).plan(cluster, progress)
    chosen = with_plan(local, layout)
    # what was measured on this machine says nothing of another one
    pace = None if measured_steps or cluster.gpu else known_pace(chosen)
    if measured_steps:
        # here, because it imports Prefect, which takes as long as the rest of a plan's process without ranks
        with prefect_at_home():
            from onward.flows.planning.step_measurement import measure
        make_private(onward_home())
        # with the sizes that this plan shows, which `auto` might choose otherwise a second time
        given = chosen.parallel.model_copy(update={"sizes": "given"})
        _, pace = measure(chosen.model_copy(update={"parallel": given}), LocalCopies(), steps=measured_steps)
        write_record(calibration_file(key_of_run(chosen)), pace)
    rows = count_rows(local, onward_home() / "shards")
    samples = chosen.train.samples_of_run(rows.train) if chosen.train.num_steps or rows.train else None
    epochs = samples / rows.train if samples is not None and rows.train else None
    changed = changed_settings(config)
    origins = {key: where for key, where in origins.items() if key in changed}
    assert layout.needs is not None, "the process of a plan computes them"
    needed = time_needed(chosen, layout, rows, pace)
    # whether checkpoints are copied: "auto" = where the hosts have the memory (trainer/checkpoint/background.py)
    has_memory = not (layout.device.startswith("CPU") and chosen.parallel.memory_gib)
    wanted = chosen.checkpoint.background
    is_copied = has_memory if wanted == "auto" else wanted
    copy_bytes = layout.needs.checkpoint_bytes if is_copied else 0
    return RunPlan(
        **{name: getattr(layout, name) for name in Plan.model_fields},
        rows=rows,
        num_steps=number_of_steps(chosen.train, rows),
        num_samples=samples,
        epochs=epochs,
        time=needed,
        disk=disk_needed(chosen, layout.needs),
        copy_bytes=copy_bytes,
        checkpoint_times=checkpoint_times(
            chosen.checkpoint,
            cluster,
            layout.needs,
            ranks=layout.num_ranks,
            copied=copy_bytes,
            step_s=needed.step_s,
        ),
        changed=changed,
        origins=origins,
    )


def disk_needed(config: RunConfig, needs: Needs) -> DiskNeeded:
    """Return what the run writes; shards are not counted, because runs share them."""
    home = RunDir(nearest_existing(onward_home()))
    found = list(shares(home, config, needs, tracking_uri=store_of(config.monitor)))
    return DiskNeeded(
        checkpoint_bytes=needs.checkpoint_bytes,
        checkpoints=most_checkpoints(config.checkpoint, config.train, config.export),
        model_bytes=needs.model_bytes,
        shares=tuple(DiskShare(what=each.what, place=str(each.path), bytes=each.bytes) for each in found),
        total_bytes=sum(each.bytes for each in found),
        problems=tuple(space_problems(found)),
    )
