"""Use a host that is back, or was added to the hostfile: after the next checkpoint, and not after the next failure.

An attempt on fewer hosts than configured has a thread that asks them whenever a checkpoint was saved. With more ranks
than now it lets the ranks save and exit, and the next attempt begins on all hosts that are ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.infra.job.hosts import read_hostfile
from onward.infra.job.job import running_job, save_running
from onward.tasks.attempts.retry_policy import adjustments, newest_checkpoint
from onward.tasks.attempts.wait_before_retry import hosts_of, unready_hosts
from onward.trainer.errors import OnwardError
from onward.trainer.run.adjustments import fewer_replicas
from onward.trainer.run.directory import RunDir, read_config

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks for a checkpoint."""


class ReturnedHosts:
    """Watches for hosts that an attempt does not use yet. `said`: which, once the ranks were asked to save; else ""."""

    def __init__(self, run: RunDir) -> None:
        self.said = ""
        self._run = run
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside, if the attempt has another layout than the configured one because hosts were lost."""
        launch = read_config(self._run, "given").launch
        # without a retry nothing would follow
        if not adjustments(self._run).data or not launch.retries:
            yield
            return
        thread = threading.Thread(target=self._watch, name="returned hosts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self) -> None:
        seen = newest_checkpoint(self._run)
        while not self._ended.wait(LOOK_S):
            # files of the run directory may be written just now, and hosts come and go
            with suppress(OSError, ValueError, OnwardError):
                newest = newest_checkpoint(self._run)
                if newest == seen:
                    continue
                seen = newest
                job = running_job(self._run.root)
                # this may take a minute, in which the attempt may have ended and the next one begun
                said = self._more_hosts()
                if not said or job is None or self._ended.is_set():
                    continue
                if save_running(self._run.root, job.tag):
                    log.warning("%s: the ranks save, and go on with more hosts", said)
                    self.said = said
                    return

    def _more_hosts(self) -> str:
        """Return in words which hosts would give the run more ranks; "" if none would."""
        config = read_config(self._run, "given")
        now = read_config(self._run)
        used = read_hostfile(Path(now.launch.hostfile))
        hosts = hosts_of(self._run)
        new = [host for host, slots in hosts.items() if slots > used.get(host, 0)]
        if not new:
            return ""
        unready = unready_hosts(self._run, list(hosts))
        slots = sum(slots for host, slots in hosts.items() if host not in unready)
        ranks = config.world_size
        if slots < ranks:
            found = fewer_replicas(config, adjustments(self._run), ranks=slots, hostfile="")
            ranks = found.data * config.parallel.tensor * config.parallel.pipeline if found else 0
        back = [host for host in new if host not in unready]
        return f"{', '.join(back)} can be used" if back and ranks > now.world_size else ""
