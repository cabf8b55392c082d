"""What the tasks do while MLflow is away: log it once, go on, try again every few seconds, and log its return."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from onward.infra.mlflow.mlflow_store import TrackingUnavailable
from onward.tasks.shown.task_logger import Log

PERIOD_S = 5.0
"""Seconds until MLflow is tried again after an outage."""


class Outage:
    """Whether MLflow is away for one purpose.

    if outage.is_waiting(): ...          it was tried just now
    with outage.noticed(): ...           the calls
    if outage.error: ...                 MLflow is away
    """

    def __init__(
        self, log: Log, *, begins: str, ends: str = "", kinds: tuple[type[Exception], ...] = (TrackingUnavailable,)
    ) -> None:
        """begins, ends: what is logged, with a %s for the error that begins it. kinds: errors that are an outage."""
        self.error: Exception | None = None
        """The error of the last calls, if it was an outage."""
        self._log = log
        self._begins = begins
        self._ends = ends
        self._kinds = kinds
        self._retry_at = -math.inf

    def is_waiting(self) -> bool:
        """Return whether MLflow was away less than PERIOD_S ago."""
        return time.monotonic() < self._retry_at

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Call MLflow inside: an outage ends the block, and is logged when it begins and when it ends."""
        try:
            yield
        except self._kinds as error:
            if self.error is None:
                self._log.warning(self._begins, error)
            self.error = error
            # each try may block until its timeout, and the task has other work
            self._retry_at = time.monotonic() + PERIOD_S
        else:
            if self.error and self._ends:
                self._log.info(self._ends)
            self.error = None


def tries_within(patience_s: float) -> Iterator[None]:
    """Yield once, and then every 0.2 s until `patience_s` have passed."""
    deadline = time.monotonic() + patience_s
    yield
    while time.monotonic() <= deadline:
        time.sleep(0.2)
        yield
