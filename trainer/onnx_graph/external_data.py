"""Tensors in files beside the .onnx: found, checked, mapped copy-on-write, and written back range by range."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_tensor

from onward.trainer.onnx_graph.element_types import DTYPES
from onward.trainer.onnx_graph.index import all_tensors
from onward.trainer.onnx_graph.tensor_protos import read_tensor

RAW: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
}
"""Element types whose bytes in a file are those of a torch tensor."""

CHUNK_BYTES = 16 * 2**20
"""How much of a tensor is compared and written at a time."""

ALIGNMENT_BYTES = 4096
"""Where a tensor begins that must be moved to the end of its file."""

SMALL_BYTES = 64 * 2**10
"""What is read rather than mapped when a graph is to be computed with (`with_small_tensors`)."""


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes in a file beside the model."""

    location: str
    """Relative to the model's directory."""
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def is_external(proto: TensorProto) -> bool:
    """Whether the tensor's values are in another file."""
    return proto.data_location == TensorProto.EXTERNAL


def byte_range(proto: TensorProto) -> ByteRange:
    """Where an external tensor is; a length that is not given follows from its shape."""
    entries = {entry.key: entry.value for entry in proto.external_data}
    size = RAW[proto.data_type].itemsize if proto.data_type in RAW else 1
    length = int(entries.get("length") or size * math.prod(proto.dims))
    return ByteRange(entries.get("location", ""), int(entries.get("offset") or 0), length)


# -- in


