"""Find the nodes on strings, sequences and trees in front of the network, and the numbers where training begins.

    text [N] -- StringSplit -- words [N, L] -- LabelEncoder -- ids [N, L] --*-- Gather -- ... -- logits
                                                                            |
    pre-processing: onnxruntime computes it once, when the data is read     |   the trained part: `model.start` = ids

    price [N, 1] ------------------------------------------------------------- Concat ...     read as it is

The pre-processing is every node that reads or writes a value that is no tensor of numbers, every node of decision trees
or support vectors, which have no gradient, and every node that such a node depends on. It cannot be trained, so a
weight among its operands is refused. It stays in the file untouched.
`begin_at_numbers` returns the settings under which the rest is trained: its `model.start` names the tensors of numbers
that the pre-processing computes for the rest. Only onnx is needed here; data/preprocessing.py runs the pre-processing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx
from onnx import TensorProto, helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import UnsupportedModel, few
from onward.trainer.onnx_graph.files.index import (
    FLOAT_TYPES,
    Index,
    inputs_of,
    known_types,
    names_read,
    nodes_between,
    nodes_inside,
    operator_of,
    part_with,
    subgraphs,
)
from onward.trainer.onnx_graph.files.operators import matches_any, name_of
from onward.trainer.onnx_graph.outputs import is_numeric, unreadable_output, with_log_probabilities

STRING_OPERATORS = frozenset(("CastMap", "CategoryMapper", "DictVectorizer", "ImageDecoder", "RegexFullMatch")) | {
    *("StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Tokenizer"),
}
"""Operators on strings and maps, whatever the types of their operands are."""
WITHOUT_GRADIENT = frozenset(("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")) | {
    *("SVMClassifier", "SVMRegressor"),
}
"""Trees and support vectors, which no gradient changes."""
IN_FRONT = STRING_OPERATORS | WITHOUT_GRADIENT
"""Operators that belong to the pre-processing."""
LAYERS = frozenset(("BatchNormalization", "Conv", "ConvTranspose", "Einsum", "GRU", "Gather", "Gemm", "MatMul")) | {
    *("GroupNormalization", "InstanceNormalization", "LSTM", "LayerNormalization", "RMSNormalization", "RNN"),
}
"""Operators whose stored operands of floats are weights. Those of others, such as Sub and Div, are constants here."""
SHAPE_ARITHMETIC = frozenset(("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Max", "Min", "Mul", "Sub")) | {
    *("ReduceProd", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Unsqueeze"),
}
"""Operators by which shapes are computed from shapes."""


@dataclass(frozen=True)
class Preprocessing:
    """The nodes in front of the trained part."""

    nodes: tuple[onnx.NodeProto, ...]
    """In the order of the graph."""
    inputs: tuple[str, ...]
    """The graph's inputs that they read."""
    tensors: tuple[str, ...]
    """The tensors of numbers that they compute for the trained part."""


def begin_at_numbers(model: onnx.ModelProto, config: ModelConfig) -> ModelConfig:
    """Return the settings with `model.start` set to the tensors of numbers behind the pre-processing, if there is any.

    A `model.start` that is given stays. Raises UnsupportedModel as `find_preprocessing` does.
    """
    preprocessing = find_preprocessing(model, config)
    if preprocessing is None:
        return config
    # a weight that is frozen so that it may stay in front is no weight of the trained part, where patterns must match
    read_in_front = {name for node in preprocessing.nodes for name in names_read(node)}
    elsewhere = Index(model.graph).stored.keys() - read_in_front
    ahead = _stored_inside(preprocessing.nodes)
    freeze = []
    for pattern in config.freeze:
        matches_elsewhere = any(fnmatchcase(name, pattern) for name in elsewhere)
        # a pattern without any match stays, and is refused where the weights are known
        if matches_elsewhere or not any(fnmatchcase(name, pattern) for name in ahead):
            freeze.append(pattern)
    return config.model_copy(update={"start": preprocessing.tensors, "freeze": tuple(freeze)})


