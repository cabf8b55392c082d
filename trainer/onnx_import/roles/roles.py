"""Find out which stored tensors of an ONNX graph are weights, which are running statistics and which are constants.

ONNX itself does not say so: weights, masks, position tables and scalars are all initializers. Three things decide, the
first one that has an answer:

    graph_flow.py         what a tensor does in the graph        running statistics; no gradient can reach it
    exporter_records.py   what the exporter wrote into the file  parameters are trained, buffers and constants are not
    role_guesses.py       use, contents and name                 guessed; `onward doctor` says so
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx
import torch

from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, names_read
from onward.trainer.onnx_graph.files.stored_protos import sparse_names
from onward.trainer.onnx_graph.inner_tensors import inner_tensors
from onward.trainer.onnx_graph.surgery.row_layout import BOUND
from onward.trainer.onnx_import.roles.exporter_records import ExporterRecords
from onward.trainer.onnx_import.roles.graph_flow import GraphFlow, flow_of
from onward.trainer.onnx_import.roles.role_guesses import frozen_because

Kind = Literal["trained", "statistic", "frozen"]

TRAINED_TYPES = (torch.float32, torch.float64)

INTEGERS = "stored as integers"
"""How the reason begins for which integers with a scale are frozen."""

SPARSE = "stored sparse, and written back as it is; store it as a plain tensor to train it"
"""Why a sparse initializer is frozen, also if it is named: training would give its zeros other values."""


@dataclass(frozen=True)
class Role:
    """What a stored tensor is to training, with the reason as a clause."""

    kind: Kind
    reason: str
    operator: str = ""
    """The operator in which a trained one is first combined with data."""
    written: bool = False
    """Whether the file decides: the exporter wrote what the tensor is, or the graph leaves no choice. False if the role
    is guessed."""


def find_roles(
    graph: onnx.GraphProto,
    weights: Mapping[str, torch.Tensor],
    records: ExporterRecords | None = None,
    scales: Mapping[str, str] | None = None,
) -> dict[str, Role]:
    """Return the role of every stored float tensor (initializers and Constant nodes) and of quantized weights, by name.

    records: what the exporter wrote about them; without it, all roles are guessed. scales: scales and zero points that
    their operators do not show, with the integers that they scale (`quantized_weights.scales_of`). Of a lifted model
    (inner_tensors.py) these are also the tensors of inner graphs and functions.
    """
    # with the names that inner graphs read, and the outputs: a stored tensor may itself be an output
    read = {name for node in graph.node for name in names_read(node)}
    read |= {value.name for value in graph.output}
    evidence = _Evidence(flow_of(graph, weights), records or ExporterRecords(), read, weights.keys())
    roles = {}
    sparse = sparse_names(graph)
    for name, tensor in weights.items():
        if name in sparse:
            roles[name] = Role("frozen", SPARSE, written=True)
        elif scales and name in scales:
            roles[name] = Role("frozen", f"a scale or zero point of {scales[name]}, stored as integers", written=True)
        elif tensor.is_floating_point():
            roles[name] = evidence.role(name, tensor)
        # listed although they are integers, so that the report says why a quantized model has nothing to train; a zero
        # point of one element is not a weight
        elif name in evidence.flow.quantized and tensor.numel() > 1:
            why = f"{INTEGERS}; train the model it was quantized from"
            roles[name] = Role("frozen", why, written=True)
    return roles


def promote_to_trained(
    found: Mapping[str, Role], weights: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, Role]:
    """Return the roles with the named frozen tensors as trained ones; running statistics stay what they are."""
    roles = dict(found)
    for name in names:
        if name not in found or name not in weights:
            continue
        # a sparse tensor is written back as it is, so that its training would be lost
        may_train = found[name].kind == "frozen" and found[name].reason != SPARSE
        if may_train and weights[name].dtype in TRAINED_TYPES:
            roles[name] = Role("trained", "named in model.train")
    return roles


def inner_roles(model: onnx.ModelProto) -> dict[str, Role]:
    """Return the roles of what inner graphs and functions store and the import does not lift (inner_tensors.py).

    model: as it was before lifting. They are frozen, and counted.
    """
    roles = {}
    for tensor in inner_tensors(model):
        if tensor.may_be_weight and not tensor.may_train:
            integers = tensor.proto.data_type not in FLOAT_TYPES
            why = f"stored as integers inside {tensor.where}" if integers else f"a result of {tensor.where}"
            roles[tensor.name] = Role("frozen", f"{why}; move it to the main graph to train it", written=True)
    return roles


@dataclass(frozen=True)
class _Evidence:
    """What is known of all stored tensors."""

    flow: GraphFlow
    records: ExporterRecords
    read: set[str]
    """Names that nodes read, and graph outputs."""
    names: Collection[str]
    """Names of all stored tensors."""

    def role(self, name: str, tensor: torch.Tensor) -> Role:
        """Return the role of one float tensor."""
        recorded = self.records.kinds.get(name)
        if name.startswith(BOUND):
            return Role("frozen", "the value of an input, from model.bind", written=True)
        if name in self.flow.statistics and not self._is_frozen_norm(name):
            return Role("statistic", "running statistic of a BatchNormalization", written=True)
        if name not in self.read:
            return Role("frozen", "no node reads it", written=True)
        # an fp8 weight, for example; FLOAT16 and BFLOAT16 are fp32 here (element_types.py)
        if tensor.dtype not in TRAINED_TYPES:
            why = f"stored in {8 * tensor.element_size()} bits, too coarse to train"
            return Role("frozen", why, written=True)
        if name in self.flow.by_row:
            return Role(
                "frozen", "one number for each place in the batch, which would make results depend on the place"
            )
        # what the exporter wrote has precedence over every guess below
        if recorded == "parameter" and (operator := self._operator(name)):
            return Role("trained", f"weight of {operator}", operator, written=True)
        if recorded == "buffer":
            return Role("frozen", "a buffer of the module", written=True)
        of_module = recorded is None and name in self.records.variables
        why = frozen_because(name, tensor, self.flow, of_module=of_module, names=self.names)
        if recorded == "constant":
            return Role("frozen", why or "a constant in the module's code", written=True)
        if why:
            return Role("frozen", why)
        operator = self.flow.first_operator.get(name, "")
        named = tensor.numel() == 1 and name not in self.flow.layer_operands
        how = ": a single number with the name of a parameter" if named else ""
        return Role("trained", f"weight of {operator}{how}", operator)

    def _operator(self, name: str) -> str:
        """Return the operator in which a parameter is first combined with data; "" if no gradient can reach it."""
        if name in self.flow.first_operator:
            return self.flow.first_operator[name]
        # combined with positions alone, or an output of the graph
        return "the graph" if name in self.flow.followed else ""

    def _is_frozen_norm(self, statistic: str) -> bool:
        """Return whether scale and bias of its BatchNormalization are buffers: a norm that is not trained at all."""
        own = {self.records.kinds.get(name) for name in self.flow.norm_weights.get(statistic, ())}
        return own == {"buffer"}
