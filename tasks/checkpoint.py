"""checkpoint: beside the training, verify what the ranks saved, announce it, record it in MLflow, delete the rest.

Each pass compares the checkpoint directory with the list in `announced.json`, so a restarted task continues where the
last one stopped. A checkpoint that fails its verification is renamed, so that nothing resumes from it. MLflow gets
paths and digests, not the files, when it can be reached. A store gets the files, too, if the run has one
(tasks/storing/run_sender.py). Training never waits for this task.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.mlflow.mlflow_store import TrackingError, TrackingUnavailable, import_for_models
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.shown.metric_points import points_of_step
from onward.tasks.shown.mlflow_outages import Outage, tries_within
from onward.tasks.shown.task_logger import Log, task_logger
from onward.tasks.storing.run_sender import RunSender
from onward.trainer.checkpoint.retention import (
    Announced,
    announced,
    list_checkpoints,
    prunable,
    remove,
    set_aside,
    sweep,
)
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.errors import CheckpointError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.history import RunHistory
from onward.trainer.run.machine.priority import lower_priority
from onward.trainer.run.outcomes.storage import storage_problem
from onward.trainer.run.records import CheckpointInfo, RunIdentity, read_record, write_record


@task(name="checkpoint", task_run_name="checkpoint", cache_policy=NO_CACHE)
def checkpoint(run: RunDir, *, tick_s: float = 0.5, patience_s: float = 60.0) -> CheckpointInfo | None:
    """Look after the run's checkpoints every `tick_s` until the flow closes the event log; write `announced.json`.

    When MLflow cannot be reached at the end, the task tries for another `patience_s`. Returns the best checkpoint, the
    newest when none was evaluated, None when there is none.
    """
    log = task_logger(__name__)
    identity = read_record(run.identity, RunIdentity)
    config = read_config(run).checkpoint
    retention = CheckpointRetention(run, config, log)
    tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
    recorder = CheckpointRecorder(tracker, log, RunHistory(run.events, series=()))
    closed = ready = False
    with RunSender(run, log) as sender:
        while not closed:
            # Read first, so that the last pass sees everything that was saved before the log was closed.
            closed = run.wait_for_end()
            retention.update(sender.held)
            sender.offer(retention.kept)
            recorder.send(retention.kept)
            if retention.kept and not ready:  # soon the last one is exported and registered
                import_for_models()
                ready = True
            if not closed:
                run.wait_for_end(tick_s)
        sender.finish()  # first: what is not there yet is lost with this disk
    recorder.finish(retention.kept, patience_s=0 if storage_problem(run.root) else patience_s)
    if not retention.kept:
        return None
    best = [info for info in retention.kept if info.best]
    if not best:
        log.warning("no checkpoint has the metric %s, so the newest counts as the best", config.best_metric)
    return best[0] if best else retention.kept[-1]


class CheckpointRetention:
    """The checkpoints of a run that are kept on disk. `kept`: those verified and announced, oldest first."""

    def __init__(self, run: RunDir, config: CheckpointConfig, log: Log) -> None:
        self.kept = announced(run)
        self._run = run
        self._config = config
        self._log = log
        self._disk_works = True

    def update(self, held: Collection[Path] = ()) -> None:
        """Verify new checkpoints, delete those no longer needed, announce the rest. An OSError is logged once.

        held: those that are being sent to a store, and stay until they are there.
        """
        try:
            # first what a killed writer has left, so that its space is free for the list
            sweep(self._run)
            found = self._found()
            unneeded = [each for each in prunable(found, keep_newest=self._config.keep_newest) if each.path not in held]
            for each in unneeded:  # first, because writing the list needs space on the disk
                remove(each.path)
            kept = tuple(each for each in found if each not in unneeded)
            if kept != self.kept:
                write_record(self._run.announced, Announced(checkpoints=kept))
            self.kept = kept
        except OSError as error:
            if self._disk_works:
                self._log.warning("checkpoints are neither verified nor deleted until the disk works again: %s", error)
            self._disk_works = False
        else:
            self._disk_works = True

    def _found(self) -> tuple[CheckpointInfo, ...]:
        known = {each.path: each for each in self.kept}
        infos = []
        for path in list_checkpoints(self._run):
            info = known.get(path)
            # a resumed attempt may have written the same step again, with other bytes
            if info is None or not _unchanged(info):
                try:
                    # every byte is read, with a lower priority than the ranks that train meanwhile
                    with ThreadPoolExecutor(1, "verification", lower_priority) as thread:
                        info = thread.submit(verify, path).result().info
                except CheckpointError as error:
                    # renamed, so that no resume tries it, and kept, so that somebody can look at it
                    self._log.warning("%s; renamed to %s", error, set_aside(path).name)
                    continue
                self._log.info("step %d: %s is complete, %.1f MB", info.step, path.name, info.bytes / 1e6)
            infos.append(info)
        return mark_best(infos, self._config)


def _unchanged(info: CheckpointInfo) -> bool:
    """Return whether the checkpoint at this path is still the one that was verified."""
    # The manifest has the digests of all files, so its digest alone is compared; verifying reads gigabytes.
    manifest = info.path / "manifest.json"
    return manifest.exists() and sha256(manifest) == info.digest


def mark_best(checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints with `best` true for the one with the best metric (the first of equals), else false.

    Only a checkpoint that was evaluated at its own step has the metric.
    """
    # of equal values the tuple with the smaller place is the minimum
    values = [config.rank_of(each.metrics) for each in checkpoints]
    ranked = [(value, place) for place, value in enumerate(values) if not math.isnan(value)]
    best = min(ranked)[1] if ranked else -1
    return tuple(each.model_copy(update={"best": place == best}) for place, each in enumerate(checkpoints))


