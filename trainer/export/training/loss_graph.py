"""Append the configured loss to a graph as ONNX nodes: model_with_loss.onnx and eval.onnx.

It computes the same numbers as trainer/model/losses/loss.py: the mean over the targets that count. The axis of the
classes is `loss.class_axis`, which `write_artifacts` has filled in from the data; else the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference

from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.attribute_weights import held_attributes
from onward.trainer.onnx_graph.builder import GraphExtender
from onward.trainer.onnx_graph.index import nodes_of
from onward.trainer.onnx_graph.initializers import stored_protos
from onward.trainer.onnx_graph.ml_types import DOMAIN
from onward.trainer.onnx_graph.strip_training import strip_training

LEAST_OPSET = 13
"""The first opset with the current SoftmaxCrossEntropyLoss."""


@dataclass(frozen=True)
class LossNames:
    """Names of the loss and the labels in every file made of one graph."""

    loss: str
    labels: str
    """"" when the graph computes its own loss."""


@dataclass(frozen=True)
class LossModel:
    """A graph with a loss, and the names of added outputs."""

    model: onnx.ModelProto
    count: str = ""
    """Output: targets that count."""
    correct: str = ""
    """Output: those of them whose class was found."""


def loss_names(model: onnx.ModelProto, config: LossConfig) -> LossNames:
    """Return the names `loss` and `labels`, or the first free ones like them.

    A scalar output that is the loss keeps its name.
    """
    extension = GraphExtender(model.graph)
    if config.name != "output":
        return LossNames(extension.free("loss"), extension.free("labels"))
    output = _output(model, config)
    return LossNames(output.name if _is_loss(output) else extension.free("loss"), "")


def _is_loss(output: onnx.ValueInfoProto) -> bool:
    kind = output.type.tensor_type
    return kind.elem_type == TensorProto.FLOAT and kind.HasField("shape") and not kind.shape.dim


def model_with_loss(model: onnx.ModelProto, config: LossConfig, *, names: LossNames) -> LossModel:
    """Return a copy of the graph, unchanged but for the labels as its last input and the loss as its first output.

    Labels are int64 of the output's shape without its last axis for cross-entropy, else floats of the output's
    shape. Raises UnsupportedModel when the opset has no such loss, ConfigError for an unknown `model.output`.
    """
    copy = _inlined_copy(model)
    return _with_loss(copy, config, names)


def evaluation_model(
    model: onnx.ModelProto,
    config: LossConfig,
    *,
    names: LossNames,
    weights: Iterable[str],
    copies: Mapping[str, tuple[str, bool]],
) -> LossModel:
    """Return the same as `model_with_loss` in inference form, with further outputs for the accuracy where there is one.

    `weights` become inputs with the file's values as their defaults, so that trained ones can be put in their
    place; `copies` (name -> original, whether transposed) follow their originals.
    """
    copy = _inlined_copy(model)
    strip_training(copy)
    found = _with_loss(copy, config, names)
    if config.name in ("cross_entropy", "bce_with_logits"):
        found = _with_accuracy(copy, config, names)
    _open(copy, set(weights), copies)
    return found


def _inlined_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model with its local functions inlined, and without opset entries that no node uses."""
    copy = onnx.ModelProto()
    copy.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    used = {"" if node.domain == "ai.onnx" else node.domain for node in nodes_of(copy.graph)} | {"", "ai.onnx"}
    for entry in [entry for entry in copy.opset_import if entry.domain not in used]:
        copy.opset_import.remove(entry)
    return copy


# -- the loss


def _with_loss(model: onnx.ModelProto, config: LossConfig, names: LossNames) -> LossModel:
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < LEAST_OPSET:
        raise UnsupportedModel(
            f"opset {opset} does not have the operators of a loss, which needs {LEAST_OPSET}; convert the file first "
            f"(onnx.version_converter.convert_version(model, {LEAST_OPSET}))"
        )
    output, outputs = _output(model, config), list(model.graph.output)
    if output.name != names.loss:
        extension = GraphExtender(model.graph, reserved=(names.loss, names.labels))
        # a half-precision file: the loss is computed in fp32, as in training
        value = extension.op("Cast", output.name, to=TensorProto.FLOAT)
        if config.name == "output":
            extension.op("ReduceMean", value, output=names.loss, keepdims=0)
        else:
            model.graph.input.append(_labels(names.labels, output, config))
            rank = len(output.type.tensor_type.shape.dim)
            LOSSES[config.name](extension, value, names.labels, names.loss, config, rank)
    others = [value for value in outputs if value.name != names.loss]
    del model.graph.output[:]
    model.graph.output.extend([helper.make_tensor_value_info(names.loss, TensorProto.FLOAT, []), *others])
    return LossModel(model)


