"""The tensors an ONNX file stores: reading them, and writing values back into the very field they came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

from trainer.errors import UnsupportedModel
from trainer.ops.values import DTYPES, element_type_name, read_tensor


def stored_tensors(graph: onnx.GraphProto, base: Path | None) -> dict[str, torch.Tensor]:
    """Every initializer, and every tensor in a Constant node, by name."""
    if graph.sparse_initializer:
        raise UnsupportedModel(f"{len(graph.sparse_initializer)} sparse initializers are not implemented")
    protos = dict(slots(graph))
    refused = [
        f"initializer {name!r}: {element_type_name(proto.data_type)} cannot be computed"
        for name, proto in protos.items()
        if proto.data_type not in DTYPES
    ]
    if refused:
        raise UnsupportedModel(refused)
    return {name: read_tensor(proto, base) for name, proto in protos.items()}


def slots(graph: onnx.GraphProto) -> Iterable[tuple[str, TensorProto]]:
    """Where tensors are stored: initializers, and the `value` of Constant nodes, under their output's name."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t


def store(tensor: torch.Tensor, proto: TensorProto) -> None:
    """Write a tensor where the proto keeps its values, unless they are the same already."""
    array = tensor.detach().cpu().numpy()
    target = numpy_helper.to_array(proto)
    converted = array.astype(target.dtype)
    if converted.tobytes() == target.tobytes():
        return
    if proto.HasField("raw_data"):
        proto.raw_data = converted.tobytes()  # little-endian, like every machine torch runs on
        return
    fresh = _typed_fields(converted, proto.data_type)
    for name, values in fresh.items():
        values_field = getattr(proto, name)
        del values_field[:]
        values_field.extend(values)


def _typed_fields(array: np.ndarray[Any, Any], data_type: int) -> dict[str, list[Any]]:
    """The values as the protobuf field of their type holds them; halves go as their bits."""
    if data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return {"int32_data": array.reshape(-1).view(np.uint16).tolist()}
    name = "float_data" if data_type == TensorProto.FLOAT else "double_data"
    return {name: array.reshape(-1).tolist()}
