"""Replace the head of an ONNX graph: give its last layer another number of outputs (`model.num_classes`).

The layer is a MatMul, Gemm or Conv with a stored weight. Nodes after it that depend on the number of outputs are
adapted:

    before    features ---- Gemm(W [1000, 512], b [1000]) ---- Reshape([-1, 1000]) ---- logits [N, 1000]
    after     features ---- Gemm(W [7, 512],    b [7])    ---- Reshape([-1, 7])    ---- logits [N, 7]

A weight with other readers, such as a tied embedding, is not changed; the layer then gets a new weight of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import (
    FLOAT_TYPES,
    Index,
    attributes_of,
    did_you_mean,
    dims_of,
    infer_types,
    names_read,
)
from onward.trainer.onnx_graph.files.operators import is_operator
from onward.trainer.onnx_graph.outputs import class_labels
from onward.trainer.quantities import shown_shape

# fmt: off
PASS_THROUGH = frozenset((
    "AveragePool", "BiasGelu", "Cast", "CastLike", "Clip", "Dropout", "Elu", "Erf", "Exp", "Expand", "Flatten",
    "Gather", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "LeakyRelu", "Log", "LogSoftmax", "MaxPool", "Neg", "NegativeLogLikelihoodLoss", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceSum", "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "Softmax",
    "SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Tanh", "Transpose", "Unsqueeze",
))
# fmt: on
"""Operators that may stand between the last layer and the output, which is followed back through operand 0."""
ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Where", "Max", "Min"))
"""Operators that may stand there too, and are followed back through every operand."""


@dataclass(frozen=True)
class _Layer:
    """A product with a stored weight."""

    node: onnx.NodeProto
    weight: str
    axis: int
    """The dimension of the stored weight that is the number of outputs."""
    transposed: bool
    """Whether the node reads the weight through a Transpose."""
    exclusive: bool
    """Whether the weight, and every value between it and the node, has no other reader."""
    data_type: int
    """The element type in which the node reads the weight."""


def _layer(node: onnx.NodeProto, index: Index) -> _Layer | None:
    """Return the node as a layer; None for other operators and for a weight that is computed."""
    if not is_operator(node, "MatMul", "Gemm", "Conv") or len(node.input) < 2:
        return None
    name = node.input[1]
    exclusive = True
    data_type = 0
    # the outputs are the first dimension of a convolution, and of a Gemm that transposes its weight
    first = node.op_type == "Conv" or bool(attributes_of(node).get("transB"))
    transposed = False
    while True:
        # along the whole path: a Transpose or a Cast between weight and node may have other readers, too
        exclusive = exclusive and len(index.readers[name]) == 1
        if name in index.stored:
            break
        maker = index.makers.get(name)
        if maker is None or maker.op_type not in ("Identity", "Cast", "Transpose"):
            return None
        # the Cast nearest to the node gives the type that the node reads
        if maker.op_type == "Cast" and not data_type:
            data_type = attributes_of(maker)["to"]
        # two Transposes cancel each other
        transposed ^= maker.op_type == "Transpose"
        name = maker.input[0]
    tensor = index.stored[name]
    # a product with a batch of matrices is not a last layer
    if (len(tensor.dims) < 3 or transposed) if node.op_type == "Conv" else len(tensor.dims) != 2:
        return None
    return _Layer(node, name, 0 if first != transposed else 1, transposed, exclusive, data_type or tensor.data_type)


def _last_layers_before(tensor: str, index: Index) -> list[_Layer]:
    """Return the last layers before a tensor; more than one if the graph branches between them."""
    layers = []
    seen = set[str]()
    frontier = [tensor]
    while frontier:
        name = frontier.pop()
        node = index.makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        # a layer ends the path: those before it compute features
        if layer := _layer(node, index):
            layers.append(layer)
        elif node.op_type in PASS_THROUGH:
            frontier.append(node.input[0])
        elif node.op_type in ELEMENTWISE:
            frontier += [name for name in node.input if name not in index.stored]
    # several paths may lead to one layer
    return list({layer.node.output[0]: layer for layer in layers}.values())


def _chosen_layer(index: Index, config: ModelConfig, output: str) -> _Layer:
    layers = [layer for node in index.graph.node if (layer := _layer(node, index))]
    last = ", ".join(dict.fromkeys(layer.weight for layer in layers[-5:])) or "none"
    if config.head:
        named = [layer for layer in layers if layer.weight == config.head]
        if len(named) == 1:
            return named[0]
        if named:
            raise ConfigError(f"model.head: {len(named)} layers use {config.head!r}; untie it, or name another")
        nearest = did_you_mean(config.head, dict.fromkeys(layer.weight for layer in layers))
        raise ConfigError(f"model.head {config.head!r} is not a weight of a MatMul, Gemm or Conv{nearest}")
    candidates = _last_layers_before(output, index)
    if len(candidates) != 1:
        cause = "no MatMul, Gemm or Conv with a stored weight leads to it"
        if candidates:
            cause = f"{len(candidates)} layers lead to it: {', '.join(layer.weight for layer in candidates)}"
        raise ConfigError(
            f"model.num_classes: the last layer before {output!r} was not found: {cause}; name its weight as "
            f"model.head (the graph's last ones: {last})"
        )
    return candidates[0]


def replace_head(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> list[str]:
    """Replace weight and bias of one layer, and constants after it that contain its number of outputs.

    Returns the problems; the model may then be changed in part.
    """
    graph = model.graph
    index = Index(model.graph)
    output = config.named_outputs(graph.output[0].name)[0]
    try:
        layer = _chosen_layer(index, config, output)
    except ConfigError as error:
        return list(error.problems)
    # operators of ai.onnx.ml turn scores into these labels: there must be one for each new output
    names = class_labels(graph)
    if names and len(names) != config.num_classes:
        return [
            f"model.num_classes {config.num_classes}: the file has labels for {len(names)} classes ({names[0]}, ..., "
            f"{names[-1]}), which its outputs read; keep the number, or convert the model with the classes that it is "
            "to have"
        ]
    old = index.stored[layer.weight].dims[layer.axis]
    # the number of groups would have to divide the new number of outputs
    groups = attributes_of(layer.node).get("group", 1)
    if groups > 1:
        return [
            f"model.head: {layer.weight!r} is a convolution of {groups} groups, which cannot be given other outputs"
        ]
    head = _Head(index, old=old, new=config.num_classes, seed=seed)
    head.replace_weight(layer)
    if problems := head.adapt_dependents(layer):
        return problems
    # shapes that the file declares for values after the head are wrong now
    stale = [value for value in graph.value_info if value.name in head.dependents | head.changed]
    for value in stale:
        graph.value_info.remove(value)
    return _declare(model, head, layer, config)


@dataclass
class _Head:
    """One replacement: the layer has `old` outputs and gets `new` ones."""

    index: Index
    old: int
    new: int
    seed: int
    bound: float = 0.0
    dependents: set[str] = field(default_factory=set)
    """Values computed from the layer's result."""
    changed: set[str] = field(default_factory=set)
    """Values stored or computed for the layer: weight, transposed weight, bias."""

    def replace_weight(self, layer: _Layer) -> None:
        """Replace the weight. A tied one stays: a new one is the layer's direct operand, without Transpose or Cast."""
        stored = self.index.stored[layer.weight]
        dims = list(stored.dims)
        dims[layer.axis] = self.new
        # the fan-in: all elements of the new weight that one output reads
        self.bound = 1 / math.sqrt(math.prod(dims) / self.new)
        if layer.exclusive:
            self._replace(layer.weight, dims, stored.data_type)
            # what is computed between weight and node has another shape now, too
            name = layer.node.input[1]
            while name not in self.index.stored:
                self.changed.add(name)
                name = self.index.makers[name].input[0]
        else:
            name = layer.node.input[1]
            layer.node.input[1] = self._add(layer.weight, dims[::-1] if layer.transposed else dims, layer.data_type)
            while name not in self.index.stored and len(self.index.readers[name]) == 1:  # by the layer, until now
                self.changed.add(name)
                self.index.graph.node.remove(unread := self.index.makers[name])
                name = unread.input[0]

    def _replace(self, name: str, dims: Sequence[int], data_type: int) -> None:
        self.changed.add(name)
        self.index.stored[name].CopyFrom(_uniform(name, dims, data_type, bound=self.bound, seed=self.seed))

    def _add(self, name: str, dims: Sequence[int], data_type: int) -> str:
        """Add a new initializer named after one with other readers; return its name."""
        tensor = _uniform(name, dims, data_type, bound=self.bound, seed=self.seed)
        tensor.name = self.index.free_name(f"{name}.head")
        self.index.graph.initializer.append(tensor)
        return tensor.name

    def adapt_dependents(self, layer: _Layer) -> list[str]:
        """Adapt bias and shapes in all nodes that depend on the layer; return a problem for each that cannot be."""
        # an Add after a convolution has its bias as [channels, 1, 1]: counted from the end, the channels come before
        # height and width
        bias_at = 1 - len(self.index.stored[layer.weight].dims) if layer.node.op_type == "Conv" else -1
        self.dependents = set(layer.node.output)
        problems = []
        has_bias = len(layer.node.input) > 2 and bool(layer.node.input[2])
        if has_bias:
            self._replace_bias(layer.node, 2, -1)
        # nodes are sorted topologically, so one pass reaches everything that depends on the layer
        for node in self.index.graph.node:
            # what is computed from the shape of the result follows the new number by itself
            if node is layer.node or not self.dependents & names_read(node) or node.op_type in ("Shape", "Size"):
                continue
            self.dependents.update(filter(None, node.output))
            if node.op_type == "Reshape":
                self._reshape(node, 1)
                continue
            for slot, name in enumerate(node.input):
                if node.op_type == "Add" and not has_bias and self._replace_bias(node, slot, bias_at):
                    has_bias = True
                elif self._has_one_entry_per_output(name):
                    problems.append(
                        f"model.num_classes: {node.op_type} {node.name or node.output[0]!r} joins {name!r}, made for "
                        f"{self.old} outputs, with what {layer.weight!r} gives; name another layer as model.head"
                    )
        return problems

    def _has_one_entry_per_output(self, name: str) -> bool:
        """Return whether a stored float tensor has a dimension as long as the old number of outputs."""
        tensor = self.index.stored.get(name)
        # of one output nearly every tensor has a dimension as long
        if tensor is None or self.old < 2:
            return False
        return tensor.data_type in FLOAT_TYPES and self.old in tensor.dims

    def _replace_bias(self, node: onnx.NodeProto, slot: int, axis: int) -> bool:
        name = node.input[slot]
        tensor = self.index.stored.get(name)
        if tensor is None or len(tensor.dims) < -axis:
            return False
        # all elements are on that axis: a bias has one number for each output
        if not tensor.dims[axis] == math.prod(tensor.dims) == self.old:
            return False
        dims = list(tensor.dims)
        dims[axis] = self.new
        if len(self.index.readers[name]) == 1:
            self._replace(name, dims, tensor.data_type)
        else:
            node.input[slot] = self._add(name, dims, tensor.data_type)
        return True

    def _reshape(self, node: onnx.NodeProto, slot: int) -> None:
        """Replace the old number of outputs in the shape operand of a Reshape, stored or built by a Concat."""
        tensor = self.index.stored.get(node.input[slot])
        maker = self.index.makers.get(node.input[slot])
        if tensor is None:
            if maker is not None and maker.op_type == "Concat":
                for part in range(len(maker.input)):
                    self._reshape(maker, part)
            return
        if tensor.data_location == TensorProto.EXTERNAL:
            return
        lengths = numpy_helper.to_array(tensor).copy()
        positions = np.flatnonzero(lengths.reshape(-1) == self.old)
        # 1 is in many shapes for other reasons; only as the last length it is taken for the number of outputs
        if not len(positions) or (self.old == 1 and positions[-1] != lengths.size - 1):
            return
        # of several equal lengths the last one, because the classes are on the last axis
        lengths.reshape(-1)[positions[-1]] = self.new
        changed = numpy_helper.from_array(lengths, node.input[slot])
        # a shape with other readers stays: Reshapes in front of the layer may have the same one
        if len(self.index.readers[node.input[slot]]) == 1:
            tensor.CopyFrom(changed)
        else:
            changed.name = self.index.free_name(f"{node.input[slot]}.head")
            self.index.graph.initializer.append(changed)
            node.input[slot] = changed.name


