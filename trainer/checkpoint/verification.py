"""Verify checkpoints: read every byte and compare with the manifest. Needs no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.checkpoint.manifest import (
    CHUNK_BYTES,
    Beat,
    FileEntry,
    Manifest,
    StoredPiece,
    TensorEntry,
    find_untiled,
    parse_manifest,
    piece_key,
)
from onward.trainer.checkpoint.retention import list_checkpoints, list_damaged
from onward.trainer.distributed.weights import NUM_NAMED, overlap
from onward.trainer.errors import CheckpointError, few, printable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.checked_data import CheckedData
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import CheckpointInfo, Record

log = logging.getLogger(__name__)


MAX_HEADER_BYTES = 1 << 30
"""A longer header of a safetensors file is not read."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint of which every byte has been compared with the manifest.

    It is passed on in place of a path, so that nothing verifies it, or reads its manifest, a second time.
    """

    info: CheckpointInfo
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Return the directory."""
        return self.info.path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor, by checkpoint key."""
        return {key: entry.shape for key, entry in self.manifest.full_tensors.items()}


def verify(path: Path, *, beat: Beat = lambda: None) -> VerifiedCheckpoint:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises CheckpointError with every file that is missing, unexpected, or of another size or digest, and with tensors
    that the pieces do not tile; OSError when the disk cannot be read.
    """
    for checkpoint in verifying(path):
        beat()
        if checkpoint:
            return checkpoint
    raise AssertionError("verifying() ends with a checkpoint or an error")


def verifying(path: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[VerifiedCheckpoint | None]:
    """Verify in steps: yield None after every CHUNK_BYTES read, at last the verified checkpoint.

    Ranks that divide the work each read every `world_size`th file. Raises as `verify`.
    """
    manifest, content = parse_manifest(path)
    expected = {"manifest.json", *(file.name for file in manifest.files)}
    unexpected = sorted({entry.name for entry in path.iterdir()} - expected)
    problems = [f"{printable(name)} does not belong to it" for name in unexpected[:NUM_NAMED]]
    for number, file in enumerate(manifest.files):
        # sizes are compared by every rank, bytes by one
        for problem in _file_problems(path, file, read=number % world_size == rank):
            if problem:
                problems.append(problem)
            else:
                yield None
    problems += itertools.islice(_tiling_problems(manifest), NUM_NAMED)
    if problems:
        raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(problems)}")
    state = manifest.state
    info = CheckpointInfo(
        step=state.step,
        path=path,
        bytes=sum(file.bytes for file in manifest.files) + len(content),
        digest=hashlib.sha256(content).hexdigest(),
        # an older evaluation is of other weights
        metrics=state.metrics if state.evaluated_at == state.step else {},
    )
    yield VerifiedCheckpoint(info, manifest)


class CheckedCheckpoint(Record):
    """A checkpoint that was read again."""

    name: str
    step: int = -1
    """-1 if its manifest cannot be read."""
    problems: tuple[str, ...] = ()


class CheckedRun(Record):
    """The checkpoints that a run keeps and its data, and all that is wrong with them."""

    run: str
    checkpoints: tuple[CheckedCheckpoint, ...]
    data: tuple[CheckedData, ...] = ()
    problems: tuple[str, ...] = ()


def check_checkpoint(path: Path) -> CheckedCheckpoint:
    """Read a checkpoint again, and return what is wrong with it."""
    try:
        info = verify(path).info
    except (CheckpointError, OSError) as error:
        return CheckedCheckpoint(name=path.name, problems=(str(error),))
    return CheckedCheckpoint(name=path.name, step=info.step)


def check_run(run: RunDir) -> CheckedRun:
    """Read every kept checkpoint of a run and its data again. Raises CheckpointError when there is no checkpoint."""
    kept = tuple(check_checkpoint(path) for path in list_checkpoints(run))
    if not kept and not list_damaged(run):
        raise CheckpointError(f"run {run.root.name} has no checkpoint to verify")
    from onward.trainer.data.storage.sharding import check_data  # imported here: ranks verify checkpoints, and no data

    problems = [f"{checkpoint.name}: {problem}" for checkpoint in kept for problem in checkpoint.problems]
    problems += [f"{path.name} was found damaged before, and is kept for examination" for path in list_damaged(run)]
    data = check_data(run)
    problems += [problem for each in data for problem in each.problems]
    return CheckedRun(run=run.root.name, checkpoints=kept, data=data, problems=tuple(problems))


