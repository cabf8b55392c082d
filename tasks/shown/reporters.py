"""Where a run is reported: MLflow always, and what `monitor.report_to` names. Each is a reader of the event log.

    events.jsonl --monitor, each event once, in order--> Reporter.add ... flush ... close
                                                             MLflow: by a cursor of its own, also after a crash
                                                             TensorBoard, W&B: boards, which get points by the
                                                             names of metric_points.py, and histograms

The training loop knows none of them. An error of a board is logged once and ends that board only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prefect.artifacts import create_table_artifact
from prefect.context import TaskRunContext

from onward.infra.mlflow.tracking import Tracker
from onward.infra.tensorboard import TensorBoard
from onward.infra.weights_and_biases import WeightsAndBiases
from onward.tasks.shown.event_shipping import RetryingShipper
from onward.tasks.shown.metric_points import values_of
from onward.tasks.shown.mlflow_tags import parameters
from onward.tasks.shown.prefect_server import prefect_answers
from onward.tasks.shown.task_logger import Log
from onward.tasks.shown.training_progress import Periodic
from onward.trainer.events import Event, Histogram, Started
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.outcomes.storage import storage_problem
from onward.trainer.run.records import MetricsSummary, RunIdentity, read_record


class Reader(Protocol):
    """Takes the events of the log, each once and in order."""

    def add(self, event: Event) -> None:
        """Take the next event."""


class Reporter(Reader, Protocol):
    """Shows a run somewhere. No call raises an error of the place where it is shown."""

    def flush(self, *, last: bool) -> None:
        """Send what was added, as far as that is possible now. last: nothing is added afterwards."""

    def close(self, summary: MetricsSummary) -> None:
        """Send the rest and how the run ended."""


class Board(Protocol):
    """What draws points and histograms over steps. Each call may raise the board's errors."""

    def scalars(self, values: Mapping[str, float], *, step: int, at_ms: int) -> None:
        """Add one value to each name."""

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], *, step: int, at_ms: int) -> None:
        """Add a histogram; `len(edges) == len(counts) + 1`."""

    def flush(self) -> None:
        """Send or write what was added."""

    def close(self, *, failed: bool) -> None:
        """Send or write the rest; nothing is added afterwards."""


def reporters_of(run: RunDir, log: Log, *, patience_s: float) -> list[Reporter]:
    """Return the reporters of a run, ready for its first event. patience_s: see `monitor`."""
    # opened late: each of the libraries takes seconds to import
    boards: dict[str, tuple[str, Callable[[], Board]]] = {
        "tensorboard": ("TensorBoard", lambda: TensorBoard(run.tensorboard)),
        "wandb": ("Weights & Biases", lambda: _weights_and_biases(run)),
    }
    wanted = dict.fromkeys(read_config(run).monitor.report_to)
    return [MLflow(run, log, patience_s=patience_s), *(BoardReporter(*boards[name], log) for name in wanted)]


def _weights_and_biases(run: RunDir) -> Board:
    """Return the run in W&B. It gets the parameters that MLflow gets, and where the report is."""
    config = read_config(run, "given")
    identity = read_record(run.identity, RunIdentity)
    return WeightsAndBiases(
        run.root,
        run_id=identity.run_id,
        project=config.monitor.experiment,
        name=identity.name,
        config=parameters(config),
        notes=f"Report: {run.report}" if config.monitor.report else "",
    )


