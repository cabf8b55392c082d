"""Read an ONNX file without its large weights: their bytes stay in the file, as external data do.

    model.onnx    graph { node ... initializer { name: "w", dims: [4096, 4096], raw_data: 64 MiB } ... }
                                                                               |
    what is read  graph { node ... initializer { name: "w", dims: [4096, 4096], location: "model.onnx",
                                                 offset: of these bytes in the file, length: 64 MiB } ... }

So a rank maps the file, and only the parts of the weights that it keeps ever become its memory. The graph is found by
walking over protobuf's wire format (https://protobuf.dev/programming-guides/encoding): a message is a sequence of
fields, each a tag (number and type) and a value; messages and bytes have their length in front of them.

A file that anything about this does not fit is read as any other: this module returns None.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto

from onward.trainer.onnx_graph.files.external_ranges import BYTEWISE_SIZES, ByteRange, set_byte_range

LARGE_BYTES = 256 * 2**10
"""Values of fewer bytes are read with the graph."""

GRAPH = 7
INITIALIZER = 5
RAW_DATA = 9
"""Numbers of the fields ModelProto.graph, GraphProto.initializer and TensorProto.raw_data."""
VARINT = 0
FIXED64 = 1
LENGTH = 2
FIXED32 = 5
"""Types of fields."""


class _Field(NamedTuple):
    number: int
    start: int
    """Where its tag begins."""
    value: int
    """Where its value begins; of one with a length, behind that."""
    end: int


def read_mapped(path: Path) -> onnx.ModelProto | None:
    """Return the model with the large initializers of its main graph as external data in the file itself.

    None if there are none, or if the file is not made as expected. Only what is returned has been read. Raises OSError
    for a file that cannot be opened.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                light = _without_large(content, path.name)
        except (ValueError, IndexError):  # an empty file, or a field that ends behind the end
            return None
    if light is None:
        return None
    try:
        return onnx.load_model_from_string(light)
    except (DecodeError, ValueError):
        return None


def _without_large(content: mmap.mmap, location: str) -> bytes | None:
    """Return the bytes of the model without its large raw data; None if there are none, or if the file is unusual."""
    outer = list(_fields(content, 0, len(content)))
    graphs = [field for field in outer if field.number == GRAPH]
    # protobuf merges a field that is written in several parts; no writer of ONNX does so
    if len(graphs) != 1:
        return None
    inner = list(_fields(content, graphs[0].value, graphs[0].end))
    initializers = [field for field in inner if field.number == INITIALIZER]
    large = [field for field in initializers if field.end - field.value > LARGE_BYTES]
    replaced = {field: light for field in large if (light := _light(content, field, location)) is not None}
    if not replaced:
        return None
    # all other fields are copied byte for byte, in their order
    graph = b"".join(
        _tagged(INITIALIZER, replaced[field]) if field in replaced else content[field.start : field.end]
        for field in inner
    )
    return b"".join(
        _tagged(GRAPH, graph) if field.number == GRAPH else content[field.start : field.end] for field in outer
    )


def _light(content: mmap.mmap, field: _Field, location: str) -> bytes | None:
    """Return a tensor without its values, with the place of these; None if it stays as it is."""
    fields = list(_fields(content, field.value, field.end))
    raw = [tensor_field for tensor_field in fields if tensor_field.number == RAW_DATA]
    if len(raw) != 1 or raw[0].end - raw[0].value <= LARGE_BYTES:
        return None
    (values,) = raw
    others = [content[other.start : other.end] for other in fields if other != values]
    tensor = TensorProto.FromString(b"".join(others))
    length = values.end - values.value
    size = BYTEWISE_SIZES.get(tensor.data_type)
    is_plain = tensor.data_location == TensorProto.DEFAULT and not tensor.external_data
    if size is None or not is_plain:
        return None
    # what does not fit its shape is refused where the file is read as a whole, with what is wrong
    if any(dim < 0 for dim in tensor.dims) or length != size * math.prod(tensor.dims):
        return None
    set_byte_range(tensor, ByteRange(location, values.value, length))
    light: bytes = tensor.SerializeToString()
    return light


# -- the wire format


def _fields(content: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of a message. Raises ValueError where it is none."""
    position = start
    while position < end:
        # a tag has the type in its last three bits, and the number of the field before them
        tag, value = _varint(content, position)
        kind = tag & 7
        if kind == LENGTH:
            length, value = _varint(content, value)
            after = value + length
        elif kind == VARINT:
            _, after = _varint(content, value)
        elif kind in (FIXED64, FIXED32):
            after = value + (8 if kind == FIXED64 else 4)
        else:
            # groups (3 and 4), which ONNX does not use, or bytes that are no message
            raise ValueError(f"a field of type {kind}")
        if after > end:
            raise ValueError("a field ends behind its message")
        yield _Field(tag >> 3, position, value, after)
        position = after


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, the lowest first, and the position behind it."""
    result = shift = 0
    while True:
        byte = content[position]
        position += 1
        result |= (byte & 127) << shift
        # the highest bit says that another byte follows
        if byte < 128:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _tagged(number: int, message: bytes) -> bytes:
    """Return a field that contains a message."""
    return _encoded(number << 3 | LENGTH) + _encoded(len(message)) + message


def _encoded(number: int) -> bytes:
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)