def find_preprocessing(model: onnx.ModelProto, config: ModelConfig) -> Preprocessing | None:
    """Return the nodes on strings and sequences on the way to `model.output`; None without any, and with `model.start`.

    Raises UnsupportedModel if the output is no tensor of numbers, if such a node depends on a weight that would be
    trained, and if nothing is left behind decision trees.
    """
    if config.start or not _may_have_any(model.graph):
        return None
    for name in config.outputs:
        model = with_log_probabilities(model, name)
    graph = model.graph
    types = known_types(model)
    outputs = config.named_outputs(graph.output[0].name)
    typed = [name for name in outputs if name in types]
    if texts := [name for name in typed if _is_text(types[name])]:
        raise UnsupportedModel(unreadable_output(model, name, types) for name in texts)
    between, _ = nodes_between(graph, outputs, set())
    front = _nodes_in_front(graph, between, types)
    if not front:
        return None
    # shapes of strings are numbers, but have no row for each sample: what reads them belongs to the front as well
    while shapes := _tensors_behind(between, front, outputs) & _shape_values(between, front):
        front |= _with_ancestors([at for at, node in enumerate(between) if names_read(node) & shapes], between)
    nodes = tuple(between[at] for at in sorted(front))
    if problems := list(_weights_in(model, nodes, config)):
        raise UnsupportedModel(problems)
    behind = _tensors_behind(between, front, outputs)
    if behind == set(outputs) and (trees := sorted({node.op_type for node in nodes} & WITHOUT_GRADIENT)):
        raise UnsupportedModel(
            f"model.output {', '.join(outputs)} is computed by {', '.join(trees)}: trees and support vectors have no "
            "weights that a gradient changes, and nothing is left to train behind them; fit them with their library"
        )
    # initializers are operands but no inputs, also where an old file lists them as such
    read = set().union(*map(names_read, nodes)) - {tensor.name for tensor in graph.initializer}
    results = [name for node in nodes for name in node.output]
    inputs = tuple(value.name for value in graph.input if value.name in read)
    tensors = tuple(name for name in results if name in behind)
    return Preprocessing(nodes, inputs, tensors)


def preprocessing_model(model: onnx.ModelProto, found: Preprocessing) -> onnx.ModelProto:
    """Return the pre-processing as a model of its own: from the graph's inputs to the tensors of numbers."""
    graph = model.graph
    types = known_types(model)
    front = part_with(model, found.nodes)
    read = set().union(*map(names_read, found.nodes))
    front.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    front.graph.input.extend(value for value in graph.input if value.name in found.inputs)
    for value in front.graph.input:
        # it is computed for any number of rows, also if the file declares one
        for dim in value.type.tensor_type.shape.dim[:1]:
            dim.ClearField("value")
    for name in found.tensors:
        # without the shape, which onnxruntime infers: a declared one may be of another batch size
        element_type = types[name].type.tensor_type.elem_type if name in types else 0
        front.graph.output.append(helper.make_tensor_value_info(name, element_type, None))
    return front


def describe(nodes: Iterable[onnx.NodeProto], tensors: Iterable[str]) -> str:
    """Return a clause: where the trained part begins, and the first of the nodes in front of it."""
    return (
        f"the trained part begins at {', '.join(tensors)}; in front of it onnxruntime computes, when the data is read: "
        f"{few(map(label_of, nodes), 6)}"
    )


def label_of(node: onnx.NodeProto) -> str:
    """Return the operator and the name of a node, for messages."""
    operator = operator_of(node)
    name = name_of(node)
    return operator if name == node.op_type else f"{operator} {name!r}"


# -- which nodes


def _may_have_any(graph: onnx.GraphProto) -> bool:
    """Return whether the graph can have pre-processing, without the inference of types, which takes long."""
    return has_untrained(graph) or any(map(_is_text, inputs_of(graph)))


def has_untrained(graph: onnx.GraphProto) -> bool:
    """Return whether a graph computes with strings, maps, trees or support vectors, which stay in front."""
    if not all(map(is_numeric, graph.input)):
        return True
    if any(tensor.data_type == TensorProto.STRING for tensor in graph.initializer):
        return True
    # operators on strings and trees, wherever their operands come from
    return any(node.op_type in IN_FRONT or _makes_strings(node) for node in nodes_inside(graph.node))


def _nodes_in_front(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], types: dict[str, onnx.ValueInfoProto]
) -> set[int]:
    """Return the positions of the nodes with an operand or result that is no tensor of numbers, and of their ancestors.

    A sequence of numbers that the graph itself makes is not meant: the network may contain it.
    """
    typed_strings = {name for name, value in types.items() if not is_numeric(value)}
    typed_texts = {name for name, value in types.items() if _is_text(value)}
    text = {value.name for value in graph.input if _is_text(value)}
    text |= {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.STRING}
    # nodes are sorted, so that what a node makes of text is known before its readers are visited
    own = []
    for at, node in enumerate(nodes):
        strings = typed_strings.intersection(node.output)
        by_name = any(inner.op_type in IN_FRONT or _makes_strings(inner) for inner in nodes_inside([node]))
        if strings or by_name or names_read(node) & text:
            own.append(at)
            # a sequence counts from here on, because this node makes it of text
            text |= strings | typed_texts.intersection(node.output)
    # a Constant of strings is an operand; alone it is no pre-processing
    return _with_ancestors(own, nodes) if any(nodes[at].op_type != "Constant" for at in own) else set()


