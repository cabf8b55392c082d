"""How much disk a run takes: each checkpoint and how many are kept, the exported file and its copies."""

from __future__ import annotations

from onward.tasks.checks.disk_space import most_checkpoints, shares, space_problems
from onward.tasks.checks.registered_models import store_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.records import Needs, Record


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


def disk_needed(config: RunConfig, needs: Needs) -> DiskNeeded:
    """Return what the run writes; shards are not counted, because runs share them."""
    home = next(each for each in (onward_home(), *onward_home().parents) if each.exists())
    found = list(shares(RunDir(home), config, needs, tracking_uri=store_of(config.monitor)))
    return DiskNeeded(
        checkpoint_bytes=needs.checkpoint_bytes,
        checkpoints=most_checkpoints(config),
        model_bytes=needs.model_bytes,
        shares=tuple(DiskShare(what=each.what, place=str(each.path), bytes=each.bytes) for each in found),
        total_bytes=sum(each.bytes for each in found),
        problems=tuple(space_problems(found)),
    )
