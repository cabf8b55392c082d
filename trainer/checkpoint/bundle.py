"""Write a checkpoint with everything that its export needs into one file, and read such a file. Needs no torch.

    FILE, a zip archive without compression
        bundle.json                             the step; size and SHA-256 of each file below
        run/config.json, run/identity.json      the settings with paths inside of the bundle; no addresses of servers
        run/checkpoints/step-000000100/         the checkpoint
        run/shards/                             the evaluation and test rows, not those to train on
        run/quantized/                          with quantize.aware
        model/, code/, tokenizer/               the ONNX file and its external data; losses and converters; tokenizer

A bundle is opened in an empty directory, as a run directory. Before that every name is checked: it is one of those
above, none leads out of the directory, none is a link, and the sizes add up to those of the archive. Of its code the
processes of the export execute what `--run-code` has allowed, and without it none (code.json, run/allowed_code.py).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from pydantic import ValidationError

from onward.trainer.checkpoint.manifest import CHUNK_BYTES, Sha256, Size
from onward.trainer.checkpoint.train_state import Count
from onward.trainer.checkpoint.verification import VerifiedCheckpoint
from onward.trainer.config.named_files import named_file, named_files
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.setting_paths import BUNDLED_SOURCES, PATHS, replaced
from onward.trainer.data.reading.fetching import restore_copies
from onward.trainer.data.schema.signature import model_files
from onward.trainer.data.storage.shard_cache import server_of
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.text.tokenizer import tokenizer_file
from onward.trainer.errors import CheckpointError, ConfigError, RuntimeUnavailable, printable, shown
from onward.trainer.run.allowed_code import AllowedCode
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.record_base import Former, first_problem
from onward.trainer.run.records import Record, RunIdentity, read_record, write_record

LISTING = "bundle.json"
MAX_LISTING_BYTES = 64 << 20
"""A longer list of files is not read."""
RECORDS = ("run/config.json", "run/identity.json")
FOLDERS = ("run/checkpoints", "run/shards", "run/quantized", "model", "code", "tokenizer")
ABSENT = "absent"
"""A folder that does not exist: settings name what is not in a bundle, the raw data and a teacher, in it."""
_DAMAGED = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error)
"""What zipfile raises for an archive that is none, or is damaged; it may also seek in front of its beginning."""
_FILE = re.compile(rf"{'|'.join(map(re.escape, RECORDS))}|(?:{'|'.join(FOLDERS)})(?:/[^/\\\0]{{1,255}})+")
_NAME = re.compile(rf"{_FILE.pattern}|{ABSENT}/[^/\\\0]{{1,255}}")


class BundledFile(Record):
    """A file of a bundle."""

    bytes: Size
    sha256: Sha256


class Bundle(Record):
    """What a bundle holds."""

    format: Literal[1] = 1
    run: str
    """Id of the run."""
    step: Count
    files: Mapping[str, BundledFile]
    """Name in the bundle -> the file."""
    certificate: Former = None
    """Of earlier versions; it has no meaning any more."""


# -- writing


def write_bundle(run: RunDir, checkpoint: VerifiedCheckpoint, target: Path) -> Bundle:
    """Write a verified checkpoint of a run with what its export needs; the file is complete or absent.

    Raises ConfigError when `target` is another file or something is missing, RuntimeUnavailable when it cannot be
    written.
    """
    # only an earlier bundle is replaced, never a file of another kind
    if target.exists() and not is_bundle(target):
        raise ConfigError(f"{target} exists and is no bundle; name another file")
    # files that were fetched from a URL may have been deleted since
    restore_copies(run)
    # evaluation rows that came from a server stay on the disk until they are in the bundle
    with ExitStack() as kept:
        return _written(run, checkpoint, target, kept)


def _written(run: RunDir, checkpoint: VerifiedCheckpoint, target: Path, kept: ExitStack) -> Bundle:
    sources, settings = _collected(run, checkpoint, kept)
    identity = read_record(run.identity, RunIdentity)
    # a bundle may go to other machines: addresses of servers stay here
    nowhere = {"mlflow_run_id": "", "mlflow_url": "", "prefect_url": "", "tracking_uri": ""}
    texts = {
        "run/config.json": settings,
        "run/identity.json": identity.model_copy(update=nowhere).model_dump_json(indent=2).encode(),
    }
    try:
        with durable_file(target) as unfinished, zipfile.ZipFile(unfinished, "x", zipfile.ZIP_STORED) as archive:
            files = {name: _add(archive, name, content) for name, content in texts.items()}
            # in a fixed order, so that equal checkpoints give equal bundles
            files |= {name: _add_file(archive, name, path) for name, path in sorted(sources.items())}
            listing = Bundle(
                run=run.root.name,
                step=checkpoint.info.step,
                files=files,
            )
            # the list comes last, because it has the digests of the files before it
            _add(archive, LISTING, listing.model_dump_json(indent=1).encode())
    except OSError as error:
        why = f"the bundle {target} cannot be written: {error.strerror or error}"
        raise (storage_error(error, target) or RuntimeUnavailable(why)) from error
    return listing


def _collected(run: RunDir, checkpoint: VerifiedCheckpoint, kept: ExitStack) -> tuple[dict[str, Path], bytes]:
    """Return name in the bundle -> file, and the settings with these names in place of paths.

    kept: ends what keeps files that were fetched from a server.
    """
    config = read_config(run, "local")
    model = config.model.path
    sources = _below("model", model.parent, model_files(model))
    code: dict[str, str] = {}
    named = [("loss.file", each.file) for each in config.losses if each.file]
    named += [("model.converters", str(path)) for path in config.model.converters]
    for number, (setting, text) in enumerate(named):
        found = named_file(setting, text)
        file = Path(found.location)
        # a folder for each: files of different folders may have one name
        sources |= _below(f"code/{number}", file.parent, [file] if found.is_code else model_files(file))
        code[text] = found.at(f"code/{number}/{file.name}")
    if config.data.text and config.data.text.tokenizer:
        sources["tokenizer/tokenizer.json"] = tokenizer_file(Path(config.data.text.tokenizer))
    shards = read_record(run.shards / "manifest.json", ShardManifest)
    # the rows to train on stay where they are: an export evaluates and tests only
    sources["run/shards/manifest.json"] = run.shards / "manifest.json"
    server = server_of(run.shards)
    for rows in (*shards.evaluation, *shards.test):
        path = run.shards / rows.name
        if server:
            path, descriptor = server.hold(rows, lambda: None)
            kept.callback(os.close, descriptor)
        sources[f"run/shards/{rows.name}"] = path
    sources |= _below("run/quantized", run.quantized, filter(Path.is_file, run.quantized.rglob("*")))
    place = f"run/checkpoints/{run.checkpoint(checkpoint.info.step).name}"
    sources |= _below(place, checkpoint.path, checkpoint.path.iterdir())
    if missing := [str(path) for path in sources.values() if not path.is_file()]:
        raise ConfigError(f"{path} is gone, and the bundle would lack it: put it back" for path in missing)
    settings = _with_paths(config, partial(_inside, code))
    return sources, settings.model_dump_json(indent=2).encode()


def _with_paths(settings: Any, path: Callable[[str, Any], Any]) -> RunConfig:
    """Return settings with other paths, and without a server of MLflow. path: (setting, its value) -> the other one."""
    for key in PATHS:
        settings = replaced(settings, key.split("."), partial(path, key))
    nowhere = settings.monitor.model_copy(update={"tracking_uri": ""})
    found: RunConfig = settings.model_copy(update={"monitor": nowhere})
    return found


def _below(name: str, folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return the names in the bundle of files in a folder."""
    return {f"{name}/{file.relative_to(folder).as_posix()}": file for file in files}


