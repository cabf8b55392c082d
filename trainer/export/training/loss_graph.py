"""Append the configured losses to a graph as ONNX nodes: model_with_loss.onnx and eval.onnx.

    output ---- formula (loss_nodes.py) ---- sum / count = mean ---- x weight --.
    labels -----'                                                                >-- sum ---- loss
    output of the next [[loss]] ---- ... -------------------------- x weight ---'

It computes the same numbers as trainer/model/losses/loss.py: the mean over the targets that count. The axis of the
classes is `loss.class_axis`, which `export_training` has filled in from the data; else the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference

from onward.trainer.config.losses import LabelUnits, LossConfig, titles
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.export.training.loss_nodes import FORMULAS, LossInputs, class_axis
from onward.trainer.model.losses.losses_in_units import LEAST, label_axis
from onward.trainer.onnx_graph.attribute_weights import held_attributes
from onward.trainer.onnx_graph.files import loss_files
from onward.trainer.onnx_graph.files.index import ML_DOMAIN, length_of, nodes_of, opsets_of
from onward.trainer.onnx_graph.files.loss_files import LEAST_OPSET, too_old, unknown_shape
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.node_builder import GraphExtender
from onward.trainer.onnx_graph.surgery.strip_training import strip_training

Dim = TypeVar("Dim")


@dataclass(frozen=True)
class LossNames:
    """Names of the losses and their labels in every file made of one graph."""

    loss: str
    """The sum of weight x mean: what is minimised."""
    titles: tuple[str, ...]
    """What each loss is called in messages and in training.json."""
    labels: tuple[str, ...]
    """Of each loss; "" where it takes none."""
    means: tuple[str, ...]
    """Of each loss without its weight; `loss` itself where it is the only one, with the weight 1."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that every file has, in order."""
        return tuple(dict.fromkeys((self.loss, *self.means)))


@dataclass(frozen=True)
class LossModel:
    """A graph with a loss, and the names of added outputs: of each loss, "" where it has no accuracy."""

    model: onnx.ModelProto
    counts: tuple[str, ...] = ()
    """Targets that count."""
    corrects: tuple[str, ...] = ()
    """Those of them whose class was found."""


def loss_names(model: onnx.ModelProto, losses: Sequence[LossConfig]) -> LossNames:
    """Return the names `loss` and `labels`, or the first free ones like them; of several losses with their titles.

    A scalar output that is the only loss keeps its name.
    """
    g = GraphExtender(model.graph)
    names = titles(losses, [value.name for value in model.graph.output])
    if len(losses) == 1 and losses[0].weight == 1.0:
        total = ""
        if losses[0].rule.by_graph:
            output = _output(model, losses[0].outputs[0])
            total = output.name if _is_loss(output) else ""
        total = total or g.free("loss")
        return LossNames(total, tuple(names), (g.free("labels") if losses[0].takes_labels else "",), (total,))
    of = [f"_{name}" for name in names] if len(losses) > 1 else ["_mean"]
    # names are taken in this order: a name that is taken already gets a number
    total = g.free("loss")
    labels = []
    for end, loss in zip(of, losses, strict=True):
        wanted = f"labels{end}" if len(losses) > 1 else "labels"
        labels.append(g.free(wanted) if loss.takes_labels else "")
    return LossNames(total, tuple(names), tuple(labels), tuple(g.free(f"loss{end}") for end in of))


def label_dims(loss: LossConfig, output: Sequence[Dim]) -> list[Dim | int]:
    """Return the shape of the labels of a loss that takes them, for an output of this shape (numbers or names)."""
    labels = loss.rule.labels
    if labels == "own":
        return loss_files.label_dims(Path(loss.named.location), output)
    if labels == "rows":
        return list(output[:1])
    if labels == "quantiles":
        last = output[-1]
        number = len(loss.quantiles)
        # of one quantile the output may have no axis for it
        has_axis = last == number or (number > 1 and not isinstance(last, int))
        return list(output[:-1] if has_axis else output)
    if loss.has_class_axis:
        axis = class_axis(loss, len(output))
        return [*output[:axis], *output[axis + 1 :]]
    return list(output)


def _is_loss(output: onnx.ValueInfoProto) -> bool:
    kind = output.type.tensor_type
    return kind.elem_type == TensorProto.FLOAT and kind.HasField("shape") and not kind.shape.dim