def _output(model: onnx.ModelProto, config: LossConfig) -> onnx.ValueInfoProto:
    """Return the value that the loss reads, with its type."""
    if not config.outputs[0]:
        first: onnx.ValueInfoProto = model.graph.output[0]
        return first
    known = shape_inference.infer_shapes(model).graph
    values: dict[str, onnx.ValueInfoProto] = {value.name: value for value in (*known.value_info, *known.output)}
    if config.outputs[0] not in values:
        raise ConfigError(f"model.output {config.outputs[0]!r} is not a tensor of known type in the graph")
    return values[config.outputs[0]]


def _labels(name: str, output: onnx.ValueInfoProto, config: LossConfig) -> onnx.ValueInfoProto:
    shape = output.type.tensor_type.shape.dim
    dims = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None) for dim in shape]
    if config.name == "cross_entropy":
        axis = _axis(config, len(dims))
        return helper.make_tensor_value_info(name, TensorProto.INT64, [*dims[:axis], *dims[axis + 1 :]])
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def _axis(config: LossConfig, rank: int) -> int:
    """Return the axis of the classes of an output of `rank` axes."""
    return (-1 if config.class_axis is None else config.class_axis) % max(rank, 1)


def _cross_entropy(g: GraphExtender, value: str, labels: str, loss: str, config: LossConfig, rank: int) -> None:
    """Add the sum over the targets that count, divided by their number; 0 if there is none, and not 0 / 0."""
    if rank > 2 and (axis := _axis(config, rank)) != rank - 1:
        value = g.op("Transpose", value, perm=[*range(axis), *range(axis + 1, rank), axis])
    classes = g.op("Gather", g.op("Shape", value), g.constant([-1]))
    # ONNX's SoftmaxCrossEntropyLoss has the classes on axis 1, here they are on the last: [..., C] becomes [rows, C]
    flat = g.op("Reshape", value, g.op("Concat", g.constant([-1]), classes, axis=0))
    targets = g.op("Reshape", labels, g.constant([-1]))
    weights = [_weights(g, config)] if config.class_weights else []
    total = g.op("SoftmaxCrossEntropyLoss", flat, targets, *weights, reduction="sum", ignore_index=config.ignored)
    if weights:
        counted = g.op("Not", g.op("Equal", targets, g.constant(config.ignored, int)))
        known = g.op("Where", counted, targets, g.constant(0, int))
        each = g.op("Mul", g.op("Gather", weights[0], known), g.op("Cast", counted, to=TensorProto.FLOAT))
        count = g.op("ReduceSum", each, keepdims=0)
        count = g.op("Where", g.op("Greater", count, g.constant(0.0)), count, g.constant(1.0))
        g.op("Div", total, count, output=loss)
        return
    count = g.op("Cast", _count(g, labels, config), to=TensorProto.FLOAT)
    g.op("Div", total, g.op("Max", count, g.constant(1.0)), output=loss)


def _count(g: GraphExtender, labels: str, config: LossConfig, output: str = "") -> str:
    counted = g.op("Not", g.op("Equal", labels, g.constant(config.ignored, int)))
    return g.op("ReduceSum", g.op("Cast", counted, to=TensorProto.INT64), keepdims=0, output=output)


def _mse(g: GraphExtender, value: str, labels: str, loss: str, config: LossConfig, rank: int) -> None:
    difference = g.op("Sub", value, labels)
    g.op("ReduceMean", g.op("Mul", difference, difference), keepdims=0, output=loss)