def _is_bundled_data(key: str, text: str) -> bool:
    """Return whether a setting names data that Onward brings along, and no file."""
    return key.startswith("data.") and text in BUNDLED_SOURCES


def _inside(code: Mapping[str, str], key: str, value: Any) -> Any:
    """Return the path of a setting inside of the bundle. code: that of losses and converters."""
    text = str(value)
    if not text or _is_bundled_data(key, text):
        return value
    if key == "model.path":
        return type(value)(f"model/{Path(text).name}")
    if key in ("loss.file", "model.converters"):
        return type(value)(code[text])
    if key == "data.text.tokenizer":
        return type(value)("tokenizer/tokenizer.json")
    if key in ("launch.hostfile", "checkpoint.load", "checkpoint.store", "export.path"):
        return type(value)("")
    return type(value)(f"{ABSENT}/{Path(text).name or 'root'}")  # an export reads neither the raw data nor a teacher


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> BundledFile:
    archive.writestr(_entry(name), content)
    return BundledFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _add_file(archive: zipfile.ZipFile, name: str, path: Path) -> BundledFile:
    """Copy a file into the archive, and compute its digest meanwhile."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file, archive.open(_entry(name), "w", force_zip64=True) as member:
        for chunk in _chunks(file):
            digest.update(chunk)
            member.write(chunk)
            size += len(chunk)
    return BundledFile(bytes=size, sha256=digest.hexdigest())


def _entry(name: str) -> zipfile.ZipInfo:
    """Return an entry without times and owners, so that equal checkpoints give equal bundles."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o600 << 16
    return entry


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


# -- reading


