"""A run in a store: which machine sends it, and what of it counts.

    STORE/RUN_ID/
        000001.json                the first machine that sends the run; created once, where nothing is replaced
        000001/alive               a number that grows while its flow lives
        000001/state.json          StoredState: what counts, by digest; written after all that it names
        000001/files/SHA256/config.json          records of the run, the event log in segments, model, exported file
        000001/checkpoints/step-000000100-3f2ab9d01c22/     rank-*.safetensors, and last manifest.json
        000002.json                the second one, which has resumed the run
        000002/state.json          names what it has sent itself, and what it goes on with of the first

Machine 2 creates its file first, and reads the state of machine 1 afterwards. Machine 1 looks for a newer file after
each state that it writes, and before it deletes or announces anything: what it has announced was in the state that
machine 2 reads. Each machine writes below its own number, so two that send the same run do not mix their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from onward.trainer.errors import DataError, Fenced
from onward.trainer.run.directory import RunDir
from onward.trainer.run.record_base import Record, first_problem
from onward.trainer.run.records import write_record
from onward.trainer.run.remote.object_store import Bucket, Folder, open_place

R = TypeVar("R", bound=BaseModel)
ALIVE_PERIOD_S = 15.0
"""Seconds between two signs of life."""
SHOWN = 12
"""Digits of a digest in the name of a checkpoint."""


class Sender(Record):
    """A machine that sends a run."""

    token: str
    """What tells it from another one that wanted the same number."""
    host: str
    began_at: str
    """ISO 8601, UTC."""


class StoredFile(Record):
    """A file of a run in the store."""

    key: str
    """Its name below STORE/RUN_ID."""
    sha256: str
    bytes: int


class StoredInput(Record):
    """What a setting named on the machine that began the run: a file with what belongs to it, or a directory."""

    setting: str
    """The value of the setting."""
    location: str
    """The path at its beginning; a function may follow."""
    name: str
    """The last part of the path."""
    files: Mapping[str, StoredFile]
    """Name relative to the directory that the path is in -> the file."""


class StoredCheckpoint(Record):
    """A complete checkpoint in the store."""

    step: int
    key: str
    """Its directory below STORE/RUN_ID."""
    digest: str
    """SHA-256 of its manifest, which has those of its files."""
    bytes: int
    best: bool = False


class StoredState(Record):
    """What counts of a run in a store."""

    version: Literal[1] = 1
    run_id: str
    name: str
    directory: Path
    """The run directory on the machine that sends it."""
    files: Mapping[str, StoredFile] = {}
    """Name in the run directory -> the file. Of the event log each segment, with the position of its first byte."""
    inputs: tuple[StoredInput, ...] = ()
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    """Oldest first."""
    ended: bool = False
    """Whether the flow has ended that sent it: another machine may go on at once."""

    def known(self) -> dict[str, StoredFile]:
        """Return digest -> a file of that content, which need not be sent again."""
        files = [*self.files.values(), *(file for each in self.inputs for file in each.files.values())]
        return {file.sha256: file for file in files}


class Sending(Record):
    """How this machine sends a run: RUN_DIR/store.json."""

    url: str
    """STORE/RUN_ID."""
    number: int
    sender: Sender
    stored: tuple[int, ...] = ()
    """The steps whose checkpoints are in the store."""
    ended: bool = False
    """Whether all is there of a run whose flow has ended."""


def record_in(run: RunDir) -> Path:
    """Return the path of `Sending`."""
    return run.root / "store.json"


class StoredRun:
    """One run in a store."""

    def __init__(self, location: str) -> None:
        self.files: Bucket | Folder = open_place(location)
        self.location = location

    def newest_sender(self, since: int = 0) -> int:
        """Return the number of the newest machine, at least `since`; 0 if none has sent the run."""
        while self.files.has(f"{since + 1:06d}.json"):
            since += 1
        return since

    def claim(self, run: RunDir, sending: Sending) -> None:
        """Make this machine the one that sends the run. Raises Fenced if another one has taken the number."""
        # here first: a process that is killed behind the next line finds its own token again
        write_record(record_in(run), sending)
        self.files.create(f"{sending.number:06d}.json", sending.sender.model_dump_json(indent=1).encode())
        # the answer to a conditional write may be lost, and a store may know no condition: what is there decides
        if (found := self.sender(sending.number)).token != sending.sender.token:
            raise Fenced(f"{found.host} goes on with the run since {found.began_at}: {self.files.shown}")

    def check_fence(self, sending: Sending) -> None:
        """Raise Fenced when another machine goes on with the run."""
        # a store that knows no condition lets two machines create one number: the later one has it
        if (found := self.sender(sending.number)).token != sending.sender.token:
            raise Fenced(_replaced(found, self.files.shown))
        if self.files.has(f"{sending.number + 1:06d}.json"):
            raise Fenced(_replaced(self.sender(self.newest_sender(sending.number)), self.files.shown))

    def sender(self, number: int) -> Sender:
        """Return who a number is."""
        return self._read(f"{number:06d}.json", Sender)

    def state(self, number: int) -> StoredState | None:
        """Return what counts of the run as machine `number` has found it or left it; None before the first state."""
        for each in range(number, 0, -1):
            # a machine may have ended before its first state, and then it has announced nothing
            if self.files.has(f"{each:06d}/state.json"):
                return self._read(f"{each:06d}/state.json", StoredState)
        return None

    def begin(self, number: int) -> None:
        """Let the state say that a flow of this machine works on the run, so that others wait for signs of its life."""
        state = self.state(number)
        if state is not None and state.ended:
            self.write_state(number, state.model_copy(update={"ended": False}))

    def write_state(self, number: int, state: StoredState) -> None:
        """Replace the state of this machine."""
        self.files.write(f"{number:06d}/state.json", state.model_dump_json(indent=1).encode())

    def sign_of_life(self, number: int) -> bytes:
        """Return what changes while the flow of a machine lives; empty before the first sign."""
        name = f"{number:06d}/alive"
        return self.files.read(name) if self.files.has(name) else b""

    def give_sign_of_life(self, number: int, count: int) -> None:
        """Write the next sign of life."""
        self.files.write(f"{number:06d}/alive", str(count).encode())

    def _read(self, name: str, kind: type[R]) -> R:
        try:
            return kind.model_validate_json(self.files.read(name))
        except ValidationError as error:
            raise DataError(f"{self.files.shown}/{name} is damaged: {first_problem(error)}") from None


def _replaced(newest: Sender, shown: str) -> str:
    return f"{newest.host} goes on with the run since {newest.began_at}, from {shown}: this machine sends nothing more"


def checkpoint_key(number: int, name: str, digest: str) -> str:
    """Return the directory of a checkpoint below STORE/RUN_ID: another content of the same step gets another one."""
    return f"{number:06d}/checkpoints/{name}-{digest[:SHOWN]}"


def file_key(number: int, sha256: str, name: str) -> str:
    """Return the name of a file below STORE/RUN_ID: another content gets another name."""
    return f"{number:06d}/files/{sha256}/{name}"
