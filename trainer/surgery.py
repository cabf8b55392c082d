"""Surgery on an ONNX graph before it is trained: weights untied, the head replaced, the trained part cut out.

    operate(model, config.model, seed=0)        in place: what the file that comes back keeps
    part = cut(model, config.model)             from model.start to model.output: what is trained, and what is judged

It needs onnx and numpy alone, so the configuration is judged by the code that changes the graph. Weights are
neither read nor moved: what a file keeps in other files stays there.
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trainer.config import ModelConfig
from trainer.errors import ConfigError

UNTIED = ".untied."
"""Stands in the name of each copy that `untie` makes, by which it is known as one that must stay apart."""

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


# -- reading a graph


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those inside If, Loop and Scan included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from nodes_of(inner)


def _reads(node: onnx.NodeProto) -> set[str]:
    """The names a node reads, those its inner graphs take from outside included."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names |= {value.name for value in inner.output}.union(*map(_reads, inner.node))
    return names - {""}


@dataclass
class _Index:
    """Who makes and who reads each tensor of a graph."""

    graph: onnx.GraphProto
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    stored: dict[str, TensorProto] = field(default_factory=dict)
    """Initializers, and the values of Constant nodes, by name."""

    def __post_init__(self) -> None:
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}
        for node in self.graph.node:
            self.makers.update(dict.fromkeys(filter(None, node.output), node))
            if node.op_type == "Constant":
                self.stored.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        for node in nodes_of(self.graph):
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)

    @property
    def computed(self) -> list[str]:
        """The names of the inputs, and of all that is computed from them."""
        return [value.name for value in self.graph.input if value.name not in self.stored] + [
            name for name in self.makers if name not in self.stored
        ]

    def unused(self, name: str) -> str:
        """The name, or the first of name_1, name_2, ... that the graph does not have."""
        taken = {*self.stored, *self.makers, *(value.name for value in self.graph.input)}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(names[-3:])}"


