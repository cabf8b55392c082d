"""Bring a run from its store to this machine, where it goes on: `onward resume STORE/RUN` with an empty disk.

    1. find the run, see that it can go on here with these settings, and that nothing sends it any more
    2. become its sender (trainer/run/remote/stored_run.py): another machine that wants the same is refused
    3. fetch the state, then what it names; compare every digest
    4. RUN_DIR: one rename, when all is there

Of a run that is finished a copy comes, without step 2: the machine that has it may go on with it.

Of the checkpoints the newest that is complete comes, and the best one. Data and shards do not: the data is read where
the settings say, and must give the shards that the run began with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from onward.flows.run_state.run_status import is_trained_to_end
from onward.flows.running.named_run import limits_to_resume
from onward.infra.servers.service_state import try_lock
from onward.tasks.checks.registered_models import store_of
from onward.tasks.storing.named_inputs import data_of_this_machine
from onward.trainer.attempt.stored_files import (
    checked_name,
    fetch_checkpoint,
    fetch_file,
    input_folder,
    paths_by_content,
    with_moved_paths,
    write_copies,
)
from onward.trainer.checkpoint.retention import Announced
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.loading import Override, load_config
from onward.trainer.config.named_files import named_files
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.urls import check_url, url_of
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import CheckpointError, ConfigError, DataError, Fenced, StorageUnavailable, say
from onward.trainer.quantities import shown_size
from onward.trainer.run.adjustments import Adjustments
from onward.trainer.run.allowed_code import SHOWN, AllowedCode
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.durable_files import fsync, sha256, write_durably
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.names import take_name
from onward.trainer.run.records import RunIdentity, read_record, record_if_written, utc_now, write_record
from onward.trainer.run.remote.object_store import open_place
from onward.trainer.run.remote.sent_files import EVENTS, start_of
from onward.trainer.run.remote.stored_run import (
    ALIVE_PERIOD_S,
    Sender,
    Sending,
    StoredCheckpoint,
    StoredRun,
    StoredState,
    record_in,
)

FIRST = "000001.json"
"""What each run in a store has."""
DECIDING = ("config.json", "origins.json", "code.json", "attempt", "ending.json", "export/model.json")
"""What says, with the results of the attempts, whether and how a run can go on."""
SILENT_S = 3 * ALIVE_PERIOD_S
"""A machine that gives no sign of life for so long is taken for lost."""


def is_in_store(text: str) -> bool:
    """Return whether `text` names a run in a store, and none of this machine: a URL, or a directory that is a store."""
    # without a slash the text is the name or id of a run on this machine
    is_in_folder = "/" in text and any(Path(text).parent.glob(f"*/{FIRST}"))
    return bool(url_of(text)) or is_in_folder


def fetch_named_run(store: str, name: str, now: RunConfig) -> RunDir | None:
    """Bring the run of a name from a store; None without a store, or where no run of it has that name.

    now: the settings with which it is to go on. Raises as `fetch_run`, and ConfigError where the run has others.
    """
    if not store or name not in _names_in(store).values():
        return None
    return fetch_run(f"{store}/{name}", lambda run: limits_to_resume(run, name, now))


def fetch_run(
    text: str, changes: Callable[[RunDir], Sequence[Override]] = lambda run: (), *, allow_code: bool = False
) -> RunDir:
    """Bring a run from its store, and return its directory; where this machine sends the run itself, the one it has.

    changes: settings of [stop] with which it is to go on, found from its config.json and origins.json. allow_code: its
    Python files may be executed, also where this machine has no such files in their places. Raises ConfigError for what
    is no run in a store, for a run that another machine trains, for one whose data is not here or whose Python nobody
    has permitted, and for one that this machine has an older copy of; DataError for damaged files; RuntimeUnavailable
    for a store that does not answer.
    """
    location = _located(text)
    stored = StoredRun(location)
    number = stored.newest_sender()
    if not number:
        raise ConfigError(f"there is no run at {stored.files.shown}")
    run = RunDir(onward_home() / "runs" / location.rpartition("/")[2])
    if run.root.exists():
        known = record_if_written(record_in(run), Sending)
        # of a run that this machine sends itself, the store has nothing newer
        if known and known.sender == stored.sender(number):
            return run
        if known is None and _is_copy(run, stored.state(number)):
            return run
        raise ConfigError(
            f"{run.root} is an earlier copy of the run, with which {stored.sender(number).host} has gone on: move it "
            "away, and repeat the command"
        )
    state = _sent_before(stored, number)
    is_finished = _is_finished(stored, state, changes, allow_code=allow_code)
    if not state.ended:
        _wait_for_silence(stored, number)
    make_private(onward_home())
    run.root.parent.mkdir(exist_ok=True)
    # beside its final place, so that a rename within one file system is enough
    partial = RunDir(run.root.with_name(f".{run.root.name}.partial"))
    with run.root.with_name(f".{run.root.name}.lock").open("ab") as lock:
        # two commands would delete each other's partial directory
        if not try_lock(lock):
            raise ConfigError(f"another process fetches {state.name} at this moment")
        shutil.rmtree(partial.root, ignore_errors=True)  # what a killed process has left
        partial.root.mkdir()
        try:
            # before this machine takes the run, which no other one could go on with then
            _refuse_full_disk(stored, state, partial)
            if not is_finished:
                state = _take_over(stored, partial, number + 1)
            _fetch(stored, state, partial)
            if not allow_code:
                # again, because the store may have changed since the run was looked at
                _refuse_unknown_code(state.name, partial)
            _adapt(partial, state, run)
            fsync(partial.root)
            partial.root.rename(run.root)
            # after a power cut the store would name a machine that has lost the run
            fsync(run.root.parent)
        finally:
            shutil.rmtree(partial.root, ignore_errors=True)
    return run


def _located(text: str) -> str:
    """Return STORE/RUN_ID of what may end with a run's name. Raises ConfigError unless it means one run."""
    try:
        location = check_url(text.rstrip("/"))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    location = location if url_of(location) else str(Path(location).absolute())
    base, _, last = location.rpartition("/")
    if open_place(location).has(FIRST):
        return location
    names = _names_in(base)
    meant = [run_id for run_id, name in names.items() if name == last]
    if len(meant) == 1:
        return f"{base}/{meant[0]}"
    of_all = ", ".join(f"{name} ({run_id})" for run_id, name in names.items()) or "none"
    what = f"{len(meant)} runs are called {last}" if meant else f"no run has the name or id {last}"
    raise ConfigError(f"in {open_place(base).shown} {what}; there are: {of_all}")


