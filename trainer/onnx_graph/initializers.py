"""Read the tensors stored in an ONNX graph, and write values back into the protobuf field that they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.attribute_weights import held_attributes
from onward.trainer.onnx_graph.files.element_types import DTYPES
from onward.trainer.onnx_graph.files.external_data import bits_differ, map_external
from onward.trainer.onnx_graph.files.external_ranges import is_external
from onward.trainer.onnx_graph.files.index import element_type_name
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.files.tensor_protos import read_tensor


def stored_tensors(graph: onnx.GraphProto, base: Path | None, *, unaligned: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor of `stored_protos`, by name and in its stored shape; external data is memory-mapped.

    base: the directory of external data. unaligned: as in `map_external`. Raises UnsupportedModel with a sentence for
    each tensor that cannot be used.
    """
    refused = []
    for sparse in graph.sparse_initializer:
        if is_external(sparse.values) or is_external(sparse.indices):
            refused.append(
                f"initializer {sparse.values.name!r} is sparse and in another file, which is not implemented; store it "
                "in the model, or as a plain tensor"
            )
    initializers = {tensor.name for tensor in graph.initializer}
    # `stored_protos` would give one of the two for both
    refused += [
        f"initializer {name!r} is also the name of an attribute (of node {node.name!r}); rename the initializer"
        for name, node, _ in held_attributes(graph)
        if name in initializers
    ]
    protos = dict(stored_protos(graph))
    for name, proto in protos.items():
        if proto.data_type not in DTYPES:
            refused.append(f"initializer {name!r}: {element_type_name(proto.data_type)} cannot be computed")
        elif is_external(proto) and base is None:
            refused.append(f"initializer {name!r} is in another file; say in which directory, as `base`")
    if refused:
        raise UnsupportedModel(refused)
    return {name: _read(proto, base, unaligned=unaligned) for name, proto in protos.items()}


def _read(proto: TensorProto, base: Path | None, *, unaligned: bool) -> torch.Tensor:
    if base is not None and is_external(proto):
        return map_external(proto, base, unaligned=unaligned)
    return read_tensor(proto)


def store_tensor(tensor: torch.Tensor, proto: TensorProto) -> None:
    """Write a tensor into a proto of the same shape, unless it has the same bits already. Not for external data."""
    if not bits_differ(tensor, read_tensor(proto)):
        return
    array = tensor.detach().cpu().numpy()
    # a tensor of half precision is trained in fp32 and rounded here, once
    converted = array.astype(numpy_helper.to_array(proto).dtype)
    if proto.HasField("raw_data"):
        proto.raw_data = converted.tobytes()  # little-endian, like every machine torch runs on
        return
    # without raw data the values are in the field of their type, and stay there
    for name, values in _typed_fields(converted, proto.data_type).items():
        values_field = getattr(proto, name)
        del values_field[:]
        values_field.extend(values)


def _typed_fields(array: np.ndarray[Any, Any], data_type: int) -> dict[str, list[Any]]:
    """Return the protobuf field for a data type and its content; half-precision values are stored as their bits."""
    if data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return {"int32_data": array.reshape(-1).view(np.uint16).tolist()}
    name = helper.tensor_dtype_to_field(data_type)
    return {name: array.reshape(-1).tolist()}
