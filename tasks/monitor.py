"""monitor: beside the training, send the event log to MLflow, TensorBoard, Prefect and the terminal.

    events.jsonl --read from the cursor's offset--> Shipper --1,000 points at a time--> MLflow
                                                       |
                                                       +--after each batch--> cursor.json

The event log stays on disk, so nothing is lost: MLflow may be unavailable for hours, this process may be killed at any
moment, and the next monitor continues at the cursor. Training never waits for this task. In the other direction, a flow
run that is cancelled or suspended in Prefect's UI stops its job.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast
from uuid import UUID

from prefect import runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from pydantic import Field

from onward.infra import mpirun
from onward.infra.tensorboard import TensorBoard
from onward.infra.tracking import BATCH, Point, Status, Tracker, TrackingError, metric_name
from onward.tasks.task_logger import Log, task_logger
from onward.trainer.events import Event, read_events
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, MetricsSummary, Record, RunIdentity, read_record, write_record

LOG_PERIOD_S = 10.0
ARTIFACT_PERIOD_S = 5.0
STATE_PERIOD_S = 3.0
OUTAGE_PERIOD_S = 5.0
"""Seconds until MLflow is tried again after an outage."""

TAIL_BYTES = 256
"""Bytes before the cursor whose checksum shows that the log is still the same one."""


@task(name="monitor", task_run_name="monitor", cache_policy=NO_CACHE)
def monitor(run: RunDir, *, tick_s: float = 0.5, patience_s: float = 60.0) -> MetricsSummary:
    """Read the event log every `tick_s` until the flow closes it, send what is left, and write `metrics.json`.

    When MLflow cannot be reached at the end, the task tries for another `patience_s`, logs an error and leaves the rest
    to the next monitor of this run (`onward resume`).
    """
    log = task_logger(__name__)
    identity = read_record(run.identity, RunIdentity)
    shipping = RetryingShipper(Shipper(run, Tracker(identity.tracking_uri, identity.mlflow_run_id)), log)
    board = TensorBoard(run.tensorboard, wanted=read_config(run).monitor.tensorboard)
    progress, lines = Progress(), LogLines(log)
    artifact, stop = ProgressArtifact(), StopRequest(run)
    offset, closed = 0, False
    while not closed:
        # Read first, so that the last pass reads everything that was written before the log was closed.
        closed = run.closed.exists()
        for event, after in read_events(run.events, offset):
            progress.add(event)
            add_to_tensorboard(board, event)
            lines.add(event)
            offset = after
        board.flush()
        shipping.tick()
        artifact.show(progress, now=closed)
        if not closed:
            lines.tick(progress)
            stop.poll()
            time.sleep(tick_s)
    board.close()
    summary = progress.summary(_outcome(run))
    shipping.finish(summary.status, patience_s=patience_s)
    write_record(run.metrics, summary)
    return summary


def add_to_tensorboard(board: TensorBoard, event: Event) -> None:
    """Write an event's metrics or histogram under their own names."""
    if event.kind == "histogram":
        board.histogram(**event.fields, step=event.step, at_ms=event.at_ms)
    elif event.kind in ("scalars", "evaluation"):
        board.scalars(event.fields["values"], step=event.step, at_ms=event.at_ms)


def _outcome(run: RunDir) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """Return how training ended, from the result of the newest attempt; without a result it has failed."""
    result = run.result(run.current_attempt)
    if not result.exists():
        return "FAILED"
    return "FINISHED" if read_record(result, AttemptResult).status == "done" else "KILLED"


class Periodic:
    """Returns True when called, at most once in `period_s`."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._due_at = -math.inf

    def __call__(self) -> bool:
        if (now := time.monotonic()) < self._due_at:
            return False
        self._due_at = now + self.period_s
        return True


class LogLines:
    """Logs each evaluation and each checkpoint, and the progress every LOG_PERIOD_S."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._due = Periodic(LOG_PERIOD_S)
        self._live = False

    def add(self, event: Event) -> None:
        """Log a new event. Events from before the first `tick` belong to an earlier monitor."""
        if self._live and event.kind == "evaluation":
            values = (f"{key} {value:.4g}" for key, value in event.fields["values"].items())
            self._log.info("step %d: %s", event.step, ", ".join(values))
        elif self._live and event.kind == "checkpoint":
            self._log.info("step %d: saved %s", event.step, event.fields["path"])

    def tick(self, progress: Progress) -> None:
        """Log the progress if it is due. Call after the new events were added."""
        self._live = True
        if self._due() and progress.step:
            self._log.info("%s", progress)


