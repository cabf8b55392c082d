"""Predict the shapes of values by ONNX's shape inference, for nodes whose rule cannot be probed on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import onnx
import torch
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import helper, shape_inference

from onward.trainer.onnx_graph.files.element_types import DTYPES, PACKED
from onward.trainer.onnx_graph.files.index import part_with

Probes = tuple[torch.Tensor, torch.Tensor]

SMALL = 64
"""Stored tensors up to this many elements are passed with their values, because shapes may be computed from them."""


def infer_probes(
    model: onnx.ModelProto, stored: Mapping[str, torch.Tensor], lengths: Mapping[tuple[str, int], tuple[int, int]]
) -> dict[str, Probes]:
    """Return {value: (meta tensor at the first, at the second trial size)}; values of other shapes are left out.

    lengths: (input, dimension) -> its two trial lengths. Shapes that the file declares are not used; they may be wrong.
    """
    lean = part_with(model, model.graph.node)
    # names alone: inference would take a declared shape for granted
    lean.graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in model.graph.output)
    # a large tensor is an input here, which has a type and a shape and no values
    for tensor in model.graph.initializer:
        if stored[tensor.name].numel() <= SMALL:
            lean.graph.initializer.append(tensor)
        else:
            lean.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for value in model.graph.input:
        if value.name not in stored:
            lean.graph.input.append(_with_symbols(value, lengths))
    try:
        values = shape_inference.infer_shapes(lean, data_prop=True).graph
    except (RuntimeError, EncodeError, shape_inference.InferenceError):  # 2 GB and more, or an inconsistent graph
        return {}
    probes = {value.name: _probes(value.type) for value in (*values.value_info, *values.output)}
    return {name: pair for name, pair in probes.items() if pair is not None}


def _with_symbols(
    value: onnx.ValueInfoProto, lengths: Mapping[tuple[str, int], tuple[int, int]]
) -> onnx.ValueInfoProto:
    """Return the input with the two trial lengths of a dynamic dimension as its symbol, such as "3:5".

    Inference copies symbols to results, but drops a dimension that is computed from one.
    """
    copy = deepcopy(value)
    for position, dim in enumerate(copy.type.tensor_type.shape.dim):
        first, second = lengths[value.name, position]
        if first == second:
            dim.dim_value = first
        else:
            dim.dim_param = f"{first}:{second}"
    return copy


def _probes(kind: onnx.TypeProto) -> Probes | None:
    tensor = kind.tensor_type
    if not tensor.HasField("shape") or tensor.elem_type not in DTYPES or tensor.elem_type in PACKED:
        return None
    shapes: tuple[list[int], list[int]] = ([], [])
    for dim in tensor.shape.dim:
        pair = [str(dim.dim_value)] * 2 if dim.HasField("dim_value") else dim.dim_param.split(":")
        # a length that inference computed of a trial length has no symbol, or one of inference's own
        if len(pair) != 2 or not all(length.isdigit() for length in pair):
            return None
        for shape, length in zip(shapes, pair, strict=True):
            shape.append(int(length))
    first, second = (torch.empty(shape, dtype=DTYPES[tensor.elem_type], device="meta") for shape in shapes)
    return first, second
