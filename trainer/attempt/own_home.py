"""Bring a run to a host with a home of its own: `python -m onward.trainer.attempt.own_home`, over ssh, before a launch.

    head host                                   this program, on the other host
    HostInputs on stdin, one line       -->
                                                RUN_DIR: the records; from the store, by digest: what settings name,
                                                and the newest checkpoints, in place of older ones
                                                shards/: their manifest, and the URL of their files, of which those
                                                that are read come into the cache of shard files
                                        <--     Brought, one line

What ranks write there comes to rank 0: the files of checkpoints (checkpoint/save.py), and what they print, by the
launcher. The next launch finds what is there already; `leave` removes it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onward.trainer.attempt.stored_files import (
    checked_name,
    fetch_checkpoint,
    fetch_file,
    input_folder,
    paths_by_content,
    with_moved_paths,
    write_copies,
)
from onward.trainer.config.urls import url_of
from onward.trainer.data.batches.cache_needs import cache_problems
from onward.trainer.data.formats.finished_shards import MANIFEST, ORIGIN, ShardOrigin
from onward.trainer.data.reading.fetching import restore_copies
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import ConfigError, OnwardError
from onward.trainer.run.allowed_code import AllowedCode
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.durable_files import sha256, write_durably
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.records import Record, read_record, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, urls_in
from onward.trainer.run.remote.stored_run import StoredCheckpoint, StoredFile, StoredInput, StoredRun

LINE = "onward home: "
"""How the line of the answer begins: the shell of a login may print something first."""
RECORDS = (
    *("config.json", "accepted.json", "adjusted.json", "code.json", "remote.json", "rehearsal.json", "identity.json"),
    *("runtime.json", "resolved.json", "attempt"),
)
"""What ranks read of a run directory, as far as it is there."""


class HostInputs(Record):
    """What a host gets of a run."""

    run: Path
    """The run directory, which is that of the head host as well."""
    nonce: str
    """What the file `name` in it has on hosts that share it with the head host."""
    name: str
    store: str
    """STORE/RUN_ID, or its directory."""
    records: Mapping[str, str] = {}
    """Name in the run directory -> content of a small file."""
    files: Mapping[str, StoredFile] = {}
    """Name in the run directory -> a large one, in the store."""
    inputs: tuple[StoredInput, ...] = ()
    """What settings name."""
    manifest: str = ""
    """That of the shards; "" before there are any."""
    shards: str = ""
    """The URL, or the directory, of their files."""
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    """The newest ones that the store and the head host have, oldest first: a damaged one is passed over."""
    leave: bool = False
    """Whether the run is over, and nothing of it has to stay."""


class Brought(Record):
    """What the program answers."""

    problems: tuple[str, ...] = ()
    """Sentences; the name of the host stands in front of them."""
    shares_home: bool = False
    """Whether the directory is that of the head host, and nothing had to come."""
    bytes: int = 0
    """How much has come from the store."""
    took_s: float = 0.0
    port: int = 0
    """As of `HostReport`: this program listens at none."""


def bring(wanted: HostInputs) -> Brought:
    """Make the run directory of this host what its ranks need. Errors are in the answer."""
    run = RunDir(wanted.run)
    began_at = time.monotonic()
    with contextlib.suppress(OSError):
        if (run.root / wanted.name).read_text() == wanted.nonce:
            return Brought(shares_home=True)
    # without config.json it is one of which a kill has left the beginning
    if run.config.exists() and not _is_copy(run):
        return Brought(problems=(f"has a run of its own in {run.root}: move it away",))
    if wanted.leave:
        if _is_copy(run):
            shutil.rmtree(run.root, ignore_errors=True)
        return Brought()
    try:
        make_private(onward_home())
        run.root.mkdir(parents=True, exist_ok=True)
        # before config.json, without which a directory is not taken for a run
        write_durably(run.own_home, run.root.name.encode())
        size = sum(_fetched(wanted, run))
        problems = tuple(_data_problems(wanted, run))
    except OSError as error:
        return Brought(problems=(f"cannot write {error.filename or run.root}: {error.strerror}",))
    except OnwardError as error:
        return Brought(problems=tuple(f"does not get what it needs: {problem}" for problem in error.problems))
    return Brought(problems=problems, bytes=size, took_s=time.monotonic() - began_at)


def _is_copy(run: RunDir) -> bool:
    """Return whether this program has made the directory."""
    return run.own_home.is_file() and run.own_home.read_text(errors="replace") == run.root.name


def _fetched(wanted: HostInputs, run: RunDir) -> Iterator[int]:
    """Write and fetch everything; yield the bytes of each file that has come from the store."""
    for name in RECORDS:
        if name in wanted.records:
            write_durably(run.root / name, wanted.records[name].encode())
        else:
            (run.root / name).unlink(missing_ok=True)
    run.attempt(run.current_attempt).mkdir(parents=True, exist_ok=True)
    stored = StoredRun(wanted.store)
    files = {run.root / checked_name(name): file for name, file in wanted.files.items()}
    for number, each in enumerate(wanted.inputs):
        files |= {input_folder(run, number) / checked_name(name): file for name, file in each.files.items()}
    for path, file in files.items():
        if not path.is_file() or path.stat().st_size != file.bytes or sha256(path) != file.sha256:
            fetch_file(stored, file, path)
            yield file.bytes
    # before there are shards ranks read the records alone
    if wanted.manifest:
        _adapt(wanted, run)
        yield from _fetch_checkpoints(stored, wanted.checkpoints, run)


def _adapt(wanted: HostInputs, run: RunDir) -> None:
    """Let records name the places of this host, and fetch again what settings name by URL."""
    write_copies(run, wanted.inputs, run)
    if run.code.exists():
        # the digests are those of the head host, not of the store
        moved = with_moved_paths(read_record(run.code, AllowedCode).files, paths_by_content(run, wanted.inputs, run))
        write_record(run.code, AllowedCode(files=moved))
    if run.remote.exists():
        # ranks read the shards, and not the data that these were made of
        data = {url for setting, url in urls_in(read_config(run, "given")) if setting.startswith("data.")}
        copies = read_record(run.remote, LocalCopies).copies
        write_record(run.remote, LocalCopies(copies=tuple(copy for copy in copies if copy.url not in data)))
        restore_copies(run)


def _fetch_checkpoints(stored: StoredRun, wanted: Sequence[StoredCheckpoint], run: RunDir) -> Iterator[int]:
    """Have these checkpoints, and no others."""
    kept = {}
    for each in wanted:
        folder = run.checkpoint(each.step)
        manifest = folder / "manifest.json"
        kept[folder] = manifest.is_file() and sha256(manifest) == each.digest
    # also what a killed attempt has left of one, and one that was only half-fetched
    for path in run.checkpoints.glob("*"):
        if not kept.get(path):
            shutil.rmtree(path)
    for each in wanted:
        if not kept[run.checkpoint(each.step)]:
            fetch_checkpoint(stored, each, run.checkpoint(each.step))
            yield each.bytes


def _data_problems(wanted: HostInputs, run: RunDir) -> Iterator[str]:
    """Let `shards` lead to their files; yield why the ranks of this host cannot read them."""
    if not wanted.manifest:
        return
    if run.shards.is_symlink():
        run.shards.unlink()
    if not url_of(wanted.shards):  # a directory that this host sees, too
        if not (Path(wanted.shards) / MANIFEST).exists():
            yield f"does not see {wanted.shards}, where checkpoint.store has the shards; name one that all hosts see"
            return
        shutil.rmtree(run.shards, ignore_errors=True)
        run.shards.symlink_to(wanted.shards, target_is_directory=True)
        return
    run.shards.mkdir(exist_ok=True)
    write_durably(run.shards / MANIFEST, wanted.manifest.encode())
    write_record(run.shards / ORIGIN, ShardOrigin(url=wanted.shards))
    config = read_config(run)
    manifest = read_record(run.shards / MANIFEST, ShardManifest)
    try:
        yield from cache_problems(run.shards, manifest, config.train, config.world_size)
    except ConfigError as error:
        yield str(error)


def main() -> None:
    """Answer one question."""
    answer = bring(HostInputs.model_validate_json(sys.stdin.readline()))
    print(f"{LINE}{answer.model_dump_json()}", flush=True)


if __name__ == "__main__":
    main()
