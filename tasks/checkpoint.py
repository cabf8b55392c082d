"""checkpoint: beside the training, verifies what the ranks saved, tells of it, and keeps the newest and the best.

The directory is the truth: each look compares it with what is announced, so a restart goes on where the last one
was. What fails its verification is set aside, so that nothing resumes from it. MLflow is told by reference, when
it can be reached; training does not wait for any of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError

from onward.infra.tracking import Tracker, TrackingUnavailable
from onward.trainer.checkpoint.manifest import (
    Announced,
    announced,
    expendable,
    list_checkpoints,
    remove,
    set_aside,
    sweep,
    verify,
)
from onward.trainer.config.sections import CheckpointConfig
from onward.trainer.errors import CheckpointError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import CheckpointInfo, RunIdentity, read_record, write_record

OUTAGE_PERIOD_S = 5.0
"""Pause before MLflow is tried again."""
Log = logging.Logger | logging.LoggerAdapter[Any]


@task(name="checkpoint", task_run_name="checkpoint", cache_policy=NO_CACHE)
def checkpoint(run: RunDir, *, tick_s: float = 0.5, patience_s: float = 60.0) -> CheckpointInfo | None:
    """Keep the run's checkpoints until the flow closes the log; leaves `announced.json`.

    Looks every `tick_s`. When MLflow is away at the end, keeps trying for `patience_s`. Returns the best
    checkpoint, the newest when none was evaluated, None when there is none.
    """
    log = _logger()
    identity = read_record(run.identity, RunIdentity)
    config = read_config(run).checkpoint
    keeper = Keeper(run, config, log)
    records = Records(Tracker(identity.tracking_uri, identity.mlflow_run_id), log)
    closed = False
    while not closed:
        closed = run.closed.exists()  # before looking: what was saved before closing is seen below
        keeper.look()
        records.bring_up_to_date(keeper.kept)
        if not closed:
            time.sleep(tick_s)
    records.finish(keeper.kept, patience_s=patience_s)
    if keeper.kept and not any(each.best for each in keeper.kept):
        log.warning("no checkpoint has the metric %s, so the newest counts as the best", config.best_metric)
    return next((each for each in keeper.kept if each.best), keeper.kept[-1] if keeper.kept else None)


def _logger() -> Log:
    """Prefect's logger of this task run; outside of one, the module's."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)


class Keeper:
    """The checkpoints of a run: `kept` are those on disk that are verified and announced, oldest first."""

    def __init__(self, run: RunDir, config: CheckpointConfig, log: Log) -> None:
        self.kept = announced(run)
        self._run = run
        self._config = config
        self._log = log
        self._disk_answers = True

    def look(self) -> None:
        """Verify what is new, delete what is no longer needed, announce the rest. Waits out a disk that fails."""
        try:
            sweep(self._run)
            found = self._found()
            unneeded = expendable(found, keep_newest=self._config.keep_newest)
            for each in unneeded:  # before announcing, which needs room on the disk
                remove(each.path)
            kept = tuple(each for each in found if each not in unneeded)
            if kept != self.kept:
                write_record(self._run.announced, Announced(checkpoints=kept))
            self.kept = kept
        except OSError as error:
            if self._disk_answers:
                self._log.warning("checkpoints are not looked after until the disk answers: %s", error)
            self._disk_answers = False
        else:
            self._disk_answers = True

    def _found(self) -> tuple[CheckpointInfo, ...]:
        known = {each.path: each for each in self.kept}
        infos = []
        for path in list_checkpoints(self._run):
            info = known.get(path)
            if info is None or not _unchanged(info):
                try:
                    info = verify(path)
                except CheckpointError as error:
                    self._log.warning("%s; set aside as %s", error, set_aside(path).name)
                    continue
                self._log.info("step %d: %s is whole, %.1f MB", info.step, path.name, info.bytes / 1e6)
            infos.append(info)
        return judged(infos, self._config)


def _unchanged(info: CheckpointInfo) -> bool:
    """Whether the checkpoint at this path is still the one that was verified."""
    manifest = info.path / "manifest.json"
    return manifest.exists() and sha256(manifest) == info.digest


def judged(checkpoints: Iterable[CheckpointInfo], config: CheckpointConfig) -> tuple[CheckpointInfo, ...]:
    """The same checkpoints with `best` true for the one with the best metric, the first of equals; false for others.

    Only a checkpoint that was evaluated at its own step can be the best.
    """
    checkpoints = tuple(checkpoints)
    sign = 1.0 if config.best_is == "least" else -1.0
    values = [sign * each.metrics.get(config.best_metric, math.nan) for each in checkpoints]
    ranked = [(value, place) for place, value in enumerate(values) if not math.isnan(value)]
    best = min(ranked)[1] if ranked else -1
    return tuple(each.model_copy(update={"best": place == best}) for place, each in enumerate(checkpoints))


class Records:
    """The checkpoints as MLflow knows them: by path and digest. An outage is said once and waited out."""

    def __init__(self, tracker: Tracker, log: Log) -> None:
        self._tracker = tracker
        self._log = log
        self._known: set[tuple[str, bool]] = set()
        self._retry_at = -math.inf

    def bring_up_to_date(self, checkpoints: Iterable[CheckpointInfo]) -> bool:
        """Record what is new, or newly the best or not; False while MLflow is away."""
        if time.monotonic() < self._retry_at:
            return False
        for each in checkpoints:
            if (each.digest, each.best) in self._known:
                continue
            try:
                self._record(each)
            except TrackingUnavailable as error:
                if math.isinf(self._retry_at):
                    self._log.warning("checkpoints are recorded in MLflow when it is back: %s", error)
                self._retry_at = time.monotonic() + OUTAGE_PERIOD_S
                return False
            except Exception as error:
                self._log.warning("step %d: MLflow did not take the record of %s: %s", each.step, each.path, error)
            self._known -= {(each.digest, not each.best)}
            self._known.add((each.digest, each.best))
        self._retry_at = -math.inf
        return True

    def _record(self, info: CheckpointInfo) -> None:
        self._tracker.record_checkpoint(
            info.step, path=info.path, bytes=info.bytes, digest=info.digest, metrics=info.metrics, best=info.best
        )

    def finish(self, checkpoints: Iterable[CheckpointInfo], *, patience_s: float) -> None:
        """Record the rest, for at most `patience_s`."""
        give_up_at = time.monotonic() + patience_s
        while not self.bring_up_to_date(checkpoints):
            if time.monotonic() > give_up_at:
                self._log.error(
                    "MLflow did not take the checkpoints for %.0f s; `onward resume` sends them", patience_s
                )
                return
            time.sleep(0.2)
