"""monitor: beside the training, send the event log to the reporters (MLflow, ...), Prefect and the terminal.

The event log stays on disk, so nothing is lost: MLflow may be unavailable for hours, this process may be killed at any
moment, and the next monitor continues at the cursor. Training never waits for this task.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Literal, cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from onward.tasks.promotion.pruning import MedianRule
from onward.tasks.shown.class_tables import Table, class_table, write_tables
from onward.tasks.shown.object_tables import object_table
from onward.tasks.shown.prefect_events import emit
from onward.tasks.shown.prefect_results import show_curve
from onward.tasks.shown.prefect_server import prefect_answers
from onward.tasks.shown.reporters import Reader, reporters_of
from onward.tasks.shown.task_logger import IN_TRAIN_LOG, Log, task_logger
from onward.tasks.shown.training_progress import Periodic, Progress
from onward.trainer.events import CheckpointSaved, Ended, Evaluated, Event, NonFiniteLoss, Started
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import AttemptResult, MetricsSummary, record_if_written, write_record

LOG_PERIOD_S = 10.0
ARTIFACT_PERIOD_S = 5.0
EVENT_PERIOD_S = 10.0


@task(name="monitor", task_run_name="monitor", cache_policy=NO_CACHE)
def monitor(run: RunDir, *, tick_s: float = 0.5, patience_s: float = 60.0) -> MetricsSummary:
    """Read the event log every `tick_s` until the flow closes it, send the rest, write `metrics.json` and `classes/`.

    When MLflow cannot be reached at the end, the task tries for another `patience_s`, logs an error and leaves the rest
    to the next monitor of this run (`onward resume`).
    """
    log = task_logger(__name__)
    history = RunHistory(run.events)
    artifact = ProgressArtifact()
    progress = Progress(history)
    lines = LogLines(log)
    announcer = Announcer(run)
    pruning = MedianRule(run, history)
    reporters = reporters_of(run, log, patience_s=patience_s)
    # each of them gets the events of earlier attempts as well, and decides itself what is new
    readers: list[Reader] = [lines, announcer, pruning, *reporters]
    closed = False
    while not closed:
        # Read first, so that the last pass reads everything that was written before the log was closed.
        closed = run.wait_for_end()
        for event in history.follow():
            for reader in readers:
                reader.add(event)
        for reporter in reporters:
            reporter.flush(last=closed)
        artifact.show(progress, now=closed)
        # after the first pass, which reads what the log had before this monitor began
        announcer.is_new = True
        if not closed:
            lines.tick(progress)
            pruning.poll()
            run.wait_for_end(tick_s)
    summary = progress.summary(_outcome(run))
    tables: list[Table] = [class_table(event, run) for event in history.confusions.values()]
    tables += [object_table(event, run) for event in history.precisions.values()]
    show_tables(tables)
    show_curve(run, history)
    write_tables(run, tables)
    for reporter in reporters:
        reporter.close(summary)
    write_record(run.metrics, summary)
    return summary


def _outcome(run: RunDir) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """Return how training ended, from the result of the newest attempt; without a result it has failed."""
    result = record_if_written(run.result(run.current_attempt), AttemptResult)
    if result is None:
        return "FAILED"
    return "FINISHED" if result.status == "done" else "KILLED"


class LogLines:
    """Logs each resume, evaluation and checkpoint and an early end, and the progress every LOG_PERIOD_S.

    Evaluations and checkpoints are in train.log already; these lines are for Prefect's page of the run.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._due = Periodic(LOG_PERIOD_S)
        self._live = False

    def add(self, event: Event) -> None:
        """Log a new event. Events from before the first `tick` belong to an earlier monitor."""
        if not self._live:
            return
        match event:
            case Started() if event.resumed:
                log = self._log.warning if event.damaged else self._log.info
                log("attempt %d %s", event.attempt, event.resumed)
            case Evaluated() | CheckpointSaved():
                self._log.info("%s", event.sentence(), extra=IN_TRAIN_LOG)
            case NonFiniteLoss():
                self._log.warning("step %d: %s", event.step, event.text)
            case Ended() if event.ended_early:
                self._log.info("step %d: the run ends early: %s", event.step, event.ended_early)

    def tick(self, progress: Progress) -> None:
        """Log the progress if it is due. Call after the new events were added."""
        self._live = True
        if self._due() and progress.step:
            self._log.info("%s", progress)


# -- Prefect: an outage of its server must neither end nor delay the monitor


class Announcer:
    """Emits an event in Prefect for each checkpoint and evaluation, at most one of each in EVENT_PERIOD_S."""

    def __init__(self, run: RunDir) -> None:
        self.is_new = False
        """Whether the events are new. Those of the first pass belong to an earlier monitor, or began with this one."""
        self._run = run
        self._due = {"checkpoint": Periodic(EVENT_PERIOD_S), "evaluation": Periodic(EVENT_PERIOD_S)}

    def add(self, event: Event) -> None:
        """Emit the event, if automations may act on it."""
        if not self.is_new:
            return
        match event:
            case CheckpointSaved() if self._due[event.kind]():
                emit("checkpoint", self._run, {"step": event.step, "path": event.path})
            case Evaluated() if self._due[event.kind]():
                emit("evaluation", self._run, {"step": event.step, "metrics": event.values})


class ProgressArtifact:
    """The progress bar on the task run's page. Outside of a task run it does nothing."""

    def __init__(self) -> None:
        self._due = Periodic(ARTIFACT_PERIOD_S)
        self._id: UUID | None = None

    def show(self, progress: Progress, *, now: bool = False) -> None:
        """Update the artifact, every few seconds or `now`."""
        # A direct call of the task's function has no task run, and so no page for the artifact.
        if TaskRunContext.get() is None or not (self._due() or now):
            return
        with contextlib.suppress(Exception):
            if not prefect_answers():
                return
            if self._id is None:
                self._id = cast(UUID, create_progress_artifact(progress.percent, "training", str(progress)))
            else:
                update_progress_artifact(self._id, progress.percent, str(progress))


def show_tables(tables: Iterable[Table]) -> None:
    """Show the tables of classes on the flow run's page. Outside of a task run it does nothing."""
    if TaskRunContext.get() is None:
        return
    for table in tables:
        key = "-".join(["classes", *re.findall(r"[a-z0-9]+", table.loss.lower())])
        with contextlib.suppress(Exception):
            if not prefect_answers():
                return
            create_markdown_artifact(table.markdown(), key=key, description="How well each class is recognised")
