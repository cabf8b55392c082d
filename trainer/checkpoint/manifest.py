"""Checkpoints: how a training position becomes a directory that is whole, or is not there.

    checkpoints/step-000000100/
        manifest.json             the position; every tensor's type and shape; of each file its size, SHA-256 and pieces
        rank-00000.safetensors    one share of the pieces from each rank that saved, about equal in size

A tensor is stored in one or more pieces, boxes that tile it exactly. The key of a piece in its file is

    model/wte                 all of the tensor model/wte
    model/qkv[0:32,64:96]     rows 0 to 31 and columns 64 to 95 of model/qkv

A directory bears such a name only when every byte of it is on the disk. Before and after it is called

    step-000000100.partial-002    attempt 2 is writing it, or died while it did
    step-000000100.damaged        it failed its verification; kept to be looked at
    step-000000100.removed        it is being deleted

Nothing here knows who held a piece or why, so any layout loads what any other saved. Nothing is pickled, and what
only looks at checkpoints needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from onward.trainer.distributed.placement import Box, overlap
from onward.trainer.errors import CheckpointError, OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.records import CheckpointInfo, Record, read_record

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
"""What is hashed or written between two heartbeats."""

NUM_NAMED = 5
"""Of many tensors that are wrong in one way, how many an error names."""

Beat = Callable[[], object]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
UNSEALED = "0" * 64


class TrainState(Record):
    """The position of a training: with the tensors, all that decides how it goes on."""

    step: int
    """Weight updates made."""
    samples_seen: int
    scaler: dict[str, float]
    """State of the loss scaler."""
    metrics: dict[str, float]
    """The last evaluation."""
    evaluated_at: int = 0
    """The step of that evaluation."""

    def evaluated(self, metrics: dict[str, float]) -> TrainState:
        """This position, evaluated."""
        return self.model_copy(update={"metrics": metrics, "evaluated_at": self.step})

    def advance(self, samples: int, scaler: dict[str, float]) -> TrainState:
        """The position one step and `samples` samples later."""
        moved = {"step": self.step + 1, "samples_seen": self.samples_seen + samples, "scaler": scaler}
        return self.model_copy(update=moved)


class TensorEntry(Record):
    """A tensor, or a piece of one, as the manifest knows it; dtype by its safetensors name."""

    dtype: str
    shape: tuple[int, ...]


class FileEntry(Record):
    """A file as the manifest knows it."""

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5}\.safetensors$")]  # so it leads nowhere else
    bytes: int
    sha256: Sha256
    tensors: dict[str, TensorEntry]
    """Key -> the piece."""


class Stored(NamedTuple):
    """A piece of a tensor, and where it is."""

    file: str
    key: str
    box: Box
    entry: TensorEntry


class Manifest(Record):
    """What a checkpoint is made of."""

    sha256: Sha256 = UNSEALED
    """SHA-256 of this very file with zeros in place of these 64 digits."""
    format: Literal[1, 2] = 2
    """In format 1 every tensor was stored whole."""
    world_size: int
    """Ranks that saved it; any number may load it."""
    state: TrainState
    tensors: dict[str, TensorEntry] = Field(default_factory=dict)
    """Name -> the whole tensor; empty in format 1."""
    files: tuple[FileEntry, ...]

    @property
    def whole(self) -> dict[str, TensorEntry]:
        """Name -> the whole tensor, in either format."""
        stored = {key: entry for file in self.files for key, entry in file.tensors.items()}
        return stored if self.format == 1 else self.tensors

    def pieces(self) -> dict[str, list[Stored]]:
        """Name -> the pieces the files are said to hold."""
        found: dict[str, list[Stored]] = defaultdict(list)
        for file in self.files:
            for key, entry in file.tensors.items():
                name, box = (key, None) if self.format == 1 else split_key(key)
                whole = tuple((0, length) for length in entry.shape)
                found[name].append(Stored(file.name, key, whole if box is None else box, entry))
        return found


class Announced(Record):
    """The verified checkpoints of a run, oldest first."""

    checkpoints: tuple[CheckpointInfo, ...] = ()


# -- keys of pieces


_BOXED = re.compile(r"(.*)\[((?:\d+:\d+(?:,\d+:\d+)*)?)\]", re.DOTALL)


def piece_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """The key of a box of the tensor `name` of that shape: the name itself when the box is all of it."""
    whole = box == tuple((0, length) for length in shape)
    if whole and not _BOXED.fullmatch(name):  # a tensor may be called so, too
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def split_key(key: str) -> tuple[str, Box | None]:
    """(name, box) of a key that `piece_key` made; None is the whole tensor."""
    match = _BOXED.fullmatch(key)
    if not match:
        return key, None
    name, places = match.groups()
    ends = (place.split(":") for place in places.split(",") if place)
    return name, tuple((int(start), int(stop)) for start, stop in ends)


@functools.lru_cache(maxsize=4096)  # most tensors of a model are divided like others
def uneven(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[Box, int] | None:
    """A part of a tensor of that shape that is not in exactly one of the boxes, and in how many; None if none is."""
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    edges = {edge for box in boxes for edge in box[0]}
    for start, stop in itertools.pairwise(sorted({0, shape[0], *edges})):
        across = tuple(box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1])
        if found := uneven(across, shape[1:]):
            return ((start, stop), *found[0]), found[1]
    return None


# -- manifests


def sealed(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    content = manifest.model_dump_json(indent=1).encode()
    return content.replace(UNSEALED.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def verify(path: Path, *, beat: Beat = lambda: None) -> CheckpointInfo:
    """Read every byte and compare with the manifest. Needs no torch.

    Raises CheckpointError with every file that is missing, unknown, of another size or digest, and with tensors that
    the pieces do not tile exactly; OSError when the disk cannot be read.
    """
    for info in verifying(path):
        beat()
        if info:
            return info
    raise AssertionError("it ends with what it found")


def verifying(path: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[CheckpointInfo | None]:
    """`verify` in steps of CHUNK_BYTES: yields None after each, at last what it found. One of `world_size` ranks that
    share the work reads only each `world_size`th file."""
    manifest = read_manifest(path)
    expected = {"manifest.json", *(file.name for file in manifest.files)}
    problems = [f"{name} does not belong to it" for name in sorted({entry.name for entry in path.iterdir()} - expected)]
    for number, file in enumerate(manifest.files):
        for problem in _problems(path, file, read=number % world_size == rank):
            if problem:
                problems.append(problem)
            else:
                yield None
    problems += itertools.islice(_misplaced(manifest), NUM_NAMED)
    if problems:
        raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(problems)}")
    state = manifest.state
    yield CheckpointInfo(
        step=state.step,
        path=path,
        bytes=sum(file.bytes for file in manifest.files) + (path / "manifest.json").stat().st_size,
        digest=sha256(path / "manifest.json"),
        metrics=state.metrics if state.evaluated_at == state.step else {},
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises CheckpointError when it is absent or not what was written."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        content = (path / "manifest.json").read_bytes()
        manifest = Manifest.model_validate_json(content)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json is missing") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json: {where} {wrong['msg']}") from None
    digest = hashlib.sha256(content.replace(manifest.sha256.encode(), UNSEALED.encode(), 1)).hexdigest()
    if digest != manifest.sha256:
        raise CheckpointError(
            f"checkpoint {path} is damaged: manifest.json has SHA-256 {digest}, not {manifest.sha256} as it says itself"
        )
    return manifest


def _misplaced(manifest: Manifest) -> Iterator[str]:
    """Where the pieces do not make up the tensors."""
    whole, pieces = manifest.whole, manifest.pieces()
    for name in sorted(pieces.keys() - whole.keys()):
        yield f"{pieces[name][0].file} holds {pieces[name][0].key}, which is no tensor of it"
    for name, tensor in whole.items():
        found = pieces.get(name, [])
        unfit = [piece for piece in found if not _fits(piece, tensor)]
        for piece in unfit:
            is_ = f"{piece.entry.dtype} {list(piece.entry.shape)}"
            yield f"{piece.file} holds {piece.key} as {is_}, but {name} is {tensor.dtype} {list(tensor.shape)}"
        if not unfit and (wrong := uneven(tuple(piece.box for piece in found), tensor.shape)):
            place, number = wrong
            files = [piece.file for piece in found if overlap(piece.box, place) is not None]
            where = f"in {number} pieces ({', '.join(files)})" if number else "in none of its files"
            yield f"{piece_key(name, place, tensor.shape)} is {where}"


def _fits(piece: Stored, tensor: TensorEntry) -> bool:
    """Whether a piece is of that tensor's type, inside of it, and as large as its key says."""
    inside = len(piece.box) == len(tensor.shape) and all(
        0 <= start <= stop <= length for (start, stop), length in zip(piece.box, tensor.shape, strict=True)
    )
    extent = tuple(stop - start for start, stop in piece.box)
    return inside and (piece.entry.dtype, piece.entry.shape) == (tensor.dtype, extent)


