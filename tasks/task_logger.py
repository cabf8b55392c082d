"""The logger of a task that runs beside the training."""

from __future__ import annotations

import logging
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import MissingContextError

Log = logging.Logger | logging.LoggerAdapter[Any]


def task_logger(name: str) -> Log:
    """Return Prefect's logger of the current task run; outside of a task run, the module's logger."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(name)
