"""monitor: beside the training, turns the event log into MLflow, TensorBoard, a Prefect artifact and log lines.

The log is the truth and stays on disk, so nothing here is lost: MLflow may be away for hours, this process
may be killed at any point, the next monitor goes on where the cursor says. Training does not wait for any
of it. The other direction is here too: a flow run that is cancelled or suspended in Prefect's UI ends its job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import MissingContextError
from pydantic import Field

from onward.infra import mpirun
from onward.infra.tensorboard import TensorBoard
from onward.infra.tracking import BATCH, Point, Status, Tracker, TrackingError, metric_name
from onward.trainer.events import Event, read_events
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, MetricsSummary, Record, RunIdentity, read_record, write_record

LOG_PERIOD_S = 10.0
ARTIFACT_PERIOD_S = 5.0
STATE_PERIOD_S = 3.0
OUTAGE_PERIOD_S = 5.0
"""Pause before MLflow is tried again."""
Log = logging.Logger | logging.LoggerAdapter[Any]

TAIL = 256
"""Bytes before the cursor by which the log is recognised."""


@task(name="monitor", task_run_name="monitor", cache_policy=NO_CACHE)
def monitor(run: RunDir, *, tick_s: float = 0.5, patience_s: float = 60.0) -> MetricsSummary:
    """Follow the event log until the flow closes it, then ship what is left; leaves `metrics.json`.

    Looks at the log every `tick_s`. When MLflow is away at the end, keeps trying for `patience_s`, then says
    so and leaves the rest to the next monitor of this run (`onward resume`).
    """
    log = _logger()
    identity = read_record(run.identity, RunIdentity)
    shipping = Shipping(Shipper(run, Tracker(identity.tracking_uri, identity.mlflow_run_id)), log)
    board = TensorBoard(run.tensorboard, wanted=read_config(run).monitor.tensorboard)
    progress, lines = Progress(), Lines(log)
    artifact, stop = ProgressArtifact(), StopRequest(run)
    offset, closed = 0, False
    while not closed:
        closed = run.closed.exists()  # before reading: what was written before closing is read below
        for event, after in read_events(run.events, offset):
            progress.add(event)
            draw(board, event)
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


def draw(board: TensorBoard, event: Event) -> None:
    """Put an event's metrics or histogram on the board, under their own names."""
    if event.kind == "histogram":
        board.histogram(**event.fields, step=event.step, at_ms=event.at_ms)
    elif event.kind in ("scalars", "evaluation"):
        board.scalars(event.fields["values"], step=event.step, at_ms=event.at_ms)


def _outcome(run: RunDir) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """How training ended: what rank 0 of the newest attempt wrote; no result means that it failed."""
    result = run.result(run.current_attempt)
    if not result.exists():
        return "FAILED"
    return "FINISHED" if read_record(result, AttemptResult).status == "done" else "KILLED"


def _logger() -> Log:
    """Prefect's logger of this task run; outside of one, the module's."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)


class Periodic:
    """True when called, but not more often than once in `period_s`."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._due_at = -math.inf

    def __call__(self) -> bool:
        if (now := time.monotonic()) < self._due_at:
            return False
        self._due_at = now + self.period_s
        return True