def external_problems(model: onnx.ModelProto, base: Path) -> list[str]:
    """One sentence for each tensor whose file is not a plain file under `base`, or too short."""
    problems = []
    for proto in filter(is_external, all_tensors(model)):
        try:
            where = byte_range(proto)
        except ValueError as error:
            problems.append(f"tensor {proto.name!r}: its place in another file cannot be read: {error}")
            continue
        file = base / where.location
        size = RAW[proto.data_type].itemsize * math.prod(proto.dims) if proto.data_type in RAW else where.length
        if why := _unsafe(where.location, base):
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
    """Why a location must not be followed: onnx's rules, which keep a model from reading other people's files."""
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts:
        return f"the location {location!r} of its values is outside the model's directory"
    steps = [base.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    if links := [step for step in steps if step.is_symlink()]:
        return f"{links[0]} is a symbolic link; put the file itself beside the model"
    return ""


def map_external(proto: TensorProto, base: Path) -> torch.Tensor:
    """An external tensor, its file mapped copy-on-write: nothing is read now, and no change reaches the file.

    Halves are converted to fp32, which reads them.
    """
    if proto.data_type not in RAW:
        return read_tensor(proto, base)
    where, dtype = byte_range(proto), RAW[proto.data_type]
    if not where.length:
        return torch.empty(tuple(proto.dims), dtype=DTYPES[proto.data_type])
    data = np.memmap(base / where.location, np.uint8, "c", where.offset, (where.length,))
    flat = torch.from_numpy(data if where.offset % dtype.itemsize == 0 else np.array(data))
    return flat.view(dtype).reshape(tuple(proto.dims)).to(DTYPES[proto.data_type])


def read_chunks(proto: TensorProto, base: Path) -> Iterator[torch.Tensor]:
    """The values of a stored tensor, flat, as they are stored, `CHUNK_BYTES` at a time."""
    dtype = RAW[proto.data_type]
    if is_external(proto):
        where = byte_range(proto)
        with (base / where.location).open("rb") as file:
            for offset in range(where.offset, where.end, CHUNK_BYTES):
                file.seek(offset)
                content = bytearray(file.read(min(CHUNK_BYTES, where.end - offset)))
                yield torch.frombuffer(content, dtype=dtype)
    elif proto.HasField("raw_data"):
        for start in range(0, len(proto.raw_data), CHUNK_BYTES):
            yield torch.frombuffer(bytearray(proto.raw_data[start : start + CHUNK_BYTES]), dtype=dtype)
    else:
        flat, step = read_tensor(proto).to(dtype).reshape(-1), CHUNK_BYTES // dtype.itemsize
        yield from (flat[start : start + step] for start in range(0, len(flat), step))


def load_small_tensors(model: onnx.ModelProto, base: Path | None) -> onnx.ModelProto:
    """The model with its small external tensors, and those in inner graphs and functions, read into a copy of it."""
    if base is None or not any(map(is_external, all_tensors(model))):
        return model
    model = onnx.ModelProto.FromString(model.SerializeToString())
    outer = {id(tensor) for tensor in model.graph.initializer}
    for proto in filter(is_external, all_tensors(model)):
        if id(proto) not in outer or byte_range(proto).length <= SMALL_BYTES:
            load_external_data_for_tensor(proto, str(base))
            proto.data_location = TensorProto.DEFAULT
            del proto.external_data[:]
    return model


# -- out


def bits_differ(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether writing the tensor would change what is stored: compared bit by bit, as it was read."""
    ours = tensor.detach().cpu().contiguous().reshape(-1)
    return not torch.equal(ours.view(torch.uint8), stored.to(ours.dtype).contiguous().reshape(-1).view(torch.uint8))


def write_external(
    tensors: Mapping[str, tuple[torch.Tensor, TensorProto]], kept: Iterable[TensorProto], files: Mapping[str, Path]
) -> None:
    """Write each tensor over its bytes in a copy of its file, where they differ.

    tensors: name -> (values, where they belong); kept: all other external tensors; files: location -> the copy.
    A changed tensor whose bytes are also those of another, which does not change alike, goes to the end of
    the file, and its proto says so.
    """
    for group in _overlapping([*tensors.values(), *((None, proto) for proto in kept)]):
        first, place_of_first = group[0][0], byte_range(group[0][1])
        alike = all(_same(tensor, first) and byte_range(proto) == place_of_first for tensor, proto in group)
        for tensor, proto in group:
            if tensor is None:
                continue
            where = byte_range(proto)
            with files[where.location].open("r+b") as file:
                if alike or _changes(tensor, RAW[proto.data_type], where, file):
                    where = where if alike else _append(proto, where, file)
                    _overwrite(tensor, RAW[proto.data_type], where, file)


Held = tuple[torch.Tensor | None, TensorProto]
"""What is to be written, if anything, and where it belongs."""


def _overlapping(held: Iterable[Held]) -> Iterator[list[Held]]:
    """Those that have bytes in common, together; most are alone."""
    group: list[Held] = []
    end, location = 0, ""
    for tensor, proto in sorted(held, key=lambda item: (byte_range(item[1]).location, byte_range(item[1]).offset)):
        where = byte_range(proto)
        if group and not (where.location == location and where.offset < end):
            yield group
            group = []
        end = max(end, where.end) if group else where.end
        location = where.location
        group.append((tensor, proto))
    if group:
        yield group


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def _changes(tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO) -> bool:
    return any(True for _ in _changed_pieces(tensor, dtype, where, file))


def _append(proto: TensorProto, where: ByteRange, file: BinaryIO) -> ByteRange:
    end = file.seek(0, os.SEEK_END)
    offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    file.truncate(offset + where.length)
    moved = ByteRange(where.location, offset, where.length)
    del proto.external_data[:]
    for key, value in (("location", moved.location), ("offset", str(offset)), ("length", str(moved.length))):
        proto.external_data.add(key=key, value=value)
    return moved


def _overwrite(tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO) -> None:
    for offset, content in _changed_pieces(tensor, dtype, where, file):
        file.seek(offset)
        file.write(content)


def _changed_pieces(
    tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO
) -> Iterator[tuple[int, bytes]]:
    """Where the file does not hold the tensor's values, in pieces: (offset, the bytes that belong there)."""
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        piece, offset = flat[start : start + step].cpu(), where.offset + start * dtype.itemsize
        file.seek(offset)
        stored = torch.frombuffer(bytearray(file.read(piece.numel() * dtype.itemsize)), dtype=dtype)
        if bits_differ(piece, stored):
            yield offset, piece.to(dtype).view(torch.uint8).numpy().tobytes()
