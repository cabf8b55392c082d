"""Find where tensors lie in other files (external data), and check that before anything opens these. Needs no torch.

A link could lead to any file of the user, so none is followed but those by which a cache of Hugging Face is made:

    models--owner--name/                        the user's own directory, as are the two in it; no links
        blobs/4f2a...                           every file, once
        snapshots/REVISION/model.onnx           -> ../../blobs/...
        snapshots/REVISION/model.onnx_data      -> ../../blobs/...    a link to a plain file in blobs, and nowhere else
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from onward.trainer.onnx_graph.files.index import all_tensors

BYTEWISE_SIZES: dict[int, int] = {
    TensorProto.FLOAT: 4,
    TensorProto.FLOAT16: 2,
    TensorProto.BFLOAT16: 2,
    TensorProto.DOUBLE: 8,
    TensorProto.BOOL: 1,
    TensorProto.UINT8: 1,
    TensorProto.INT8: 1,
    TensorProto.INT16: 2,
    TensorProto.INT32: 4,
    TensorProto.INT64: 8,
}
"""Bytes of an element in a file, of the types that are stored as a torch tensor of one type is."""


ALIGNMENT_BYTES = 4096
"""Tensors that are written begin at a multiple of this, as onnx aligns them, so that they can be mapped."""


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes in an external data file."""

    location: str
    """Relative to the model's directory."""
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def is_external(proto: TensorProto) -> bool:
    """Return whether a tensor's values are in another file."""
    return proto.data_location == TensorProto.EXTERNAL


def byte_range(proto: TensorProto) -> ByteRange:
    """Return the byte range of an external tensor; a length that is not given follows from its shape.

    Raises ValueError for numbers that are none, or too long to be read.
    """
    entries = {entry.key: entry.value for entry in proto.external_data}
    size = BYTEWISE_SIZES.get(proto.data_type, 1)
    length = int(entries.get("length") or size * math.prod(proto.dims))
    return ByteRange(entries.get("location", ""), int(entries.get("offset") or 0), length)


def set_byte_range(proto: TensorProto, where: ByteRange) -> None:
    """Make a tensor external, with its values in a byte range."""
    proto.data_location = TensorProto.EXTERNAL
    del proto.external_data[:]
    for key, value in (("location", where.location), ("offset", str(where.offset)), ("length", str(where.length))):
        proto.external_data.add(key=key, value=value)


def aligned(end: int) -> int:
    """Return the first multiple of ALIGNMENT_BYTES from the end of a file on."""
    # rounded up, by a floor division of the negative
    return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def external_problems(model: onnx.ModelProto, base: Path, *, own: str = "") -> list[str]:
    """Return one sentence for each tensor whose file is not a plain file under `base`, or is too short.

    own: the name of the model's file, which may be a link, if tensors are mapped from there (mapped_model.py).
    """
    problems = []
    for proto in filter(is_external, all_tensors(model)):
        try:
            where = byte_range(proto)
        except ValueError as error:
            problems.append(f"tensor {proto.name!r}: its place in another file cannot be read: {error}")
            continue
        file = base / where.location
        size = where.length
        # types of less than a byte are packed, and strings have no fixed length: these are read by onnx
        if proto.data_type in BYTEWISE_SIZES:
            size = BYTEWISE_SIZES[proto.data_type] * math.prod(proto.dims)
        # the place is checked first: no file outside of the directory is looked at, not even for its size
        if where.location != own and (why := _unsafe(where.location, base)):
            problems.append(f"tensor {proto.name!r}: {why}")
        elif not file.is_file():
            problems.append(f"tensor {proto.name!r}: its file {file} is not there")
        elif where.offset < 0 or where.end > file.stat().st_size:
            problems.append(
                f"tensor {proto.name!r}: bytes {where.offset} to {where.end} are outside {file}, "
                f"which has {file.stat().st_size}; the file is cut short or of another model"
            )
        elif where.length != size:
            problems.append(f"tensor {proto.name!r}: {where.length} bytes in {file}, but its shape takes {size}")
    return problems


def _unsafe(location: str, base: Path) -> str:
    """Return why a location is refused, "" if it is safe.

    These are onnx's own rules against path traversal, which allow no links at all, and `_is_in_cache`.
    """
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts:
        return f"the location {location!r} of its values is outside the model's directory"
    # every directory on the way, not the file alone: a linked directory leads outside as well
    steps = [base.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    links = [step for step in steps if step.is_symlink()]
    if not links or (links == steps[-1:] and _is_in_cache(links[0])):
        return ""
    return (
        f"{links[0]} is a symbolic link, which is followed only from a cache of Hugging Face, in a directory of yours, "
        "to its blobs; put the file itself beside the model"
    )


def _is_in_cache(link: Path) -> bool:
    """Return whether a link leads from a snapshot of a cache to a plain file among the blobs of the same cache."""
    try:
        # the directory that the user named may be a link; what lies below it in the file's name is none
        folder = link.parent.resolve(strict=True)
        target = link.resolve(strict=True)
        caches = [parent.parent for parent in folder.parents if parent.name == "snapshots"]
        return any(_is_own_cache(cache, target) for cache in caches)
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        return False


def _is_own_cache(cache: Path, blob: Path) -> bool:
    if blob.parent != cache / "blobs":
        return False
    # by lstat: a link in place of a directory would lead elsewhere
    folders = [folder.lstat() for folder in (cache, cache / "snapshots", cache / "blobs")]
    file = blob.lstat()
    # another user who owns one of them could exchange what is in it between the check and the reading
    is_own = all(entry.st_uid == os.geteuid() for entry in (*folders, file))
    are_folders = all(stat.S_ISDIR(folder.st_mode) for folder in folders)
    return is_own and are_folders and stat.S_ISREG(file.st_mode)


# -- reading


def load_external(tensors: Iterable[TensorProto], base: Path) -> None:
    """Read the values of those of the tensors that are external into them; `external_problems` has found none."""
    for tensor in filter(is_external, tensors):
        # a link is checked again: it may lead elsewhere since `external_problems` looked
        where = byte_range(tensor)
        file = base / where.location
        if file.is_symlink() and not _unsafe(where.location, base):
            with file.open("rb") as content:  # onnx follows no links
                content.seek(where.offset)
                tensor.raw_data = content.read(where.length)
        else:
            load_external_data_for_tensor(tensor, str(base))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def array_of(tensor: TensorProto, base: Path) -> np.ndarray[Any, Any]:
    """Return the values of a tensor, in its shape; they may be in another file below `base`."""
    if is_external(tensor):
        loaded = TensorProto()
        loaded.CopyFrom(tensor)
        load_external([loaded], base)
        tensor = loaded
    return numpy_helper.to_array(tensor)
