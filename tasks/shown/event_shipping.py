"""Send the metrics of the event log to MLflow, each point exactly once, also after a crash or an outage.

    events.jsonl --read from the cursor's offset--> Shipper --1,000 points at a time--> MLflow
                                                       |
                                                       +--after each batch--> cursor.json

A monitor that starts again asks MLflow for the last step of each metric, and continues at the cursor: the directory of
a run that was put back from a copy has an older one.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

from pydantic import Field

from onward.infra.mlflow.mlflow_store import TrackingError, file_of, last_steps
from onward.infra.mlflow.model_package import Point
from onward.infra.mlflow.tracking import BATCH, Status, Tracker
from onward.tasks.shown.metric_points import points_of
from onward.tasks.shown.mlflow_outages import Outage, tries_within
from onward.tasks.shown.task_logger import Log
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Record, read_record, write_record

TAIL_BYTES = 256
"""Bytes before the cursor whose checksum shows that the log is still the same one."""


class Cursor(Record):
    """How far the event log is sent: everything before byte `offset`, and each metric up to its step in `last`."""

    mlflow_run_id: str
    file: str = ""
    """Which file the database was. Another one, such as an older copy that was put back, may lack what was sent."""
    offset: int = 0
    tail: int = 0
    """CRC-32 of the TAIL_BYTES before `offset`. After a power failure the log may be shorter or different."""
    last: dict[str, int] = Field(default_factory=dict)
    """Metric -> greatest step sent. A resumed attempt repeats steps, which are not sent again."""


class Shipper:
    """Sends the points of the event log to MLflow, each exactly once and in the order of steps.

    log: another log of the run, such as the usage of a node; None = its event log.

    The cursor is written after a batch was sent. A crash in between sends the same batch again, with the same
    timestamps, and MLflow stores equal points once.
    """

    def __init__(self, run: RunDir, tracker: Tracker, *, log: Path | None = None) -> None:
        self._log = log or run.events
        self._file = log.with_suffix(".cursor") if log else run.cursor
        self.tracker = tracker
        self.cursor = Cursor(mlflow_run_id=tracker.run_id, file=file_of(tracker.tracking_uri))
        self._knows_mlflow = False
        with contextlib.suppress(Exception):  # without a readable cursor everything is sent again, which is only slower
            found = read_record(self._file, Cursor)
            if found.mlflow_run_id == tracker.run_id and found.file in (self.cursor.file, ""):
                # After a power failure the log may have lost its end: read it from the beginning, and skip by step.
                same_log = _tail(self._log, found.offset) == found.tail
                known = {"file": self.cursor.file} | ({} if same_log else {"offset": 0, "tail": 0})
                self.cursor = found.model_copy(update=known)

    def ship(self) -> int:
        """Send everything in the log; return the number of points. The call may be repeated after a TrackingError."""
        sent = 0
        # the database was replaced while this runs
        if (file := file_of(self.tracker.tracking_uri)) not in (self.cursor.file, ""):
            self.cursor = Cursor(mlflow_run_id=self.tracker.run_id, file=file)
            self._knows_mlflow = False
        if not self._knows_mlflow:
            last = dict(self.cursor.last)
            # once for each connection: another process may have sent more than the cursor says
            for key, step in last_steps(self.tracker, self.tracker.run_id).items():
                last[key] = max(step, last.get(key, -1))
            self.cursor = self.cursor.model_copy(update={"last": last})
            self._knows_mlflow = True
        while True:
            points, cursor = self._next()
            # the log has no further complete line
            if cursor.offset == self.cursor.offset:
                return sent
            if points:
                self.tracker.log_batch(points)
            # after the points were sent: a crash in between repeats a batch, and never loses one
            write_record(self._file, cursor)
            self.cursor = cursor
            sent += len(points)

    def _next(self) -> tuple[list[Point], Cursor]:
        """Return the next batch of points and the cursor after it."""
        points: list[Point] = []
        offset = self.cursor.offset
        last = dict(self.cursor.last)
        for event, after in read_events(self._log, offset):
            fresh = [point for point in points_of(event) if point.step > last.get(point.key, -1)]
            # an event is never divided, so that the cursor stands between lines
            if len(points) + len(fresh) > BATCH and points:
                break
            # Steps that an earlier attempt has sent are skipped: MLflow cannot replace a point.
            points += fresh
            last |= {point.key: point.step for point in fresh}
            offset = after
        if offset == self.cursor.offset:
            return [], self.cursor
        tail = _tail(self._log, offset)
        return points, self.cursor.model_copy(update={"offset": offset, "tail": tail, "last": last})


def _tail(path: Path, offset: int) -> int:
    """Return the CRC-32 of the TAIL_BYTES before `offset`."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, offset - TAIL_BYTES))
        return zlib.crc32(file.read(min(offset, TAIL_BYTES)))
    return 0


class RetryingShipper:
    """Shippers of all logs of a run, which wait out an outage of MLflow."""

    def __init__(self, run: RunDir, tracker: Tracker, log: Log) -> None:
        self._run = run
        self._shipper = Shipper(run, tracker)
        self._nodes: dict[Path, Shipper] = {}
        self._log = log
        self._outage = Outage(
            log,
            begins="metrics stay in the event log until MLflow can be reached again: %s",
            ends="MLflow has all metrics again",
            kinds=(TrackingError, OSError),
        )
        self._tags: dict[str, str] = {}
        self._files: list[tuple[Path, str]] = []
        self._status: Status = "FAILED"  # so that the first tick sets RUNNING; an earlier attempt may have set another

    def tick(self, status: Status = "RUNNING") -> bool:
        """Send new points and the status; return False while MLflow, or the disk of the cursor, is unavailable."""
        if self._outage.is_waiting():
            return False
        with self._outage.noticed():
            self._shipper.ship()
            for path in sorted(self._run.nodes.glob("*.jsonl")):
                if path not in self._nodes:
                    self._nodes[path] = Shipper(self._run, self._shipper.tracker, log=path)
                self._nodes[path].ship()
            if self._tags:
                self._shipper.tracker.set_tags(self._tags)
                self._tags = {}
            while self._files:
                self._shipper.tracker.log_file(*self._files[0])
                # removed after the upload: an outage in between repeats it
                self._files.pop(0)
            if self._status != status:
                self._shipper.tracker.set_status(status)
                self._status = status
        return self._outage.error is None

    def tag(self, name: str, text: str) -> None:
        """Set a tag of the MLflow run with the next tick that reaches MLflow."""
        self._tags[name] = text

    def file(self, path: Path, folder: str) -> None:
        """Upload a small file to a folder of the run's artifacts with the next tick that reaches MLflow."""
        if path.exists():
            self._files.append((path, folder))

    def finish(self, status: Status, *, patience_s: float, ended_early: str = "") -> None:
        """Send the rest and the final status; give up after `patience_s`. ended_early: why, or ""."""
        if ended_early:
            self.tag("onward.ended_early", ended_early)
        for _ in tries_within(patience_s):
            if self.tick(status):
                return
        self._log.error(
            "MLflow could not be reached for %.0f s: it has the event log up to byte %d, and lacks the final status "
            "%s; `onward resume` of this run sends the rest",
            *(patience_s, self._shipper.cursor.offset, status),
        )
