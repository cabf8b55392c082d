"""Keep onnxruntime from ending the process at an integer division that has no result.

The quotient of the least int32 and -1 is 2^31, which int32 does not have. The processor reports the division as an
error, and the system ends the process (SIGFPE). Torch's division does the same. NumPy, and here every division, gives
the least int32 again, as two's complement arithmetic does:

    Div(a, b)    ->    minus = Cast(Equal(b, -1))    1 where b is -1, else 0
                       Div(a, b + 2 minus) * (1 - 2 minus)          by 1 in place of -1, then the sign
    Mod(a, b)    ->    Mod(a, b + 2 minus)                          0 in both cases
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.onnx_graph.files.index import Index, graphs_of, known_types, nodes_of, replace_entries
from onward.trainer.onnx_graph.files.operators import is_operator

DTYPES: Mapping[int, type[np.signedinteger[Any]]] = {TensorProto.INT32: np.int32, TensorProto.INT64: np.int64}
"""The types whose division can end the process; smaller ones are divided in int32."""


def guard_integer_divisions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a copy in which no division of int32 or int64 can end the process.

    Only nodes whose types are known are changed; those of the model's own functions are not.
    """
    # without types, whose inference takes long: most files have no division by an unknown number
    if not any(map(_divides, graphs_of(model.graph))):
        return model
    types = {name: value.type.tensor_type.elem_type for name, value in known_types(model).items()}
    # with the initializers of inner graphs, which `known_types` leaves out
    types |= {tensor.name: tensor.data_type for graph in graphs_of(model.graph) for tensor in graph.initializer}
    divisions = filter(_is_division, nodes_of(model.graph))
    if not any(_kind(node, types) in DTYPES for node in divisions):
        return model  # of floats, as most are: no copy of the weights
    guarded = deepcopy(model)
    names = (f"guarded_division_{number}" for number in count())
    for graph in reversed(list(graphs_of(guarded.graph))):  # inner ones first: the nodes around them are then copied
        index = Index(graph)
        nodes = list[onnx.NodeProto]()
        for node in graph.node:
            kind = _kind(node, types)
            guard = kind in DTYPES and _may_overflow(node, index)
            nodes += _guarded(node, kind, names) if guard else [node]
        replace_entries(graph, node=nodes)
    return guarded


def _kind(node: onnx.NodeProto, types: Mapping[str, int]) -> int:
    """Return the type of a node's operands; 0 if it is not known."""
    # both operands and the result of a division have one type, so any of them says it
    return next((types[name] for name in (*node.input, *node.output) if types.get(name)), 0)


def _is_division(node: onnx.NodeProto) -> bool:
    return is_operator(node, "Div", "Mod")


def _divides(graph: onnx.GraphProto) -> bool:
    index = Index(graph)
    return any(_may_overflow(node, index) for node in graph.node)


def _may_overflow(node: onnx.NodeProto, index: Index) -> bool:
    """Return whether a node divides by something that is not known to be another number than -1."""
    if not _is_division(node) or len(node.input) != 2:
        return False
    divisor = index.stored.get(node.input[1])
    if divisor is None or divisor.data_location == TensorProto.EXTERNAL:
        return True
    return divisor.data_type in DTYPES and bool((numpy_helper.to_array(divisor) == -1).any())


def _guarded(node: onnx.NodeProto, kind: int, names: Iterator[str]) -> Iterator[onnx.NodeProto]:
    dividend, divisor = node.input
    prefix = next(names)

    def number(value: int) -> onnx.NodeProto:
        tensor = numpy_helper.from_array(np.array(value, DTYPES[kind]))
        return helper.make_node("Constant", [], [f"{prefix}_{value}"], value=tensor)

    def call(operator: str, *operands: str, result: str, **attributes: Any) -> onnx.NodeProto:
        # the dividend and the divisor have names of the file, all other operands are made here
        inputs = [operand if operand in node.input else f"{prefix}_{operand}" for operand in operands]
        return helper.make_node(operator, inputs, [f"{prefix}_{result}"], **attributes)

    yield from map(number, (-1, 1, 2))
    yield call("Equal", divisor, "-1", result="is_minus")
    yield call("Cast", "is_minus", result="minus", to=kind)
    yield call("Mul", "minus", "2", result="twice")
    yield call("Add", divisor, "twice", result="safe")
    safe = deepcopy(node)
    safe.input[:] = [dividend, f"{prefix}_safe"]
    if node.op_type == "Mod":
        yield safe
        return
    safe.output[:] = [f"{prefix}_quotient"]
    yield safe
    yield call("Sub", "1", "twice", result="sign")
    yield helper.make_node("Mul", [f"{prefix}_quotient", f"{prefix}_sign"], list(node.output))
