"""Read and write the numbers that nodes hold in attributes as if they were initializers.

    Constant -> y                              value_float = float, or value_floats = floats of [n]
    LinearClassifier(X) -> label, scores      coefficients = floats of [classes * features], intercepts = floats

    stored_tensors      "y" [] or [n]    "label/coefficients" [classes, features]    "label/intercepts" [classes]
    with_operands       LinearClassifier(X, "label/coefficients", "label/intercepts")        only while it is imported
    store_floats        the trained numbers, in the same attribute of the same node

A name is, or begins with, the node's first output, because only names of outputs are unique in a graph and stay the
same when a part of it is extracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.onnx_graph.files.index import ML_DOMAIN
from onward.trainer.onnx_graph.files.operators import is_operator

if TYPE_CHECKING:
    import torch

HELD = {
    "LinearClassifier": ("coefficients", "intercepts"),
    "LinearRegressor": ("coefficients", "intercepts"),
    "Scaler": ("offset", "scale"),
}
"""Operator of ai.onnx.ml -> the attributes that are treated as stored tensors."""

NUMBERS = ("value_float", "value_floats")
"""Attributes of a Constant that are not tensors."""


def held_attributes(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.NodeProto, onnx.AttributeProto]]:
    """Yield (name of the stored tensor, node, attribute) of the main graph, in the order of the nodes."""
    for node in graph.node:
        for attribute in held_by(node):
            yield _name(node, attribute.name), node, attribute


def held_by(node: onnx.NodeProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of a node that are treated as stored tensors."""
    names: tuple[str, ...] = ()
    if node.domain == ML_DOMAIN:
        names = HELD.get(node.op_type, ())
    elif is_operator(node, "Constant"):
        names = NUMBERS
    # in the order of the table, whatever that of the file is
    for name in names:
        yield from (attribute for attribute in node.attribute if attribute.name == name)


def _name(node: onnx.NodeProto, attribute: str) -> str:
    result = next(filter(None, node.output))
    return result if is_operator(node, "Constant") else f"{result}/{attribute}"


def as_tensor_proto(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> TensorProto:
    """Return a copy of an attribute as an fp32 tensor; coefficients are [outputs, features], the others [n]."""
    if attribute.name == "value_float":
        return TensorProto(data_type=TensorProto.FLOAT, float_data=[attribute.f])
    dims = [len(attribute.floats)]
    rows = _num_rows(node)
    # coefficients of a damaged file that are no whole rows stay a vector
    if attribute.name == "coefficients" and rows and not dims[0] % rows:
        dims = [rows, dims[0] // rows]
    return TensorProto(data_type=TensorProto.FLOAT, dims=dims, float_data=attribute.floats)


def _num_rows(node: onnx.NodeProto) -> int:
    """Return how many scores a linear model computes; the file only holds their coefficients one after the other."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "LinearRegressor":
        return int(attributes["targets"].i) if "targets" in attributes else 1
    # one row may serve two classes, so intercepts are counted before labels
    counted = [("intercepts", "floats"), ("classlabels_ints", "ints"), ("classlabels_strings", "strings")]
    lengths = (len(getattr(attributes[name], field)) for name, field in counted if name in attributes)
    return next(filter(None, lengths), 0)


def store_floats(tensor: torch.Tensor, attribute: onnx.AttributeProto) -> None:
    """Write a tensor of any shape into an attribute of a float or floats, unless it has the same bits already."""
    now = tensor.detach().cpu().float().flatten().numpy()
    before = [attribute.f] if attribute.name == "value_float" else list(attribute.floats)
    if now.tobytes() == np.array(before, np.float32).tobytes():
        return
    if attribute.name == "value_float":
        attribute.f = now.item()
        return
    del attribute.floats[:]
    attribute.floats.extend(now.tolist())


def with_operands(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with such attributes as further operands, in the order of HELD; the model itself if it has none.

    ONNX does not define these operands, so only the import and the analysis of roles read such a model. They are named
    as in `stored_tensors` and have no initializers; the attributes stay.
    """
    if not any(node.domain == ML_DOMAIN for _, node, _ in held_attributes(model.graph)):
        return model
    copy = deepcopy(model)
    for node in copy.graph.node:
        if node.domain == ML_DOMAIN and (held := {attribute.name for attribute in held_by(node)}):
            # an absent attribute is an absent operand, so that each keeps its slot
            node.input.extend(_name(node, name) if name in held else "" for name in HELD[node.op_type])
    return copy