def is_bundle(path: Path) -> bool:
    """Return whether a file is a zip archive with the list of a bundle, whatever else is in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return LISTING in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, struct.error):
        return False


def unpack(path: Path, folder: Path, *, run_code: bool = False) -> tuple[RunDir, Path]:
    """Open a bundle in an empty directory; return its run directory and its checkpoint.

    run_code: whether a bundle with Python code may be opened. Raises CheckpointError for a file that is not a complete
    bundle or is damaged, ConfigError for one with Python code.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            listing = _checked(archive, path)
            for name, file in listing.files.items():
                _extract(archive, name, file, folder / PurePosixPath(name), path)
    except (OSError, *_DAMAGED) as error:
        # an error of the disk
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} ({size:,} bytes) is not a bundle, or a part of it is missing: {error}; write or copy it again"
        ) from None
    run = RunDir(folder / "run")
    settings = _absolute_settings(run, folder, path)
    # the settings decide what is executed, and not the folder that a file lies in
    code = [str(Path(file.location).relative_to(folder)) for _, file in named_files(settings) if file.is_code]
    if code and not run_code:
        names = ", ".join(code[:5])
        raise ConfigError(
            f"{path} holds Python code ({names}), which an export runs with your rights: read it, it is a zip "
            "archive, and allow it with --run-code"
        )
    run.config.write_text(settings.model_dump_json(indent=2))
    # with the digests that were compared when the files were written here
    permitted = {str(folder / name): listing.files[name].sha256 for name in code if name in listing.files}
    write_record(run.code, AllowedCode(files=permitted))
    shards = read_record(run.shards / "manifest.json", ShardManifest)
    shard_names = [shard.name for shard in shards.all_files]
    # shards are opened by these names: one with a folder in it could lead out of the bundle
    plain = {name for name in shard_names if Path(name).name == name} - {".."}
    if outside := [name for name in shard_names if name not in plain]:
        raise CheckpointError(f"{path} is refused: the rows in '{shown(outside[0])}' are not in it")
    return run, run.checkpoint(listing.step)


def _checked(archive: zipfile.ZipFile, path: Path) -> Bundle:
    """Return the list of a bundle. Raises CheckpointError unless the entries are those of the list, in its folders."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    # a dict has one entry of a name: with two, one would be compared and the other extracted
    if LISTING not in entries or len(entries) != len(archive.infolist()):
        raise CheckpointError(f"{path} is not a bundle: it has no {LISTING}, or two files of one name")
    # before anything is read: a packed list of a few bytes may unfold to gigabytes
    if entries[LISTING].file_size > MAX_LISTING_BYTES or entries[LISTING].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path} is not a bundle: {LISTING} has {entries[LISTING].file_size:,} bytes, or is packed"
        )
    try:
        listing = Bundle.model_validate_json(archive.read(LISTING))
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a bundle: {LISTING}: {first_problem(error)}") from None
    names = [name for name in (*entries, *listing.files) if name != LISTING]
    if strange := [name for name in names if not _is_inside(name, _FILE)]:
        raise CheckpointError(
            f"{path} is refused: '{shown(strange[0])}' would be written outside of {', '.join((*RECORDS, *FOLDERS))}"
        )
    belonging = {LISTING, *listing.files}
    problems = [f"{name} is missing" for name in listing.files if name not in entries]
    problems += [f"{name} does not belong to it" for name in entries if name not in belonging]
    problems += [f"{name} is packed" for name, entry in entries.items() if entry.compress_type != zipfile.ZIP_STORED]
    for name, file in listing.files.items():
        if name in entries and entries[name].file_size != file.bytes:
            problems.append(f"{name} has {entries[name].file_size:,} bytes, not {file.bytes:,}")
    # entries may overlap: a small archive would fill the disk
    if (total := sum(file.bytes for file in listing.files.values())) > path.stat().st_size:
        problems.append(f"its files have {total:,} bytes, more than itself")
    if problems:
        raise CheckpointError(f"the bundle {path} is damaged: {'; '.join(map(printable, problems[:5]))}")
    return listing


def _is_inside(name: str, pattern: re.Pattern[str] = _NAME) -> bool:
    parts = name.split("/")
    return pattern.fullmatch(name) is not None and not {"", ".", ".."} & set(parts) and name == printable(name)


def _extract(archive: zipfile.ZipFile, name: str, file: BundledFile, target: Path, bundle: Path) -> None:
    """Write one file, as a regular file whatever the archive says it is, and compare its digest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(name) as member, target.open("xb") as written:
        for chunk in _chunks(member):
            digest.update(chunk)
            written.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(
            f"the bundle {bundle} is damaged: {name} has SHA-256 {digest.hexdigest()}, not {file.sha256}"
        )


def _absolute_settings(run: RunDir, folder: Path, bundle: Path) -> RunConfig:
    """Return the settings of an opened bundle, with the files in `folder`. Raises CheckpointError for other paths."""

    def opened(setting: str, value: Any) -> Any:
        text = str(value)
        if not text or _is_bundled_data(setting, text):
            return value
        if not _is_inside(named_file(setting, text).location):
            raise CheckpointError(f"{bundle} is refused: its settings name '{shown(text)}', which is not in it")
        return type(value)(str(folder / text))

    return _with_paths(read_config(run, "given"), opened)
