"""Show the progress of a run in the terminal: a bar with loss, samples/s, data wait and the time left.

It reads only the event log, so it shows any run that writes one. Without a terminal there is no bar.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from onward.flows.runs import find_run, is_running
from onward.tasks.training_progress import Periodic, Progress
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir

LINE_PERIOD_S = 10.0


@contextlib.contextmanager
def live_progress(run: RunDir, *, stream: TextIO | None = None, tick_s: float = 0.2) -> Iterator[None]:
    """Show a progress bar on `stream` (default: stderr) while the body runs, if the stream is a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(run, stream, done, tick_s), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def follow(text: str, *, tick_s: float = 0.2) -> str:
    """Show the progress of a run on stderr until it ends; return the id of the run.

    Without a terminal a line is printed when the progress has changed, at most every LINE_PERIOD_S.
    """
    run = find_run(text)
    said, due = "", Periodic(LINE_PERIOD_S)
    progress, offset = Progress(), 0
    with live_progress(run):
        while is_running(run):
            time.sleep(tick_s)
            for event, after in read_events(run.events, offset):
                progress.add(event)
                offset = after
            if not sys.stderr.isatty() and str(progress) != said and due():
                said = str(progress)
                print(f"onward: {said}", file=sys.stderr, flush=True)
    return run.root.name


def _show(run: RunDir, stream: TextIO, done: threading.Event, tick_s: float) -> None:
    console = Console(file=stream)
    # transient: the result table replaces the bar at the end.
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)
    with _logs_above(console, stream):
        for progress in _follow(run, done, tick_s):
            bar.update(task, completed=progress.step, total=progress.num_steps or None, description=progress.pace())
            if progress.num_steps and not done.is_set():
                bar.start()  # shown from the first step on; calling it again does nothing
        bar.stop()


def _follow(run: RunDir, done: threading.Event, tick_s: float) -> Iterator[Progress]:
    """Yield the progress every `tick_s`, and once more when `done` is set."""
    progress, offset, last = Progress(), 0, False
    # One more pass after `done`, for the events that were written since the last one.
    while not last:
        last = done.wait(tick_s)
        for event, after in read_events(run.events, offset):
            progress.add(event)
            offset = after
        yield progress


@contextlib.contextmanager
def _logs_above(console: Console, stream: TextIO) -> Iterator[None]:
    """Print log lines that go to `stream` above the bar, and not into it."""
    # Handlers keep the stream they were made with, so each of them has to be redirected.
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream
    }
    try:
        for handler in handlers:
            handler.setStream(cast(TextIO, FileProxy(console, stream)))
        yield
    finally:
        for handler in handlers:
            handler.setStream(stream)
