"""Show the cause of an error and what to do in Prefect's logs, and not a Python traceback.

the log of the flow (flow.log, the terminal of a worker)     with the traceback
the page of the run in Prefect                               "ConfigError: model.path: there is no file ..."
"""

from __future__ import annotations

import copy
import logging

from prefect.logging.handlers import APILogHandler

from onward.trainer.errors import OnwardError


class Explained(logging.Formatter):
    """Formats a record with one of Onward's errors as its sentences, and any other one as it is."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OnwardError):
            return super().format(record)
        plain = copy.copy(record)
        plain.exc_info = None
        plain.exc_text = None
        plain.args = None
        plain.msg = "\n".join([f"{type(error).__name__}:", *(f"- {problem}" for problem in error.problems)])
        return f"{super().format(plain)}\nThe traceback is in the log of the flow."


def explain_errors() -> None:
    """Let all that Prefect's server gets of the logs of runs be formatted so. May be called again."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "onward"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, APILogHandler):
                handler.setFormatter(Explained())