class MLflow:
    """The MLflow run: points, tags, small files and its status."""

    def __init__(self, run: RunDir, log: Log, *, patience_s: float) -> None:
        identity = read_record(run.identity, RunIdentity)
        self._run = run
        self._patience_s = patience_s
        self._shipping = RetryingShipper(run, Tracker(identity.tracking_uri, identity.mlflow_run_id), log)
        self._endings = EndingReports(run)
        # shipped with the first tick in which MLflow answers
        for file in (run.packages, run.runtime, run.rehearsal):
            self._shipping.file(file, "environment")

    def add(self, event: Event) -> None:
        """Take an event. Its points are read again by the shippers, which know what MLflow has."""
        if isinstance(event, Started) and event.resumed:
            self._shipping.tag("onward.resumed", event.resumed)

    def flush(self, *, last: bool) -> None:
        """Send new points, and how attempts ended."""
        for name, text in self._endings.new_tags(now=last).items():
            self._shipping.tag(name, text)
        self._shipping.tick()

    def close(self, summary: MetricsSummary) -> None:
        """Send the rest, the tables of classes, the profile and the status; in an outage try for `patience_s`."""
        for folder, pattern in ((self._run.classes, "[!.]*"), (self._run.profile, "rank-*")):
            for file in sorted(folder.glob(pattern)):
                self._shipping.file(file, folder.name)
        # a broken disk does not recover while the task waits
        patience_s = 0 if storage_problem(self._run.root) else self._patience_s
        self._shipping.finish(summary.status, patience_s=patience_s, ended_early=summary.ended_early)


class BoardReporter:
    """A board that gets each (name, step) once: a resumed attempt repeats steps. Its first error ends it."""

    def __init__(self, name: str, opened: Callable[[], Board], log: Log) -> None:
        self._name = name
        self._log = log
        self._board: Board | None = None
        self._last: dict[str, int] = {}
        with self._ended_by_errors():
            self._board = opened()

    def add(self, event: Event) -> None:
        """Draw an event's metrics under the names that MLflow shows, or its histogram under its own."""
        if self._board is None:
            return
        step = event.step
        at_ms = event.at_ms
        with self._ended_by_errors():
            if isinstance(event, Histogram):
                if self._is_new(event.name, step):
                    self._board.histogram(event.name, event.counts, event.edges, step=step, at_ms=at_ms)
            elif fresh := {name: value for name, value in values_of(event).items() if self._is_new(name, step)}:
                self._board.scalars(fresh, step=step, at_ms=at_ms)

    def _is_new(self, name: str, step: int) -> bool:
        """Return whether the name has no value of this step or a later one yet, and note that it has one now."""
        # boards draw a line through the points in the order in which they came
        is_new = step > self._last.get(name, -1)
        self._last[name] = max(step, self._last.get(name, -1))
        return is_new

    def flush(self, *, last: bool) -> None:
        """Let the board write what it has."""
        with self._ended_by_errors():
            if self._board:
                self._board.flush()

    def close(self, summary: MetricsSummary) -> None:
        """Let the board write the rest."""
        with self._ended_by_errors():
            if self._board:
                self._board.close(failed=summary.status == "FAILED")

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """Log the first error inside, and use the board no more: the event log has everything."""
        try:
            yield
        except Exception as error:
            self._board = None
            self._log.warning("nothing more goes to %s until this run is resumed: %s", self._name, error)


# -- show how the attempts of a run ended in Prefect and MLflow, as soon as each has ended

ENDINGS_PERIOD_S = 2.0


class EndingReports:
    """A table of all attempts on the page of the Prefect flow run, and MLflow tags with the newest ending."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._due = Periodic(ENDINGS_PERIOD_S)
        self._shown = 0

    def new_tags(self, *, now: bool) -> Mapping[str, str]:
        """Show attempts that have ended since the last call, and return their MLflow tags; {} if there are none.

        Looks every ENDINGS_PERIOD_S, or `now`.
        """
        if not (self._due() or now) or len(found := endings(self._run)) == self._shown:
            return {}
        # before the calls: an outage must not show the same table again and again
        self._shown = len(found)
        # A direct call of the task's function has no task run, and so no page; an error of Prefect ends nothing.
        if TaskRunContext.get() and prefect_answers():
            with contextlib.suppress(Exception):
                create_table_artifact(
                    [row_of(ending) for ending in found], key="attempts", description="How each attempt ended, and why"
                )
        newest = found[-1]
        return {
            "onward.attempts": str(newest.attempt),
            "onward.ending.kind": newest.kind,
            "onward.ending": str(newest),
        }


def row_of(ending: AttemptEnding) -> dict[str, str | int]:
    """Return an ending as a row of the table."""
    return {
        "attempt": ending.attempt,
        "kind": ending.kind,
        "began at step": ending.resumed_from,
        "ended at step": ending.step,
        "what happened": ending.sentence,
        "what followed": ending.action,
    }
