"""Notice within seconds that a host is frozen or cut off, which ends no connection of MPI's or gloo's for minutes.

    this host --- a byte each second over ssh ---> a small program on each other host
              <-------------- a byte back --------

A host that sends nothing for SILENT_S is asked anew over ssh; it is lost if it does not answer that either. The program
ends by itself when nothing more comes from here, so that none is left on a host that was cut off.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from onward.infra.job.hosts import is_here, why_silent
from onward.infra.job.mpirun import environment_of_ranks, remote_shell

PERIOD_S = 1.0
SILENT_S = 7.0
ASKED_S = 5
"""Longest time for the answer to the question after that, unless the first login to the host took longer."""
START_S = 60.0
"""Longest time until the first byte of a host: the shell of a login may be slow."""
MOST_HOSTS = 64
"""Of more hosts none is watched in this way: each takes a connection of ssh."""
MOST_FAILURES = 3
"""Programs that end at once, one after the other, before a host is not watched any more: it does not allow them."""
ECHO = "import os, select\nwhile select.select([0], [], [], 30)[0] and os.read(0, 99): os.write(1, b'.')"


class HostBeats:
    """Watches the hosts of a job, each in a thread."""

    def __init__(self, hosts: Sequence[str]) -> None:
        # this process would be frozen or cut off together with its own host
        self._hosts = [host for host in hosts if not is_here(host)]
        self._lost: dict[str, str] = {}
        self._login_s = dict.fromkeys(self._hosts, 0.0)
        """How long the longest login to each host took."""
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside."""
        if len(self._hosts) <= MOST_HOSTS:
            for host in self._hosts:
                self._start(host)
        try:
            yield
        finally:
            self._ended.set()

    def lost(self) -> dict[str, str]:
        """Return the hosts that are lost, with what ssh said."""
        return dict(self._lost)

    def watch_again(self) -> None:
        """Watch hosts again that seemed lost, although the job goes on."""
        for host in self.lost():
            del self._lost[host]
            self._start(host)

    def _start(self, host: str) -> None:
        threading.Thread(target=self._follow, args=(host,), name=f"beats of {host}", daemon=True).start()

    def _follow(self, host: str) -> None:
        failures = 0
        while failures < MOST_FAILURES:
            num_beats = self._listen(host)
            if self._ended.is_set():
                return
            # a host whose logins are always slow is not lost for that
            limit_s = max(ASKED_S, math.ceil(2.0 * self._login_s[host]))
            if why := why_silent(host, limit_s=limit_s):
                self._lost[host] = f"silent for {SILENT_S:g} s; {why}"
                return
            # a host whose program has sent bytes allows programs, however that one ended
            failures = 0 if num_beats else failures + 1

    def _listen(self, host: str) -> int:
        """Exchange bytes with a program on a host until it is silent or ends; return how many came back."""
        environment = environment_of_ranks(os.environ)
        command = shlex.join([sys.executable, "-I", "-S", "-c", ECHO])
        count = 0
        try:
            program = subprocess.Popen(
                # by exec no shell stays between ssh and the program
                [*remote_shell(environment), host, f"exec {command}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError:
            return count
        assert program.stdin is not None
        assert program.stdout is not None
        began_at = came_at = time.monotonic()
        with contextlib.suppress(OSError), program:
            try:
                while not self._ended.is_set():
                    os.write(program.stdin.fileno(), b".")
                    # what has come is read first: this process, too, may have been stopped for a while
                    if select.select([program.stdout], [], [], PERIOD_S)[0]:
                        if not os.read(program.stdout.fileno(), 4096):
                            break
                        came_at = time.monotonic()
                        if not count:
                            self._login_s[host] = max(self._login_s[host], came_at - began_at)
                        count += 1
                        self._ended.wait(PERIOD_S)
                    elif time.monotonic() - came_at > (SILENT_S if count else START_S):
                        break
            finally:
                # this ends ssh alone: the program on the host ends when no more bytes come
                program.kill()
        return count
