"""Start Python programs of this host as forks of one process that has imported torch, which takes seconds each time.

    flow process --- pipe ---> fork server (trainer/fork_server.py): imports torch and the trainer once
         |                          | fork
         +--- client (child_program.py) .. the rehearsal, the export, a report
         +--- mpirun --- client ............ a rank of the preflight, of an attempt, of the next attempt

The client is what is started, waited for and signalled. The server ends when the flow process has ended, however that
was, and all of its forks have; without a server each program is started as ever.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from onward.infra.job.child_program import python_of
from onward.infra.job.job_guard import NO_TAG, TAG
from onward.infra.job.launcher import LaunchError
from onward.infra.job.mpirun import Mpirun
from onward.infra.job.temporary_folders import lock_of, make, remove, remove_abandoned

SERVER = ("onward.trainer.fork_server",)
"""The module of the server."""
LONGEST_PATH = 100
"""Bytes that the kernel takes for the path of a socket, nearly."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # numpy and scipy would start threads when they are imported; torch has threads of its own
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    TAG: NO_TAG,  # a fork holds its job's tag in a file, where `members` reads it
}
"""Environment of the server, beside that of this process."""
END_S = 5.0
"""Longest time that the server has to end."""


@dataclass(frozen=True)
class Server:
    """A fork server that this process has started."""

    process: subprocess.Popen[bytes]
    path: Path

    def python(self) -> list[str]:
        """Return the words that run Python as a fork of this server."""
        return python_of(str(self.path))


_server: ContextVar[Server | None] = ContextVar("fork server", default=None)
"""The server inside `fork_server`. The command line starts it, and the tasks use it; between them is a Prefect flow,
whose parameters are settings only, so it is not passed as an argument."""


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Let `python` use a fork server inside. Within another one, or where it cannot be started, do nothing."""
    if _server.get():
        yield
        return
    with started() as server:
        token = _server.set(server)
        try:
            yield
        finally:
            _server.reset(token)


@contextlib.contextmanager
def started() -> Iterator[Server | None]:
    """Keep a fork server running inside; None where it cannot be started."""
    folder: Path | None = None
    with contextlib.suppress(OSError):  # the disk is full, or TMPDIR cannot be written
        remove_abandoned()
        folder = make(lambda: Path(tempfile.mkdtemp(prefix="onward-forks-")))
    if folder is None:
        yield None
        return
    # this process keeps one end open, whose close tells the server to end
    read, written = os.pipe()
    server = _start(folder, read)
    os.close(read)
    try:
        yield server
    finally:
        os.close(written)  # the server reads the end of this pipe, also when this process is killed
        if server:
            _end(server.process)
        remove(folder)


def python() -> list[str]:
    """Return the words that run Python: as a fork if a server runs, else the interpreter itself."""
    server = _server.get()
    # without a server everything works as well, only more slowly
    if server is None or server.process.poll() is not None:
        return [sys.executable]
    return server.python()


def _start(folder: Path, alive: int) -> Server | None:
    path = folder / "socket"
    # as in a long TMPDIR
    if len(os.fsencode(path)) > LONGEST_PATH:
        return None
    with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):  # no memory or process id is left
        listener.bind(str(path))
        listener.listen(64)  # from now on clients wait for their forks
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *SERVER, str(listener.fileno()), str(alive), str(folder)],
                # TMPDIR: packages leave files behind
                env={**os.environ, **_libraries(), **ENVIRONMENT, "TMPDIR": str(folder)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(), alive, lock_of(folder)),
                start_new_session=True,  # Ctrl-C in the terminal goes to the flow process alone
            )
        return Server(process, path)
    return None


def _libraries() -> dict[str, str]:
    """Return the variable in which mpirun names its libraries to the ranks; their forks need it from the beginning."""
    try:
        libraries = Mpirun().program().parent.parent / "lib"
    except LaunchError:
        return {}
    return {"LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
