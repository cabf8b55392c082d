"""Operators that ONNX itself defines by simpler ones: their definition, ready to be imported node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import defs, helper

from trainer.ops.values import Value

ELEMENT_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.bool: onnx.TensorProto.BOOL,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
}


def has_definition(node: onnx.NodeProto, opset: int) -> bool:
    """Whether the standard defines the operator by simpler ones."""
    try:
        schema: Any = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def function_body(node: onnx.NodeProto, opset: int, operands: Sequence[Value]) -> onnx.FunctionProto | None:
    """The node's definition in the opset, its attributes filled in; None if the standard gives none."""
    if not has_definition(node, opset):
        return None
    schema: Any = defs.get_schema(node.op_type, opset, "")  # its stub lacks what follows
    function = onnx.FunctionProto()
    if schema.has_function:
        function.CopyFrom(schema.function_body)
    else:
        types = [_type(operand).SerializeToString() for operand in operands]
        function.ParseFromString(schema.get_context_dependent_function(node.SerializeToString(), types))
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            given[name] = attribute.default_value
    for inner in function.node:
        _fill_in(inner, given)
    return function


def _type(operand: Value) -> onnx.TypeProto:
    if operand is None:
        return onnx.TypeProto()
    dtype = operand.dtype if operand.dtype in ELEMENT_TYPES else torch.int64  # host integers
    return helper.make_tensor_type_proto(ELEMENT_TYPES[dtype], [None] * operand.ndim)


def _fill_in(node: onnx.NodeProto, given: dict[str, onnx.AttributeProto]) -> None:
    """Replace references to the outer node's attributes by their values; drop those it does not have."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue
            value = onnx.AttributeProto()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
            attribute = value
        kept.append(attribute)
    copies = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend(copies)
