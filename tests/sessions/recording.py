"""Type commands into a real terminal of 80 columns, and read what it shows.

The commands run in one directory with one home, which have short names on the page whatever they are here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyte

from onward.infra.servers import services
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from tests.sessions.script import Session
from tests.support.ranks import ROOT
from tests.support.workshop import until

COLUMNS, LINES = 80, 50
UNWRAPPED = 500
"""Columns of the screen that is read: lines that a terminal of COLUMNS would wrap stay one line."""
HOME, FOLDER, HOST = "/home/ada/.onward", "/home/ada/models", "node-1"
PYTHON = "/home/ada/.venv/bin/python"


@dataclass(frozen=True)
class Recorded:
    """What a command showed."""

    text: str
    """What stays on the terminal."""
    view: str
    """The live view at half of the steps; "" without one."""


class Terminal:
    """A directory with a home of its own, into which commands are typed."""

    def __init__(self, root: Path) -> None:
        self.home, self.folder = root / "home", root / "work"
        self.home.mkdir(mode=0o700)
        self.folder.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        other = ("PREFECT", "MLFLOW", "ONWARD", "COLUMNS", "LINES", "NO_COLOR")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(other)}
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        python = os.pathsep.join([str(ROOT / ".package"), str(ROOT)])
        return kept | {"ONWARD_HOME": str(self.home), "PATH": search, "PYTHONPATH": python, "TERM": "xterm-256color"}

    def record(self, session: Session) -> Recorded:
        """Run a session and return what it showed; raises AssertionError for another exit status than its own."""
        with self._beside(session.beside):
            found = self.typed(session.command, status=session.status, shows_view=session.shows_view)
        return Recorded(self._with_short_paths(found.text), self._with_short_paths(found.view))

    def typed(self, command: str, *, status: int = 0, shows_view: bool = False, columns: int = COLUMNS) -> Recorded:
        """Run one command in a terminal of its own until it ends."""
        screen = pyte.HistoryScreen(UNWRAPPED, LINES, history=20_000, ratio=0.5)
        stream, view = pyte.ByteStream(screen), ""
        pid, terminal = pty.fork()
        if pid == 0:
            try:
                os.chdir(self.folder)
                words = shlex.split(command)
                os.execvpe(words[0], words, self.environment)
            finally:
                os._exit(127)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        with contextlib.suppress(OSError):  # the end of the last process that has the terminal open
            while content := os.read(terminal, 65536):
                stream.feed(content)
                if shows_view and not view:
                    view = view_at_half("\n".join(line.rstrip() for line in screen.display))
        os.close(terminal)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        text = shown_on(screen)
        assert ended == status, f"`{command}` ended with {ended}:\n{text[-4000:]}"
        return Recorded(text, view)

    @contextlib.contextmanager
    def _beside(self, command: str) -> Iterator[None]:
        """Run a command that trains beside the block; it has made a step when the block begins, and ends then."""
        if not command:
            yield
            return
        before = {path.name for path in (self.home / "runs").iterdir()}
        process = subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: self._trains(before) or process.poll() is not None, limit_s=600)
            yield
            process.wait(120)
        finally:
            if process.poll() is None:
                process.kill()

    def _trains(self, before: set[str]) -> bool:
        new = [path for path in (self.home / "runs").iterdir() if path.name not in before]
        return any(event.kind == "scalars" for path in new for event, _ in read_events(RunDir(path).events))

    def _with_short_paths(self, text: str) -> str:
        text = text.replace(str(self.home), HOME).replace(str(self.folder), FOLDER)
        # a script of a job names the Python that wrote it
        text = text.replace(sys.executable, PYTHON).replace(tempfile.gettempdir(), "/tmp")
        return re.sub(rf"\bon {re.escape(socket.gethostname())}\b", f"on {HOST}", text)

    def close(self) -> None:
        """Stop the servers of the home, and whatever else it has left."""
        with contextlib.suppress(services.ServiceError):
            services.down(self.home)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("ONWARD_HOME") == str(self.home):
                    process.kill()


def shown_on(screen: pyte.HistoryScreen) -> str:
    """The lines of a screen and those that have left it at the top, without spaces at their ends."""
    above = ["".join(line[column].data for column in sorted(line)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*above, *screen.display]).rstrip()


def view_at_half(text: str) -> str:
    """The live view, if it is complete and half of the steps are made; else ""."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"start \d", line) and number:
            view = "\n".join(lines[number - 1 :]).rstrip().splitlines()
            done = re.search(r"  (\d+)/(\d+)  \d+%.* left$", "\n".join(view[:4]), re.M)
            complete = view[-1].startswith("checkpoint  step ") and any(row.startswith("memory") for row in view)
            trend = any(" steps" in row and row.startswith("loss ") for row in view)
            return "\n".join(view) if done and complete and trend and int(done[1]) * 2 >= int(done[2]) else ""
    return ""
