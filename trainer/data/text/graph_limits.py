"""Find what a graph says about its text inputs: rows of the embeddings that they index, and of the positions.

    input_ids [B, L] --(Cast, Identity, ...)--> Gather(axis 0) <-- initializer [V, D]        V ids fit
    Range, or a constant 0, 1, 2, ... --------> Gather(axis 0) <-- initializer [P, D]        P positions fit

Only what the graph shows: an embedding that is computed, or positions that are computed from the ids, are not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx.numpy_helper

PASSES_VALUES = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Transpose", "Expand"}
"""Operators whose result has the values of their first input."""
LEAST_WIDTH = 2
"""Columns of an embedding, and positions, at least."""


def embedding_rows(graph: onnx.GraphProto, name: str) -> tuple[int, str] | None:
    """Return (rows, name) of the smallest embedding that an input indexes, or None if the graph shows none."""
    return _smallest_table(graph, {name})


def position_rows(graph: onnx.GraphProto) -> tuple[int, str] | None:
    """Return (rows, name) of the smallest embedding that is indexed by 0, 1, 2, ..., or None."""
    counted = {tensor.name for tensor in _tensors(graph) if _counts_up(tensor)}
    return _smallest_table(graph, counted | {node.output[0] for node in graph.node if node.op_type == "Range"})


def _smallest_table(graph: onnx.GraphProto, indices: set[str]) -> tuple[int, str] | None:
    tables, names = _tables(graph), set(indices)
    found: list[tuple[int, str]] = []
    for node in graph.node:  # in topological order
        if node.op_type in PASSES_VALUES and node.input and node.input[0] in names:
            names.add(node.output[0])
        elif _is_lookup(node) and node.input[1] in names and node.input[0] in tables:
            found.append((tables[node.input[0]], node.input[0]))
    return min(found, default=None)


def _counts_up(tensor: onnx.TensorProto) -> bool:
    """Whether a constant holds 0, 1, 2, ... along its last axis, as exporters keep position ids."""
    if tensor.data_type not in (onnx.TensorProto.INT64, onnx.TensorProto.INT32):
        return False
    if tensor.data_location == onnx.TensorProto.EXTERNAL or not tensor.dims or tensor.dims[-1] < LEAST_WIDTH:
        return False
    values = onnx.numpy_helper.to_array(tensor)
    return bool((values == np.arange(values.shape[-1])).all())


def _tables(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Return initializer of two dimensions -> its rows, under each name that it is passed on by."""
    found = {
        tensor.name: tensor.dims[0]
        for tensor in _tensors(graph)
        if len(tensor.dims) == 2 and tensor.dims[1] >= LEAST_WIDTH
    }
    for node in graph.node:
        if node.op_type in ("Identity", "Cast", "DequantizeLinear") and node.input and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def _tensors(graph: onnx.GraphProto) -> Iterable[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensor = onnx.TensorProto()
                tensor.CopyFrom(attribute.t)
                tensor.name = node.output[0]
                yield tensor


def _is_lookup(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and all(a.i == 0 for a in node.attribute if a.name == "axis")
