"""Find lengths of an input's dimensions that the file leaves open although its operators admit one length only.

    image [batch, channels, height, width] ---- Cast ---- Conv W [768, 3, 16, 16] ----        channels = 3

Exporters that declare every dimension dynamic, as optimum does for vision models, write such files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import onnx

from onward.trainer.onnx_graph.files.index import attributes_of
from onward.trainer.onnx_graph.files.stored_protos import stored_protos

Shape = Sequence[int]
Known = Mapping[tuple[str, int], int]
"""(input, dimension) -> its length."""

KEEPS_SHAPE = {"Cast", "Identity"}
SCALES = {"Add", "Sub", "Mul", "Div"}
"""These keep it too if operand 1 is a single number."""


def _gemm(node: onnx.NodeProto, weight: Shape, rank: int) -> tuple[int, int]:
    return 1 - attributes_of(node).get("transA", 0), weight[attributes_of(node).get("transB", 0)]


READS: dict[str, Callable[[onnx.NodeProto, Shape, int], tuple[int, int]]] = {
    "Conv": lambda node, weight, rank: (1, weight[1] * int(attributes_of(node).get("group", 1))),
    "ConvTranspose": lambda node, weight, rank: (1, weight[0]),
    "MatMul": lambda node, weight, rank: (rank - 1, weight[-2] if len(weight) > 1 else weight[0]),
    "Gemm": _gemm,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), lambda node, weight, rank: (2, weight[2])),
}
"""Operator -> (node, shape of its stored operand 1, rank of operand 0) to (dimension of operand 0, its length)."""


def known_lengths(graph: onnx.GraphProto) -> Known:
    """Return the lengths of dynamic dimensions, but for the batch, that the operators reading an input determine."""
    shapes = {name: tuple(tensor.dims) for name, tensor in stored_protos(graph)}
    types = {value.name: value.type.tensor_type for value in graph.input if value.name not in shapes}
    inputs = {name: kind.shape.dim for name, kind in types.items() if kind.HasField("shape")}
    source = {name: name for name in inputs}  # value that has the shape of an input -> that input
    found: dict[tuple[str, int], int] = {}
    # in topological order: a Cast of an input is known before the Conv that reads it
    for node in graph.node:
        name = source.get(node.input[0]) if node.input else None
        if name is None:
            continue
        shape = shapes.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type in KEEPS_SHAPE or (node.op_type in SCALES and shape == ()):
            source[node.output[0]] = name
        elif node.op_type in READS and shape:
            position, length = READS[node.op_type](node, shape, len(inputs[name]))
            # dimension 0 is the batch; a length that the file declares is not looked at again
            if 0 < position < len(inputs[name]) and inputs[name][position].dim_value <= 0:
                found.setdefault((name, position), length)
    return found


def with_lengths(model: onnx.ModelProto, known: Known) -> onnx.ModelProto:
    """Return the model with these lengths declared, wherever inputs have their symbols; itself if there are none."""
    if not known:
        return model
    declared = deepcopy(model)
    inputs = {value.name: value.type.tensor_type.shape.dim for value in declared.graph.input}
    # a symbol is one length wherever it stands, in other inputs as well
    symbols = {inputs[name][position].dim_param: length for (name, position), length in known.items()}
    for name, dims in inputs.items():
        for position, dim in enumerate(dims[1:], 1):
            length = known.get((name, position)) or (symbols.get(dim.dim_param) if dim.dim_param else None)
            if length:
                dim.dim_value = length
    return declared