def model_with_loss(model: onnx.ModelProto, losses: Sequence[LossConfig], *, names: LossNames) -> onnx.ModelProto:
    """Return a copy of the graph, unchanged but for the labels as its last inputs and the losses as its first outputs.

    Labels have the type `label_dtype` of the loss and the shape `label_dims`. Raises UnsupportedModel when the opset
    has no such loss, ConfigError for an unknown output.
    """
    copy = _inlined_copy(model)
    _append_losses(copy, losses, names)
    return copy


def evaluation_model(
    model: onnx.ModelProto,
    losses: Sequence[LossConfig],
    *,
    names: LossNames,
    weights: Iterable[str],
    copies: Mapping[str, tuple[str, bool]],
) -> LossModel:
    """Return the same as `model_with_loss` in inference form, with further outputs for accuracies where there are any.

    `weights` become inputs with the file's values as their defaults, so that trained ones can be put in their
    place; `copies` (name -> original, whether transposed) follow their originals. Raises UnsupportedModel for weights
    that a node holds as attributes, which cannot be inputs.
    """
    copy = _inlined_copy(model)
    wanted = set(weights)
    of_trees = [name for name, node, _ in held_attributes(copy.graph) if node.domain == ML_DOMAIN]
    if held := [name for name in of_trees if name in wanted]:
        raise UnsupportedModel(
            f"no training files can be made of this model: {', '.join(held)} are attributes of ai.onnx.ml, which no "
            "input can change"
        )
    strip_training(copy)
    # before the losses come in front of it
    first = copy.graph.output[0].name
    _append_losses(copy, losses, names)
    found = [
        _append_accuracy(copy, loss, labels, first) if "accuracy" in loss.rule.metrics else ("", "")
        for loss, labels in zip(losses, names.labels, strict=True)
    ]
    _open(copy, wanted, copies)
    counts, corrects = zip(*found, strict=True)
    return LossModel(copy, counts, corrects)


def _inlined_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model with its local functions inlined, and without opset entries that no node uses."""
    copy = deepcopy(inliner.inline_local_functions(model) if model.functions else model)
    # inlining leaves the domains of the functions behind, which a runtime may not know
    used = {"" if node.domain == "ai.onnx" else node.domain for node in nodes_of(copy.graph)} | {"", "ai.onnx"}
    for entry in [entry for entry in copy.opset_import if entry.domain not in used]:
        copy.opset_import.remove(entry)
    return copy


# -- the losses


def _append_losses(model: onnx.ModelProto, losses: Sequence[LossConfig], names: LossNames) -> None:
    """Append labels, formulas and weights in place."""
    if (opset := opsets_of(model).get("", 0)) < LEAST_OPSET:
        raise UnsupportedModel(too_old(opset))
    # the outputs of the file stay, behind the losses
    before = list(model.graph.output)
    found = [[_output(model, name) for name in loss.outputs] for loss in losses]
    if found[0][0].name != names.loss:  # else the graph has it already
        g = GraphExtender(model.graph, reserved=(*names.outputs, *names.labels), opset=opset)
        terms = []
        for loss, outputs, labels, mean in zip(losses, found, names.labels, names.means, strict=True):
            if labels:
                model.graph.input.append(_labels(labels, loss, outputs[0]))
            _append_loss(g, loss, outputs, labels, mean)
            terms.append(mean if loss.weight == 1.0 else g.op("Mul", mean, g.constant(loss.weight)))
        if names.means != (names.loss,):
            g.op("Sum", *terms, output=names.loss)
    # an output that is the loss itself is listed once
    others = [value for value in before if value.name not in names.outputs]
    del model.graph.output[:]
    own = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in names.outputs]
    model.graph.output.extend([*own, *others])


def _labels(name: str, loss: LossConfig, output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return the labels of a loss as an input. Raises UnsupportedModel if the file does not declare their shape."""
    if not output.type.tensor_type.HasField("shape"):
        raise UnsupportedModel(unknown_shape(output.name))
    shape = output.type.tensor_type.shape.dim
    dims = [dim.dim_param or length_of(dim) for dim in shape]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(loss.label_dtype))
    return helper.make_tensor_value_info(name, kind, label_dims(loss, dims))


