"""Read the structure of an ONNX graph: inner graphs, producers and readers of values, types and shapes.

Nothing here reads the values of weights, and nothing imports torch.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto, helper

FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Element types in which weights are trained, and those among them of half precision."""

PACKED_BITS: dict[int, int] = {
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2, TensorProto.FLOAT4E2M1: 4
}  # fmt: skip
"""Element types of less than a byte -> their bits."""

NEVER_TRAINED = frozenset({TensorProto.INT64, TensorProto.UINT64, TensorProto.BOOL, TensorProto.STRING})
"""Element types of lengths, indices and masks, in which no weights are stored."""

SMALL = 1024
"""Number of elements up to which a tensor may be one that shapes are computed from."""

UNTIED = ".untied."
"""Part of the name of every copy that `model.untie` makes; the search for tied weights leaves these apart."""


# -- domains


def domain_of(part: onnx.NodeProto | onnx.OperatorSetIdProto) -> str:
    """Return the domain of an operator, "" for that of ONNX, which has a second name."""
    return "" if part.domain == "ai.onnx" else part.domain


def opsets_of(model: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    """Return the opset version of each domain that a model or a function imports."""
    return {domain_of(entry): entry.version for entry in model.opset_import}


def operator_of(node: onnx.NodeProto) -> str:
    """Return the operator of a node, with its domain if it is none of ONNX's own."""
    return f"{domain}.{node.op_type}" if (domain := domain_of(node)) else node.op_type


# -- parts of a model


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs without initializers, which files with an IR version below 4 list as well."""
    stored = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in stored]


def bodies_of(model: onnx.ModelProto) -> Iterator[tuple[Iterable[onnx.NodeProto], dict[str, int]]]:
    """Yield (nodes, opsets) of the graph and of each function, once each, however often it is called."""
    yield model.graph.node, opsets_of(model)
    for function in model.functions:
        yield function.node, opsets_of(function)


def part_with(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """Return a model of these nodes with the opsets, functions and names of another one, and nothing else of it."""
    part = onnx.ModelProto(
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        domain=model.domain,
        opset_import=model.opset_import,
        functions=model.functions,
    )
    part.graph.name = model.graph.name
    part.graph.node.extend(nodes)
    return part


def replace_entries(graph: onnx.GraphProto, **fields: Iterable[Any]) -> None:
    """Replace all entries of these fields; the new ones may be among the former ones."""
    for name, entries in fields.items():
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]  # clearing invalidates them
        graph.ClearField(name)
        getattr(graph, name).extend(copies)


# -- inner graphs: branches of If, bodies of Loop and Scan


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in the attributes of one node."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside nodes, at any depth, each before the graphs inside it."""
    for node in nodes:
        for graph in subgraphs(node):
            yield graph
            yield from inner_graphs(graph.node)


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph, and all graphs inside it."""
    yield graph
    yield from inner_graphs(graph.node)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a graph and of the graphs inside it."""
    for inner in graphs_of(graph):
        yield from inner.node


def nodes_inside(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of the graphs inside them, each node before the nodes inside it."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_inside(graph.node)


# -- names and tensors


def all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every name of a value or a node in a graph and the graphs inside it."""
    for inner in graphs_of(graph):
        yield from (value.name for values in (inner.input, inner.output, inner.initializer) for value in values)
        for node in inner.node:
            yield from (node.name, *node.input, *node.output)


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads, those that its inner graphs read included."""
    names = set(node.input)
    for graph in subgraphs(node):
        names |= {value.name for value in graph.output}.union(*map(names_read, graph.node))
    return names - {""}


def nodes_between(
    graph: onnx.GraphProto, outputs: Iterable[str], start: set[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes that compute tensors from `start` and the inputs, in graph order, and all names they read."""
    needed = set(outputs)
    kept = []
    for node in reversed(graph.node):
        # backwards over the sorted nodes, so that every reader of a value is visited before its producer
        if (needed - start) & set(node.output):
            kept.append(node)
            needed |= names_read(node)
    return kept[::-1], needed


def all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor that a model stores: in the graph, in inner graphs, in node attributes, in its functions."""
    graphs = [*graphs_of(model.graph), *(g for function in model.functions for g in inner_graphs(function.node))]
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in (node for body in (*graphs, *model.functions) for node in body.node):
        for attribute in node.attribute:
            yield from [attribute.t] if attribute.HasField("t") else attribute.tensors


def locations(model: onnx.ModelProto) -> list[str]:
    """Return the external data files of a model, relative to its directory."""
    external = (tensor for tensor in all_tensors(model) if tensor.data_location == TensorProto.EXTERNAL)
    entries = (entry for tensor in external for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return an attribute as a Python value: strings as str, tensors and graphs as protos."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str | int | float) or not hasattr(value, "__iter__"):
        return value
    return [item.decode(errors="backslashreplace") if isinstance(item, bytes) else item for item in value]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name, as Python values."""
    return {attribute.name: attribute_value(attribute) for attribute in node.attribute}


# -- producers and readers


@dataclass
class Index:
    """The producer and the readers of each value of a graph."""

    graph: onnx.GraphProto
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    """Value -> the node of the main graph that computes it."""
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    """Value -> the nodes that read it, those in inner graphs included."""
    stored: dict[str, TensorProto] = field(default_factory=dict)
    """Name -> tensor, of initializers and of Constant nodes."""

    def __post_init__(self) -> None:
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}
        for node in self.graph.node:
            # an absent optional output has the name ""
            self.makers.update(dict.fromkeys(filter(None, node.output), node))
            if node.op_type == "Constant":
                self.stored.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        # with the nodes of inner graphs, which read values of the main graph by name; `makers` leaves them out, because
        # their results are local
        for node in nodes_of(self.graph):
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)

    @property
    def computed(self) -> list[str]:
        """Return the names of the inputs and of all values computed from them."""
        inputs = [value.name for value in inputs_of(self.graph)]
        # without Constant nodes, which are among `makers` as well
        results = [name for name in self.makers if name not in self.stored]
        return inputs + results

    def free_name(self, name: str) -> str:
        """Return the name, or the first of name_1, name_2, ... that the graph does not use."""
        taken = {*self.stored, *self.makers, *(value.name for value in self.graph.input)}
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        return next(free for free in itertools.chain([name], numbered) if free not in taken)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known one, or the last three."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; there is {', '.join(names[-3:])}"


def integer_problems(graph: onnx.GraphProto, setting: str, patterns: Iterable[str]) -> Iterator[str]:
    """Yield which entries of a setting that names weights name a tensor of a type that is never trained.

    Integers of up to 32 bits may be quantized weights, about which the import decides.
    """
    stored = Index(graph).stored
    for pattern in patterns:
        # a pattern with wildcards may match other tensors as well, and is not refused
        if pattern in stored and stored[pattern].data_type in NEVER_TRAINED:
            name = str(TensorProto.DataType.Name(stored[pattern].data_type)).lower()
            yield f"{setting}: {pattern!r} is {name}; only tensors of floating-point numbers are trained"


# -- types and shapes


def known_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the type and shape of every tensor that the file declares or that ONNX infers.

    If inference finds a contradiction in the graph, only what the file declares.
    """
    try:
        return infer_types(model)
    except onnx.shape_inference.InferenceError:
        graph = model.graph
        return {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}


def infer_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the same as `known_types`. Raises InferenceError for a graph that contradicts itself."""
    # onnx serializes the model, which fails at 2 GB
    light = without_large_tensors(model)
    added = dict[str, onnx.ValueInfoProto]()
    # it ends: each round gives a type to results that had none
    while True:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
        types = {value.name: value for value in (*inferred.value_info, *inferred.output, *inferred.input)} | added
        # what follows an operator that ONNX does not know is inferred in the next round
        if not (further := {value.name: value for value in further_results(model.graph, types)}):
            return types
        light.graph.value_info.extend(further.values())
        added |= further


def without_large_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which the initializers of more than SMALL elements are inputs."""
    graph = model.graph
    light = part_with(model, graph.node)
    # before IR version 4 every initializer had to be an input as well
    light.ir_version = max(model.ir_version, 4)
    target = light.graph
    declared = {value.name for value in graph.input}
    target.input.extend(graph.input)
    for tensor in graph.initializer:
        # small ones stay initializers: shapes may be computed from them (Reshape, Slice)
        if math.prod(tensor.dims) <= SMALL and tensor.data_location != TensorProto.EXTERNAL:
            target.initializer.append(tensor)
        elif tensor.name not in declared:
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    return light


def innermost_type(value: onnx.ValueInfoProto) -> onnx.TypeProto:
    """Return the type of a value; of a sequence or an optional, that of what is in it."""
    kind = value.type
    while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, which).elem_type
    return kind


def shape_text(value: onnx.ValueInfoProto) -> str:
    """Return the declared shape of a tensor, for messages: `[1, batch, ?]`."""
    kind = value.type.tensor_type
    return f"[{', '.join(map(dim_text, kind.shape.dim))}]" if kind.HasField("shape") else "of any shape"


def element_type_name(element_type: int) -> str:
    """Return the name that ONNX gives an element type, such as FLOAT8E4M3FN."""
    names = {int(value): str(name) for name, value in TensorProto.DataType.items()}
    return names.get(element_type, f"number {element_type}")


def dims_of(value: onnx.ValueInfoProto | None) -> list[int | None] | None:
    """Return the lengths of a tensor's dimensions, None for an unknown one; None for a tensor of unknown rank."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [length_of(dim) for dim in value.type.tensor_type.shape.dim]


def length_of(dim: onnx.TensorShapeProto.Dimension) -> int | None:
    """Return the length that a dimension declares, None for an unknown one, as which exporters of Paddle write -1."""
    return dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None


def dim_text(dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return the length or the symbol of a dimension, "?" if it has neither, for messages."""
    length = length_of(dim)
    return (dim.dim_param or "?") if length is None else str(length)


# -- infer types and shapes that ONNX's shape inference leaves out: of ai.onnx.ml, and of skl2onnx's Tokenizer

ML_DOMAIN = "ai.onnx.ml"
Dims = list[int | str | None]


def further_results(graph: onnx.GraphProto, known: Mapping[str, onnx.ValueInfoProto]) -> Iterator[onnx.ValueInfoProto]:
    """Yield the type of each result whose type is not among `known`, and whose operand's is."""
    for node in graph.node:
        if node.domain not in (ML_DOMAIN, "com.microsoft"):
            continue
        name = node.output[-1]  # of classifiers: the scores, after the labels
        # a declared value may have a shape and no element type
        typed = name in known and known[name].type.tensor_type.elem_type
        operand = known.get(node.input[0]) if node.input else None
        if not name or typed or operand is None:
            continue
        kind = operand.type.tensor_type.elem_type
        dims = _dims(operand)
        if (node.domain, node.op_type) == ("com.microsoft", "Tokenizer"):  # one dimension more, for the tokens
            yield helper.make_tensor_value_info(name, TensorProto.STRING, None if dims is None else [*dims, None])
        if node.domain != ML_DOMAIN:
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        # an undefined type is no type: it would be asked for again without end
        if node.op_type == "Imputer" and kind:
            yield helper.make_tensor_value_info(name, kind, dims)
        elif node.op_type in ("Scaler", "Normalizer"):
            yield helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        elif node.op_type in ("LinearRegressor", "TreeEnsembleRegressor", "SVMRegressor"):
            targets = next((attributes[key].i for key in ("targets", "n_targets") if key in attributes), 1)
            yield _matrix(name, dims, targets)
        elif node.op_type in ("TreeEnsembleClassifier", "SVMClassifier"):
            # one of the attributes for labels has them: as integers or as strings
            counts = (len(attributes[key].ints) + len(attributes[key].strings) for key in attributes if "label" in key)
            yield _matrix(name, dims, next(counts, None))
        elif node.op_type == "FeatureVectorizer":
            widths = list(attributes["inputdimensions"].ints) if "inputdimensions" in attributes else []
            yield _matrix(name, dims, sum(widths) or None)


def _dims(value: onnx.ValueInfoProto) -> Dims | None:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [dim.dim_param or length_of(dim) for dim in kind.shape.dim]


def _matrix(name: str, rows: Dims | None, columns: int | None) -> onnx.ValueInfoProto:
    """Return the type of an fp32 matrix with the rows of an operand."""
    row = rows[0] if rows and len(rows) == 2 else None
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [row, columns])