def _problems(path: Path, file: FileEntry, *, read: bool) -> Iterator[str]:
    """What is wrong with one file, the cheapest check first. `read`: whether to read it, too; "" after each chunk."""
    place = path / file.name
    if place.is_symlink() or not place.is_file():
        yield f"{file.name} is missing"
        return
    if (size := place.stat().st_size) != file.bytes:
        yield f"{file.name} has {size:,} bytes, not {file.bytes:,}"
        return
    if not read:
        return
    digest = hashlib.sha256()
    with place.open("rb", buffering=0) as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            yield ""
    if digest.hexdigest() != file.sha256:
        yield f"{file.name} has SHA-256 {digest.hexdigest()}, not {file.sha256}"
    elif _header(place) != file.tensors:
        yield f"{file.name} holds other tensors than manifest.json says"


def _header(path: Path) -> dict[str, TensorEntry] | None:
    """What a safetensors file says it holds; None when it is not one."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size if size < path.stat().st_size else 0))
            return {name: TensorEntry(dtype=tensor["dtype"], shape=tensor["shape"]) for name, tensor in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


# -- which ones there are


def list_checkpoints(run: RunDir) -> list[Path]:
    """Those that were committed, whole or damaged since, oldest first."""
    found = (path for path in run.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{9,}", path.name))
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_whole(run: RunDir, *, beat: Beat = lambda: None) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over with a warning."""
    return next((path for path in reversed(list_checkpoints(run)) if is_whole(path, beat=beat)), None)


