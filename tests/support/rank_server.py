"""Start ranks from a process that has imported torch already: one import of 4 CPU seconds for hundreds of ranks.

    pytest --- server (imports torch and the training loop once)
                  | fork
                  +--- rank 0, rank 1 ...      real processes; their environment and output are those of their client
    mpirun --+-- client 0 --- socket ---+      asks for a fork, forwards signals, exits with its status
             +-- client 1 --- socket ---+      its death closes the socket: the server kills its rank

mpirun starts the clients as it starts any program, and MPI finds the job in the environment that it gave them. Tests of
starting and ending real processes (tests/infra, tests/tasks, tests/flows) do not use this.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
SHARED = "ONWARD_RANK_SERVER"
"""Environment: the socket of a server that a parent process has started."""
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that has started threads must not fork; each rank of a test uses one thread anyhow."""


@functools.cache
def command() -> tuple[str, ...]:
    """Return the words that run `-m MODULE ARGUMENTS` in a fork of the server; starts the server at the first call.

    A process with SHARED in its environment starts none: it uses the server that is named there.
    """
    if shared := os.environ.get(SHARED):
        return (sys.executable, "-S", "-E", str(Path(__file__)), shared)
    folder = tempfile.mkdtemp(prefix="onward-ranks-")
    path = str(Path(folder) / "socket")
    alive, ours = os.pipe()  # the server ends when the last writer of this pipe, pytest, is gone
    ready, written = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, path, str(alive), str(written)],
        env={**os.environ, **THREADS},
        pass_fds=(alive, written),
        start_new_session=True,
    )
    os.close(alive)
    os.close(written)
    assert os.read(ready, 1) == b"1", f"the server of ranks ended with status {process.wait()}"
    os.close(ready)
    atexit.register(_end, process, ours, folder)
    return (sys.executable, "-S", "-E", str(Path(__file__)), path)


def _end(process: subprocess.Popen[bytes], ours: int, folder: str) -> None:
    os.close(ours)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# -- the client: started by mpirun, imports the standard library alone


def be_client(path: str, module: str, arguments: list[str]) -> int:
    """Ask for a fork that runs the module; return its exit status, or die by the signal that ended it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: as a rank, it does not outlive mpirun
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps([module, arguments, dict(os.environ), str(Path.cwd())]).encode()
    files = array.array("i", [0, 1, 2])
    connection.sendmsg([len(request).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    connection.sendall(request)
    rank = int.from_bytes(_read(connection, 8))
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(rank, number))
    status = int.from_bytes(_read(connection, 8), signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    return status


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        block = connection.recv(size - len(content))
        if not block:
            raise ConnectionError("the server of ranks is gone")
        content += block
    return content


# -- the server


def serve(path: str, alive: int, written: int) -> None:
    """Import what ranks need, then fork one rank for each request until `alive` is closed at its other end."""
    import torch._dynamo  # noqa: F401  half the CPU time of a small training: tracing the first graph imports it

    import onward.trainer.export.export
    import onward.trainer.loop  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of everything imported here
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(written, b"1")
    os.close(written)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, "listener")
    selector.register(alive, selectors.EVENT_READ, "alive")
    ranks: dict[int, tuple[int, int, socket.socket]] = {}  # pid -> pid, its pidfd, its client's connection
    while True:
        for key, _ in selector.select():
            if key.data == "alive":
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if key.data == "listener":
                connection, _ = listener.accept()
                if (rank := _fork(connection, (listener.fileno(), alive))) is not None:
                    ranks[rank[0]] = rank
                    selector.register(rank[1], selectors.EVENT_READ, rank)
                    selector.register(connection, selectors.EVENT_READ, rank)
                continue
            pid, ended, connection = key.data
            if pid not in ranks:  # it ended, and its client's connection closed, between two looks
                continue
            if key.fileobj is connection:  # its client is gone
                selector.unregister(connection)
                signal.pidfd_send_signal(ended, signal.SIGKILL)
            else:
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, signed=True))
                for each in (connection, ended):
                    with contextlib.suppress(KeyError):
                        selector.unregister(each)
                connection.close()
                os.close(ended)
                del ranks[pid]


def _fork(connection: socket.socket, ours: tuple[int, ...]) -> tuple[int, int, socket.socket] | None:
    size, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    if len(size) < 8:
        connection.close()
        return None
    files = array.array("i")
    files.frombytes(ancillary[0][2][: 3 * files.itemsize])
    module, arguments, environment, folder = json.loads(_read(connection, int.from_bytes(size)))
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # its client is gone: the closed connection is noticed next
            connection.sendall(pid.to_bytes(8))
        return pid, os.pidfd_open(pid), connection
    status = 70
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for each in ours:
            os.close(each)
        connection.close()
        _be_rank(module, arguments, environment, folder)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _be_rank(module: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """What `python -m module` does, in this process."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    sys.path[0] = folder
    for each in filter(None, reversed(environment.get("PYTHONPATH", "").split(os.pathsep))):
        if each not in sys.path:
            sys.path.insert(1, each)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(be_client(sys.argv[1], sys.argv[3], sys.argv[4:]))  # argv: socket -m module arguments
