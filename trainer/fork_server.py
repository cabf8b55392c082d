"""Import torch and the trainer once, and fork for each client: `python -m ... LISTENER ALIVE FOLDER`.

A client (infra/fork_client.py) sends its words, environment, working directory and output, and gets the process id of
the fork and at last its exit status. While it lives, the client is what others see of the fork, so the server carries
over what the client cannot: its end by SIGKILL, and its stop by SIGSTOP.

LISTENER is the file descriptor of a socket, ALIVE that of the reading end of a pipe, which closes when the process that
has started the server ends. The server then takes no client any more, and ends when its last fork has ended, because
the ranks of a killed flow still save a checkpoint.

No thread runs here, because a process that has threads must not fork, and no device is used.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.distributed.launched import JOB_TAG
from onward.trainer.run.this_machine import spin_briefly_if_busy

LOOK_S = 0.2
"""Seconds between two looks at whether clients are stopped."""
ALONE = {"OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1"}
"""Environment for the imports, without which numpy and scipy start threads. torch has threads of its own."""

SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""The thread of pyarrow's allocator, which makes itself ready for a fork."""


@dataclass
class Fork:
    """A fork that runs."""

    pid: int
    handle: int
    """A file descriptor (pidfd) that is readable when it has ended."""
    connection: socket.socket
    client: int
    """Process id of its client."""
    is_stopped: bool = False


def serve(listener: socket.socket, alive: int, folder: str) -> None:
    """Fork for each client until `alive` is closed at its other end and all forks have ended; then delete `folder`."""
    selector, forks = selectors.DefaultSelector(), dict[int, Fork]()
    selector.register(listener, selectors.EVENT_READ, listener)
    selector.register(alive, selectors.EVENT_READ, alive)
    serving = True
    while serving or forks:
        for key, _ in selector.select(LOOK_S if forks else None):
            if key.data == alive:
                serving = False
                selector.unregister(alive)
                selector.unregister(listener)
                listener.close()
            elif key.data is listener:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError, ValueError):  # a client that has gone, or no process id is left
                    others = [file for each in forks.values() for file in (each.handle, each.connection.fileno())]
                    fork = _fork(connection, (listener.fileno(), alive, *others))
                    forks[fork.pid] = fork
                    for file in (fork.connection, fork.handle):
                        selector.register(file, selectors.EVENT_READ, fork)
                    continue
                connection.close()
            elif key.data.pid in forks:
                _notice(key.data, selector, forks, ended=key.fileobj == key.data.handle)
        for fork in forks.values():
            _carry_over_stop(fork)
    shutil.rmtree(folder, ignore_errors=True)  # a flow that was killed has left it


def _notice(fork: Fork, selector: selectors.BaseSelector, forks: dict[int, Fork], *, ended: bool) -> None:
    if not ended:  # its client is gone
        selector.unregister(fork.connection)
        signal.pidfd_send_signal(fork.handle, signal.SIGKILL)
        return
    _, status = os.waitpid(fork.pid, 0)
    with contextlib.suppress(OSError):
        fork.connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    for file in (fork.connection, fork.handle):
        with contextlib.suppress(KeyError):
            selector.unregister(file)
    fork.connection.close()
    os.close(fork.handle)
    del forks[fork.pid]


def _carry_over_stop(fork: Fork) -> None:
    """Stop the fork while its client is stopped, as a rank that somebody stops."""
    with contextlib.suppress(OSError):
        stopped = _state(fork.client) == "T"
        if stopped != fork.is_stopped:
            signal.pidfd_send_signal(fork.handle, signal.SIGSTOP if stopped else signal.SIGCONT)
            fork.is_stopped = stopped


def _state(pid: int) -> str:
    # after the name, which is in parentheses and may contain anything
    return (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]


# -- the fork


def _fork(connection: socket.socket, ours: tuple[int, ...]) -> Fork:
    """Fork for the client of a connection. Returns in this process alone. Raises OSError, ValueError."""
    size, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    if len(size) < 8 or not ancillary:
        raise ValueError("the client has gone")
    files = array.array("i")
    files.frombytes(ancillary[0][2][: 3 * files.itemsize])
    try:
        words, environment, folder = json.loads(_read(connection, int.from_bytes(size, "big")))
        if not _libraries(environment) <= _LIBRARIES:  # the loader reads it only when a program starts
            connection.sendall((0).to_bytes(8, "big"))
            raise ValueError("the client becomes the program itself")
        client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # its client has gone, which is noticed next
                connection.sendall(pid.to_bytes(8, "big"))
            return Fork(pid, os.pidfd_open(pid), connection, client)
    finally:
        if os.getpid() == _SERVER:
            for file in files:
                os.close(file)
    status = 70
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for file in (*ours, connection.detach()):
            os.close(file)
        _run(words, environment, folder)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _libraries(environment: Mapping[str, str]) -> set[str]:
    """Return what decides in an environment which shared libraries a program finds."""
    names = ("LD_LIBRARY_PATH", "LD_PRELOAD")
    return {part for name in names for part in environment.get(name, "").split(os.pathsep)} | {""}


_SERVER = os.getpid()
_LIBRARIES = _libraries(os.environ)


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        block = connection.recv(size - len(content))
        if not block:
            raise ConnectionError("the client has gone")
        content += block
    return content


def _run(words: list[str], environment: dict[str, str], folder: str) -> None:
    """What `python -m MODULE ARGUMENTS` does, in this process."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: what the server watches must not outlive it
    if os.getppid() != _SERVER:
        os._exit(70)
    os.environ.clear()
    os.environ.update(environment)
    _show_tag(environment.get(JOB_TAG, ""))
    tempfile.tempdir = None  # found by the environment of the server
    os.chdir(folder)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    sys.path[0] = folder
    _, module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show_tag(tag: str) -> None:
    """Write the tag of the fork's job where the kernel shows a process's environment (/proc/PID/environ).

    That is the memory with which the server began, so it has a tag of the same length. Everybody finds the processes of
    a job by it.
    """
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    first, last = int(fields[47]), int(fields[48])  # env_start and env_end, the fields 50 and 51 of proc(5)
    entry = f"{JOB_TAG}=".encode()
    at = ctypes.string_at(first, last - first).find(b"\0" + entry)
    if at >= 0 and len(tag) == 32:
        ctypes.memmove(first + at + 1 + len(entry), tag.encode(), 32)


def _threads() -> set[str]:
    """Return the names of this process's threads."""
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def main(listener: int, alive: int, folder: str) -> None:
    """Import what the forks need, then serve."""
    own = _threads()
    given = {name: os.environ.get(name) for name in ALONE}
    os.environ.update(ALONE)
    gc.disable()  # what is imported stays: looking through it for garbage takes a tenth of the time
    spin_briefly_if_busy()  # what OpenMP reads when torch is imported, the forks keep
    import pandas  # noqa: F401  most data is read with it
    import torch._dynamo  # noqa: F401  torch imports it when the first optimizer is made

    import onward.trainer.distributed.preflight
    import onward.trainer.export.export
    import onward.trainer.loop
    import onward.trainer.rehearsal.rehearse  # noqa: F401

    for name, value in given.items():
        os.environ.pop(name)
        os.environ.update({name: value} if value is not None else {})
    if others := _threads() - own - SAFE_THREADS:
        sys.exit(f"an imported package has started a thread ({others}); each program is started by itself")
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a fork would copy the pages of everything that was imported here
    serve(socket.socket(fileno=listener), alive, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # nothing is left to be done; taking torch down would take a third of a second, for which a flow waits
