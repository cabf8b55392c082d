"""What a machine sends of a run to its store: records, event log, what settings name, checkpoints, and the state.

The calls go on where a kill or an outage has ended those before them. Of the senders of a run on one machine, in one
process or in several, one has the lock RUN_DIR/.store.lock: only it knows what the store has.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Collection
from pathlib import Path
from typing import IO

from onward.infra.servers.service_state import try_lock
from onward.tasks.shown.task_logger import Log
from onward.tasks.storing.named_inputs import named_inputs
from onward.trainer.checkpoint.manifest import parse_manifest
from onward.trainer.checkpoint.retention import announced, prunable
from onward.trainer.errors import CheckpointError, RuntimeUnavailable, Stopped
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import CheckpointInfo, RunIdentity, read_record, write_record
from onward.trainer.run.remote.sent_files import EVENTS, segments, sent_files, start_of
from onward.trainer.run.remote.stored_run import (
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
LOCK = ".store.lock"
"""In the run directory: held by the sender that knows what the store has."""


class Transfer:
    """What a machine has sent of a run, and the calls that send more.

    Raises AWAY, Fenced, OSError and RecordError of this disk, and Stopped once it is abandoned.
    """

    def __init__(self, run: RunDir, sending: Sending, log: Log, abandoned: threading.Event) -> None:
        self._run = run
        self._sending = sending
        self._log = log
        self._stored = StoredRun(sending.url)
        self._files = self._stored.files
        self._keep_newest = read_config(run, "given").checkpoint.keep_newest
        self._abandoned = abandoned
        self._lock: IO[bytes] | None = None
        """Held while the state is known, because only one sender may know it."""
        self._state: StoredState | None = None
        self._inputs: tuple[StoredInput, ...] | None = None
        """What settings name, once it has been sent."""
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
        # once, because a model may be large, and looks follow each other every few seconds
        if self._inputs is None:
            self._inputs = self._sent_inputs(state, known)
        self._replace(state.model_copy(update={"files": files, "inputs": self._inputs}))

    def _sent_inputs(self, state: StoredState, known: dict[str, StoredFile]) -> tuple[StoredInput, ...]:
        """Return what settings name, after sending what is not in the store. What is gone is said, and left out."""
        there = {each.setting for each in state.inputs}
        inputs = [*state.inputs]
        for each in named_inputs(self._run):
            if each.setting in there:
                continue
            try:
                sent = {name: self._sent(path, known) for name, path in each.files.items()}
            except FileNotFoundError as error:
                what = "%s is gone, and not in the store: a resume on another machine needs it there"
                self._log.warning(what, error.filename)
                continue
            inputs.append(StoredInput(setting=each.setting, location=each.location, name=each.name, files=sent))
        return tuple(inputs)

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
                self._refuse_abandoned()
                # an upload that was cut has left some of them
                if not self._files.is_same(f"{key}/{file.name}", info.path / file.name, file.sha256):
                    self._files.put(f"{key}/{file.name}", info.path / file.name)
        except (CheckpointError, FileNotFoundError):
            self._passed_over.add(info.digest)
            return
        # last: what has a manifest is complete
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
        self._refuse_abandoned()
        if self._state:
            return self._state
        # a lock of an open file, so that two threads of one process exclude each other, too
        self._lock = self._lock or (self._run.root / LOCK).open("ab")
        if not try_lock(self._lock):
            raise RuntimeUnavailable(f"another process or thread still sends {self._run.root}")
        self._stored.claim(self._run, self._sending)
        self._stored.check_fence(self._sending)
        name = read_record(self._run.identity, RunIdentity).name
        empty = StoredState(run_id=self._run.root.name, name=name, directory=self._run.root.resolve())
        found = self._stored.state(self._sending.number) or empty
        # the former machine may have had another name and directory for the run
        self._state = found.model_copy(update={"name": name, "directory": empty.directory, "ended": False})
        # what this machine has begun to send and will not go on with
        own = f"{self._sending.number:06d}"
        wanted = {each.key for each in found.checkpoints}
        # what is announced is sent next, and of its files those that have arrived are not sent again
        wanted |= {checkpoint_key(self._sending.number, info.path.name, info.digest) for info in announced(self._run)}
        names = self._files.names(f"{own}/checkpoints/")
        self._files.remove(sorted(name for name in names if name.rpartition("/")[0] not in wanted))
        return self._state

    def _refuse_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise Stopped("the sender was abandoned")

    def close(self) -> None:
        """Let another sender begin."""
        if self._lock:
            self._lock.close()

    def _replace(self, state: StoredState) -> None:
        """Write the state if it is new, see that it counts, and delete what it names no more."""
        before = self._connected()
        if state == before:
            return
        self._refuse_abandoned()
        self._stored.write_state(self._sending.number, state)
        # behind the state: who claims the run later reads it, and who did before is seen here
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
        self._refuse_abandoned()
        # before the content is read, so that a change behind it is seen at the next look
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
