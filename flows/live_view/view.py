"""Show a run while it runs: the live view in a terminal, else a line whenever there is something new.

It reads only files of the run directory, so it shows any run, wherever it was started. What else is printed meanwhile
appears above the view.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from onward.flows.live_view.live_state import LiveFacts
from onward.flows.live_view.screen import Screen, sentence
from onward.flows.shown.terminal import unescaped
from onward.tasks.shown.training_progress import Periodic
from onward.trainer.errors import printable
from onward.trainer.run.directory import RunDir

LINE_PERIOD_S = 10.0
TICK_S = 0.25


class ViewConsole(Console):
    """A console whose own commands move the cursor, while the texts that it shows are escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            # control segments are those of the console itself; texts come from files and may contain escape codes of
            # anybody
            text = segment.text if segment.control else printable(segment.text, keep="\n\t")
            yield Segment(text, segment.style, segment.control)


class LiveView:
    """The view of one run, which may not have a directory yet. Use it inside of `live_view`."""

    def __init__(self, stream: TextIO) -> None:
        self.console = ViewConsole(file=unescaped(stream))
        self.is_live = stream.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal
        self.facts = LiveFacts()
        self._stream = stream
        self._messages: list[str] = []
        self._due = Periodic(LINE_PERIOD_S)
        self._said = ""
        self._is_attached = False
        self._live: Live | None = None

    def attach(self, run: RunDir, name: str = "") -> None:
        """Show this run from now on."""
        self.facts.attach(run, name)
        self._is_attached = True

    def say(self, text: str) -> None:
        """Print a line, from a signal handler: the view prints it above itself at its next tick."""
        if self.is_live:
            self._messages.append(text)
        else:
            os.write(2, f"\n{text}\n".encode())  # not print, which the signal may have interrupted

    def start(self) -> None:
        """Show the view for the first time."""
        if self.is_live:
            self._fit()
            shown = Screen(self.facts)
            self._live = Live(
                shown,
                console=self.console,
                auto_refresh=False,
                transient=True,  # the table of the result takes its place
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)

    def tick(self) -> None:
        """Read what is new, and show it."""
        self.facts.read()
        while self._messages:
            self.print(self._messages.pop(0))
        if self._live:
            self._fit()
            self._live.refresh()
        # without a terminal a line is printed only if it differs, so that a log file does not fill up while nothing
        # happens
        elif self._is_attached and (text := sentence(self.facts)) != self._said and self._due():
            self._said = text
            print(f"onward: {text}", file=self._stream, flush=True)

    def stop(self) -> None:
        """Remove the view from the terminal."""
        while self._messages:
            self.print(self._messages.pop(0))
        if self._live:
            self._live.stop()

    def _fit(self) -> None:
        """Take the size of the terminal, which may change; rich takes that of standard input, which may be another."""
        with contextlib.suppress(OSError, ValueError):
            self.console.size = ConsoleDimensions(*os.get_terminal_size(self._stream.fileno()))

    def print(self, line: str) -> None:
        """Print a line above the view, wrapped between words. No word is broken, so that paths can be copied."""
        indent = " " * (len(line) - len(line.lstrip()))
        lines = textwrap.wrap(
            line,
            self.console.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        # soft_wrap keeps rich from wrapping the text a second time, at its own places
        self.console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)


@contextlib.contextmanager
def live_view(run: RunDir | None = None, *, stream: TextIO | None = None, tick_s: float = TICK_S) -> Iterator[LiveView]:
    """Show a run on `stream` (default: stderr) while the body runs: a live view in a terminal, else lines.

    run: None if it has no directory yet; `attach` names it then. What is printed on `stream` inside, and by log
    handlers that write to it, appears above the view.
    """
    stream = stream or sys.stderr
    view = LiveView(stream)
    if run:
        view.attach(run)
        view.facts.read()
    done = threading.Event()

    def update() -> None:
        while not done.wait(tick_s):
            view.tick()

    # the main thread belongs to the flow, which receives the signals
    thread = threading.Thread(target=update, name="live view", daemon=True)
    with _printed_above(view, stream):
        view.start()
        thread.start()
        try:
            yield view
        finally:
            # the thread ends first: a tick after the stop would draw the view again
            done.set()
            thread.join()
            view.stop()


def follow(run: RunDir) -> None:
    """Show a run on stderr until no flow works on it any more."""
    from onward.flows.run_state.runs import is_running

    with live_view(run):
        while is_running(run):
            time.sleep(TICK_S)


class _Above:
    """Stands for a terminal's stream while a view is on it: prints each complete line above the view.

    A line that is written over and over, such as the progress of a download, is a row of the view.
    """

    def __init__(self, view: LiveView, stream: TextIO) -> None:
        self._view = view
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        *complete, begun = (self._begun + text).split("\n")
        for line in complete:
            # of a line that was written over and over only the last state counts
            self._view.print(line.rpartition("\r")[2])
        # a carriage return in a line without an end: a progress bar that goes on
        _, again, self._begun = begun.rpartition("\r")
        if again or complete:
            self._view.facts.note = Text.from_ansi(self._begun).plain.strip() if again else ""
        return len(text)

    def end(self) -> None:
        """Print a line that has no end."""
        if self._begun and not self._view.facts.note:
            self.write("\n")

    def flush(self) -> None:
        """Do nothing: each complete line is printed at once."""

    @property
    def rich_proxied_file(self) -> TextIO:
        """Return this stream: consoles of rich, such as that of Prefect's logs, print above the view, too."""
        return cast(TextIO, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # isatty, fileno, encoding: those of the terminal


@contextlib.contextmanager
def _printed_above(view: LiveView, stream: TextIO) -> Iterator[None]:
    """Print above a live view what is written to `stream`: by print, and by the log handlers that have it."""
    if not view.is_live:
        yield
        return
    # from now on each line that is printed goes through the view, which draws itself again below it
    above = _Above(view, stream)
    # handlers keep the stream they were made with, so each of them has to be redirected
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = set()
    for logger in loggers:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handlers.add(handler)
    is_stderr = sys.stderr is stream
    try:
        for redirected in handlers:
            redirected.setStream(cast(TextIO, above))
        if is_stderr:
            sys.stderr = cast(TextIO, above)
        yield
    finally:
        above.end()
        for redirected in handlers:
            redirected.setStream(stream)
        if is_stderr:
            sys.stderr = stream
