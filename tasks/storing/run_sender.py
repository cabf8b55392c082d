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

import contextlib
import datetime
import hashlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from onward.tasks.shown.mlflow_outages import Outage
from onward.tasks.shown.task_logger import Log
from onward.tasks.storing.named_inputs import data_of_this_machine, named_inputs
from onward.trainer.checkpoint.manifest import parse_manifest
from onward.trainer.checkpoint.retention import announced, prunable
from onward.trainer.errors import CheckpointError, ConfigError, Fenced, RecordError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.machine.priority import lower_priority
from onward.trainer.run.records import CheckpointInfo, RunIdentity, read_record, record_if_written, write_record
from onward.trainer.run.remote.object_store import AWAY
from onward.trainer.run.remote.sent_files import EVENTS, segments, sent_files, start_of
from onward.trainer.run.remote.stored_run import (
    ALIVE_PERIOD_S,
    Sender,
    Sending,
    StoredCheckpoint,
    StoredFile,
    StoredInput,
    StoredRun,
    StoredState,
    checkpoint_key,
    file_key,
    record_in,
)

SMALL_BYTES = 4 << 20
"""A file of at most this size is read once, hashed and sent: it may be replaced or appended to meanwhile."""
LOOK_S = 20.0
"""Seconds between two looks for records that have changed."""
RETRY_S = 2.0
"""The same while the store is away."""
PATIENCE_S = 60.0
"""Seconds that the end of a run waits for a store that does not answer."""


def begin_sending(run: RunDir, store: str, log: Log) -> None:
    """Make this machine the one that sends the run. Does nothing where it is already, and without a store.

    Raises ConfigError when another machine goes on with the run, RuntimeUnavailable when the store does not answer and
    the run is new.
    """
    if not store:
        return
    known = record_if_written(record_in(run), Sending)
    sender = Sender(token=uuid.uuid4().hex, host=socket.gethostname(), began_at=_now())
    sending = known or Sending(url=f"{store}/{run.root.name}", number=1, sender=sender)
    stored = StoredRun(sending.url)
    try:
        stored.claim(run, sending)
        stored.check_fence(sending)
    except Fenced as error:
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
        for each in data_of_this_machine(run):
            log.warning("%s is on this machine, and not sent: a resume on another machine needs it there", each)


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
        self._done = threading.Event()
        """Set when the thread has ended."""
        self._is_complete = self.sending is None
        self._ends = ends
        self._outage = Outage(
            log,
            begins="the store cannot be used; training goes on, and what is to be stored is sent later: %s",
            ends="the store can be used again",
            kinds=AWAY,
        )
        if self.sending is None:
            self._done.set()
            return
        self._transfer = _Transfer(run, self.sending, log)
        # a daemon thread: a store that never answers must not keep the flow alive
        threading.Thread(target=self._send, name="store", daemon=True).start()

    def offer(self, kept: Iterable[CheckpointInfo]) -> None:
        """Let these verified checkpoints be in the store, in place of those that a run does not keep."""
        if self._kept != (kept := tuple(kept)):
            self._kept = kept
            self._changed.set()

    def finish(self, patience_s: float = PATIENCE_S) -> bool:
        """Send what is left, and return whether all is in the store; give up a store that is away for `patience_s`."""
        self._closing.set()
        self._changed.set()
        deadline = time.monotonic() + patience_s
        # with progress it takes as long as it takes: what is not stored is lost with this disk
        while not self._done.wait(0.2):
            if self._outage.error is None:
                deadline = time.monotonic() + patience_s
            if time.monotonic() > deadline:
                self._log.error(
                    "not everything is in the store %s, which could not be used for %.0f s; `onward resume` sends the "
                    "rest: %s",
                    *(self.sending.url if self.sending else "", patience_s, self._outage.error),
                )
                return False
        return self._is_complete

    def _send(self) -> None:
        lower_priority()
        try:
            while not self._sends_all():
                self._changed.wait(RETRY_S if self._outage.error else LOOK_S)
                self._changed.clear()
            self._is_complete = True
        except Fenced as error:
            self._log.error("%s", error)
            # the flow saves and ends, as after `onward stop`: two machines that train one run waste one of them
            if not self._ends:
                os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            self._log.exception("nothing more is sent to the store; `onward resume` goes on with it")
        finally:
            self.held = frozenset()
            self._done.set()

    def _sends_all(self) -> bool:
        """Send what is to be sent now; return whether that was the last time."""
        is_last = self._closing.is_set()
        if self._outage.is_waiting():
            return False
        with self._outage.noticed():
            # after each the list may be another one; the newest first, because a resume goes on from it
            while info := next((each for each in reversed(self._kept or ()) if self._transfer.lacks(each)), None):
                self.held = frozenset({info.path})
                # a run that is resumed from it does not repeat the events before it
                self._transfer.send_records()
                self._transfer.send_checkpoint(info)
                self.held = frozenset()
            self._transfer.send_records()
            if (kept := self._kept) is not None:
                self._transfer.keep(kept, ended=is_last and self._ends)
        return is_last and self._outage.error is None