def _with_ancestors(chosen: Iterable[int], nodes: list[onnx.NodeProto]) -> set[int]:
    """Return the chosen positions and those of all nodes that the chosen ones depend on."""
    positions = set(chosen)
    needed = set[str]()
    # from the end: all readers of a result are visited before the node that computes it
    for at in reversed(range(len(nodes))):
        if at in positions or needed.intersection(nodes[at].output):
            positions.add(at)
            needed |= names_read(nodes[at])
    return positions


def _tensors_behind(nodes: list[onnx.NodeProto], front: set[int], outputs: Sequence[str]) -> set[str]:
    """Return the results of the nodes in front that the nodes behind them read, or that are outputs.

    Constants are not counted: the trained part has them, too.
    """
    ahead = [nodes[at] for at in front if nodes[at].op_type != "Constant"]
    made = {name for node in ahead for name in node.output} - {""}
    read = set().union(outputs, *(names_read(node) for at, node in enumerate(nodes) if at not in front))
    return made & read


def _shape_values(nodes: list[onnx.NodeProto], front: set[int]) -> set[str]:
    """Return the results in front that are computed from shapes alone."""
    shapes = set[str]()
    makers = [node for node in nodes if node.op_type != "Constant"]
    computed = {name for node in makers for name in node.output}
    for at, node in enumerate(nodes):
        # constants beside shapes, such as the 1 of `length - 1`, are no other source
        operands = names_read(node) & computed
        from_shapes = node.op_type in SHAPE_ARITHMETIC and bool(operands) and operands <= shapes
        if at in front and (node.op_type in ("Shape", "Size") or from_shapes):
            shapes.update(filter(None, node.output))
    return shapes


# -- types


def _makes_strings(node: onnx.NodeProto) -> bool:
    if node.op_type != "Cast":
        return False
    return any(attribute.name == "to" and attribute.i == TensorProto.STRING for attribute in node.attribute)


def _is_text(value: onnx.ValueInfoProto) -> bool:
    """Return whether a value is of strings, or no tensor at all: a sequence, a map or an optional value."""
    kind = value.type.WhichOneof("value")
    return kind not in (None, "tensor_type", "sparse_tensor_type") or not is_numeric(value)


# -- weights in front


def _weights_in(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each weight that a node in front computes with, unless the settings freeze it."""
    outer = Index(model.graph).stored
    bodies = {(f.domain, f.name): f for f in model.functions}
    for node in nodes:
        stored = outer | {t.name: t for graph in _graphs_inside(node) for t in Index(graph).stored.values()}
        body = bodies.get((node.domain, node.op_type))
        if body is not None and any(inner.op_type in LAYERS for inner in nodes_inside(body.node)):
            layers = [node]  # its stored operands are operands of the body's layers
        else:
            layers = [inner for inner in nodes_inside([node]) if inner.op_type in LAYERS]
        for layer in layers:
            for name in layer.input:
                tensor = stored.get(name)
                # a single number is a constant of the file's arithmetic
                if tensor is None or tensor.data_type not in FLOAT_TYPES or math.prod(tensor.dims) < 2:
                    continue
                if _is_trained(name, config):
                    yield (
                        f"{label_of(node)} is needed for strings, sequences or trees, in front of the part that can be "
                        f"trained, but computes with the weight {name!r} {list(tensor.dims)}: freeze it (model.freeze "
                        f"= [{name!r}]) to keep it as it is, or export the model with this layer behind the strings"
                    )


def _stored_inside(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the names that nodes read, and those of the tensors that graphs inside them store."""
    names = set[str]()
    for node in nodes:
        names |= names_read(node)
        for graph in _graphs_inside(node):
            names.update(Index(graph).stored)
    return names


def _graphs_inside(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for inner in nodes_inside([node]):
        yield from subgraphs(inner)


def _is_trained(name: str, config: ModelConfig) -> bool:
    return matches_any(name, config.train) and not matches_any(name, config.freeze)
