"""List the checkpoints of a run, and delete or set aside those that are not kept. Needs no torch.

The name of a directory says what state it is in:

    step-000000100                complete, unless a disk has damaged it since
    step-000000100.partial-002    attempt 2 is writing it, or ended while writing it
    step-000000100.damaged        failed its verification; kept for inspection
    step-000000100.discarded      was damaged; its run has begun again at step 0, as its user wanted
    step-000000100.removed        is being deleted

A directory gets its plain name by a rename after every byte of it is on the disk, and loses it before it is deleted.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import fsync
from onward.trainer.run.records import CheckpointInfo, Record, TrainResult, read_record


class Ranked(Protocol):
    """A checkpoint, here or in a store."""

    @property
    def step(self) -> int: ...

    @property
    def best(self) -> bool: ...


C = TypeVar("C", bound=Ranked)


class Announced(Record):
    """The verified checkpoints of a run, oldest first."""

    checkpoints: tuple[CheckpointInfo, ...] = ()


def list_checkpoints(run: RunDir) -> list[Path]:
    """Return the directories with the name of a complete checkpoint, oldest first."""
    found = (path for path in run.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{9,}", path.name))
    # by number, because names of ten digits sort before names of nine
    return sorted(found, key=lambda path: step_in(path.name))


def list_damaged(run: RunDir) -> list[Path]:
    """Return the directories that were set aside as damaged, oldest first."""
    found = (path for path in run.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{9,}\.damaged", path.name))
    return sorted(found, key=lambda path: step_in(path.name))


def step_in(name: str) -> int:
    """Return the step in the name of a checkpoint's directory, complete or damaged."""
    return int(name.removeprefix("step-").partition(".")[0])


def announced(run: RunDir) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints that the checkpoint task has verified, oldest first; none without a readable list.

    Their paths are below this run directory, also if it was moved since the list was written.
    """
    with contextlib.suppress(OnwardError):
        known = read_record(run.announced, Announced).checkpoints
        return tuple(each.model_copy(update={"path": run.checkpoints / each.path.name}) for each in known)
    return ()


def describe_exported(
    step: int, checkpoints: Iterable[CheckpointInfo], trained: TrainResult, checkpoint: CheckpointConfig
) -> str:
    """Return which step is exported: "step 263: evaluation/loss 0.9134; the last, step 329, had 0.9257"."""
    name = checkpoint.best_metric
    measured = {info.step: info.metrics[name] for info in checkpoints if name in info.metrics}
    value = f": {name} {measured[step]:.4g}" if step in measured else ""
    if step == trained.step:
        return f"step {step}, the last{value}"
    return f"step {step}{value}; the last, step {trained.step}, had {trained.metrics.get(name, math.nan):.4g}"


def prunable(checkpoints: Iterable[C], *, keep_newest: int) -> list[C]:
    """Return the checkpoints that are neither the best nor among the newest `keep_newest` (at least 1)."""
    newest_first = sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)
    return [checkpoint for checkpoint in newest_first[max(1, keep_newest) :] if not checkpoint.best]


def remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one is never taken for complete."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)  # of a deletion that a crash interrupted
    path.rename(doomed)
    fsync(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing resumes from it; replaces an earlier damaged one of its step."""
    return _renamed(path, f"{path.name}.damaged")


def discard(run: RunDir) -> None:
    """Rename every checkpoint of a run that has damaged ones only, which then begins again at step 0."""
    # those that were set aside before are discarded together with these
    for path in list_checkpoints(run):
        set_aside(path)
    for path in list_damaged(run):
        _renamed(path, f"{path.name.removesuffix('.damaged')}.discarded")


def _renamed(path: Path, name: str) -> Path:
    """Rename a directory durably; one that has the new name already is deleted."""
    new = path.with_name(name)
    shutil.rmtree(new, ignore_errors=True)
    path.rename(new)
    fsync(path.parent)
    return new


def sweep(run: RunDir, *, attempt: int = 0) -> None:
    """Delete unfinished deletions, and the unfinished checkpoints of attempts up to `attempt`."""
    for path in run.checkpoints.glob("step-*"):
        partial = re.fullmatch(r"step-\d+\.partial-(\d+)", path.name)
        if path.name.endswith(".removed") or (partial and int(partial[1]) <= attempt):
            shutil.rmtree(path, ignore_errors=True)  # another process may be deleting it, too