def newest_complete(run: RunDir, *, beat: Beat = lambda: None) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that verifies; each damaged one is logged."""
    for path in reversed(list_checkpoints(run)):
        try:
            return verify(path, beat=beat)
        except (CheckpointError, OSError) as error:
            log.warning("not used: %s", error)
    return None


def all_damaged(run: RunDir, damaged: Sequence[str], problem: str = "") -> CheckpointError:
    """Return the error of a run that has checkpoints, all of them damaged, with what its user can do.

    problem: what is wrong with one of them, if that is known.
    """
    many = "the only checkpoint" if len(damaged) == 1 else f"all {len(damaged)} checkpoints"
    trial = membership(run)
    began, command, new = "it", f"resume {run.root.name}", "run"
    if trial:
        began, command, new = f"trial {trial.number} of its sweep", f"sweep --resume {trial.sweep_id}", "sweep"
    are = "is" if len(damaged) == 1 else "are"
    reason = f"; {problem}" if problem else ""
    return CheckpointError(
        f"{many} of run {run.root.name} {are} damaged ({few(damaged)}), so there is nothing to go on from{reason}; put "
        f"an undamaged copy back as {run.checkpoints / damaged[0]}, or begin {began} again at step 0 with "
        f"`onward {command} --from-start`, which keeps the damaged ones in {run.checkpoints}, or start a new {new}"
    )


def _file_problems(path: Path, file: FileEntry, *, read: bool) -> Iterator[str]:
    """Yield what is wrong with one file, the cheapest check first. read: compare its bytes; yields "" per chunk."""
    place = path / file.name
    if place.is_symlink() or not place.is_file():
        there = place.is_symlink() or place.exists()
        yield f"{file.name} is {'not a regular file' if there else 'missing'}"
        return
    if (size := place.stat().st_size) != file.bytes:
        yield f"{file.name} has {size:,} bytes, not {file.bytes:,}"
        return
    # another rank reads the bytes of this file
    if not read:
        return
    digest = hashlib.sha256()
    with place.open("rb", buffering=0) as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            yield ""
    if digest.hexdigest() != file.sha256:
        yield f"{file.name} has SHA-256 {digest.hexdigest()}, not {file.sha256}"
    # the digest is right, but the manifest may have been made for other content
    elif _header(place) != file.tensors:
        yield f"{file.name} holds other tensors than manifest.json says"


def _header(path: Path) -> dict[str, TensorEntry] | None:
    """Return what the header of a safetensors file lists; None if it is not one."""
    with path.open("rb") as file:
        # the length may be damaged as well, so never more is read than the file has
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size if size < min(path.stat().st_size, MAX_HEADER_BYTES) else 0))
            return {name: TensorEntry(dtype=tensor["dtype"], shape=tensor["shape"]) for name, tensor in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def _tiling_problems(manifest: Manifest) -> Iterator[str]:
    """Yield where the pieces do not make up the tensors."""
    tensors = manifest.full_tensors
    pieces = manifest.pieces()
    for name in sorted(pieces.keys() - tensors.keys()):
        yield f"{pieces[name][0].file} holds {pieces[name][0].key}, which is not a tensor of it"
    for name, tensor in tensors.items():
        found = pieces.get(name, [])
        # boxes are compared only once they lie in the tensor
        unfit = [piece for piece in found if not _fits(piece, tensor)]
        for piece in unfit:
            stored = f"{piece.entry.dtype} {list(piece.entry.shape)}"
            yield f"{piece.file} holds {piece.key} as {stored}, but {name} is {tensor.dtype} {list(tensor.shape)}"
        if not unfit and (untiled := find_untiled(tuple(piece.box for piece in found), tensor.shape)):
            box, number = untiled
            files = [piece.file for piece in found if overlap(piece.box, box) is not None]
            where = f"in {number} pieces ({', '.join(files)})" if number else "in none of its files"
            yield f"{piece_key(name, box, tensor.shape)} is {where}"


def _fits(piece: StoredPiece, tensor: TensorEntry) -> bool:
    """Return whether a piece has the tensor's dtype, lies inside of it, and has the shape that its key says."""
    # the key of a piece comes from the file, and may name a box of anything
    inside = len(piece.box) == len(tensor.shape) and all(
        0 <= start <= stop <= length for (start, stop), length in zip(piece.box, tensor.shape, strict=True)
    )
    extent = tuple(stop - start for start, stop in piece.box)
    return inside and (piece.entry.dtype, piece.entry.shape) == (tensor.dtype, extent)
