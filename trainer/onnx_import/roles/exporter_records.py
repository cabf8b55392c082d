"""Read what exporters wrote into an ONNX file about the tensors that it stores: kinds, origins and modules.

Nothing here is guessed; a tensor about which the file says nothing is absent from the result. What is read:

    written by         where                                                       what it says
    torch, dynamo      metadata of the graph: ...ExportedProgram.graph_signature   name and kind of every weight
                       metadata of value_info: ...InputSpec.kind                   kind of one stored tensor
                       metadata of value_info: ...optimizer.folded_from            the values that it was computed from
                       metadata of nodes: pkg.torch.onnx.name_scopes               the module that a node belongs to
    torch, TorchScript names of nodes, such as /encoder/layers.0/fc1/MatMul        the module that a node belongs to
                       names of tensors, such as layers.0.fc1.weight               a parameter or a buffer, not which
                       Constant nodes, such as /fc1/Constant_2_output_0            a constant of the module's code
    tf2onnx, Keras 3   names such as model/head/Cast/ReadVariableOp:0              a variable, with its layer
                       names such as model/norm/Sub/y:0, model/Const:0             a constant of the traced function
    paddle2onnx        names such as linear_0.w_0                                  a weight or statistic, with its layer
    skl2onnx           the names coefficient, intercepts, idfcst                   weights, or a constant

The dynamo exporter writes PARAMETER, BUFFER and CONSTANT_TENSOR. TensorFlow and Paddle write that a tensor is a
variable, but not whether it is trainable. jax2onnx writes nothing (const_1, const_2, ...).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx
import torch

from onward.trainer.onnx_graph.exporter_names import (
    FOLDED_FROM,
    is_exporter_name,
    list_of_names,
    metadata,
    module_of_node,
)
from onward.trainer.onnx_graph.inner_tensors import InnerTensor

RecordedKind = Literal["parameter", "buffer", "constant"]

INPUT_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"

TORCH_KINDS: dict[str, RecordedKind] = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}

TORCHSCRIPT_CONSTANT = re.compile(r"/(?:.*/)?Constant(?:_\d+)?_output_0")
TENSORFLOW = "tf2onnx"  # Keras 3 exports with it
TF_VARIABLE = re.compile(r"(?:.*?PartitionedCall/)?(.+?)(?:/[^/]+)?/(?:ReadVariableOp|Read)(?:_\d+)?(?:/resource)?:0")
SKLEARN_KINDS: tuple[tuple[re.Pattern[str], RecordedKind], ...] = (
    (re.compile(r"(coefficient|intercepts)\d*"), "parameter"),
    (re.compile(r"idfcst\d*"), "constant"),
)
"""Names that skl2onnx gives to the weights of its networks, and to the inverse document frequencies of a vectorizer."""
TF_CONSTANT = re.compile(r"(?:.*/)?Const(?:_\d+)?:0|.+/[xy]:0")
PADDLE_VARIABLE = re.compile(r"([a-z]\w*_\d+)\.[wb]_\d+")


@dataclass(frozen=True)
class ExporterRecords:
    """What exporters wrote about the stored tensors of a graph. The keys of all mappings are initializer names."""

    kinds: Mapping[str, RecordedKind] = field(default_factory=dict)
    """Stored tensor -> what it was in the module; for a folded one, what it was computed from."""
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored tensor -> the parameters and buffers that the exporter computed it from, by their names in the module."""
    originals: Mapping[str, str] = field(default_factory=dict)
    """Stored tensor -> the one weight that it was folded from; absent if there are several, or if nothing is written.

    A tensor of its own name is absent, too: it is the weight itself.
    """
    weights: Mapping[str, RecordedKind] = field(default_factory=dict)
    """Every weight of the exported network by its name in the module, those that the file no longer stores included."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Stored tensor -> path of the module that owns it ("": the outermost), or of the first one that reads it."""
    variables: frozenset[str] = frozenset()
    """Stored tensors that are parameters or buffers of the module by their names; not known which of the two."""