def _append_loss(
    g: GraphExtender, loss: LossConfig, outputs: Sequence[onnx.ValueInfoProto], labels: str, mean: str
) -> None:
    # a half-precision file: the loss is computed in fp32, as in training
    values = [g.op("Cast", output.name, to=TensorProto.FLOAT) for output in outputs]
    rank = len(outputs[0].type.tensor_type.shape.dim)
    # the loss compares standardised numbers, while the file and the labels have the user's units
    if units := loss.label_units:
        shape = [dim.dim_value for dim in outputs[0].type.tensor_type.shape.dim]
        axis = label_axis(units, shape)
        labels_rank = len(label_dims(loss, shape))
        values = [_standardised(g, values[0], units, rank - axis)]
        labels = _standardised(g, labels, units, labels_rank - axis)
    total, count = FORMULAS[loss.name](g, LossInputs(loss, values, labels, rank))
    # of no targets the sum is 0, and so is the mean, not 0 / 0
    some = g.op("Where", g.op("Greater", count, g.constant(0.0)), count, g.constant(1.0))
    g.op("Div", total, some, output=mean)


def _standardised(g: GraphExtender, values: str, units: LabelUnits, axes: int) -> str:
    """Add the nodes of `standardised` (model/losses/losses_in_units.py); axes: the units' own and those behind."""
    if units.log:
        least = g.constant(LEAST)
        # below LEAST the logarithm goes on as its tangent: it does not exist below -1
        line = g.op("Div", g.op("Sub", values, least), g.constant(1 + LEAST))
        line = g.op("Add", line, g.constant(math.log1p(LEAST)))
        curve = g.op("Log", g.op("Add", g.op("Max", values, least), g.constant(1.0)))
        values = g.op("Where", g.op("Greater", values, least), curve, line)
    for kind, numbers in (("Sub", units.center), ("Div", units.scale)):
        shape = (len(numbers), *[1] * (axes - 1))
        stored = numpy_helper.from_array(np.reshape(numbers, shape).astype(np.float32))
        values = g.op(kind, values, g.op("Constant", value=stored))
    return values


def _output(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    """Return a value that a loss reads, with its type; of no name the first output of the graph."""
    if not name:
        first: onnx.ValueInfoProto = model.graph.output[0]
        return first
    known = shape_inference.infer_shapes(model).graph
    values: dict[str, onnx.ValueInfoProto] = {value.name: value for value in (*known.value_info, *known.output)}
    if name not in values:
        raise ConfigError(f"model.output {name!r} is not a tensor of known type in the graph")
    return values[name]


# -- evaluation


def _append_accuracy(model: onnx.ModelProto, loss: LossConfig, labels: str, first: str) -> tuple[str, str]:
    """Append two outputs, int64: the number of targets that count, and of the right ones among them."""
    g = GraphExtender(model.graph)
    output = loss.outputs[0] or first
    count = g.free("count")
    correct = g.free("correct")
    if loss.rule.labels == "classes":
        axis = -1 if loss.class_axis is None else loss.class_axis
        # of probabilities the greatest is the class
        classes = g.op("ArgMax", labels, axis=axis, keepdims=0) if loss.soft_labels else labels
        counted = g.op("Not", g.op("Equal", classes, g.constant(loss.ignored, int)))
        right = g.op("And", g.op("Equal", g.op("ArgMax", output, axis=axis, keepdims=0), classes), counted)
        g.op("ReduceSum", g.op("Cast", counted, to=TensorProto.INT64), keepdims=0, output=count)
    else:
        # a score above 0 is a probability above one half
        positive = g.op("Greater", g.op("Cast", output, to=TensorProto.FLOAT), g.constant(0.0))
        right = g.op("Equal", positive, g.op("Greater", labels, g.constant(0.5)))
        g.op("Size", labels, output=count)
    g.op("ReduceSum", g.op("Cast", right, to=TensorProto.INT64), keepdims=0, output=correct)
    for name in (count, correct):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))
    return count, correct


def _open(model: onnx.ModelProto, weights: set[str], copies: Mapping[str, tuple[str, bool]]) -> None:
    """Make stored tensors inputs with a default; copies become views of their originals."""
    graph = model.graph
    wanted = weights | copies.keys()
    stored = dict(stored_protos(graph))
    # only an initializer can be the default of an input
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        if node.output[0] in wanted:
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
