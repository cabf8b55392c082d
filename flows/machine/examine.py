"""Run all checks of the machine at the same time, each bounded in time, and make the report."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from onward.flows.machine.file_system import disk_space, file_system, home_directory
from onward.flows.machine.machine_findings import Finding, MachineReport
from onward.flows.machine.mpi import mpi
from onward.flows.machine.network import hosts, loopback, servers, work_pool
from onward.flows.machine.packages import packages
from onward.flows.machine.resources import compiler, cores, gpus, memory, open_files, shared_memory
from onward.trainer.run.directory import onward_home
from onward.trainer.run.records import utc_now

Check = Callable[[], Iterable[Finding]]

LIMIT_S = 60.0
"""Longest time of a check; mpirun and the compilers have limits of their own."""
CHECKS: Mapping[str, Check] = {
    "home": home_directory,
    "disk": disk_space,
    "file system": file_system,
    "memory": memory,
    "cores": cores,
    "/dev/shm": shared_memory,
    "open files": open_files,
    "GPUs": gpus,
    "compiler": compiler,
    "loopback": loopback,
    "servers": servers,
    "work pool": work_pool,
    "packages": packages,
}
"""Subject -> its check, in the order of the report. MPI, in the main thread, comes first."""


def examine(hostfile: str = "", checks: Mapping[str, Check] = CHECKS, limit_s: float = LIMIT_S) -> MachineReport:
    """Examine this machine, and with a hostfile its hosts. Call from the main thread.

    A home that does not exist is made for it, and removed again.
    """
    began_at = time.monotonic()
    with _home():
        found = _found(hostfile, checks, limit_s)
    return MachineReport(
        host=socket.gethostname(),
        home=str(onward_home()),
        examined_at=utc_now(),
        elapsed_s=time.monotonic() - began_at,
        findings=tuple(found),
    )


@contextlib.contextmanager
def _home() -> Iterator[None]:
    """Let the home exist inside: its file system is tried there, and nowhere else is anything written."""
    home = onward_home()
    # from the inside out, in which order they are removed again
    missing = [each for each in (home, *home.parents) if not each.exists()]
    with contextlib.suppress(OSError):  # that it cannot be made is a finding
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # something is in it by now
                each.rmdir()


def _found(hostfile: str, checks: Mapping[str, Check], limit_s: float) -> list[Finding]:
    began_at = time.monotonic()
    # the checks run beside MPI, which needs the main thread for its signals and takes the longest
    threads = {subject: _Bounded(subject, check) for subject, check in checks.items()}
    found: list[Finding] = []
    networks: tuple[str, ...] = ()
    if hostfile:
        found, networks = hosts(hostfile)
    # MPI would fail for the same reasons, after a long time and with a message that explains less
    if not any(each.level == "problem" for each in found):
        found = [*_findings("MPI", partial(mpi, hostfile, networks)), *found]
    for thread in threads.values():
        # one limit for all: the second check that hangs is not waited for as long again
        found += thread.result(limit_s - (time.monotonic() - began_at))
    return found


class _Bounded(threading.Thread):
    """Runs a check. A daemon: a check that hangs in a system call must not keep the command from ending."""

    def __init__(self, subject: str, check: Check) -> None:
        super().__init__(name=f"check {subject}", daemon=True)
        self._subject = subject
        self._check = check
        self._found: list[Finding] | None = None
        self._began_at = time.monotonic()
        self.start()

    def run(self) -> None:
        self._found = _findings(self._subject, self._check)

    def result(self, limit_s: float) -> list[Finding]:
        """Wait at most `limit_s` for the findings; a check that has not ended by then is a problem."""
        self.join(max(0.0, limit_s))
        if self._found is not None:
            return self._found
        what = f"no answer in {time.monotonic() - self._began_at:.0f} s"
        fix = "a file system or a server that does not answer hangs everything that uses it: find out which one"
        return [Finding.problem(self._subject, what, fix)]


def _findings(subject: str, check: Check) -> list[Finding]:
    """Return the findings of a check; an error of the check itself is one."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        what = f"the check failed: {type(error).__name__}: {error}"
        found.append(Finding.problem(subject, what, "report it, with this line"))
    return found
