"""Import torch and the trainer once, and run programs as forks of that: `python -m ... LISTENER ALIVE FOLDER`.

    flow -- pipe -- server        imports, then forks a keeper for each client
                      | fork
    client -- socket -- keeper    waits for the end of the client or of the program, whichever comes first
                          | fork
                        program   `python -m MODULE ARGUMENTS` with the client's environment, directory and output

A client (infra/job/child_program.py) sends a line with its words, environment and working directory, and its output; it
gets a line with the process id of the program, and at last a line with its exit status. While the program runs, the
client is what others see of it, so the keeper carries over what the client cannot: its end by SIGKILL, and its stop by
SIGSTOP. The kernel ends a keeper with the server, and a program with its keeper.

LISTENER is the file descriptor of a socket, ALIVE that of the reading end of a pipe, which closes when the process that
has started the server ends. The server then takes no client any more, and ends when the last program has ended, because
the ranks of a killed flow still save a checkpoint.

No thread runs in the server, because a process that has threads must not fork, and it uses no device.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil

from onward.trainer.distributed.launched import JOB_TAG, killed_with
from onward.trainer.run.machine.this_machine import ignore_lower_precision, spin_briefly_if_busy

LOOK_S = 0.2
"""Seconds between two looks at whether a client is stopped."""
SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""The thread of pyarrow's allocator, which makes itself ready for a fork."""


def serve(listener: socket.socket, alive: int) -> None:
    """Fork a keeper for each client until `alive` is closed at its other end and all keepers have ended."""
    while alive not in select.select([listener.fileno(), alive], [], [])[0]:
        # no process id or memory is left: the client reads the end of its connection, and becomes the program itself
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                in_a_fork(partial(keep, connection, listener, alive))
        _reap(os.WNOHANG)
    listener.close()
    _reap(0)


def _reap(options: int) -> None:
    """Read the exit status of all children: of those that have ended (os.WNOHANG), or wait for each (0)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def in_a_fork(role: Callable[[], int]) -> int:
    """Call `role` in a fork, which ends with the exit status that it returns. Returns the process id of the fork.

    The fork ends here whatever happens in it: it must never go on as the process from which it was forked. Nor does it
    outlive that process. Raises OSError where no process can be made.
    """
    # read before the fork: afterwards getppid() could already be that of a parent that has adopted it
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        # the parent may have died between the fork and the request to be killed with it
        if killed_with(parent):
            status = role()
    finally:
        try:
            os._exit(status)
        finally:  # the status is no C int
            os._exit(255)


# -- the keeper


def keep(connection: socket.socket, listener: socket.socket, alive: int) -> int:
    """Run the program of a client in a fork, end or stop it with the client, and send how it has ended."""
    listener.close()
    os.close(alive)
    # stdin, stdout and stderr of the client come with the first byte, as file descriptors
    _, output, *_ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as request:
        words, environment, folder = json.loads(request.readline())
    if not _libraries(environment) <= _LIBRARIES:  # the loader reads them only when a program starts
        return 0  # the client becomes the program itself
    # the kernel says which process the client is; what it says itself could be wrong or old
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    pid = in_a_fork(partial(be_program, connection, output, partial(_run, words, environment, folder)))
    # the program alone holds them now, so that the end of its output is seen
    for file in output:
        os.close(file)
    connection.sendall(b"%d\n" % pid)
    # a descriptor that becomes readable when the program ends, so one select waits for both
    ended = os.pidfd_open(pid)
    is_stopped = False
    while not select.select([ended, connection.fileno()], [], [], LOOK_S)[0]:
        with contextlib.suppress(OSError, psutil.Error):  # the client has ended
            # whichever of both is stopped or goes on, the other does so, too: mpirun and its watch see the client alone
            if any(_is_stopped(each) != is_stopped for each in (client, pid)):
                is_stopped = not is_stopped
                for each in (client, pid):
                    os.kill(each, signal.SIGSTOP if is_stopped else signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)  # the client has ended; a program that has ended by itself is not changed
    # waiting also removes the zombie, whose process id nobody can take until then
    _, status = os.waitpid(pid, 0)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _libraries(environment: Mapping[str, str]) -> set[str]:
    """Return what decides in an environment which shared libraries a program finds."""
    names = ("LD_LIBRARY_PATH", "LD_PRELOAD")
    return {part for name in names for part in environment.get(name, "").split(os.pathsep)} | {""}


_LIBRARIES = _libraries(os.environ)


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


# -- the program


def be_program(connection: socket.socket, output: list[int], run: Callable[[], object]) -> int:
    """Run a program as the interpreter does, with the client's stdin, stdout and stderr; return its exit status."""
    # the program writes to the client's terminal or log, without a copy in between
    for number, file in enumerate(output):
        os.dup2(file, number)
        os.close(file)
    connection.close()
    status = 0
    ended_by = None
    try:
        run()
    except BaseException as error:
        status = 1
        ended_by = error
        with contextlib.suppress(BaseException):  # stderr is closed or on a full disk
            status = _report(error)
    # os._exit ends the fork, so what the interpreter does at its end is done here, in its order
    for last in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            last()
        except BaseException:
            status = 120  # that of the interpreter where output is lost
    if isinstance(ended_by, KeyboardInterrupt):
        # the interpreter ends by SIGINT itself after Ctrl-C, which a shell tells from an exit status
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return status


def _report(error: BaseException) -> int:
    """Report an exception that nothing has caught, as the interpreter does; return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _report(leaving)
    except BaseException as failed:  # its traceback names the first error as what it followed from
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _run(words: list[str], environment: dict[str, str], folder: str) -> None:
    """Do what `python -m MODULE ARGUMENTS` does, in this process."""
    # a group of its own: Ctrl-C in the terminal goes to the client, which passes it on
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    _hold_tag(environment.get(JOB_TAG, ""))
    tempfile.tempdir = None  # found by the environment of the server
    os.chdir(folder)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    # `python -m` puts the working directory first
    sys.path[0] = folder
    _, module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _hold_tag(tag: str) -> None:
    """Keep a file in memory open that is named after the tag of the fork's job: everybody finds its processes by that.

    What the kernel shows as the environment of a fork is that with which the server began. The file goes on to forks of
    the fork; a process that runs another program has the tag in its environment.
    """
    if tag:
        os.memfd_create(f"{JOB_TAG}={tag}")


def _threads() -> set[str]:
    """Return the names of this process's threads."""
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def main(listener: int, alive: int, folder: str) -> None:
    """Import what the forks need, then serve."""
    # threads that exist already were not started by the imports
    own = _threads()
    gc.disable()  # what is imported stays: looking through it for garbage takes a tenth of the time
    # what OpenMP and oneDNN read when torch is imported, the forks keep
    spin_briefly_if_busy()
    ignore_lower_precision()
    import pandas  # noqa: F401  most data is read with it
    import torch._dynamo  # noqa: F401  torch imports it when the first optimizer is made

    import onward.trainer.distributed.preflight
    import onward.trainer.export.exported_model
    import onward.trainer.loop
    import onward.trainer.rehearsal.rehearse  # noqa: F401

    if others := _threads() - own - SAFE_THREADS:
        sys.exit(f"an imported package has started a thread ({others}); each program is started by itself")
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a fork would copy the pages of everything that was imported here
    serve(socket.socket(fileno=listener), alive)
    shutil.rmtree(folder, ignore_errors=True)  # a flow that was killed has left it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # nothing is left to be done; taking torch down would take a third of a second, for which a flow waits
