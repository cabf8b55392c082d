"""Fetch files of a run from its store, and let its records name the places where they are on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from onward.trainer.checkpoint.manifest import read_manifest
from onward.trainer.checkpoint.verification import verify
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import CheckpointError, DataError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.records import read_record, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, LocalCopy
from onward.trainer.run.remote.stored_run import StoredCheckpoint, StoredFile, StoredInput, StoredRun


def fetch_checkpoint(stored: StoredRun, checkpoint: StoredCheckpoint, folder: Path) -> None:
    """Fetch a checkpoint into a new directory. Raises CheckpointError and DataError for a damaged one."""
    folder.mkdir(parents=True)
    content = stored.files.read(f"{checkpoint.key}/manifest.json")
    # the state has only this digest, and the manifest those of all other files
    if hashlib.sha256(content).hexdigest() != checkpoint.digest:
        raise CheckpointError("manifest.json is another one")
    (folder / "manifest.json").write_bytes(content)
    fsync(folder / "manifest.json")
    for file in read_manifest(folder).files:
        stored.files.get(f"{checkpoint.key}/{file.name}", file.bytes, folder / file.name)
        fsync(folder / file.name)
    verify(folder)
    fsync(folder)


def fetch_file(stored: StoredRun, file: StoredFile, path: Path) -> None:
    """Fetch a file durably. Raises DataError for other content than that of the digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored.files.get(file.key, file.bytes, path)
    if (found := sha256(path)) != file.sha256:
        raise DataError(f"{stored.files.shown}/{file.key} is damaged: it has SHA-256 {found[:12]}")
    fsync(path)


def checked_name(name: str) -> str:
    """Return a name in a run directory. Raises DataError for one that leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise DataError(f"the state in the store names the file {name!r}, which is not inside of a run directory")
    return name


def input_folder(run: RunDir, number: int) -> Path:
    """Return the directory of what one setting named on the machine that sends the run."""
    return run.root / "inputs" / str(number)


def write_copies(partial: RunDir, inputs: Sequence[StoredInput], run: RunDir) -> None:
    """Record in `partial`, which becomes `run`, where the copies are of what settings named on the other machine."""
    copies = []
    for number, each in enumerate(inputs):
        # the function behind the path stays
        path = f"{input_folder(run, number) / each.name}{each.setting.removeprefix(each.location)}"
        size = sum(file.bytes for file in each.files.values())
        key = hashlib.sha256("".join(file.sha256 for file in each.files.values()).encode()).hexdigest()
        copies.append(LocalCopy(url=each.setting, path=Path(path), key=key[:24], bytes=size))
    moved = {copy.url for copy in copies}
    # copies of URLs are fetched again, and must be of the same version
    if partial.remote.exists():
        copies += [copy for copy in read_record(partial.remote, LocalCopies).copies if copy.url not in moved]
    if copies:
        write_record(partial.remote, LocalCopies(copies=tuple(copies)))


def with_moved_paths(digests: Mapping[str, str], here: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return path -> digest with the paths of this machine."""
    return {here.get((Path(path).name, digest), path): digest for path, digest in digests.items()}


def paths_by_content(partial: RunDir, inputs: Sequence[StoredInput], run: RunDir) -> dict[tuple[str, str], str]:
    """Return (name, digest) -> the path in `run` of each file in `partial`, which becomes `run`.

    By content, because the records have the paths of the machine that has written them.
    """
    here = {}
    for number, each in enumerate(inputs):
        path = input_folder(partial, number) / each.name
        if path.is_file():
            here[each.name, model_digest(path)] = str(input_folder(run, number) / each.name)
    return here