class Progress:
    """The progress of the training, from the events so far; `str()` is one line for the log."""

    def __init__(self) -> None:
        self.step = self.num_steps = self.num_events = 0
        self.loss = self.samples_per_s = math.nan
        self._samples_per_step = math.nan
        self._speeds: list[float] = []
        self._first: dict[str, float] = {}
        self._last: tuple[int, dict[str, float]] = (-1, {})

    def add(self, event: Event) -> None:
        """Update the progress with the next event."""
        self.num_events += 1
        # A resumed attempt begins at an earlier step than the last one has reached.
        self.step = max(self.step, event.step)
        values = event.fields.get("values", {})
        if event.kind == "start":
            self.num_steps = event.fields.get("num_steps", 0)
            self._samples_per_step = event.fields.get("num_samples", math.nan) / max(1, self.num_steps)
        elif event.kind == "scalars":
            self.loss = values.get("train/loss", self.loss)
            if speed := values.get("train/samples_per_s"):
                self.samples_per_s = speed
                self._speeds.append(speed)
        elif event.kind == "evaluation":
            if event.step == 0 and not self._first:
                self._first = values
            if event.step > self._last[0]:
                self._last = (event.step, values)

    @property
    def remaining_s(self) -> float:
        """Seconds left at the newest speed; NaN while the speed is unknown."""
        return (self.num_steps - self.step) * self._samples_per_step / self.samples_per_s

    @property
    def percent(self) -> float:
        return 100.0 * self.step / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        return f"step {self.step}/{self.num_steps}, {self.pace()}"

    def pace(self) -> str:
        """Return loss, speed and time left as text, as far as they are known."""
        parts = [] if math.isnan(self.loss) else [f"loss {self.loss:.4g}"]
        if not math.isnan(self.samples_per_s):
            parts.append(f"{self.samples_per_s:.4g} samples/s")
        if not math.isnan(self.remaining_s):
            minutes, seconds = divmod(round(self.remaining_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
        return ", ".join(parts) or "starting"

    def summary(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> MetricsSummary:
        """Return the record for a training that ended as `status`. The speed is the median over all steps."""
        speed = statistics.median(self._speeds) if self._speeds else 0.0
        return MetricsSummary(
            status=status,
            step=self.step,
            num_events=self.num_events,
            first=self._first,
            last=self._last[1],
            samples_per_s=speed,
        )


# -- MLflow


class Cursor(Record):
    """How far the event log is sent: everything before byte `offset`, and each metric up to its step in `last`."""

    mlflow_run_id: str
    offset: int = 0
    tail: int = 0
    """CRC-32 of the TAIL_BYTES before `offset`. After a power failure the log may be shorter or different."""
    last: dict[str, int] = Field(default_factory=dict)
    """Metric -> greatest step sent. A resumed attempt repeats steps, which are not sent again."""


class Shipper:
    """Sends the points of the event log to MLflow, each exactly once and in the order of steps.

    The cursor is written after a batch was sent. A crash in between sends the same batch again, with the same
    timestamps, and MLflow stores equal points once.
    """

    def __init__(self, run: RunDir, tracker: Tracker) -> None:
        self._run = run
        self.tracker = tracker
        self.cursor = Cursor(mlflow_run_id=tracker.run_id)
        with contextlib.suppress(Exception):  # without a readable cursor everything is sent again, which is only slower
            found = read_record(run.cursor, Cursor)
            if found.mlflow_run_id == tracker.run_id:
                # After a power failure the log may have lost its end: read it from the beginning, and skip by step.
                same_log = _tail(run.events, found.offset) == found.tail
                self.cursor = found if same_log else found.model_copy(update={"offset": 0, "tail": 0})

    def ship(self) -> int:
        """Send everything in the log; return the number of points. The call may be repeated after a TrackingError."""
        sent = 0
        while True:
            points, cursor = self._next()
            if cursor.offset == self.cursor.offset:
                return sent
            if points:
                self.tracker.log_batch(points)
            write_record(self._run.cursor, cursor)
            self.cursor = cursor
            sent += len(points)

    def _next(self) -> tuple[list[Point], Cursor]:
        """Return the next batch of points and the cursor after it."""
        points: list[Point] = []
        offset, last = self.cursor.offset, dict(self.cursor.last)
        for event, after in read_events(self._run.events, offset):
            fresh = [point for point in points_of(event) if point.step > last.get(point.key, -1)]
            if len(points) + len(fresh) > BATCH and points:
                break
            # Steps that an earlier attempt has sent are skipped: MLflow cannot replace a point.
            points += fresh
            last |= {point.key: point.step for point in fresh}
            offset = after
        if offset == self.cursor.offset:
            return [], self.cursor
        tail = _tail(self._run.events, offset)
        return points, Cursor(mlflow_run_id=self.tracker.run_id, offset=offset, tail=tail, last=last)


def points_of(event: Event) -> Iterator[Point]:
    """Yield the metric points of one event, under names that MLflow accepts; values that are no numbers are skipped."""
    if event.kind in ("scalars", "evaluation"):
        for key, value in event.fields.get("values", {}).items():
            if isinstance(value, int | float):
                yield Point(metric_name(key), float(value), event.at_ms, event.step)


def _tail(path: Path, offset: int) -> int:
    """Return the CRC-32 of the TAIL_BYTES before `offset`."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, offset - TAIL_BYTES))
        return zlib.crc32(file.read(min(offset, TAIL_BYTES)))
    return 0


class RetryingShipper:
    """A Shipper that logs an outage of MLflow once and tries again every OUTAGE_PERIOD_S."""

    def __init__(self, shipper: Shipper, log: Log) -> None:
        self._shipper = shipper
        self._log = log
        self._due = Periodic(0.0)
        self._status: Status = "FAILED"  # so that the first tick sets RUNNING; an earlier attempt may have set another

    def tick(self, status: Status = "RUNNING") -> bool:
        """Send new points and the status; return False while MLflow, or the disk of the cursor, is unavailable."""
        if not self._due():
            return False
        try:
            self._shipper.ship()
            if self._status != status:
                self._shipper.tracker.set_status(status)
        except (TrackingError, OSError) as error:
            if not self._due.period_s:
                self._log.warning("metrics stay in the event log until MLflow can be reached again: %s", error)
            self._due = Periodic(OUTAGE_PERIOD_S)
            self._due()
            return False
        if self._due.period_s:
            self._log.info("MLflow has all metrics again")
        self._due, self._status = Periodic(0.0), status
        return True

    def finish(self, status: Status, *, patience_s: float) -> None:
        """Send the rest and the final status; give up after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while not self.tick(status):
            if time.monotonic() > deadline:
                self._log.error(
                    "MLflow could not be reached for %.0f s: it has the event log up to byte %d, and lacks the final "
                    "status %s; `onward resume` of this run sends the rest",
                    *(patience_s, self._shipper.cursor.offset, status),
                )
                return
            time.sleep(0.2)


# -- Prefect: an error of its server must not end the monitor


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
            if self._id is None:
                self._id = cast(UUID, create_progress_artifact(progress.percent, "training", str(progress)))
            else:
                update_progress_artifact(self._id, progress.percent, str(progress))


class StopRequest:
    """Stops the job when its flow run is cancelled or suspended in Prefect. Outside of a flow run it does nothing.

    Prefect itself stops only the runs that a worker started. Without this class any other run would stay in the state
    Cancelling, and a suspended run would go on training.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._due = Periodic(STATE_PERIOD_S)

    def poll(self) -> None:
        """Read the flow run's state every STATE_PERIOD_S, and let the job save and stop if it is to end."""
        flow_run_id = runtime.flow_run.get_id()
        if not flow_run_id or not self._due():
            return
        # An error of the Prefect server must not end the monitor; the next poll tries again.
        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
            if state and (state.is_cancelling() or state.is_cancelled() or state.is_paused()):
                mpirun.stop_running(self._run.root)