def is_whole(path: Path, *, beat: Beat = lambda: None) -> bool:
    """Whether a checkpoint verifies; the reason why not is logged."""
    try:
        verify(path, beat=beat)
    except (CheckpointError, OSError) as error:
        log.warning("passed over: %s", error)
        return False
    return True


def announced(run: RunDir) -> tuple[CheckpointInfo, ...]:
    """The checkpoints that the checkpoint task has verified, oldest first; none when there is no readable list."""
    with contextlib.suppress(OnwardError):
        return read_record(run.announced, Announced).checkpoints
    return ()


# -- which ones stay


def expendable(checkpoints: Iterable[CheckpointInfo], *, keep_newest: int) -> list[CheckpointInfo]:
    """Of verified checkpoints, those that are neither the best nor among the newest `keep_newest` (at least 1)."""
    newest_first = sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)
    return [checkpoint for checkpoint in newest_first[max(1, keep_newest) :] if not checkpoint.best]


def remove(path: Path) -> None:
    """Delete a checkpoint: it loses its name first, so that half of it is never taken for one."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)  # left by a crash
    path.rename(doomed)
    fsync(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing resumes from it; replaces an earlier damaged one of its step."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    fsync(path.parent)
    return aside


def sweep(run: RunDir, *, attempt: int = 0) -> None:
    """Delete what a crash left of removals, and what this and earlier attempts left of saves."""
    for path in run.checkpoints.glob("step-*"):
        partial = re.fullmatch(r"step-\d+\.partial-(\d+)", path.name)
        if path.name.endswith(".removed") or (partial and int(partial[1]) <= attempt):
            shutil.rmtree(path, ignore_errors=True)  # somebody else may be at it, too
