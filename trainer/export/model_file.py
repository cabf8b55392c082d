"""A parsed ONNX file, copies of it in full and in fp32, and its trained part."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, numpy_helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.onnx_graph.files.external_ranges import load_external
from onward.trainer.onnx_graph.files.index import HALF_TYPES, all_tensors, graphs_of, locations
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph


@dataclass(frozen=True)
class ModelFile:
    """A parsed ONNX file. Its external data is not loaded: tensors are read from their files when they are needed."""

    path: Path
    proto: onnx.ModelProto

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        return cls(path, onnx.load_model(str(path), load_external_data=False))

    def with_external_data(self) -> onnx.ModelProto:
        """Return a copy of the model that holds all of its tensors."""
        model = deepcopy(self.proto)
        load_external(all_tensors(model), self.path.parent)
        return model


def proto_of(model: ModelFile | onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph of a file, or of a model that is in no file."""
    return model.proto if isinstance(model, ModelFile) else model


def in_half_precision(model: onnx.ModelProto) -> bool:
    """Return whether any stored tensor, input or output is fp16 or bf16."""
    if any(tensor.data_type in HALF_TYPES for tensor in all_tensors(model)):
        return True
    values = (*model.graph.input, *model.graph.output)
    return any(value.type.tensor_type.elem_type in HALF_TYPES for value in values)


def fp32_copy(model: ModelFile | onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which every fp16 and bf16 is fp32: the same function, without the rounding between nodes."""
    copy = full_copy(model)
    for graph in graphs_of(copy.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _widen_type(value.type)
        for node in graph.node:
            for attribute in node.attribute:
                # a node that names a type would make half precision again
                if attribute.name in ("to", "dtype", "output_dtype", "stash_type") and attribute.i in HALF_TYPES:
                    attribute.i = TensorProto.FLOAT
    for tensor in all_tensors(copy):
        if tensor.data_type in HALF_TYPES:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))
    return copy


def _widen_type(kind: TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in HALF_TYPES:
        kind.tensor_type.elem_type = TensorProto.FLOAT
    elif kind.HasField("sequence_type"):
        _widen_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _widen_type(kind.optional_type.elem_type)


def full_copy(model: ModelFile | onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that holds all of its tensors."""
    if isinstance(model, ModelFile):
        return model.with_external_data()
    return deepcopy(model)


def trained_part(
    model: onnx.ModelProto, source: Path, folder: Path, config: ModelConfig
) -> ModelFile | onnx.ModelProto:
    """Return the part of the original that is trained; as a file in `folder` if it has external data."""
    return beside_its_data(extract_subgraph(model, config), source, folder)


def beside_its_data(model: onnx.ModelProto, source: Path, folder: Path) -> ModelFile | onnx.ModelProto:
    """Return a model made from the file `source`; as a file in `folder` if it has external data, which is copied."""
    if not (names := locations(model)):
        return model
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, folder / name)
    (folder / "part.onnx").write_bytes(model.SerializeToString())
    return ModelFile(folder / "part.onnx", model)