def _uniform(name: str, dims: Sequence[int], data_type: int, *, bound: float, seed: int) -> TensorProto:
    """Draw from U(-bound, bound) with bound = 1 / sqrt(fan_in), as torch initialises Linear and Conv.

    That is Kaiming-uniform with a = sqrt(5) (He et al. 2015, arXiv:1502.01852). Name, shape and seed determine it.
    """
    # not Python's hash of the name, which differs between processes, so that ranks would have different heads
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.uniform(-bound, bound, tuple(dims)).astype(helper.tensor_dtype_to_np_dtype(data_type))
    return numpy_helper.from_array(values, name)


def _declare(model: onnx.ModelProto, head: _Head, layer: _Layer, config: ModelConfig) -> list[str]:
    """Correct the declared shapes of the graph's outputs; return a problem if the trained output did not change."""
    output = config.named_outputs(model.graph.output[0].name)[0]
    declared = [value for value in model.graph.output if value.name in head.dependents]
    axes = {value.name: _axes_of_length(dims_of(value) or [], head.old) for value in declared}
    # forget the declared lengths, so that inference may derive the new ones
    for value in declared:
        for axis in axes[value.name]:
            value.type.tensor_type.shape.dim[axis].ClearField("dim_value")
    try:
        after = infer_types(model)
    except onnx.shape_inference.InferenceError as error:
        return [
            f"model.num_classes: what follows {layer.weight!r} does not go with {head.new} outputs: {error}; name "
            "another layer as model.head"
        ]
    for value in declared:
        inferred = _axes_of_length(dims_of(after.get(value.name)) or [], head.new)
        follows = [axis for axis in axes[value.name] if axis in inferred]
        for axis in axes[value.name]:
            # where inference says nothing, the classes are on the last of the axes
            is_new = axis in follows or (not follows and axis == axes[value.name][-1])
            value.type.tensor_type.shape.dim[axis].dim_value = head.new if is_new else head.old
    now = dims_of(after.get(output)) or [None, None]
    # a graph that computes its own loss has a scalar output; a length that is not known may be right
    if LOSS_RULES[config.loss].by_graph or head.new in now or None in now[1:]:
        return []
    return [
        f"model.num_classes: {output!r} is {shown_shape(now)}, also when the layer before it has {head.new} outputs: a "
        "node in between fixes its shape; name another layer as model.head, or an earlier tensor as model.output"
    ]


def _axes_of_length(dims: Sequence[int | None], length: int) -> list[int]:
    return [axis for axis, dim in enumerate(dims) if dim == length]