def read_records(model: onnx.ModelProto, inner: Sequence[InnerTensor] = ()) -> ExporterRecords:
    """Return what the exporter of a model wrote about its stored tensors (initializers and Constant nodes).

    inner: what was lifted into a lifted model (inner_tensors.py); Constant nodes stay what they were.
    """
    graph = model.graph
    trainable = [tensor for tensor in inner if tensor.may_train]
    own_names_inside = {tensor.name: tensor.own_name for tensor in trainable if tensor.is_constant}
    constant_nodes = [node.output[0] for node in graph.node if node.op_type == "Constant"]
    constant_nodes += own_names_inside
    stored = dict.fromkeys([*(tensor.name for tensor in graph.initializer), *constant_nodes])
    of_values = {value.name: metadata(value) for value in graph.value_info}
    weights = _signature(metadata(graph).get(SIGNATURE, ""))
    for name, written in of_values.items():
        if kind := TORCH_KINDS.get(written.get(INPUT_KIND, "")):
            weights[name] = kind
    # kinds that are written come first; what names alone show is added below
    kinds = {name: weights[name] for name in stored if name in weights}
    folded = {}
    for name in stored:
        # without the kinds of its origins, which other tools may have removed, it is not known what a folded tensor is
        if weights and FOLDED_FROM in (written := of_values.get(name, {})):
            origins = tuple(origin for origin in list_of_names(written[FOLDED_FROM]) if origin in weights)
            folded[name] = origins
            kinds.setdefault(name, _kind_of_folded([weights[origin] for origin in origins]))
    if weights:
        # the signature lists every weight, and the exporter stores all of them as initializers
        kinds |= {name: "constant" for name in constant_nodes if name not in kinds}
    variables = _variables(model, stored, constant_nodes)
    if model.producer_name == "pytorch" and variables:
        # torch stores parameters as initializers; of a frozen TorchScript module it stores none under its own name
        made_up = [n for n in constant_nodes if TORCHSCRIPT_CONSTANT.fullmatch(own_names_inside.get(n, n))]
        kinds |= dict.fromkeys(made_up, "constant")
    if model.producer_name == TENSORFLOW:
        others = [name for name in stored if name not in variables]
        kinds |= {name: "constant" for name in others if TF_CONSTANT.fullmatch(name)}
    if model.producer_name == "skl2onnx":
        for pattern, kind in SKLEARN_KINDS:
            kinds |= {name: kind for name in stored if pattern.fullmatch(name)}
    readers = _modules_of_readers(graph, stored)
    # when BatchNormalization is folded into a convolution, the new bias has no record, but the convolution is in the
    # module of the BatchNormalization: computed from buffers alone if that module has nothing else
    own_kinds: dict[str, set[str]] = {}
    for name, kind in weights.items():
        own_kinds.setdefault(name.rpartition(".")[0], set()).add(kind)
    unknown = [name for name in readers if name not in kinds]
    kinds |= {name: "buffer" for name in unknown if own_kinds.get(readers[name]) == {"buffer"}}
    originals = _originals(folded, weights)
    # a folded tensor belongs to the module of the weight that it was computed from
    own_names = {name: originals.get(name, name) for name in stored}
    owners = {name: own.rpartition(".")[0] for name, own in own_names.items() if own in weights}
    return ExporterRecords(
        kinds=kinds,
        folded=folded,
        originals=originals,
        weights=weights,
        modules=readers | variables | owners,
        variables=frozenset(variables),
    )


def _variables(model: onnx.ModelProto, stored: Iterable[str], constant_nodes: Collection[str]) -> dict[str, str]:
    """Return the stored tensors that are variables of the module by their names, with the paths of their modules."""
    if model.producer_name == "pytorch":
        # the TorchScript exporter keeps the names of the state dict, and makes up all other names; the dynamo exporter,
        # whose records other tools remove, names folded tensors after torch's operations (mul_8)
        dynamo = any(node.name.startswith("node_") for node in model.graph.node)
        modules = {}
        for name in stored:
            if name in constant_nodes or is_exporter_name(name):
                continue
            operation = re.sub(r"(_\d+)+$", "", name)
            if not (dynamo and hasattr(torch.ops.aten, operation)):
                modules[name] = name.rpartition(".")[0]
        return modules
    pattern = TF_VARIABLE if model.producer_name == TENSORFLOW else PADDLE_VARIABLE
    matches = {name: pattern.fullmatch(name) for name in stored}
    return {name: match[1].replace("/", ".") for name, match in matches.items() if match}


def _signature(text: str) -> dict[str, RecordedKind]:
    """Return the weights of a torch.export signature with their kinds, those that no longer are in the file included.

    Its lines read: p_fc_weight: PARAMETER target='fc.weight'
    """
    lines = re.findall(r"^\S+: ([A-Z_]+) target='([^']+)'", text, re.M)
    return {target: TORCH_KINDS[kind] for kind, target in lines if kind in TORCH_KINDS}


def _kind_of_folded(origins: Iterable[RecordedKind]) -> RecordedKind:
    """Return the kind of a tensor that was computed from weights: what is computed from a parameter changes with it.

    A tensor that was computed from no weight was written in the module's code.
    """
    kinds = set(origins)
    if "parameter" in kinds:
        return "parameter"
    return "buffer" if "buffer" in kinds else "constant"


def _originals(folded: Mapping[str, tuple[str, ...]], weights: Mapping[str, RecordedKind]) -> dict[str, str]:
    """Return the one parameter, or else the one buffer, that each folded tensor was computed from."""
    originals = {}
    for name, origins in folded.items():
        parameters = [origin for origin in origins if weights[origin] == "parameter"]
        candidates = parameters or list(origins)
        if len(candidates) == 1:
            originals[name] = candidates[0]
    return originals


# -- modules


def _modules_of_readers(graph: onnx.GraphProto, stored: Iterable[str]) -> dict[str, str]:
    """Return the path of the module of the first node that reads each stored tensor."""
    names = set(stored)
    modules = dict[str, str]()
    for node in graph.node:
        if module := module_of_node(node):
            for name in names.intersection(node.input):
                modules.setdefault(name, module)
    return modules
