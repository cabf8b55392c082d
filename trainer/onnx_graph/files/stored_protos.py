"""The tensors that a graph stores, as they are in the file: their protos and their bytes.

Without torch, whose import takes longer than `onward diff`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.checker import ValidationError

from onward.trainer.onnx_graph.attribute_weights import as_tensor_proto, held_attributes
from onward.trainer.onnx_graph.files.external_ranges import byte_range, is_external, load_external
from onward.trainer.onnx_graph.files.index import all_tensors

CHUNK_BYTES = 16 * 2**20
"""Tensors are compared and written in chunks of this size."""

SMALL_BYTES = 64 * 2**10
"""`load_small_tensors` reads tensors up to this size."""


def stored_protos(graph: onnx.GraphProto) -> Iterable[tuple[str, TensorProto]]:
    """Yield (name, proto) of initializers, of Constant nodes (named as their output) and of attribute_weights.py.

    The last ones are copies, which `store_tensor` cannot change (see `store_floats`), and so are sparse initializers,
    which are yielded as dense tensors.
    """
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for sparse in graph.sparse_initializer:
        yield sparse.values.name, dense_tensor(sparse)
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t
    # `stored_tensors` refuses a file in which an initializer has the same name
    for name, node, attribute in held_attributes(graph):
        yield name, as_tensor_proto(node, attribute)


def sparse_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the sparse initializers of a graph."""
    return {sparse.values.name for sparse in graph.sparse_initializer}


def dense_tensor(sparse: onnx.SparseTensorProto) -> TensorProto:
    """Return a sparse initializer as a dense one with zeros between its values.

    A tensor whose values or places are external data is returned as its values alone, which readers refuse.
    """
    if is_external(sparse.values) or is_external(sparse.indices):
        return sparse.values
    values = numpy_helper.to_array(sparse.values)
    indices = numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    # indices [n]: one number each, counted through the tensor; [n, rank]: a number for each dimension
    dense[np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def read_chunks(proto: TensorProto, base: Path) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the values of a tensor of a type in BYTEWISE_SIZES, flat [n] and in this type, in chunks of CHUNK_BYTES."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(proto.data_type))
    if is_external(proto):
        where = byte_range(proto)
        with (base / where.location).open("rb") as file:
            for offset in range(where.offset, where.end, CHUNK_BYTES):
                file.seek(offset)
                yield np.frombuffer(file.read(min(CHUNK_BYTES, where.end - offset)), dtype)
    elif proto.HasField("raw_data"):
        for start in range(0, len(proto.raw_data), CHUNK_BYTES):
            yield np.frombuffer(proto.raw_data[start : start + CHUNK_BYTES], dtype)
    else:
        flat = numpy_helper.to_array(proto).reshape(-1)
        step = CHUNK_BYTES // dtype.itemsize
        yield from (flat[start : start + step] for start in range(0, len(flat), step))


def _is_small(proto: TensorProto) -> bool:
    try:
        return byte_range(proto).length <= SMALL_BYTES
    except ValueError:  # external_problems says that its place cannot be read
        return False


def load_small_tensors(model: onnx.ModelProto, base: Path | None) -> onnx.ModelProto:
    """Return a copy of the model with small external tensors loaded, and all those of inner graphs and functions."""
    if base is None or not any(map(is_external, all_tensors(model))):
        return model
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for position, proto in enumerate(all_tensors(model)):
        # initializers of the main graph come first; in inner graphs all are loaded: nothing maps those, and lowering
        # reads them as constants
        inner = position >= len(model.graph.initializer)
        if is_external(proto) and (inner or _is_small(proto)):
            # of a file that is searched before it is checked; external_problems says what is wrong with its place
            with contextlib.suppress(OSError, ValueError, ValidationError):
                load_external([proto], base)
    return model
