"""Reading an ONNX graph's structure without its weights: who makes and who reads what, types and shapes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

UNTIED = ".untied."
"""Stands in the name of each copy that surgery makes, by which it is known as one that must stay apart."""


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside If, Loop and Scan nodes, at any depth."""
    for node in nodes:
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield graph
                yield from inner_graphs(graph.node)


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and those inside it."""
    yield graph
    yield from inner_graphs(graph.node)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those inside If, Loop and Scan included."""
    for inner in graphs_of(graph):
        yield from inner.node


def all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor a model holds: of the graph, of the graphs inside its nodes, of its functions."""
    graphs = [*graphs_of(model.graph), *(g for function in model.functions for g in inner_graphs(function.node))]
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in (node for body in (*graphs, *model.functions) for node in body.node):
        for attribute in node.attribute:
            yield from [attribute.t] if attribute.HasField("t") else attribute.tensors


def locations(model: onnx.ModelProto) -> list[str]:
    """The files a model keeps tensors in, relative to its own directory."""
    entries = (entry for tensor in all_tensors(model) for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def reads(node: onnx.NodeProto) -> set[str]:
    """The names a node reads, those its inner graphs take from outside included."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names |= {value.name for value in inner.output}.union(*map(reads, inner.node))
    return names - {""}


@dataclass
class Index:
    """Who makes and who reads each tensor of a graph."""

    graph: onnx.GraphProto
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    stored: dict[str, TensorProto] = field(default_factory=dict)
    """Initializers, and the values of Constant nodes, by name."""

    def __post_init__(self) -> None:
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}
        for node in self.graph.node:
            self.makers.update(dict.fromkeys(filter(None, node.output), node))
            if node.op_type == "Constant":
                self.stored.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        for node in nodes_of(self.graph):
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)

    @property
    def computed(self) -> list[str]:
        """The names of the inputs, and of all that is computed from them."""
        return [value.name for value in self.graph.input if value.name not in self.stored] + [
            name for name in self.makers if name not in self.stored
        ]

    def unused(self, name: str) -> str:
        """The name, or the first of name_1, name_2, ... that the graph does not have."""
        taken = {*self.stored, *self.makers, *(value.name for value in self.graph.input)}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)


def near(name: str, known: Iterable[str]) -> str:
    """How a sentence about an unknown name ends: with the name that may be meant, or a few of the known ones."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; there is {', '.join(names[-3:])}"


def inferred(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Type and shape of every tensor of which the file says them or onnx infers them. Weights are not copied.

    Of a graph that contradicts itself, only what the file says.
    """
    try:
        return infer(model)
    except onnx.shape_inference.InferenceError:
        graph = model.graph
        return {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}


def infer(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """As `inferred`. Raises InferenceError for a graph that contradicts itself."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph, target = model.graph, light.graph
    target.name = graph.name
    target.node.extend(graph.node)
    declared = {value.name for value in graph.input}
    target.input.extend(graph.input)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= 1024 and tensor.data_location != TensorProto.EXTERNAL:
            target.initializer.append(tensor)
        elif tensor.name not in declared:
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    found = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    return {value.name: value for value in (*found.value_info, *found.output, *found.input)}


def dims_of(value: onnx.ValueInfoProto | None) -> list[int | None] | None:
    """The lengths of a tensor's dimensions, None where they are not known; None for one of unknown rank."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
