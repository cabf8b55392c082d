"""Write a model of any size: one file up to protobuf's limit, above it a small file and a data file beside it.

    up to 2 GB    model.onnx         graph and weights
    above         model.onnx         graph, and where each large weight lies
                  model.onnx.data    the large weights (external data)

The only place that writes a model which may hold all of its weights.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.external_ranges import ByteRange, aligned, is_external, set_byte_range
from onward.trainer.onnx_graph.files.index import all_tensors, locations
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.run.durable_files import fsync

MOST_BYTES = 2**31 - 2**20
"""Greatest size of one ONNX file, which is one protobuf message of at most 2 GB, less a margin for names."""
LARGE_BYTES = 1024
"""A tensor of fewer bytes stays in the model: it may be a shape, which checkers and runtimes read there."""
FOLDER_PREFIX = ".whole-"
"""Folders in which a model and its data file are made begin so."""


def data_file_of(path: Path) -> Path:
    """Return where the large weights of a model lie that is too large for one file."""
    return path.with_name(f"{path.name}.data")


def fits_one_file(model: onnx.ModelProto, most: int = MOST_BYTES) -> bool:
    """Return whether a model with the tensors that it holds is small enough for one file."""
    # not ByteSize(), which serializes the model, and fails at 2 GB
    held = sum(map(_held_bytes, all_tensors(model)))
    return held <= most and model.ByteSize() <= most


def write_whole(model: onnx.ModelProto, path: Path, *, most: int = MOST_BYTES) -> Path | None:
    """Write a model to `path`; return its data file, None if it has none. The model is not changed.

    The data file gets its final name at once: `path` must have it, too, or be in a folder of its own. External tensors
    stay where they are. Raises OSError.
    """
    if fits_one_file(model, most):
        path.write_bytes(model.SerializeToString())
        return None
    light = without_initializers(model)
    data = data_file_of(path)
    with data.open("wb") as file:
        for tensor in model.graph.initializer:
            _add_light(light.graph.initializer.add(), tensor, data.name, file)
        # weights in nodes are few, and were copied with them
        for tensor in all_tensors(light):
            if _is_moved(tensor):
                whole = TensorProto()
                whole.CopyFrom(tensor)
                tensor.Clear()
                _add_light(tensor, whole, data.name, file)
    path.write_bytes(light.SerializeToString())
    return data


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield the path of a model to write, in a new folder beside `target`; then move it and its data file there.

    After an exception in the block `target` is as it was before. After one while the files are moved, or a crash then,
    it may be absent if the new model has a data file, but never a model beside the data of another. Names are final
    from the start: a model names its data file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=target.parent) as folder:
        made = Path(folder) / target.name
        yield made
        fsync(made)
        data = data_file_of(made)
        stale = stale_data(target, made)
        if data.exists():
            fsync(data)
            # first: beside the data of the new model the old one would load with wrong weights
            target.unlink(missing_ok=True)
            data.replace(data_file_of(target))
        made.replace(target)
        # last: until then the old model needs it
        if stale:
            stale.unlink(missing_ok=True)
        fsync(target.parent)


def stale_data(target: Path, made: Path) -> Path | None:
    """Return the data file of the model at `target` if no model needs it once `made` has replaced that; else None.

    A file that only has the name is not stale: it may be that of a model that was renamed.
    """
    data = data_file_of(target)
    if data_file_of(made).exists() or not data.exists():
        return None
    # the new model may keep weights of the original in a file of that name
    return data if _names(target, data.name) and not _names(made, data.name) else None


def copies_under(place: Path, path: Path, data: Path | None, *, folder: Path) -> dict[Path, Path]:
    """Return which file is copied where, for a copy of a model at `place`; data: its data file, None if it has none.

    A data file is renamed with its model. folder: where a model is written that names the new one.
    """
    if data is None:
        return {path: place}
    model = onnx.load_model(str(path), load_external_data=False)
    for tensor in filter(is_external, all_tensors(model)):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data_file_of(place).name
    renamed = folder / path.name
    renamed.write_bytes(model.SerializeToString())
    # the weights first, which the other file names
    return {data: data_file_of(place), renamed: place}


def _names(model: Path, data: str) -> bool:
    """Return whether a model has weights in the file `data` beside it; False if it cannot be read."""
    try:
        return data in locations(read_model(model))
    except (UnsupportedModel, OSError):
        return False


def _held_bytes(tensor: TensorProto) -> int:
    """Return about how many bytes of a file a tensor takes."""
    if is_external(tensor):
        return 0
    if not tensor.HasField("raw_data"):
        return int(tensor.ByteSize())
    try:
        size = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        size = 1
    num_values: int = math.prod(tensor.dims)
    return num_values * size


def _is_moved(tensor: TensorProto) -> bool:
    # other fields than raw_data cannot be external data, and exporters write small tensors alone to them
    return not is_external(tensor) and tensor.HasField("raw_data") and _held_bytes(tensor) >= LARGE_BYTES


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the initializers of the main graph."""
    light = onnx.ModelProto()
    _copy_fields(model, light, without="graph")
    _copy_fields(model.graph, light.graph, without="initializer")
    return light


def _copy_fields(source: Message, target: Message, *, without: str) -> None:
    """Copy all fields of a message but one, whose copy would take the memory of all weights."""
    for field, value in source.ListFields():
        if field.name == without:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _add_light(target: TensorProto, tensor: TensorProto, location: str, file: BinaryIO) -> None:
    """Fill `target` with a tensor, whose values go to the end of the data file if they are large."""
    if not _is_moved(tensor):
        target.CopyFrom(tensor)
        return
    _copy_fields(tensor, target, without="raw_data")
    values = tensor.raw_data
    end = file.tell()
    offset = aligned(end)
    file.write(b"\0" * (offset - end))
    file.write(values)
    set_byte_range(target, ByteRange(location, offset, len(values)))
