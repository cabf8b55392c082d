"""Faults of processes: signals, pauses, a held thread, killed servers.

Each function gets the scene and a number from 0 to 1, hits its target and returns its description; it raises NoTarget
when there is none yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from tests.soak.scene import NoTarget, Scene

LONGEST_HANG_S = 200.0
"""How long to wait for the end of a rank that is held."""
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_FOR_THREADS = 0x4206, 0x4207, 0x40000000
"""Of linux/ptrace.h and, as __WALL, linux/wait.h."""


def send(process: psutil.Process, number: int) -> str:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        raise NoTarget("the process has just ended") from None
    return f"process {process.pid}"


def one_rank(scene: Scene, choice: float) -> tuple[int, psutil.Process]:
    ranks = scene.ranks()
    number = int(choice * len(ranks))
    return number, ranks[number]


def to_rank(number: int, scene: Scene, choice: float) -> str:
    rank, process = one_rank(scene, choice)
    return f"rank {rank}, {send(process, number)}"


def to_all_ranks(number: int, scene: Scene, choice: float) -> str:
    return "; ".join(send(process, number) for process in scene.ranks())


def to_mpirun(number: int, scene: Scene, choice: float) -> str:
    return f"mpirun, {send(scene.mpirun(), number)}"


def to_flow(number: int, scene: Scene, choice: float) -> str:
    if scene.flow is None:
        raise NoTarget("no command runs")
    return f"flow, {send(scene.flow, number)}"


def pause(find: Callable[[Scene, float], Sequence[psutil.Process]], seconds: float, scene: Scene, choice: float) -> str:
    """Stop processes for some seconds."""
    stopped = find(scene, choice)
    told = "; ".join(send(process, signal.SIGSTOP) for process in stopped)
    time.sleep(seconds)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    return f"{told} for {seconds:g} s"


def hold(scene: Scene, choice: float) -> str:
    """Hold the main thread of a rank by ptrace, as in a deadlock of native code, until the rank is ended."""
    programs = scene.programs()
    rank = int(choice * len(programs))
    process = programs[rank]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(PTRACE_SEIZE, process.pid, None, None) or libc.ptrace(PTRACE_INTERRUPT, process.pid, None, None):
        raise NoTarget(f"ptrace of process {process.pid}: {os.strerror(ctypes.get_errno())}")
    until = time.monotonic() + LONGEST_HANG_S
    while time.monotonic() < until:
        # the launcher is told of the rank's end only after its tracer
        pid, status = os.waitpid(process.pid, os.WNOHANG | WAIT_FOR_THREADS)
        if pid and not os.WIFSTOPPED(status):
            break
        time.sleep(0.02)
    return f"rank {rank}, process {process.pid}"


def kill_guard(scene: Scene, choice: float) -> str:
    guards = scene.guards()
    return f"guard, {send(guards[int(choice * len(guards))], signal.SIGKILL)}"


def kill_guard_and_flow(scene: Scene, choice: float) -> str:
    told = [send(guard, signal.SIGKILL) for guard in scene.guards()]
    return f"{len(told)} guards; {to_flow(signal.SIGKILL, scene, choice)}"


def kill_exporter(scene: Scene, choice: float) -> str:
    return f"exporter, {send(scene.having('onward.trainer', 'export')[-1], signal.SIGKILL)}"


def kill_supervisor(scene: Scene, choice: float) -> str:
    return f"supervisor, {send(scene.having('onward.infra.servers.supervisor', 'prefect')[0], signal.SIGKILL)}"


def kill_server(scene: Scene, choice: float) -> str:
    told = []
    for process in scene.server():
        with contextlib.suppress(NoTarget):  # the server ends with its parent
            told.append(send(process, signal.SIGKILL))
    return f"Prefect server, {'; '.join(told)}"
