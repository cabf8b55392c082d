"""A pseudo-terminal: a stream to write to, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time

import pyte

LINES = 40


class Terminal:
    """A terminal of `columns`: `stream` to write to, `screen` what it shows, `text` all that was written."""

    def __init__(self, columns: int = 80) -> None:
        keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.columns = columns
        self.stream = os.fdopen(screen, "w", encoding="utf-8")
        self.text = ""
        self._screen = pyte.Screen(columns, LINES)
        self._fed = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, args=(keyboard,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        while True:
            try:
                content = os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                os.close(descriptor)
                return
            with self._lock:
                self.text += content.decode(errors="replace")
                self._fed.feed(content)

    @property
    def screen(self) -> str:
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def wait_for(self, pattern: str) -> None:
        """Wait until the screen shows a pattern."""
        give_up_at = time.monotonic() + 30
        while not re.search(pattern, self.screen):
            assert time.monotonic() < give_up_at, f"{pattern!r} never came; the terminal shows\n{self.screen}"
            time.sleep(0.01)

    def close(self) -> str:
        """Close the terminal; return what it shows at last."""
        self.stream.close()
        self._reader.join()
        return self.screen
