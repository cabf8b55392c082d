"""The logger of a task that runs beside the training; and the mark of what is said elsewhere, too."""

from __future__ import annotations

import logging
from typing import Any

Log = logging.Logger | logging.LoggerAdapter[Any]

# `extra` of a log record, which flows/run_state/flow_log.py reads
IN_TRAIN_LOG = {"also_in": "train.log"}
"""A rank has written it: it is not in flow.log as well."""
IN_RESULT = {"also_in": "result"}
"""The result of the run has it: it is not printed on the terminal as well."""


def task_logger(name: str) -> Log:
    """Return Prefect's logger of the current task run; outside of a task run, the module's logger.

    Its records have the module's name as `of_onward`, by which the flow's log tells them from Prefect's own.
    """
    # whoever needs the names above may not import Prefect yet, which makes its directory then
    from prefect import get_run_logger
    from prefect.exceptions import MissingContextError

    try:
        return get_run_logger(of_onward=name)
    except MissingContextError:
        return logging.getLogger(name)