def inferred(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Type and shape of every tensor of which the file says them or onnx infers them. Weights are not copied."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph, target = model.graph, light.graph
    target.name = graph.name
    target.node.extend(graph.node)
    declared = {value.name for value in graph.input}
    target.input.extend(graph.input)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= 1024 and tensor.data_location != TensorProto.EXTERNAL:
            target.initializer.append(tensor)
        elif tensor.name not in declared:
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    found = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    return {value.name: value for value in (*found.value_info, *found.output, *found.input)}


def _dims(value: onnx.ValueInfoProto | None) -> list[int | None] | None:
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


# -- what the file keeps


def operate(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> None:
    """Untie weights and replace the head, in place, as `model.untie`, `model.num_classes` and `model.head` say.

    The same seed makes the same weights everywhere. Raises ConfigError with everything wrong at once, `cut`'s
    findings included.
    """
    problems = _cut_problems(model, config)
    problems += _untie(model.graph, config.untie)
    if config.num_classes and not problems:
        problems += _replace_head(model, config, seed=seed)
    if problems:
        raise ConfigError(problems)


def _untie(graph: onnx.GraphProto, patterns: Sequence[str]) -> list[str]:
    """Give every reader of a matching weight but the first a copy of its own."""
    index, problems = _Index(graph), []
    shared = {name: readers for name in index.stored if len(readers := index.readers.get(name, ())) > 1}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shared):
            matching = [name for name in index.stored if fnmatchcase(name, pattern)]
            problems.append(
                f"model.untie: {matching[0]!r} is read by one node only; there is nothing to untie"
                if matching
                else f"model.untie: no initializer matches {pattern!r}{_near(pattern, shared or index.stored)}"
            )
    for name, readers in shared.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            for number, node in enumerate(readers[1:], start=1):
                copy = graph.initializer.add()
                copy.CopyFrom(index.stored[name])
                copy.name = f"{name}{UNTIED}{number}"
                _reread(node, name, copy.name)
    return problems


def _reread(node: onnx.NodeProto, old: str, new: str) -> None:
    for slot, name in enumerate(node.input):
        if name == old:
            node.input[slot] = new


# -- the head


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


def _layer(node: onnx.NodeProto, index: _Index) -> _Layer | None:
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


def _leading_to(tensor: str, index: _Index) -> list[_Layer]:
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


def _chosen_layer(index: _Index, config: ModelConfig, output: str) -> _Layer:
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
            else f"model.head {config.head!r} is no weight of a MatMul, Gemm or Conv{_near(config.head, known)}"
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


def _replace_head(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> list[str]:
    """New weight and bias for one layer, and every constant after it that knows the number of its outputs."""
    graph, index = model.graph, _Index(model.graph)
    output = config.output or graph.output[0].name
    try:
        layer = _chosen_layer(index, config, output)
    except ConfigError as error:
        return list(error.problems)
    before, old = inferred(model), index.stored[layer.weight].dims[layer.axis]
    if group := next((a.i for a in layer.node.attribute if a.name == "group" and a.i != 1), 0):
        return [f"model.head: {layer.weight!r} is a convolution of {group} groups, which cannot be given other outputs"]
    head = _Head(index, old=old, new=config.num_classes, seed=seed)
    head.replace_weight(layer)
    if problems := head.follow(layer):
        return problems
    stale = [value for value in graph.value_info if value.name in head.descended]
    for value in stale:
        graph.value_info.remove(value)
    return _declare(model, head, output, before)


@dataclass
class _Head:
    """The replacement of a head in progress."""

    index: _Index
    old: int
    new: int
    seed: int
    bound: float = 0.0
    descended: set[str] = field(default_factory=set)
    """What is computed from the head."""

    def replace_weight(self, layer: _Layer) -> None:
        """A tied one goes straight into the layer, past the Transpose or Cast that it is read through."""
        stored = self.index.stored[layer.weight]
        dims = list(stored.dims)
        dims[layer.axis] = self.new
        self.bound = 1 / math.sqrt(math.prod(dims) / self.new)
        if layer.own:
            self._replace(layer.weight, dims, stored.data_type)
        else:
            layer.node.input[1] = self._add(layer.weight, dims[::-1] if layer.turned else dims, layer.data_type)

    def _replace(self, name: str, dims: Sequence[int], data_type: int) -> None:
        self.index.stored[name].CopyFrom(_uniform(name, dims, data_type, bound=self.bound, seed=self.seed))

    def _add(self, name: str, dims: Sequence[int], data_type: int) -> str:
        """A new tensor beside one that others read; returns its name."""
        tensor = _uniform(name, dims, data_type, bound=self.bound, seed=self.seed)
        tensor.name = self.index.unused(f"{name}.head")
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
            if node is layer.node or not self.descended & _reads(node) or node.op_type in ("Shape", "Size"):
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
            changed.name = self.index.unused(f"{node.input[slot]}.head")
            self.index.graph.initializer.append(changed)
            node.input[slot] = changed.name


def _uniform(name: str, dims: Sequence[int], data_type: int, *, bound: float, seed: int) -> TensorProto:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as torch begins weight and bias of Linear and Conv: Kaiming-uniform with
    a = sqrt(5) (He et al. 2015, arXiv:1502.01852). A function of name, shape and seed."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.uniform(-bound, bound, tuple(dims)).astype(helper.tensor_dtype_to_np_dtype(data_type))
    return numpy_helper.from_array(values, name)


def _declare(model: onnx.ModelProto, head: _Head, output: str, before: Mapping[str, onnx.ValueInfoProto]) -> list[str]:
    """Correct the shapes that the graph's outputs declare; what was inferred of the one trained must have followed."""
    declared = [value for value in model.graph.output if value.name in head.descended]
    places = {value.name: [i for i, dim in enumerate(_dims(value) or []) if dim == head.old] for value in declared}
    for value in declared:
        for place in places[value.name]:
            value.type.tensor_type.shape.dim[place].ClearField("dim_value")
    after = inferred(model)
    for value in declared:
        found = _dims(after.get(value.name)) or []
        follows = [place for place in places[value.name] if place < len(found) and found[place] == head.new]
        for place in places[value.name]:
            here = place in follows or (not follows and place == places[value.name][-1])
            value.type.tensor_type.shape.dim[place].dim_value = head.new if here else head.old
    was, now = _dims(before.get(output)), _dims(after.get(output))
    if head.old != head.new and was and now and head.old in was and head.new not in now and None not in now:
        return [
            f"model.num_classes: {output!r} is still {now} wide after the last layer got {head.new} outputs; "
            "what follows it fixes the shape"
        ]
    return []


# -- the part that is trained


def is_cut(model: onnx.ModelProto, config: ModelConfig) -> bool:
    """Whether only a part of the graph is trained."""
    inner = bool(config.output) and config.output not in [value.name for value in model.graph.output]
    return inner or bool(config.start)


def cut(model: onnx.ModelProto, config: ModelConfig) -> onnx.ModelProto:
    """The part of a graph that is trained: what leads from `model.start` (or the graph's inputs) to `model.output`.

    The model itself when neither is inside it. A part gives the one tensor that the loss reads; it takes the
    graph's own inputs that are still needed, then the tensors of `model.start`. Raises ConfigError with everything
    wrong at once.
    """
    if problems := _cut_problems(model, config):
        raise ConfigError(problems)
    if not is_cut(model, config):
        return model
    graph, types = model.graph, inferred(model)
    output = config.output or graph.output[0].name
    kept, needed = _ancestors(graph, output, set(config.start))
    part = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name, domain=model.domain)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = graph.name
    part.graph.node.extend(kept)
    for node in part.graph.node:  # a node that makes a start and something else goes on making the other
        for place, name in enumerate(node.output):
            if name in config.start:
                node.output[place] = f"{name}.before"
    own = [value for value in graph.input if value.name in needed]
    part.graph.input.extend([*own, *(types[name] for name in config.start if name not in {v.name for v in own})])
    part.graph.output.append(types[output])
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in needed)
    part.graph.sparse_initializer.extend(t for t in graph.sparse_initializer if t.values.name in needed)
    inside = {name for node in kept for name in node.output} - {output, *config.start}
    part.graph.value_info.extend(value for value in graph.value_info if value.name in inside)
    return part


