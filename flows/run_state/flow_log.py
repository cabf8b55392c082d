"""The log of a flow: Onward's own lines on the terminal, and everything in RUN_DIR/flow.log.

    onward.*, warnings of tasks beside the training -> terminal (stderr)
    onward.*, Prefect, MLflow, ... -----------------> flow.log, with tracebacks
    what libraries print on stderr -----------------> flow.log

What is said once is not said again: a record with `also_in` = "train.log" is not in flow.log, and one with "result",
which the table at the end shows, not on the terminal. Prefect's page of the run has both.

On a full disk flow.log has a gap, and the terminal one line that says so.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from onward.trainer.run.directory import RunDir


class NamedFormatter(logging.Formatter):
    """Names the module or the task that a record of a task run is from, and not Prefect's one logger for all tasks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name is logging's
        task = getattr(record, "task_run_name", "") if record.name == "prefect.task_runs" else ""
        named = copy.copy(record)
        named.name = getattr(record, "of_onward", f"{record.name} {task}".rstrip())
        return super().formatMessage(named)


class FlowLog(logging.FileHandler):
    """Writes flow.log. A line that cannot be written is left out, and the first of them is reported once."""

    def __init__(self, path: Path, terminal: TextIO) -> None:
        super().__init__(path, errors="replace")
        self.setFormatter(NamedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.addFilter(lambda record: getattr(record, "also_in", "") != "train.log")
        self._terminal = terminal
        self._complete = True

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.report(error)
        else:
            super().handleError(record)  # a mistake in a call of the logger: its traceback goes into the log itself

    def report(self, error: OSError) -> None:
        """Say once on the terminal that lines are missing."""
        if self._complete:
            print(f"{self.baseFilename} has a gap from here on: {error.strerror}", file=self._terminal)
        self._complete = False

    def close(self) -> None:
        """Close the file; what is left in its buffer is lost if the disk is still full."""
        with contextlib.suppress(OSError):
            super().close()


class _Printed(io.TextIOBase):
    """What is printed on stderr, which goes into the log."""

    def __init__(self, log: FlowLog, terminal: TextIO, said: set[str]) -> None:
        self.terminal = terminal
        self.said = said
        self._log = log

    def write(self, text: str) -> int:
        with self._log.lock or contextlib.nullcontext():
            stream = self._log.stream
            try:
                if stream and not stream.closed:
                    stream.write(text)
                    stream.flush()
            except OSError as error:
                self._log.report(error)
        return len(text)

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def own_log(run: RunDir) -> Iterator[None]:
    """Write the log of a flow that no command has opened: of a run of a deployment, which a worker has started."""
    root = logging.getLogger()
    own = logging.getLogger("onward")
    if any(isinstance(handler, FlowLog) for handler in root.handlers):
        yield
        return
    log_file = FlowLog(run.root / "flow.log", sys.stderr)
    level = own.level
    root.addHandler(log_file)
    own.setLevel(logging.INFO)
    try:
        yield
    except Exception as error:
        # Prefect logs it, too, but only after the flow has ended
        raised = (type(error), error, error.__traceback__)
        log_file.handle(logging.LogRecord(__name__, logging.ERROR, "", 0, "the run failed", None, raised))
        raise
    finally:
        own.setLevel(level)
        root.removeHandler(log_file)
        log_file.close()


@contextlib.contextmanager
def flow_log(run: RunDir) -> Iterator[TextIO]:
    """Write the log of a flow; yield the terminal's stream, which `sys.stderr` is not inside."""
    import prefect.main  # noqa: F401  this import configures the loggers that are changed below

    run.root.mkdir(parents=True, exist_ok=True)
    # of a trial, whose log is inside that of its sweep, it is the sweep's terminal
    sweep = sys.stderr if isinstance(sys.stderr, _Printed) else None
    shown, said = (sweep.terminal, sweep.said) if sweep else (sys.stderr, set[str]())
    log_file = FlowLog(run.root / "flow.log", shown)
    terminal = logging.StreamHandler(shown)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.addFilter(_is_for_the_terminal)
    if sweep:  # whose trials have the same data, machine and warnings
        terminal.addFilter(lambda record: _is_new(record, said))
    root = logging.getLogger()
    # this removes Prefect's console handler
    before = root.handlers
    root.handlers = [log_file, terminal]
    logging.getLogger("onward").setLevel(logging.INFO)
    try:
        with contextlib.redirect_stderr(_Printed(log_file, shown, said)):
            try:
                yield shown
            finally:
                # now, because Prefect would report on the terminal what it cannot send when the process ends
                for handler in logging.getLogger("prefect.flow_runs").handlers:
                    handler.flush()
    finally:
        root.handlers = before
        log_file.close()


def _is_for_the_terminal(record: logging.LogRecord) -> bool:
    beside = hasattr(record, "of_onward") and record.levelno >= logging.WARNING
    return (record.name.startswith("onward.") or beside) and getattr(record, "also_in", "") != "result"


def _is_new(record: logging.LogRecord, said: set[str]) -> bool:
    """Return whether no trial has said the same, but for the seconds that it took."""
    text = re.sub(r"\b\d+\.\d+ s\b", "", record.getMessage())
    is_new = text not in said
    said.add(text)
    return is_new
