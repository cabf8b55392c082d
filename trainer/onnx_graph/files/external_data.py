"""Map and overwrite tensors that an ONNX model stores in other files (external data)."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.files.element_types import DTYPES, HALVES
from onward.trainer.onnx_graph.files.external_ranges import (
    BYTEWISE_SIZES,
    ByteRange,
    aligned,
    byte_range,
    set_byte_range,
)
from onward.trainer.onnx_graph.files.stored_protos import CHUNK_BYTES
from onward.trainer.onnx_graph.files.tensor_protos import read_tensor

BYTEWISE_DTYPES = {element_type: DTYPES[element_type] for element_type in BYTEWISE_SIZES} | HALVES
"""Element types whose bytes in a file are those of a torch tensor of this type."""

UNALIGNED_MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""Processors that read a number at any address."""


# -- reading


def map_external(proto: TensorProto, base: Path, *, unaligned: bool = False) -> torch.Tensor:
    """Return an external tensor, of the shape in its proto, with its file mapped copy-on-write: reads are deferred, and
    writes stay in memory.

    Half-precision tensors are converted to fp32, which reads them at once. unaligned: map what lies at an odd offset,
    too, where the processor allows that. The caller looks at such a tensor and copies it (`own_copy`, `copy_bytes`)
    before it computes with it.
    """
    if proto.data_type not in BYTEWISE_DTYPES:
        return read_tensor(proto, base)
    where = byte_range(proto)
    dtype = BYTEWISE_DTYPES[proto.data_type]
    # mmap refuses a length of 0
    if not where.length:
        return torch.empty(tuple(proto.dims), dtype=DTYPES[proto.data_type])
    # mode "c" is copy-on-write: training changes pages in memory and never the user's file
    data = np.memmap(base / where.location, np.uint8, "c", where.offset, (where.length,))
    # torch's kernels expect aligned memory; a tensor at an unaligned offset is read into a copy
    unaligned = unaligned and dtype == DTYPES[proto.data_type] and platform.machine() in UNALIGNED_MACHINES
    mapped = unaligned or where.offset % dtype.itemsize == 0
    flat = torch.from_numpy(data if mapped else np.array(data))
    return flat.view(dtype).reshape(tuple(proto.dims)).to(DTYPES[proto.data_type])


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is not torch's own: a mapped file, or an array of numpy."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a mapped tensor in memory of its own, in the same memory format."""
    copy = torch.empty_like(tensor, requires_grad=False)
    copy_bytes(copy, tensor.detach())
    return copy


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, which may be unaligned, into another one of the same type and shape."""
    # as bytes, which are aligned anywhere; torch views only a last dimension without gaps so
    if source.ndim and source.stride(-1) == 1 == target.stride(-1) and source.dtype == target.dtype:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.copy_(source)


# -- writing


def bits_differ(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a tensor differs bitwise from the stored one of the same size, in the type that it was read in."""
    ours = tensor.detach().cpu().contiguous().reshape(-1)
    # bytes and not numbers: NaN differs from itself, and -0 is equal to 0
    return not torch.equal(ours.view(torch.uint8), stored.to(ours.dtype).contiguous().reshape(-1).view(torch.uint8))


def write_external(
    tensors: Mapping[str, tuple[torch.Tensor, TensorProto]], kept: Iterable[TensorProto], files: Mapping[str, Path]
) -> None:
    """Write changed tensors over their byte ranges in copies of the external data files.

    tensors: name -> (new values, proto); kept: protos of all other external tensors; files: location -> the copy.
    Two tensors may share bytes. If they change differently, a changed one is written to the end of the file and its
    proto is updated:

        before    [ a and b          ]                     both protos: offset 0
        after     [ b (unchanged)    ] ... [ a (new) ]     a: offset at the end, b: offset 0
    """
    # frozen tensors take part too: a changed weight must not be written over bytes that one of them reads
    for group in _overlapping([*tensors.values(), *((None, proto) for proto in kept)]):
        first = group[0][0]
        place_of_first = byte_range(group[0][1])
        # tied weights that were stored once: all get the same values, and one write is enough
        alike = all(_same(tensor, first) and byte_range(proto) == place_of_first for tensor, proto in group)
        for tensor, proto in group:
            if tensor is None:
                continue
            where = byte_range(proto)
            with files[where.location].open("r+b") as file:
                # an unchanged tensor keeps its range, and so do the others that read these bytes
                if alike or _changes(tensor, BYTEWISE_DTYPES[proto.data_type], where, file):
                    where = where if alike else _append_range(proto, where, file)
                    _write_changes(tensor, BYTEWISE_DTYPES[proto.data_type], where, file)


Destination = tuple[torch.Tensor | None, TensorProto]
"""(new values, or None if they do not change; proto)."""


def _overlapping(destinations: Iterable[Destination]) -> Iterator[list[Destination]]:
    """Group the tensors that share bytes; most groups have one member."""
    group: list[Destination] = []
    end = 0
    location = ""
    for tensor, proto in sorted(
        destinations, key=lambda item: (byte_range(item[1]).location, byte_range(item[1]).offset)
    ):
        where = byte_range(proto)
        if group and not (where.location == location and where.offset < end):
            yield group
            group = []
        # the greatest end so far: a short tensor may lie inside a long one that begins before it
        end = max(end, where.end) if group else where.end
        location = where.location
        group.append((tensor, proto))
    if group:
        yield group


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)


def _changes(tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO) -> bool:
    return any(True for _ in _changed_chunks(tensor, dtype, where, file))


def _append_range(proto: TensorProto, where: ByteRange, file: BinaryIO) -> ByteRange:
    moved = ByteRange(where.location, aligned(file.seek(0, os.SEEK_END)), where.length)
    # extends the file with zeros, which the caller then overwrites
    file.truncate(moved.end)
    set_byte_range(proto, moved)
    return moved


def _write_changes(tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO) -> None:
    for offset, content in _changed_chunks(tensor, dtype, where, file):
        file.seek(offset)
        file.write(content)


def _changed_chunks(
    tensor: torch.Tensor, dtype: torch.dtype, where: ByteRange, file: BinaryIO
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, new bytes) of each chunk whose bytes in the file differ from the tensor."""
    # in chunks, so that a tensor of several GB is not copied as a whole; unchanged pages of the file are not written
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step].cpu()
        offset = where.offset + start * dtype.itemsize
        file.seek(offset)
        stored = torch.frombuffer(bytearray(file.read(chunk.numel() * dtype.itemsize)), dtype=dtype)
        if bits_differ(chunk, stored):
            yield offset, chunk.to(dtype).view(torch.uint8).numpy().tobytes()
