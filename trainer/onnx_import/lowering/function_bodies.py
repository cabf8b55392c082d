"""Function bodies of nodes (defined by ONNX or by the model) and the inner graphs of If, Loop, Scan and SequenceMap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import defs, helper

from onward.trainer.onnx_graph.files.index import domain_of, replace_entries, subgraphs
from onward.trainer.onnx_graph.files.tensor_protos import read_tensor
from onward.trainer.onnx_import.tracing.values import Traced, Value, element_type


def has_definition(node: onnx.NodeProto, opset: int) -> bool:
    """Return whether the ONNX standard defines the operator as a function of simpler ones."""
    try:
        schema: Any = defs.get_schema(node.op_type, opset, domain_of(node))
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def function_body(node: onnx.NodeProto, opset: int, operands: Sequence[Value]) -> onnx.FunctionProto | None:
    """Return the function body that ONNX defines for a node, with the node's attributes filled in; None without one.

    Some bodies depend on the operands' types and on known lengths, such as the number of channels.
    """
    if not has_definition(node, opset):
        return None
    schema: Any = defs.get_schema(node.op_type, opset, domain_of(node))  # its stub lacks what follows
    function = onnx.FunctionProto()
    if schema.has_function:
        function.CopyFrom(schema.function_body)
    else:
        # onnx's C++ binding takes serialized messages here
        types = [_type(operand).SerializeToString() for operand in operands]
        function.ParseFromString(schema.get_context_dependent_function(node.SerializeToString(), types))
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        # a body refers to attributes by name alone, and has no defaults of its own
        if name not in given and attribute.default_value.type:
            given[name] = attribute.default_value
    # nodes of the body refer to attributes of the calling node by name
    for inner in function.node:
        _fill_in(inner, given)
    return function if function.node else None


def _type(operand: Value) -> onnx.TypeProto:
    if operand is None:
        return onnx.TypeProto()
    return helper.make_tensor_type_proto(element_type(operand), _lengths(operand))


def _lengths(operand: Value) -> list[int | None]:
    """Return the static lengths of a value, None for dynamic ones."""
    if not isinstance(operand, Traced):
        return list(operand.shape)
    # a length that differs between the two trial sizes is dynamic
    first, second = (probe.shape for probe in operand.probes)
    return [a if a == b else None for a, b in zip(first, second, strict=True)]


def local_body(function: onnx.FunctionProto, node: onnx.NodeProto) -> onnx.FunctionProto:
    """Return the body of a function of the model, with the calling node's attributes filled in."""
    body = deepcopy(function)
    given = {attribute.name: attribute for attribute in (*function.attribute_proto, *node.attribute)}
    for inner in body.node:
        _fill_in(inner, given)
    return body


def _fill_in(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> None:
    """Replace references to the calling node's attributes by their values; drop references to absent ones."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue
            value = deepcopy(given[attribute.ref_attr_name])
            value.name = attribute.name
            attribute = value
        kept.append(onnx.AttributeProto.FromString(attribute.SerializeToString()))
    del node.attribute[:]
    node.attribute.extend(kept)
    for graph in subgraphs(node):
        for inner in graph.node:
            _fill_in(inner, given)


# -- inner graphs: branches and loop bodies


def outer_names_read(node: onnx.NodeProto) -> list[str]:
    """Return the outer-scope values that the inner graphs of a node read, in the order of first use."""
    return list(dict.fromkeys(name for graph in subgraphs(node) for name in _outer_names_of(graph)))


def _outer_names_of(graph: onnx.GraphProto) -> list[str]:
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    outer: list[str] = []
    for node in graph.node:
        outer += [name for name in (*node.input, *outer_names_read(node)) if name not in own]
        own.update(node.output)
    return outer + [value.name for value in graph.output if value.name not in own]


def hoist_stored_tensors(node: onnx.NodeProto, base: Path | None) -> tuple[onnx.NodeProto, dict[str, torch.Tensor]]:
    """Move the tensors stored inside a node's inner graphs out of them; return a copy of the node and the tensors.

    The inner graphs then read them as outer-scope values under new, unique names, so that a RuntimeNode gets them as
    operands:

        If(c) { then: Add(x, w) with initializer w }    ->    If(c) { then: Add(x, "y/0/w") },  {"y/0/w": tensor}
    """
    copy = deepcopy(node)
    tensors: dict[str, torch.Tensor] = {}
    # the name of an output is unique in the graph, that of a node may be absent
    prefix = next(filter(None, node.output), node.name)
    for i, graph in enumerate(subgraphs(copy)):
        _hoist(graph, f"{prefix}/{i}", {}, tensors, base)
    return copy, tensors


def _hoist(
    graph: onnx.GraphProto, prefix: str, names: Mapping[str, str], tensors: dict[str, torch.Tensor], base: Path | None
) -> None:
    """Move the stored tensors of a graph into `tensors`. names: old -> new name of those of outer graphs."""
    inner_names = {value.name for value in graph.input}
    inner_names |= {name for node in graph.node for name in node.output}
    renamed = {old: new for old, new in names.items() if old not in inner_names}  # an inner name hides an outer one
    stored = [(tensor.name, tensor) for tensor in graph.initializer]
    kept = []
    for node in graph.node:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        # a Constant of another attribute, such as value_ints, stays a node
        if node.op_type == "Constant" and values:
            stored.append((node.output[0], values[0]))
        else:
            kept.append(node)
    for name, proto in stored:
        renamed[name] = f"{prefix}/{name}"
        tensors[renamed[name]] = read_tensor(proto, base)
    # deeper graphs see the new names of this one's tensors, and get a prefix of their own
    for position, node in enumerate(kept):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for i, inner in enumerate(subgraphs(node)):
            _hoist(inner, f"{prefix}/{position}/{i}", renamed, tensors, base)
    for value in graph.output:
        value.name = renamed.get(value.name, value.name)
    replace_entries(graph, node=kept, initializer=())