def _names_in(store: str) -> dict[str, str]:
    """Return the id of each run in a store, with its name."""
    names = {}
    for run_id in open_place(store).folders():
        stored = StoredRun(f"{store}/{run_id}")
        if state := stored.state(stored.newest_sender()):
            names[run_id] = state.name
    return names


def _sent_before(stored: StoredRun, number: int) -> StoredState:
    """Return what counts of a run. Raises ConfigError for one that cannot go on here."""
    state = stored.state(number)
    if state is None or "config.json" not in state.files:
        raise ConfigError(f"nothing of the run at {stored.files.shown} was sent before it ended: start it again")
    if "trial.json" in state.files:
        raise ConfigError(f"{state.name} is a trial of a sweep, and goes on only with the sweep, on its machine")
    return state


def _is_finished(
    stored: StoredRun, state: StoredState, changes: Callable[[RunDir], Sequence[Override]], *, allow_code: bool
) -> bool:
    """Return whether a run has ended with nothing left to train. Raises ConfigError for one that cannot go on here.

    Before this machine claims the run, because no other one could go on with it afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        # only small records, because the answer may be that nothing has to come
        for name, file in state.files.items():
            if name in DECIDING or name.endswith("/result.json"):
                fetch_file(stored, file, run.root / checked_name(name))
        saved = read_config(run, "given")
        config = load_config(saved, changes(run))
        if config.model_copy(update={"stop": saved.stop}) != saved:
            raise ConfigError(f"{state.name} keeps the settings that it began with, but for [stop]")
        if not allow_code:
            # of a finished run as well: its copy may be evaluated, or go on with other limits
            _refuse_unknown_code(state.name, run)
        if state.ended and is_trained_to_end(run, config.stop, config.checkpoint):
            return True
        absent = [f"{setting}: there is no {path} here" for setting, path in data_of_this_machine(run, is_here=False)]
    if absent:
        raise ConfigError([*absent, f"{state.name} goes on only with the data that it began with"])
    return False


def _refuse_unknown_code(name: str, run: RunDir) -> None:
    """Raise ConfigError unless each Python file of a run is also on this machine, in its place: who may write to the
    store could otherwise let this machine execute anything."""
    # without the record a process would execute whatever the settings name: so none of it is known
    named = {file.location: "unknown" for _, file in named_files(read_config(run, "given")) if file.is_code}
    files = read_record(run.code, AllowedCode).files if run.code.exists() else named
    here = {path: sha256(Path(path)) for path in files if Path(path).is_file()}
    unknown = [f"{path}, SHA-256 {digest[:SHOWN]}" for path, digest in files.items() if here.get(path) != digest]
    if unknown:
        raise ConfigError(
            f"{name} executes Python from the store that is not on this machine: {'; '.join(unknown)}; put the same "
            "files in their places, or, if you trust all who can write to it, use `onward resume STORE/RUN "
            "--allow-code`"
        )


def _is_copy(run: RunDir, state: StoredState | None) -> bool:
    """Return whether a directory without a record of a sender has what counts of a finished run."""
    if state is None or not state.ended:
        return False
    ending = state.files.get(run.flow_ending.name)
    return ending is not None and run.flow_ending.exists() and sha256(run.flow_ending) == ending.sha256


def _wait_for_silence(stored: StoredRun, number: int) -> None:
    """Return when the machine that has sent the run seems to be lost. Raises ConfigError if it gives a sign of life."""
    host = stored.sender(number).host
    # only a change counts, since the clocks of two machines may differ
    seen = stored.sign_of_life(number)
    say(f"the run has not ended on {host}; waiting {SILENT_S:g} s for a sign of life of it")
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        if stored.sign_of_life(number) != seen:
            raise ConfigError(f"the run is trained on {host}: stop it there with `onward stop`, and repeat the command")


def _take_over(stored: StoredRun, run: RunDir, number: int) -> StoredState:
    """Become the machine that sends the run, and return what counts of it."""
    sender = Sender(token=uuid.uuid4().hex, host=socket.gethostname(), began_at=utc_now())
    try:
        stored.claim(run, Sending(url=stored.location, number=number, sender=sender))
    except Fenced as error:
        raise ConfigError(str(error)) from error
    stored.begin(number)
    # only now: the former machine may have added to it until it saw the claim
    return _sent_before(stored, number)


# -- what is fetched


def _fetch(stored: StoredRun, state: StoredState, partial: RunDir) -> None:
    """Fetch records, event log, what settings named, and checkpoints."""
    started_at = time.monotonic()
    segments = sorted((name for name in state.files if name.startswith(f"{EVENTS}/")), key=start_of)
    files = {partial.root / checked_name(name): state.files[name] for name in state.files.keys() - set(segments)}
    for number, each in enumerate(state.inputs):
        files |= {input_folder(partial, number) / checked_name(name): file for name, file in each.files.items()}
    for path, file in files.items():
        fetch_file(stored, file, path)
    with partial.events.open("wb") as log:
        for name in segments:
            if start_of(name) != log.tell():
                raise DataError(f"the event log in {stored.files.shown} lacks the bytes from {log.tell()}")
            content = stored.files.read(state.files[name].key)
            if hashlib.sha256(content).hexdigest() != state.files[name].sha256:
                raise DataError(f"{stored.files.shown}/{state.files[name].key} is damaged")
            log.write(content)
    fsync(partial.events)
    fetched = _fetch_checkpoints(stored, state.checkpoints, partial)
    size = shown_size(sum(path.stat().st_size for path in partial.root.rglob("*") if path.is_file()))
    steps = ", ".join(str(each.step) for each in fetched) or "none"
    took_s = time.monotonic() - started_at
    say(f"fetched {state.name} from {stored.files.shown}: {size} in {took_s:.1f} s, checkpoints of steps: {steps}")


def _refuse_full_disk(stored: StoredRun, state: StoredState, run: RunDir) -> None:
    fetched = {each for each in state.checkpoints if each.best} | {*state.checkpoints[-1:]}
    needed = sum(file.bytes for file in state.known().values()) + sum(each.bytes for each in fetched)
    if needed > (free := shutil.disk_usage(run.root).free):
        raise StorageUnavailable(
            f"{state.name} in {stored.files.shown} has {shown_size(needed)}, but {run.root.parent} has "
            f"{shown_size(free)} free; make room there, or set ONWARD_HOME to a directory on a larger disk"
        )


def _fetch_checkpoints(
    stored: StoredRun, checkpoints: tuple[StoredCheckpoint, ...], run: RunDir
) -> list[StoredCheckpoint]:
    """Fetch the newest checkpoint that verifies, and the best one. Raises CheckpointError when all are damaged."""
    fetched: list[StoredCheckpoint] = []
    problems = []
    # an older one is needed only as the best, or where the newer ones are damaged
    for each in reversed(checkpoints):
        if fetched and not each.best:
            continue
        folder = run.checkpoint(each.step)
        try:
            fetch_checkpoint(stored, each, folder)
            fetched.append(each)
        except (CheckpointError, DataError) as error:
            problems.append(f"{stored.files.shown}/{each.key}: {error}")
            say(f"not used: {problems[-1]}")
            shutil.rmtree(folder, ignore_errors=True)
    if checkpoints and not fetched:
        raise CheckpointError("all checkpoints in the store are damaged: " + "; ".join(problems))
    # which one is the best changes after a manifest is written, so the list of the store says it
    infos = [verify(run.checkpoint(each.step)).info.model_copy(update={"best": each.best}) for each in fetched]
    if infos:
        write_record(run.announced, Announced(checkpoints=tuple(sorted(infos, key=lambda info: info.step))))
    return fetched


# -- what is different on this machine


def _adapt(partial: RunDir, state: StoredState, run: RunDir) -> None:
    """Let the records in `partial`, which becomes `run`, name places of this machine."""
    write_copies(partial, state.inputs, run)
    here = paths_by_content(partial, state.inputs, run)
    if partial.code.exists():
        allowed = read_record(partial.code, AllowedCode)
        moved = with_moved_paths(allowed.files, here)
        write_record(partial.code, AllowedCode(files=moved))
        for file, digest in moved.items():
            say(f"the run executes {Path(file).name} from the store, of SHA-256 {digest[:SHOWN]}")
    identity = read_record(partial.identity, RunIdentity)
    # the link leads to the former flow, and the one that goes on here gets its own
    changes = {"prefect_url": "", "code_sha256": with_moved_paths(identity.code_sha256, here)}
    if identity.tracking_uri.startswith(("sqlite:", "file:")):
        # a database of the other machine: the one of this machine gets the run with its whole history
        nowhere = {"mlflow_run_id": "", "mlflow_url": ""}
        changes |= nowhere | {"tracking_uri": store_of(read_config(partial, "given").monitor)}
    name = take_name(identity.config_name or identity.name, identity.run_id, wanted=identity.name)
    if name != identity.name:
        say(f"another run is called {identity.name} here, so this one is called {name}")
    write_record(partial.identity, identity.model_copy(update=changes | {"name": name}))
    if partial.adjusted.exists():
        # of hosts that were left in the other cluster; without it the hosts of `launch.hostfile` are asked
        write_record(partial.adjusted, read_record(partial.adjusted, Adjustments).with_configured_layout())
    if partial.exported.exists():
        # from the quotation mark to the slash: only whole paths into the run directory are changed
        there, now = (json.dumps(f"{root}/")[:-1] for root in (state.directory, run.root))
        text = partial.exported.read_text(encoding="utf-8").replace(there, now)
        write_durably(partial.exported, text.encode())
    manifest = partial.shards / "manifest.json"
    if manifest.exists():
        key = read_record(manifest, ShardManifest).key
        # kept for a comparison: the shards made here must be those that the run began with
        manifest.rename(partial.began_with)
        shutil.rmtree(partial.shards)
        partial.shards.symlink_to(onward_home() / "shards" / key, target_is_directory=True)
