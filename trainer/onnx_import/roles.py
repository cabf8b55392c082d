"""Find out which stored tensors of an ONNX graph are weights, which are running statistics and which are constants.

An ONNX file does not say so: weights, masks, position tables and scalars are all initializers. Values are therefore
followed through the graph (graph_flow.py) until a stored tensor is combined with data in float arithmetic. Afterwards
the contents of each candidate are checked (tensor_contents.py): masks, sinusoidal tables and single numbers are
frozen, but for a bias of one output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx
import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.index import names_read, subgraphs
from onward.trainer.onnx_import.graph_flow import GraphFlow, flow_of
from onward.trainer.onnx_import.role_tables import ELEMENTWISE
from onward.trainer.onnx_import.tensor_contents import (
    is_exporter_name,
    is_integer_table,
    is_mask,
    is_sinusoidal_table,
)

Kind = Literal["trained", "statistic", "frozen"]

TRAINED_TYPES = (torch.float32, torch.float64)
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Role:
    """What a stored tensor is to training, with the reason as a clause."""

    kind: Kind
    reason: str
    operator: str = ""
    """The operator in which a trained one is first combined with data."""


def find_roles(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> dict[str, Role]:
    """Return the role of every stored float tensor (initializers and Constant nodes) and of quantized weights, by name.

    Tensors stored inside the graphs of If, Loop and Scan are listed too, as frozen, under `node/name`.
    """
    analysis = flow_of(graph, weights)
    # with the names that inner graphs read, and the outputs: a stored tensor may itself be an output
    read = {name for node in graph.node for name in names_read(node)} | {value.name for value in graph.output}
    found = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            found[name] = _role(name, tensor, analysis, read)
        # listed although they are integers, so that the report says why a quantized model has nothing to train; a zero
        # point of one element is not a weight
        elif name in analysis.quantized and tensor.numel() > 1:
            found[name] = Role("frozen", "stored as integers; train the model it was quantized from")
    return found | dict(_inner_roles(graph))


def promote_to_trained(
    found: Mapping[str, Role], weights: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, Role]:
    """Return the roles with the named frozen tensors as trained ones; running statistics stay what they are."""
    chosen = {
        name
        for name in names
        if name in found and found[name].kind == "frozen" and name in weights and weights[name].dtype in TRAINED_TYPES
    }
    return {name: Role("trained", "named in model.train") if name in chosen else role for name, role in found.items()}


def _inner_roles(graph: onnx.GraphProto) -> Iterator[tuple[str, Role]]:
    """Yield the roles of float tensors that are stored inside inner graphs."""
    for node in graph.node:
        for body in subgraphs(node):
            constants = [
                (inner.output[0], attribute.t)
                for inner in body.node
                for attribute in inner.attribute
                if inner.op_type == "Constant" and attribute.name == "value"
            ]
            for name, tensor in [*((tensor.name, tensor) for tensor in body.initializer), *constants]:
                if tensor.data_type in FLOATS and any(dim > 1 for dim in tensor.dims):
                    why = f"stored inside the body of {node.op_type}; move it to the main graph to train it"
                    yield f"{node.name or node.output[0]}/{name}", Role("frozen", why)
            yield from _inner_roles(body)


def _role(name: str, tensor: torch.Tensor, analysis: GraphFlow, read: set[str]) -> Role:
    if name in analysis.statistics:
        return Role("statistic", "running statistic of a BatchNormalization")
    if name not in read:
        return Role("frozen", "no node reads it")
    # an fp8 weight, for example; FLOAT16 and BFLOAT16 are fp32 here (element_types.py)
    if tensor.dtype not in TRAINED_TYPES:
        return Role("frozen", f"stored in {8 * tensor.element_size()} bits, too coarse to train")
    if name not in analysis.first_operator:
        return Role("frozen", analysis.frozen_reason.get(name, "is not combined with data in float arithmetic"))
    operator = analysis.first_operator[name]
    # examined last, and of candidates only: a matrix of zeros may be a mask or a new weight
    if why := _contents_reason(name, tensor, analysis):
        return Role("frozen", why)
    return Role("trained", f"weight of {operator}", operator)


def _contents_reason(name: str, tensor: torch.Tensor, analysis: GraphFlow) -> str:
    """Return why a tensor that is combined with data is not a weight judging by its contents; "" if it is one."""
    operator, weighted = analysis.first_operator[name], name in analysis.layer_operands
    if tensor.numel() == 1 and (not weighted or (tensor.ndim == 0 and is_exporter_name(name))):
        return "a single number"  # including the 0 of a mask that is computed in the graph and added to a product
    if is_mask(tensor) or name in analysis.masks:
        return "a mask"
    if name in analysis.states and not tensor.any():
        return "the zero state a recurrent layer begins in"
    # exporters write GroupNorm as an InstanceNormalization with scale 1 and bias 0, followed by Mul and Add with the
    # real ones
    if operator == "InstanceNormalization" and is_exporter_name(name) and bool(((tensor == 0) | (tensor == 1)).all()):
        return "the neutral scale or bias of a normalisation whose own ones come after it"
    # a real bias of zeros has the name of its layer; training these would add parameters that the torch model did not
    # have
    if name in analysis.conv_biases and re.fullmatch(r"val_\d+", name) and not tensor.any():
        return "zeros an exporter gave convolutions that have no bias"
    if not weighted and (operator in ELEMENTWISE or operator.startswith("Gather")) and is_sinusoidal_table(tensor):
        return "a table of sines, cosines or positions"
    if not weighted and operator in ELEMENTWISE and is_integer_table(tensor):
        return "a table of whole numbers: a grid, strides or distances"
    return ""
