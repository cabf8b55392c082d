"""Send a run to its store beside the training, in a thread of the flow's process (layout: stored_run.py).

    checkpoint task  --offer(kept)-->  thread: records, event log --> files of each checkpoint --> its manifest
                     <---- held ----           --> state.json --> is this machine still the one? --> "is stored"

It is the flow that sends, and not a rank: a step never waits for a network, the ranks of a host that is lost leave
nothing half-sent, and the flow has verified each checkpoint before. A thread is enough, because the ranks are processes
of their own, and what it does is done outside of Python's lock: reading, hashing, sending.

A store that does not answer is no error of the run: it is logged, tried again every few seconds, and what a run could
not send in its time is sent by the next `onward resume`. A checkpoint that is being sent is kept on the disk meanwhile,
so that a slow network sends some checkpoints completely rather than parts of all.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

from onward.infra.job import slurm_jobs
from onward.tasks.shown.mlflow_outages import Outage
from onward.tasks.shown.task_logger import Log
from onward.tasks.storing.named_inputs import data_of_this_machine
from onward.tasks.storing.run_transfer import Transfer
from onward.trainer.checkpoint.retention import announced
from onward.trainer.errors import ConfigError, Fenced, RecordError, RuntimeUnavailable, Stopped
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine.priority import lower_priority
from onward.trainer.run.records import CheckpointInfo, record_if_written, utc_now
from onward.trainer.run.remote.object_store import AWAY
from onward.trainer.run.remote.stored_run import Sender, Sending, StoredRun, record_in

LOOK_S = 20.0
"""Seconds between two looks for records that have changed."""
RETRY_S = 2.0
"""The same while the store is away."""
PATIENCE_S = 60.0
"""Seconds that the end of a run waits for a store that does not answer."""
LAST_S = 30.0
"""Time that a flow needs to end behind that, before the end of a job of Slurm."""


def begin_sending(run: RunDir, store: str, log: Log) -> None:
    """Make this machine the one that sends the run. Does nothing where it is already, and without a store.

    Raises ConfigError when another machine goes on with the run, RuntimeUnavailable when the store does not answer and
    the run is new.
    """
    if not store:
        return
    known = record_if_written(record_in(run), Sending)
    sender = Sender(token=uuid.uuid4().hex, host=socket.gethostname(), began_at=utc_now())
    sending = known or Sending(url=f"{store}/{run.root.name}", number=1, sender=sender)
    sending = sending.model_copy(update={"ended": False})
    stored = StoredRun(sending.url)
    try:
        stored.claim(run, sending)
        stored.check_fence(sending)
        stored.begin(sending.number)
    except Fenced as error:
        if known is None:  # a copy of a finished run, which stays one
            record_in(run).unlink()
        raise ConfigError(
            f"{error}; `onward resume {sending.url}` with another ONWARD_HOME goes on with what it has sent"
        ) from error
    except AWAY as error:
        if known is None:
            record_in(run).unlink()
            raise RuntimeUnavailable(f"checkpoint.store: {problem}" for problem in error.problems) from error
        log.warning("the store cannot be used; the run goes on, and what is to be stored is sent later: %s", error)
    if known is None:
        log.info("checkpoints are sent to %s, from where `onward resume` continues on any machine", stored.files.shown)
        for setting, path in data_of_this_machine(run):
            said = "%s %s is on this machine, and not sent: a resume on another machine needs it there"
            log.warning(said, setting, path)


class RunSender:
    """Sends one run, in a thread, until `finish`. Nothing is done without a record of `begin_sending`."""

    def __init__(self, run: RunDir, log: Log, *, ends: bool = False) -> None:
        """ends: the flow of the run ends, so that another machine may go on at once."""
        self.sending = record_if_written(record_in(run), Sending)
        self.held: frozenset[Path] = frozenset()
        """The checkpoint that is being sent: it must stay on the disk."""
        self._log = log
        self._kept: tuple[CheckpointInfo, ...] | None = None
        """None before the first offer: then nothing leaves the store."""
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._done = threading.Event()
        """Set when the thread has ended."""
        self._is_complete = self.sending is None
        self._ends = ends
        self._outage = Outage(
            log,
            begins="nothing can be sent to the store; training goes on, and what is to be stored is sent later: %s",
            ends="the store gets again what is to be stored",
            # also of the local disk, which may be full for a while
            kinds=(*AWAY, RecordError, OSError),
        )
        if self.sending is None:
            self._done.set()
            return
        self._transfer = Transfer(run, self.sending, log, self._abandoned)
        # a daemon thread: a store that never answers must not keep the flow alive
        threading.Thread(target=self._send, name="store", daemon=True).start()

    def __enter__(self) -> RunSender:
        return self

    def __exit__(self, *ended: object) -> None:
        self._abandon()

    def offer(self, kept: tuple[CheckpointInfo, ...]) -> None:
        """Let these verified checkpoints be in the store, in place of those that a run does not keep."""
        if self._kept != kept:
            self._kept = kept
            self._changed.set()

    def finish(self, patience_s: float = PATIENCE_S) -> bool:
        """Send what is left, and return whether all is in the store; give up a store that is away for `patience_s`."""
        self._closing.set()
        self._changed.set()
        deadline = time.monotonic() + patience_s
        ends_at = slurm_jobs.ends_at()
        # with progress it takes as long as it takes: what is not stored is lost with this disk
        while not self._done.wait(0.2):
            if self._outage.error is None:
                deadline = time.monotonic() + patience_s
            # a job of Slurm that ends meanwhile would not be started again; the next start sends the rest
            if time.monotonic() > deadline or time.time() > ends_at - LAST_S:
                self._log.error(
                    "not everything is in the store %s, and `onward resume` sends the rest: %s",
                    *(self.sending.url if self.sending else "", self._outage.error or "the job of Slurm ends"),
                )
                self._abandon()
                return False
        return self._is_complete

    def _abandon(self) -> None:
        """Let the thread end before it writes anything more: nobody waits for it."""
        self._abandoned.set()
        self._changed.set()

    def _send(self) -> None:
        # hashing takes a core, which the ranks of this host need more
        lower_priority()
        try:
            while not self._sends_all():
                self._changed.wait(RETRY_S if self._outage.error else LOOK_S)
                # before the next look, so that an offer that comes during it is not missed
                self._changed.clear()
            self._is_complete = True
        except Stopped:
            self._log.debug("the sender was abandoned")
        except Fenced as error:
            self._log.error("%s", error)
            # the flow saves and ends, as after `onward stop`: two machines that train one run waste one of them
            if not self._ends and not self._abandoned.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            self._log.exception("nothing more is sent to the store; `onward resume` goes on with it")
        finally:
            self._transfer.close()
            self.held = frozenset()
            self._done.set()

    def _sends_all(self) -> bool:
        """Send what is to be sent now; return whether that was the last time."""
        # asked before the look: what is written while it goes on gets another one
        is_last = self._closing.is_set()
        if self._outage.is_waiting():
            return False
        with self._outage.noticed():
            # after each the list may be another one; the newest first, because a resume goes on from it
            while info := self._newest_to_send():
                self.held = frozenset({info.path})
                # a run that is resumed from it does not repeat the events before it
                self._transfer.send_records()
                self._transfer.send_checkpoint(info)
                self.held = frozenset()
            self._transfer.send_records()
            if (kept := self._kept) is not None:
                self._transfer.keep(kept, ended=is_last and self._ends)
        return is_last and self._outage.error is None

    def _newest_to_send(self) -> CheckpointInfo | None:
        for info in reversed(self._kept or ()):
            if self._transfer.lacks(info):
                return info
        return None


def send_rest(run: RunDir, log: Log) -> None:
    """Send what a flow has written at its end, or could not send before, and say that another machine may go on."""
    with RunSender(run, log, ends=True) as sender:
        sender.offer(announced(run))
        sender.finish()