def _ancestors(graph: onnx.GraphProto, output: str, start: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that compute a tensor, in their order, if `start` is given; and all that they read."""
    needed, kept = {output}, []
    for node in reversed(graph.node):
        if (needed - start) & set(node.output):
            kept.append(node)
            needed |= _reads(node)
    return kept[::-1], needed


def _cut_problems(model: onnx.ModelProto, config: ModelConfig) -> list[str]:
    index = _Index(model.graph)
    outputs = [value.name for value in model.graph.output]
    output, computed = config.output or outputs[0], index.computed
    known = [*(name for name in computed if name not in outputs), *outputs]
    problems = []
    for key, names in (("model.output", [config.output] if config.output else []), ("model.start", config.start)):
        for name in names:
            if name in index.stored:
                problems.append(f"{key} {name!r} is a weight; name a tensor that is computed from the inputs")
            elif name not in known:
                problems.append(f"{key} {name!r} is no tensor of the model{_near(name, known)}")
    if problems or not is_cut(model, config):
        return problems
    _, needed = _ancestors(model.graph, output, set(config.start))
    if output in config.start or output not in index.makers:
        return [f"model.output {output!r} is what the training begins from; nothing is computed in between"]
    problems += [
        f"model.start {name!r} is not on the way to {output!r}; leave it out"
        for name in config.start
        if name not in needed
    ]
    if not needed & {*config.start, *(value.name for value in model.graph.input if value.name not in index.stored)}:
        problems.append(f"model.output {output!r} depends on none of the model's inputs")
    types = inferred(model)
    for name in (*config.start, output):
        if name not in types or not types[name].type.tensor_type.elem_type:
            problems.append(
                f"the type of {name!r} is not declared in the file and cannot be inferred; begin or end elsewhere"
            )
    return problems
