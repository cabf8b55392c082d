"""Compare what a run will write with the space that is left, for each file system that it writes to.

    RUN_DIR            checkpoints, the exported file and what is made of it
    the MLflow store   the exported file, where the store is on this machine
    export.path        the exported file
    /tmp               the exported file, while it is packed for MLflow

Directories of one file system share its space. Shards are not counted here: `shard data` knows whether they are cached.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onward.infra.mlflow.mlflow_store import database_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.config.urls import url_of
from onward.trainer.quantities import mb
from onward.trainer.run.directory import RunDir
from onward.trainer.run.home import nearest_existing
from onward.trainer.run.records import Needs

OTHER_FILES = 100
"""About the number of files of a run beside its checkpoints: records, logs, TensorBoard, the exported files."""


@dataclass(frozen=True)
class Share:
    """Something that a run will write."""

    what: str
    path: Path
    """The directory that it is written to, or one above it that exists."""
    bytes: int
    files: int = 1


def shares(run: RunDir, config: RunConfig, needs: Needs, *, tracking_uri: str) -> Iterator[Share]:
    """Yield what the run will write, as far as it is not there yet."""
    number = most_checkpoints(config.checkpoint, config.train, config.export)
    files = number * (config.world_size + 2)  # one of each rank, the manifest and the directory
    kept = sum(path.stat().st_size for path in run.checkpoints.glob("step-*/*") if path.is_file())
    # a resumed run has a part of its checkpoints already; one is written before another is deleted
    left = max(needs.checkpoint_bytes, number * needs.checkpoint_bytes - kept)
    what = f"{number} checkpoints of {mb(needs.checkpoint_bytes)}" if number > 1 else "a checkpoint"
    yield Share(what, run.root, left, files + OTHER_FILES)
    variants = len(config.export.variants)
    made = f" and {variants} file{'s' * (variants > 1)} made of it" if variants else ""
    yield Share(f"the exported file{made}", run.root, needs.model_bytes * (1 + variants))
    # MLflow packs a copy of the file in TMPDIR before it takes it
    yield Share("the exported file while it is packed", Path(tempfile.gettempdir()), needs.model_bytes)
    if database := database_of(tracking_uri):
        yield Share("the exported file in MLflow", nearest_existing(database.parent), needs.model_bytes)
    if config.export.path and not url_of(config.export.path):
        place = nearest_existing(Path(config.export.path).parent)
        yield Share("the exported file at export.path", place, needs.model_bytes)


def most_checkpoints(checkpoint: CheckpointConfig, train: TrainConfig, export: ExportConfig) -> int:
    """Return how many checkpoints of the run can be on the disk at once: the newest, the best and the one written."""
    most = checkpoint.keep_newest + 2
    # by time, or at the best evaluations, one may follow any step
    at_any_step = checkpoint.minutes > 0 or export.checkpoint == "best"
    if not checkpoint.period and not at_any_step:
        return 1
    # with num_epochs the number of steps is known only when the data is sharded
    period = 1 if at_any_step else checkpoint.period
    return min(most, math.ceil(train.num_steps / period)) if train.num_steps else most


def space_problems(found: Iterable[Share]) -> Iterator[str]:
    """Yield a sentence for each file system with too little space, or too few inodes, for its shares."""
    # several directories may share one file system, whose space they use together
    by_device: dict[int, list[Share]] = defaultdict(list)
    for share in found:
        by_device[share.path.stat().st_dev].append(share)
    for on_it in by_device.values():
        where = on_it[0].path
        place = os.statvfs(where)
        free = place.f_bavail * place.f_frsize
        needed = sum(share.bytes for share in on_it)
        files = sum(share.files for share in on_it)
        if free < needed:
            listed = ", ".join(f"{share.what} {mb(share.bytes)}" for share in on_it if share.bytes)
            yield (
                f"{mb(free)} of disk are free on the file system of {where}, but the run needs at least {mb(needed)} "
                f"there: {listed}; make room, lower checkpoint.keep_newest, or set ONWARD_HOME to a directory on a "
                "larger disk"
            )
        if place.f_files and place.f_favail < files:  # without f_files it has no such limit
            yield (
                f"{place.f_favail} inodes are free on the file system of {where}, but the run writes about {files} "
                "files there; delete files, or set ONWARD_HOME to a directory on another file system"
            )
