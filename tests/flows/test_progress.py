"""The progress bar, on a real pseudo-terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import threading
import time
from pathlib import Path

from onward.flows.progress import live_progress
from onward.trainer.events import EventWriter
from onward.trainer.run.directory import RunDir


class Terminal:
    """A pseudo-terminal: `stream` to write to, `text` the output so far."""

    def __init__(self) -> None:
        keyboard, screen = pty.openpty()
        self.stream = os.fdopen(screen, "w")
        self.text = ""
        self._reader = threading.Thread(target=self._read, args=(keyboard,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        while True:
            try:
                self.text += os.read(descriptor, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                os.close(descriptor)
                return

    def wait_for(self, pattern: str) -> None:
        give_up_at = time.monotonic() + 20
        while not re.search(pattern, self.text):
            assert time.monotonic() < give_up_at, f"{pattern!r} never came; the terminal has {self.text!r}"
            time.sleep(0.01)

    def close(self) -> None:
        self.stream.close()
        self._reader.join()


def training(run: RunDir) -> None:
    events = EventWriter(run.events, attempt=1, rank=0)
    events.emit("start", 0, num_steps=100, num_samples=3200, num_parameters=7)
    events.scalars(10, loss=0.75, samples_per_s=32.0)
    events.close()


def test_the_bar_shows_loss_speed_and_time_left_and_is_updated(tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal()
    with live_progress(run, stream=terminal.stream, tick_s=0.01):
        training(run)
        terminal.wait_for(r"10/100.*loss 0\.75, 32 samples/s, 0:01:30 left")
        events = EventWriter(run.events, attempt=1, rank=0)
        events.scalars(55, loss=0.25, samples_per_s=64.0)
        events.close()
        terminal.wait_for(r"55/100.*loss 0\.25, 64 samples/s, 0:00:22 left")
    terminal.close()


def test_log_lines_are_printed_above_the_bar_and_the_log_handler_is_restored(tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal()
    log, handler = logging.getLogger("tests.progress"), logging.StreamHandler(terminal.stream)
    log.addHandler(handler)
    training(run)
    with live_progress(run, stream=terminal.stream, tick_s=0.01):
        terminal.wait_for(r"10/100")
        log.warning("saved [step-10]")
        terminal.wait_for(r"(\r|\x1b\[2K|\n)saved \[step-10\]\r\n")
    assert handler.stream is terminal.stream
    log.removeHandler(handler)
    terminal.close()


def test_without_a_terminal_nothing_is_written(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    with live_progress(run, stream=stream, tick_s=0.01):
        training(run)
    assert stream.getvalue() == ""