def _l1(g: GraphExtender, value: str, labels: str, loss: str, config: LossConfig, rank: int) -> None:
    g.op("ReduceMean", g.op("Abs", g.op("Sub", value, labels)), keepdims=0, output=loss)


def _bce_with_logits(g: GraphExtender, value: str, labels: str, loss: str, config: LossConfig, rank: int) -> None:
    """Add max(x, 0) - xy + log(1 + exp(-|x|)), which does not overflow for any x."""
    linear = g.op("Sub", g.op("Relu", value), g.op("Mul", value, labels))
    rest = g.op("Softplus", g.op("Neg", g.op("Abs", value)))
    g.op("ReduceMean", g.op("Add", linear, rest), keepdims=0, output=loss)


def _weights(g: GraphExtender, config: LossConfig) -> str:
    return g.op("Constant", value=numpy_helper.from_array(np.asarray(config.class_weights, np.float32)))


def _huber(g: GraphExtender, value: str, labels: str, loss: str, config: LossConfig, rank: int) -> None:
    """Add d^2 / 2 where d = |x - y| is at most delta, and delta (d - delta / 2) elsewhere."""
    d, delta = g.op("Abs", g.op("Sub", value, labels)), g.constant(config.delta)
    square = g.op("Mul", g.op("Mul", d, d), g.constant(0.5))
    line = g.op("Mul", delta, g.op("Sub", d, g.constant(0.5 * config.delta)))
    g.op("ReduceMean", g.op("Where", g.op("LessOrEqual", d, delta), square, line), keepdims=0, output=loss)


LOSSES: dict[str, Callable[[GraphExtender, str, str, str, LossConfig, int], None]] = {
    "huber": _huber,
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "l1": _l1,
    "bce_with_logits": _bce_with_logits,
}


# -- evaluation


def _with_accuracy(model: onnx.ModelProto, config: LossConfig, names: LossNames) -> LossModel:
    """Add two outputs, int64: the number of targets that count, and of the right ones among them."""
    g = GraphExtender(model.graph)
    output, labels = config.outputs[0] or model.graph.output[1].name, names.labels
    count, correct = g.free("count"), g.free("correct")
    if config.name == "cross_entropy":
        axis = -1 if config.class_axis is None else config.class_axis
        counted = g.op("Not", g.op("Equal", labels, g.constant(config.ignored, int)))
        right = g.op("And", g.op("Equal", g.op("ArgMax", output, axis=axis, keepdims=0), labels), counted)
        _count(g, labels, config, output=count)
    else:
        positive = g.op("Greater", g.op("Cast", output, to=TensorProto.FLOAT), g.constant(0.0))
        right = g.op("Equal", positive, g.op("Greater", labels, g.constant(0.5)))
        g.op("Size", labels, output=count)
    g.op("ReduceSum", g.op("Cast", right, to=TensorProto.INT64), keepdims=0, output=correct)
    for name in (count, correct):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))
    return LossModel(model, count, correct)


def _open(model: onnx.ModelProto, weights: set[str], copies: Mapping[str, tuple[str, bool]]) -> None:
    """Make stored tensors inputs with a default; copies become views of their originals.

    Raises UnsupportedModel for weights that a node holds as attributes, which cannot be inputs.
    """
    graph = model.graph
    if held := [name for name, node, _ in held_attributes(graph) if name in weights and node.domain == DOMAIN]:
        raise UnsupportedModel(
            f"no training files can be made of this model: {', '.join(held)} are attributes of ai.onnx.ml, which no "
            "input can change"
        )
    wanted = weights | copies.keys()
    stored = dict(stored_protos(graph))
    for node in [node for node in graph.node if node.op_type == "Constant" and node.output[0] in wanted]:
        value = numpy_helper.to_array(stored[node.output[0]])
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        graph.node.remove(node)
    inputs = {value.name for value in graph.input}
    for tensor in list(graph.initializer):
        if tensor.name in copies:
            original, transposed = copies[tensor.name]
            view = helper.make_node("Transpose" if transposed else "Identity", [original], [tensor.name])
            graph.node.insert(0, view)  # of a matrix: transposed is reversed, which needs no attribute
            graph.initializer.remove(tensor)
        elif tensor.name in weights - inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
