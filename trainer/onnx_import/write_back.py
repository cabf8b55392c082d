"""Write trained weights into a copy of the ONNX file that they were imported from.

Only the bytes of changed tensors differ from the source file: names, opset, nodes and the order of fields stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import onnx
import torch
from onnx import TensorProto

from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.attribute_weights import held_attributes, store_floats
from onward.trainer.onnx_graph.files.external_data import write_external
from onward.trainer.onnx_graph.files.external_ranges import byte_range, is_external
from onward.trainer.onnx_graph.files.index import all_tensors
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.initializers import store_tensor
from onward.trainer.onnx_graph.inner_tensors import all_stored_protos
from onward.trainer.onnx_import.imported_graph import ImportedGraph, stored_weights
from onward.trainer.onnx_import.quantization.quantized_weights import stored_as_integers
from onward.trainer.run.durable_files import durable_file


def write_model(
    module: ImportedGraph, model: onnx.ModelProto, source: Path, target: Path, *, content: str = ""
) -> list[Path]:
    """Write `model` with the module's weights to `target`, and its external data files beside it.

    source: the file that `model` was read from. External data files keep their names; they are copies of those
    beside `source` in which only the bytes of changed weights differ. All files are written under temporary names
    and renamed, the model last. Memory use does not grow with the size of the weights. A model that was not trained
    is written with the same bytes as `source`. content: `content_digest` of `source`, "" = `source` is read again for
    it. Returns every file written, the model first. Raises ConfigError when `model` is not the one the module was
    imported from, or when a file of another model would be overwritten.
    """
    trained, outside = fill_weights(module, model, source.parent)
    externals = [tensor for tensor in all_tensors(trained) if is_external(tensor)]
    locations = sorted({byte_range(tensor).location for tensor in externals})
    if problems := _overwrite_problems(source, target, locations):
        raise ConfigError(problems)
    with contextlib.ExitStack() as files:
        # ExitStack renames in reverse order, so the model file, entered first, appears last
        written = files.enter_context(durable_file(target))
        copies = {name: files.enter_context(durable_file(target.parent / name)) for name in locations}
        for location, copy in copies.items():
            shutil.copyfile(source.parent / location, copy)
        trained_outside = {id(proto) for _, proto in outside.values()}
        write_external(outside, (proto for proto in externals if id(proto) not in trained_outside), copies)
        written.write_bytes(_serialized(trained, source, content))
    return [target, *(target.parent / name for name in locations)]


def fill_weights(
    module: ImportedGraph, model: onnx.ModelProto, base: Path | None = None
) -> tuple[onnx.ModelProto, dict[str, tuple[torch.Tensor, TensorProto]]]:
    """Return a copy of `model` with the weights that the model file holds, and (tensor, proto) of external ones.

    Each weight is stored in the element type and the protobuf field, or the attribute, of the original. A tensor
    without changes is not touched. base: the directory of external data. Raises ConfigError when `model` is not the
    one the module was imported from.
    """
    trained = deepcopy(model)
    protos = all_stored_protos(trained)
    attributes = {name: attribute for name, _, attribute in held_attributes(trained.graph)}
    outside = {}
    # integers with a scale get their rounded values first, in the type of the file
    for name, tensor in stored_as_integers(trained.graph, stored_weights(module), base).items():
        proto = protos.get(name)
        if proto is None or list(proto.dims) != list(tensor.shape):
            raise ConfigError(
                f"the model has no tensor {name!r} of shape {list(tensor.shape)}: it is not the one imported"
            )
        if is_external(proto):
            outside[name] = (tensor, proto)
        elif name in attributes:
            store_floats(tensor, attributes[name])
        else:
            store_tensor(tensor, proto)
    return trained, outside


def content_digest(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of a model as protobuf writes it here.

    Writers may order fields differently, so files of equal models can have different bytes.
    """
    return hashlib.sha256(model.SerializeToString()).hexdigest()


def _serialized(model: onnx.ModelProto, source: Path, content: str) -> bytes:
    """Return the model as bytes; those of the source file if the content is equal."""
    serialized: bytes = model.SerializeToString()
    content = content or content_digest(onnx.ModelProto.FromString(source.read_bytes()))
    return source.read_bytes() if hashlib.sha256(serialized).hexdigest() == content else serialized


def _overwrite_problems(source: Path, target: Path, locations: Sequence[str]) -> list[str]:
    """Return one sentence for each file that must not be overwritten: the source's own and those of other models."""
    if target.exists() and target.samefile(source):
        return [f"{target} is the model that was trained; write to another file"]
    ours: set[str] = set()  # external data files of an earlier export to the same target may be replaced
    if target.is_file():
        with contextlib.suppress(UnsupportedModel, OSError):
            before = read_model(target)
            ours = {byte_range(tensor).location for tensor in all_tensors(before) if is_external(tensor)}
    problems = []
    for location in locations:
        side = target.parent / location
        if side.exists() and side.samefile(source.parent / location):
            problems.append(f"{side} holds the weights of {source}; write to another directory")
        elif side.exists() and location not in ours:
            problems.append(f"{side} exists and is not a file of {target.name}; write to another directory")
    return problems
