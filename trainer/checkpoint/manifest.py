"""The format of a checkpoint: its files, the keys of its pieces, and its manifest. Needs no torch.

    checkpoints/step-000000100/
        manifest.json             the position; dtype and shape of every tensor; size, SHA-256 and pieces of every file
        rank-00000.safetensors    the pieces that rank 0 wrote; the files are of about equal size

A tensor is stored in one or more pieces, boxes that tile it. The key of a piece in its file says which box it is:

    model/wte                     all of model/wte          model/qkv, shape [64, 96]
    model/qkv[0:32,0:96]          rows 0 to 31              +-----------------+
    model/qkv[32:64,0:64]         ...                       |  [0:32,0:96]    |
    model/qkv[32:64,64:96]        ...                       +-----------+-----+
                                                            | [32:64,   |     |
                                                            |    0:64]  |     |  <- [32:64,64:96]
                                                            +-----------+-----+

The manifest does not say why a rank held a piece, so any layout loads what any other saved. Nothing is pickled.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import stat
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from onward.trainer.checkpoint.train_state import Count, TrainState
from onward.trainer.distributed.weights import Box
from onward.trainer.errors import CheckpointError
from onward.trainer.run.record_base import Former, Record, first_problem

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NO_DIGEST = "0" * 64
"""In the place of the digest of the file that it stands in."""
CHUNK_BYTES = 16 << 20
"""What is hashed or written between two heartbeats."""

Beat = Callable[[], object]
"""Reports that the process is alive."""
Size = Count
"""A number of bytes, elements or ranks; nothing larger can be allocated or stored."""
MAX_MANIFEST_BYTES = 1 << 29
"""A larger file is no manifest: it would describe more than a million pieces."""


class TensorEntry(Record):
    """A tensor, or a piece of one; dtype by its safetensors name."""

    dtype: str
    shape: tuple[Size, ...]


class FileEntry(Record):
    """A file of the checkpoint."""

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5}\.safetensors$")]  # so that it cannot leave the directory
    bytes: Size
    sha256: Sha256
    tensors: dict[str, TensorEntry]
    """Key -> the piece."""


class StoredPiece(NamedTuple):
    """A piece of a tensor, and the file that holds it."""

    file: str
    key: str
    box: Box
    entry: TensorEntry


class Manifest(Record):
    """What a checkpoint is made of."""

    sha256: Sha256 = NO_DIGEST
    """SHA-256 of this file with 64 zeros in place of these digits."""
    format: Literal[1, 2] = 2
    """In format 1 every tensor was stored in one piece."""
    world_size: Size
    """Ranks that saved it; any number may load it."""
    state: TrainState
    tensors: dict[str, TensorEntry] = Field(default_factory=dict)
    """Name -> the full tensor; empty in format 1."""
    files: tuple[FileEntry, ...]
    model_sha256: str = ""
    """SHA-256 of the ONNX file that the run began with; "" if it is not known."""
    certificate: Former = None
    """Of earlier versions; it has no meaning any more."""

    @property
    def full_tensors(self) -> dict[str, TensorEntry]:
        """Return name -> the full tensor, in either format."""
        stored = {key: entry for file in self.files for key, entry in file.tensors.items()}
        return stored if self.format == 1 else self.tensors

    def pieces(self) -> dict[str, list[StoredPiece]]:
        """Return name -> the pieces that the files should hold."""
        found: dict[str, list[StoredPiece]] = defaultdict(list)
        for file in self.files:
            for key, entry in file.tensors.items():
                name, box = (key, None) if self.format == 1 else split_key(key)
                full = tuple((0, length) for length in entry.shape)
                found[name].append(StoredPiece(file.name, key, full if box is None else box, entry))
        return found


# -- pieces


_INTERVAL = "[0-9]{1,18}:[0-9]{1,18}"
_BOXED = re.compile(rf"(.*)\[((?:{_INTERVAL}(?:,{_INTERVAL})*)?)\]", re.DOTALL)


def piece_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the key of a box of the tensor `name` of that shape: the name itself for the full tensor."""
    full = box == tuple((0, length) for length in shape)
    if full and not _BOXED.fullmatch(name):  # a tensor's own name may end like the key of a piece
        return name
    return f"{name}{shown_box(box)}"


def shown_box(box: Box) -> str:
    """Return a box as text: "[0:4,2:8]"."""
    return f"[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def split_key(key: str) -> tuple[str, Box | None]:
    """Return (name, box) of a key that `piece_key` made; None is the full tensor."""
    match = _BOXED.fullmatch(key)
    if not match:
        return key, None
    name, intervals = match.groups()
    ends = (interval.split(":") for interval in intervals.split(",") if interval)
    return name, tuple((int(start), int(stop)) for start, stop in ends)


@functools.lru_cache(maxsize=4096)  # most tensors of a model are divided in the same way as others
def find_untiled(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[Box, int] | None:
    """Find a box of a tensor that does not lie in exactly one of `boxes`; return it and in how many it lies.

    Returns None when the boxes tile the tensor. Sweeps over the first dimension: between two neighbouring edges
    0 | e1 | e2 | ... the same boxes are present, so the remaining dimensions of these must tile.
    """
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    # the set of boxes changes only at an edge, so that one look between two edges is enough
    edges = {edge for box in boxes for edge in box[0]}
    for start, stop in itertools.pairwise(sorted({0, shape[0], *edges})):
        present = tuple(box[1:] for box in boxes if box[0][0] <= start < stop <= box[0][1])
        if found := find_untiled(present, shape[1:]):
            return ((start, stop), *found[0]), found[1]
    return None


# -- reading and writing


def serialise(manifest: Manifest) -> bytes:
    """Return the content of manifest.json, with its own digest in it."""
    # the digest is of the file with zeros in its place, because a file cannot contain its own digest
    content = manifest.model_dump_json(indent=1).encode()
    return content.replace(NO_DIGEST.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint directory. Raises CheckpointError as `parse_manifest`."""
    return parse_manifest(path)[0]


def parse_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Read the manifest of a checkpoint directory; return it and the content of the file.

    Raises CheckpointError when it is missing, not a file, not valid, or not of the digest that it contains. Symbolic
    links are not followed: they may lead out of the run directory.
    """
    # before anything is opened: a link may lead out of the run directory
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, not a checkpoint: put the directory itself there")
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        content = _read_regular(path / "manifest.json")
        manifest = Manifest.model_validate_json(content)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json: {first_problem(error)}") from None
    # the content as it was when its digest was computed
    digest = hashlib.sha256(content.replace(manifest.sha256.encode(), NO_DIGEST.encode(), 1)).hexdigest()
    if digest != manifest.sha256:
        raise CheckpointError(
            f"checkpoint {path} is damaged: manifest.json has SHA-256 {digest}, but contains the digest "
            f"{manifest.sha256}"
        )
    return manifest, content


def _read_regular(path: Path) -> bytes:
    """Return the content of a file. Raises CheckpointError with a clause if it is absent, or something else."""
    try:
        kind = path.lstat()
    except FileNotFoundError:
        raise CheckpointError("is missing") from None
    # anything else may lead elsewhere, or may never end: a link, a pipe, a device
    if not stat.S_ISREG(kind.st_mode):
        raise CheckpointError("is a symbolic link" if stat.S_ISLNK(kind.st_mode) else "is not a regular file")
    if kind.st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"has {kind.st_size:,} bytes, more than any manifest ({MAX_MANIFEST_BYTES:,})")
    with path.open("rb") as file:
        return file.read(kind.st_size)
