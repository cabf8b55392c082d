r"""Write texts of files and users to a terminal so that it shows them, and does not obey them.

    print, logging         -> EscapedStream    "\x1b[2J" is written as the letters \x1b[2J
    rich, Prefect's logs   -> rich_proxied_file: the same, but colours pass
    the live view          -> ViewConsole      moves the cursor itself; what it shows is escaped before
    progress of a download -> unescaped        the same (trainer/run/remote/remote_files.py)

A file can hold any character in the name of a tensor, a column or a class. ESC begins commands to the terminal, such as
to clear the screen; other characters change the order of the letters that follow.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from onward.trainer.errors import printable

_COLOUR = re.compile(r"(\x1b\[[0-79;]*m)")
"""A command that sets colours, and none that hides the letters (8)."""


class EscapedStream:
    """Stands for a text stream; what is written to it reaches the stream without control characters."""

    def __init__(self, stream: TextIO, *, colours: bool = False) -> None:
        self.unescaped = stream
        self._colours = colours

    def write(self, text: str) -> int:
        parts = _COLOUR.split(text) if self._colours else [text]
        # of a split by a group, every second part is what the group has found
        safe = [part if place % 2 else printable(part, keep="\n\t") for place, part in enumerate(parts)]
        self.unescaped.write("".join(safe))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @property
    def rich_proxied_file(self) -> TextIO:
        """Return what consoles of rich write to in place of this stream."""
        return cast(TextIO, EscapedStream(self.unescaped, colours=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)  # isatty, fileno, encoding, flush


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what is printed on stdout and stderr in the body."""
    # both, because warnings and logs show texts of files as well
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, EscapedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream that an EscapedStream stands for, to which the live view writes."""
    return cast(TextIO, getattr(stream, "unescaped", stream))