class Lines:
    """Log lines: each evaluation and checkpoint, and every few seconds how far the training is."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._due = Periodic(LOG_PERIOD_S)
        self._live = False

    def add(self, event: Event) -> None:
        """Report an event, unless it was there before this monitor."""
        if self._live and event.kind == "evaluation":
            values = (f"{key} {value:.4g}" for key, value in event.fields["values"].items())
            self._log.info("step %d: %s", event.step, ", ".join(values))
        elif self._live and event.kind == "checkpoint":
            self._log.info("step %d: saved %s", event.step, event.fields["path"])

    def tick(self, progress: Progress) -> None:
        """Call after the new events."""
        self._live = True
        if self._due() and progress.step:
            self._log.info("%s", progress)


# -- what is known of the training so far


class Progress:
    """Where the training is, from the events so far; `str()` of it is one line for people."""

    def __init__(self) -> None:
        self.step = self.num_steps = self.num_events = 0
        self.loss = self.samples_per_s = math.nan
        self._samples_per_step = math.nan
        self._speeds: list[float] = []
        self._first: dict[str, float] = {}
        self._last: tuple[int, dict[str, float]] = (-1, {})

    def add(self, event: Event) -> None:
        """Take the next event into account."""
        self.num_events += 1
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
        """Time left at the newest speed; NaN while that is unknown."""
        return (self.num_steps - self.step) * self._samples_per_step / self.samples_per_s

    @property
    def percent(self) -> float:
        return 100.0 * self.step / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        return f"step {self.step}/{self.num_steps}, {self.pace()}"

    def pace(self) -> str:
        """Loss, speed and time left, as far as they are known."""
        parts = [] if math.isnan(self.loss) else [f"loss {self.loss:.4g}"]
        if not math.isnan(self.samples_per_s):
            parts.append(f"{self.samples_per_s:.4g} samples/s")
        if not math.isnan(self.remaining_s):
            minutes, seconds = divmod(round(self.remaining_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
        return ", ".join(parts) or "starting"

    def summary(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> MetricsSummary:
        """The record of it, once training ended as `status`. Speed: the median over all steps."""
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
    """How far the event log is shipped: everything before `offset`, and each metric up to its step in `last`."""

    mlflow_run_id: str
    offset: int = 0
    tail: int = 0
    """CRC-32 of the bytes before `offset`: after a power cut the log may be shorter, or another one."""
    last: dict[str, int] = Field(default_factory=dict)
    """Metric -> greatest step shipped; a resumed attempt repeats steps, which are not shipped again."""


class Shipper:
    """Sends each metric's points to MLflow in the order of steps: none is left out, none is sent anew.

    A batch is sent first and the cursor written after it. A crash in between sends the same batch again,
    timestamps included, which MLflow stores once.
    """

    def __init__(self, run: RunDir, tracker: Tracker) -> None:
        self._run = run
        self.tracker = tracker
        self.cursor = Cursor(mlflow_run_id=tracker.run_id)
        with contextlib.suppress(Exception):  # absent or unreadable: from the beginning, which is only slower
            found = read_record(run.cursor, Cursor)
            if found.mlflow_run_id == tracker.run_id:
                same_log = _tail(run.events, found.offset) == found.tail
                self.cursor = found if same_log else found.model_copy(update={"offset": 0, "tail": 0})

    def ship(self) -> int:
        """Send everything the log has; returns the number of points. Raises TrackingError, having lost nothing."""
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
        """The next batch of points, and the cursor after it."""
        points: list[Point] = []
        offset, last = self.cursor.offset, dict(self.cursor.last)
        for event, after in read_events(self._run.events, offset):
            fresh = [point for point in points_of(event) if point.step > last.get(point.key, -1)]
            if len(points) + len(fresh) > BATCH and points:
                break
            points += fresh
            last |= {point.key: point.step for point in fresh}
            offset = after
        if offset == self.cursor.offset:
            return [], self.cursor
        tail = _tail(self._run.events, offset)
        return points, Cursor(mlflow_run_id=self.tracker.run_id, offset=offset, tail=tail, last=last)


def points_of(event: Event) -> Iterator[Point]:
    """The metric points of one event, under the names MLflow accepts; what is not a number is left out."""
    if event.kind in ("scalars", "evaluation"):
        for key, value in event.fields.get("values", {}).items():
            if isinstance(value, int | float):
                yield Point(metric_name(key), float(value), event.at_ms, event.step)


def _tail(path: Path, offset: int) -> int:
    """CRC-32 of the last bytes before `offset`."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, offset - TAIL))
        return zlib.crc32(file.read(min(offset, TAIL)))
    return 0


class Shipping:
    """A Shipper with patience: an outage is said once and waited out."""

    def __init__(self, shipper: Shipper, log: Log) -> None:
        self._shipper = shipper
        self._log = log
        self._due = Periodic(0.0)
        self._status: Status = "FAILED"  # of an attempt before this one, perhaps

    def tick(self, status: Status = "RUNNING") -> bool:
        """Ship what there is and tell MLflow the status; False while MLflow, or the disk of the cursor, is away."""
        if not self._due():
            return False
        try:
            self._shipper.ship()
            if self._status != status:
                self._shipper.tracker.set_status(status)
        except (TrackingError, OSError) as error:
            if not self._due.period_s:
                self._log.warning("metrics wait in the event log: %s", error)
            self._due = Periodic(OUTAGE_PERIOD_S)
            self._due()
            return False
        if self._due.period_s:
            self._log.info("MLflow has everything again")
        self._due, self._status = Periodic(0.0), status
        return True

    def finish(self, status: Status, *, patience_s: float) -> None:
        """Ship the rest and the final status, for at most `patience_s`."""
        give_up_at = time.monotonic() + patience_s
        while not self.tick(status):
            if time.monotonic() > give_up_at:
                self._log.error(
                    "MLflow did not take the metrics for %.0f s: it has the event log up to byte %d, and %s as the "
                    "run's status is missing; `onward resume` of this run sends the rest",
                    *(patience_s, self._shipper.cursor.offset, status),
                )
                return
            time.sleep(0.2)


# -- Prefect: whose server may be away, which must not end the watch


class ProgressArtifact:
    """The progress bar on the task run's page; nothing outside of a task run."""

    def __init__(self) -> None:
        self._due = Periodic(ARTIFACT_PERIOD_S)
        self._id: UUID | None = None

    def show(self, progress: Progress, *, now: bool = False) -> None:
        """Bring the artifact up to date, every few seconds or `now`."""
        if TaskRunContext.get() is None or not (self._due() or now):
            return
        with contextlib.suppress(Exception):
            if self._id is None:
                self._id = cast(UUID, create_progress_artifact(progress.percent, "training", str(progress)))
            else:
                update_progress_artifact(self._id, progress.percent, str(progress))


class StopRequest:
    """Asks Prefect every few seconds whether the flow run shall stop; nothing outside of a flow run.

    Prefect itself stops only runs that a worker started: without this, cancelling any other in the UI would
    leave it "Cancelling" for ever, and a suspended one training.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._due = Periodic(STATE_PERIOD_S)

    def poll(self) -> None:
        """Stop the job of this run, softly, if its flow run is being cancelled or suspended."""
        flow_run_id = runtime.flow_run.get_id()
        if not flow_run_id or not self._due():
            return
        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
            if state and (state.is_cancelling() or state.is_cancelled() or state.is_paused()):
                mpirun.stop_running(self._run.root)