class CheckpointRecorder:
    """Records checkpoints in MLflow by path and digest."""

    def __init__(self, tracker: Tracker, log: Log, history: RunHistory) -> None:
        self._tracker = tracker
        self._log = log
        self._history = history
        self._recorded: set[tuple[str, bool]] = set()  # (digest, best)
        self._shown: frozenset[str] = frozenset()
        self._outage = Outage(log, begins="MLflow cannot be reached; checkpoints are recorded when it is back: %s")

    def send(self, checkpoints: Collection[CheckpointInfo]) -> bool:
        """Record new checkpoints and those whose `best` has changed; return False while MLflow cannot be reached."""
        if self._outage.is_waiting():
            return False
        with self._outage.noticed():
            for each in checkpoints:
                if (each.digest, each.best) not in self._recorded:
                    self._record(each)
            self._mark_deleted(frozenset(each.path.name for each in checkpoints))
        return self._outage.error is None

    def _mark_deleted(self, kept: frozenset[str]) -> None:
        """Mark the records of checkpoints that were deleted since the last call."""
        # MLflow is asked only after a deletion
        if self._shown - kept:
            try:
                self._tracker.mark_deleted_checkpoints()
            except TrackingUnavailable:
                raise
            except TrackingError as error:
                self._log.warning("MLflow refused to mark the records of deleted checkpoints: %s", error)
        self._shown = kept

    def _record(self, info: CheckpointInfo) -> None:
        """Record a checkpoint. A refusal is logged, and not tried again."""
        self._history.read()
        try:
            self._tracker.record_checkpoint(
                info.step,
                path=info.path,
                bytes=info.bytes,
                digest=info.digest,
                metrics=info.metrics,
                points=points_of_step(self._history, info.step) if info.metrics else (),
                best=info.best,
            )
        except TrackingUnavailable:
            raise
        except Exception as error:
            self._log.warning("step %d: MLflow refused the record of %s: %s", info.step, info.path, error)
        # A former best is recorded again when it is the best again.
        self._recorded -= {(info.digest, not info.best)}
        self._recorded.add((info.digest, info.best))

    def finish(self, checkpoints: Collection[CheckpointInfo], *, patience_s: float) -> None:
        """Record the rest; give up after `patience_s`."""
        for _ in tries_within(patience_s):
            if self.send(checkpoints):
                return
        self._log.error("MLflow could not be reached for %.0f s; `onward resume` records the checkpoints", patience_s)