class _Transfer:
    """What a machine has sent of a run, and the calls that send more. Raises AWAY and Fenced."""

    def __init__(self, run: RunDir, sending: Sending, log: Log) -> None:
        self._run = run
        self._sending = sending
        self._log = log
        self._stored = StoredRun(sending.url)
        self._files = self._stored.files
        self._keep_newest = read_config(run, "given").checkpoint.keep_newest
        self._state: StoredState | None = None
        self._seen: dict[Path, tuple[tuple[int, ...], StoredFile]] = {}
        """Local file -> what tells that it is the same, and what it is in the store."""
        self._passed_over: set[str] = set()
        """Digests of checkpoints that were gone, or others, when they were to be sent."""

    def send_records(self) -> None:
        """Send records that have changed, the end of the event log, and once what settings name."""
        state = self._connected()
        known = state.known()
        files = {}
        for name, path in sent_files(self._run):
            with contextlib.suppress(FileNotFoundError):  # replaced or deleted just now: the next look has it
                files[name] = self._sent(path, known)
        files |= self._sent_log(state, known)
        inputs = state.inputs
        if not inputs:
            for each in named_inputs(self._run):
                sent = {name: self._sent(path, known) for name, path in each.files.items()}
                found = StoredInput(setting=each.setting, location=each.location, name=each.name, files=sent)
                inputs = (*inputs, found)
        self._replace(state.model_copy(update={"files": files, "inputs": inputs}))

    def _sent_log(self, state: StoredState, known: dict[str, StoredFile]) -> dict[str, StoredFile]:
        """Return the segments of the event log in the store, after sending the new ones."""
        before = {name: file for name, file in state.files.items() if name.startswith(f"{EVENTS}/")}
        new = {name: self._written(name, content, known) for name, content in segments(self._run, before)}
        if not new:
            return before
        # those behind the first new one are of a log that has been replaced
        first = min(map(start_of, new))
        return {name: file for name, file in before.items() if start_of(name) < first} | new

    def lacks(self, info: CheckpointInfo) -> bool:
        """Return whether a checkpoint is not in the store."""
        there = {each.digest for each in self._connected().checkpoints}
        return info.digest not in there | self._passed_over

    def send_checkpoint(self, info: CheckpointInfo) -> None:
        """Send a checkpoint: its files, then its manifest, then the state that names it. Announce it."""
        state = self._connected()
        key = checkpoint_key(self._sending.number, info.path.name, info.digest)
        try:
            manifest, content = parse_manifest(info.path)
            if hashlib.sha256(content).hexdigest() != info.digest:
                raise CheckpointError("it is another one now")
            for file in manifest.files:
                # an upload that was cut has left some of them
                if not self._files.is_same(f"{key}/{file.name}", info.path / file.name, file.sha256):
                    self._files.put(f"{key}/{file.name}", info.path / file.name)
        except (CheckpointError, FileNotFoundError):
            self._passed_over.add(info.digest)
            return
        self._files.create(f"{key}/manifest.json", content)
        stored = StoredCheckpoint(step=info.step, key=key, digest=info.digest, bytes=info.bytes, best=info.best)
        # of a step that was made again the former one goes
        others = [each for each in state.checkpoints if each.step != info.step]
        checkpoints = tuple(sorted([*others, stored], key=lambda each: each.step))
        self._replace(state.model_copy(update={"checkpoints": checkpoints}))
        self._log.info("step %d: %s is stored in %s", info.step, info.path.name, self._files.shown)

    def keep(self, kept: Collection[CheckpointInfo], *, ended: bool) -> None:
        """Delete what the settings keep no longer, of what is in the store: kept are the checkpoints of this disk.

        The store decides by its own list, so that nothing leaves it before its successors are there, and nothing that
        only this disk has lost.
        """
        state = self._connected()
        best = {info.digest: info.best for info in kept}
        has_best = any(best.values())
        marked = [
            # one that is only in the store stays the best one until the run has another
            each.model_copy(update={"best": best.get(each.digest, each.best and not has_best)})
            for each in state.checkpoints
        ]
        unneeded = {each.key for each in prunable(marked, keep_newest=self._keep_newest) if each.digest not in best}
        checkpoints = tuple(each for each in marked if each.key not in unneeded)
        self._replace(state.model_copy(update={"checkpoints": checkpoints, "ended": ended}))

    def _connected(self) -> StoredState:
        """Return what counts of the run; the first time it is read, and what a killed flow has left is deleted."""
        if self._state is not None:
            return self._state
        self._stored.claim(self._run, self._sending)
        self._stored.check_fence(self._sending)
        name = read_record(self._run.identity, RunIdentity).name
        empty = StoredState(run_id=self._run.root.name, name=name, directory=self._run.root.resolve())
        found = self._stored.state(self._sending.number) or empty
        self._state = found.model_copy(update={"name": name, "directory": empty.directory, "ended": False})
        self._remove_unfinished(self._state)
        return self._state

    def _remove_unfinished(self, state: StoredState) -> None:
        """Delete what this machine has begun to send and will not go on with."""
        own = f"{self._sending.number:06d}"
        wanted = {each.key for each in state.checkpoints}
        wanted |= {checkpoint_key(self._sending.number, info.path.name, info.digest) for info in announced(self._run)}
        names = self._files.names(f"{own}/checkpoints/")
        self._files.remove(sorted(name for name in names if name.rpartition("/")[0] not in wanted))

    def _replace(self, state: StoredState) -> None:
        """Write the state if it is new, see that it counts, and delete what it names no more."""
        before = self._connected()
        if state == before:
            return
        self._stored.write_state(self._sending.number, state)
        self._stored.check_fence(self._sending)
        self._state = state
        self._sending = self._sending.model_copy(
            update={"stored": tuple(each.step for each in state.checkpoints), "ended": state.ended}
        )
        write_record(record_in(self._run), self._sending)
        self._files.remove(sorted({each.key for each in _files_of(before)} - {each.key for each in _files_of(state)}))
        for gone in {each.key for each in before.checkpoints} - {each.key for each in state.checkpoints}:
            # the manifest first: without it nothing takes the rest for a checkpoint
            names = sorted(self._files.names(f"{gone}/"), key=lambda name: not name.endswith("/manifest.json"))
            self._files.remove(names)

    def _sent(self, path: Path, known: dict[str, StoredFile]) -> StoredFile:
        """Return what a local file is in the store, after sending it if it is not there."""
        signature = _signature(path)
        size = signature[1]
        if path in self._seen and self._seen[path][0] == signature:
            return self._seen[path][1]
        if size <= SMALL_BYTES:
            sent = self._written(path.name, path.read_bytes(), known)
        else:
            digest = sha256(path)
            key = file_key(self._sending.number, digest, path.name)
            sent = known.get(digest) or StoredFile(key=key, sha256=digest, bytes=size)
            if digest not in known and not self._files.is_same(key, path, digest):
                self._files.put(key, path)
                if signature != _signature(path):  # it was replaced meanwhile
                    return self._sent(path, known)
        self._seen[path] = (signature, sent)
        return sent

    def _written(self, name: str, content: bytes, known: dict[str, StoredFile]) -> StoredFile:
        digest = hashlib.sha256(content).hexdigest()
        if digest in known:
            return known[digest]
        key = file_key(self._sending.number, digest, name.rpartition("/")[2])
        self._files.write(key, content)
        return StoredFile(key=key, sha256=digest, bytes=len(content))


def _signature(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _files_of(state: StoredState) -> list[StoredFile]:
    return [*state.files.values(), *(file for each in state.inputs for file in each.files.values())]


@contextlib.contextmanager
def signs_of_life(run: RunDir) -> Iterator[None]:
    """Let the store show that the flow of a run lives, as long as the block does, also before and behind the training.

    A machine that wants to go on with the run waits for that, and takes the run if there is none.
    """
    ends = threading.Event()

    def give() -> None:
        count = time.time_ns()  # that no former flow of the run has written
        while not ends.wait(0.0 if record_in(run).exists() else 0.5):
            # a store that is away is reported by whoever sends
            with contextlib.suppress(*AWAY, RecordError):
                sending = read_record(record_in(run), Sending)
                StoredRun(sending.url).give_sign_of_life(sending.number, count)
                count += 1
                ends.wait(ALIVE_PERIOD_S)

    threading.Thread(target=give, name="signs of life", daemon=True).start()
    try:
        yield
    finally:
        ends.set()


def send_rest(run: RunDir, log: Log) -> None:
    """Send what a flow has written at its end, or could not send before, and say that another machine may go on."""
    sender = RunSender(run, log, ends=True)
    sender.offer(announced(run))
    sender.finish()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
