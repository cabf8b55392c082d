"""A new head for an ONNX graph: its last layer gets another number of outputs, and what follows learns of it.

The layer is a MatMul, Gemm or Conv with a stored weight. A weight that others read too (a tied embedding) stays
as it is: the layer then gets one of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.sections import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.index import Index, did_you_mean, dims_of, infer_types, names_read

# fmt: off
UNCHANGED = frozenset((
    "AveragePool", "BiasGelu", "Cast", "CastLike", "Clip", "Dropout", "Elu", "Erf", "Exp", "Expand", "Flatten",
    "Gather", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "LeakyRelu", "Log", "LogSoftmax", "MaxPool", "Neg", "NegativeLogLikelihoodLoss", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceSum", "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "Softmax",
    "SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Tanh", "Transpose", "Unsqueeze",
))
# fmt: on
"""Operators that may stand between the last layer and the output; their first operand leads back to it."""
COMBINED = frozenset(("Add", "Sub", "Mul", "Div", "Where", "Max", "Min"))
"""The same, of which any operand may lead back to it."""


@dataclass(frozen=True)
class _Layer:
    """A product with a stored weight."""

    node: onnx.NodeProto
    weight: str
    axis: int
    """Of the stored weight: the one that counts the outputs."""
    turned: bool
    """Whether the node reads the weight transposed."""
    own: bool
    """Whether nothing else reads the weight, nor what lies between it and the node."""
    data_type: int
    """In which the node reads the weight."""


def _layer(node: onnx.NodeProto, index: Index) -> _Layer | None:
    """The node as a layer; None if it is none, or its weight is computed."""
    if node.op_type not in ("MatMul", "Gemm", "Conv") or node.domain not in ("", "ai.onnx") or len(node.input) < 2:
        return None
    name, own, data_type = node.input[1], True, 0
    first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
    turned = False
    while True:
        own = own and len(index.readers[name]) == 1
        if name in index.stored:
            break
        maker = index.makers.get(name)
        if maker is None or maker.op_type not in ("Identity", "Cast", "Transpose"):
            return None
        if maker.op_type == "Cast":
            data_type = data_type or next(a.i for a in maker.attribute if a.name == "to")
        turned ^= maker.op_type == "Transpose"
        name = maker.input[0]
    tensor = index.stored[name]
    if (len(tensor.dims) < 3 or turned) if node.op_type == "Conv" else len(tensor.dims) != 2:
        return None
    return _Layer(node, name, 0 if first != turned else 1, turned, own, data_type or tensor.data_type)


def _leading_to(tensor: str, index: Index) -> list[_Layer]:
    """The last layers before a tensor: one, unless the graph branches there."""
    found, seen, frontier = [], set[str](), [tensor]
    while frontier:
        name = frontier.pop()
        node = index.makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if layer := _layer(node, index):
            found.append(layer)
        elif node.op_type in UNCHANGED:
            frontier.append(node.input[0])
        elif node.op_type in COMBINED:
            frontier += [name for name in node.input if name not in index.stored]
    return list({layer.node.output[0]: layer for layer in found}.values())


def _chosen_layer(index: Index, config: ModelConfig, output: str) -> _Layer:
    layers = [layer for node in index.graph.node if (layer := _layer(node, index))]
    last = ", ".join(dict.fromkeys(layer.weight for layer in layers[-5:])) or "none"
    if config.head:
        named = [layer for layer in layers if layer.weight == config.head]
        if len(named) == 1:
            return named[0]
        known = dict.fromkeys(layer.weight for layer in layers)
        raise ConfigError(
            f"model.head: {len(named)} layers use {config.head!r}; untie it, or name another"
            if named
            else f"model.head {config.head!r} is no weight of a MatMul, Gemm or Conv{did_you_mean(config.head, known)}"
        )
    found = _leading_to(output, index)
    if len(found) != 1:
        several = f"{len(found)} layers lead to it: {', '.join(layer.weight for layer in found)}"
        raise ConfigError(
            f"model.num_classes: the last layer before {output!r} was not found: "
            f"{several if found else 'no MatMul, Gemm or Conv with a stored weight leads to it'}; name its weight as "
            f"model.head (the graph's last ones: {last})"
        )
    return found[0]


def replace_head(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> list[str]:
    """New weight and bias for one layer, and every constant after it that knows the number of its outputs."""
    graph, index = model.graph, Index(model.graph)
    output = config.output or graph.output[0].name
    try:
        layer = _chosen_layer(index, config, output)
    except ConfigError as error:
        return list(error.problems)
    old = index.stored[layer.weight].dims[layer.axis]
    if group := next((a.i for a in layer.node.attribute if a.name == "group" and a.i != 1), 0):
        return [f"model.head: {layer.weight!r} is a convolution of {group} groups, which cannot be given other outputs"]
    head = _Head(index, old=old, new=config.num_classes, seed=seed)
    head.replace_weight(layer)
    if problems := head.follow(layer):
        return problems
    stale = [value for value in graph.value_info if value.name in head.descended | head.changed]
    for value in stale:
        graph.value_info.remove(value)
    return _declare(model, head, layer, config)


@dataclass
class _Head:
    """The replacement of a head in progress."""

    index: Index
    old: int
    new: int
    seed: int
    bound: float = 0.0
    descended: set[str] = field(default_factory=set)
    """What is computed from the head."""
    changed: set[str] = field(default_factory=set)
    """What is stored or computed for it: its weight, how that is turned, its bias, shapes."""

    def replace_weight(self, layer: _Layer) -> None:
        """A tied one goes straight into the layer, past the Transpose or Cast that it is read through."""
        stored = self.index.stored[layer.weight]
        dims = list(stored.dims)
        dims[layer.axis] = self.new
        self.bound = 1 / math.sqrt(math.prod(dims) / self.new)
        if layer.own:
            self._replace(layer.weight, dims, stored.data_type)
            name = layer.node.input[1]
            while name not in self.index.stored:
                self.changed.add(name)
                name = self.index.makers[name].input[0]
        else:
            name = layer.node.input[1]
            layer.node.input[1] = self._add(layer.weight, dims[::-1] if layer.turned else dims, layer.data_type)
            while name not in self.index.stored and len(self.index.readers[name]) == 1:  # by the layer, until now
                self.changed.add(name)
                self.index.graph.node.remove(unread := self.index.makers[name])
                name = unread.input[0]

    def _replace(self, name: str, dims: Sequence[int], data_type: int) -> None:
        self.changed.add(name)
        self.index.stored[name].CopyFrom(_uniform(name, dims, data_type, bound=self.bound, seed=self.seed))

    def _add(self, name: str, dims: Sequence[int], data_type: int) -> str:
        """A new tensor beside one that others read; returns its name."""
        tensor = _uniform(name, dims, data_type, bound=self.bound, seed=self.seed)
        tensor.name = self.index.free_name(f"{name}.head")
        self.index.graph.initializer.append(tensor)
        return tensor.name

    def follow(self, layer: _Layer) -> list[str]:
        """Go through everything computed from the head: its bias, its shapes. Returns what does not allow another."""
        bias_at = 1 - len(self.index.stored[layer.weight].dims) if layer.node.op_type == "Conv" else -1
        self.descended, problems = set(layer.node.output), []
        has_bias = len(layer.node.input) > 2 and bool(layer.node.input[2])
        if has_bias:
            self._replace_bias(layer.node, 2, -1)
        for node in self.index.graph.node:
            if node is layer.node or not self.descended & names_read(node) or node.op_type in ("Shape", "Size"):
                continue
            self.descended.update(filter(None, node.output))
            if node.op_type == "Reshape":
                self._reshape(node, 1)
                continue
            for slot, name in enumerate(node.input):
                if node.op_type == "Add" and not has_bias and self._replace_bias(node, slot, bias_at):
                    has_bias = True
                elif self._counts_outputs(name):
                    problems.append(
                        f"model.num_classes: {node.op_type} {node.name or node.output[0]!r} joins {name!r}, made for "
                        f"{self.old} outputs, with what {layer.weight!r} gives; name another layer as model.head"
                    )
        return problems

    def _counts_outputs(self, name: str) -> bool:
        """Whether a stored tensor has one number (or row) for each of the old outputs."""
        tensor = self.index.stored.get(name)
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        return tensor is not None and tensor.data_type in floats and self.old > 1 and self.old in tensor.dims

    def _replace_bias(self, node: onnx.NodeProto, slot: int, axis: int) -> bool:
        name = node.input[slot]
        tensor = self.index.stored.get(name)
        if tensor is None or len(tensor.dims) < -axis or (tensor.dims[axis], math.prod(tensor.dims)) != (self.old,) * 2:
            return False
        dims = list(tensor.dims)
        dims[axis] = self.new
        if len(self.index.readers[name]) == 1:
            self._replace(name, dims, tensor.data_type)
        else:
            node.input[slot] = self._add(name, dims, tensor.data_type)
        return True

    def _reshape(self, node: onnx.NodeProto, slot: int) -> None:
        """Correct the shape that a Reshape is given, where it was stored or put together by a Concat."""
        tensor, maker = self.index.stored.get(node.input[slot]), self.index.makers.get(node.input[slot])
        if tensor is None:
            for place in range(len(maker.input)) if maker is not None and maker.op_type == "Concat" else ():
                self._reshape(maker, place)  # type: ignore[arg-type]
            return
        if tensor.data_location == TensorProto.EXTERNAL:
            return
        lengths = numpy_helper.to_array(tensor).copy()
        places = np.flatnonzero(lengths.reshape(-1) == self.old)
        if not len(places) or (self.old == 1 and places[-1] != lengths.size - 1):
            return
        lengths.reshape(-1)[places[-1]] = self.new
        changed = numpy_helper.from_array(lengths, node.input[slot])
        if len(self.index.readers[node.input[slot]]) == 1:
            tensor.CopyFrom(changed)
        else:
            changed.name = self.index.free_name(f"{node.input[slot]}.head")
            self.index.graph.initializer.append(changed)
            node.input[slot] = changed.name


def _uniform(name: str, dims: Sequence[int], data_type: int, *, bound: float, seed: int) -> TensorProto:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as torch begins weight and bias of Linear and Conv: Kaiming-uniform with
    a = sqrt(5) (He et al. 2015, arXiv:1502.01852). A function of name, shape and seed."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.uniform(-bound, bound, tuple(dims)).astype(helper.tensor_dtype_to_np_dtype(data_type))
    return numpy_helper.from_array(values, name)


def _declare(model: onnx.ModelProto, head: _Head, layer: _Layer, config: ModelConfig) -> list[str]:
    """Correct the shapes that the graph's outputs declare; that of the trained one must have followed."""
    output = config.output or model.graph.output[0].name
    declared = [value for value in model.graph.output if value.name in head.descended]
    places = {value.name: [i for i, dim in enumerate(dims_of(value) or []) if dim == head.old] for value in declared}
    for value in declared:
        for place in places[value.name]:
            value.type.tensor_type.shape.dim[place].ClearField("dim_value")
    try:
        after = infer_types(model)
    except onnx.shape_inference.InferenceError as error:
        return [
            f"model.num_classes: what follows {layer.weight!r} does not go with {head.new} outputs: {error}; name "
            "another layer as model.head"
        ]
    for value in declared:
        found = dims_of(after.get(value.name)) or []
        follows = [place for place in places[value.name] if place < len(found) and found[place] == head.new]
        for place in places[value.name]:
            here = place in follows or (not follows and place == places[value.name][-1])
            value.type.tensor_type.shape.dim[place].dim_value = head.new if here else head.old
    now = dims_of(after.get(output)) or [None, None]
    if config.loss == "output" or head.new in now or None in now[1:]:
        return []
    shape = ", ".join("?" if dim is None else str(dim) for dim in now)
    return [
        f"model.num_classes: {output!r} is [{shape}], also when the layer before it has {head.new} outputs: a node in "
        "between fixes its shape; name another layer as model.head, or an earlier tensor as model.output"
    ]
