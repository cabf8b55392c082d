"""The digest of a model's structure: what it computes, whatever values its trained weights have."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import onnx

from onward.trainer.onnx_graph.files.index import graphs_of
from onward.trainer.onnx_graph.files.model_files import read_model

KEPT_VALUES = 64
"""Integers in small tensors are shapes and axes, which belong to the structure."""
FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def structure_digest(path: Path) -> str:
    """Return a SHA-256 of the nodes, and of the names, types and shapes of the tensors; equal for other weights."""
    model = read_model(path)
    model.ClearField("metadata_props")
    model.ClearField("doc_string")
    for graph in graphs_of(model.graph):
        for tensor in graph.initializer:
            # floats may be trained, and many integers may be a quantized weight
            if tensor.data_type in FLOATS or math.prod(tensor.dims) > KEPT_VALUES:
                bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
                tensor.CopyFrom(bare)
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
