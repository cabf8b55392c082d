"""Find the outputs of a file that can be computed and trained, and the scores behind class labels and probabilities.

    X --- MatMul, Add --- scores --- Softmax --- probabilities --- ZipMap ------------------- output_probability (maps)
                                                       `---------- ArgMax --- classes[.] ---- output_label (strings)

torch has neither strings nor maps: `with_numeric_outputs` leaves such outputs out, and the nodes that only they need.
They stay in the file. A label has no gradient, and a loss is better computed from scores than from probabilities:
`score_tensors` names the tensors that a loss can read.

A LinearClassifier applies its own softmax, so the file has no tensor of its scores. `with_log_probabilities` computes

    LinearClassifier<SOFTMAX> --- probabilities                                           the file
    LinearClassifier<NONE> --- LogSoftmax --- "probabilities/log_probabilities"            the part that is trained
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from onward.trainer.onnx_graph.files.index import (
    FLOAT_TYPES,
    ML_DOMAIN,
    Index,
    attributes_of,
    innermost_type,
    known_types,
    nodes_between,
    opsets_of,
    replace_entries,
)
from onward.trainer.onnx_graph.files.model_files import stored_array
from onward.trainer.onnx_graph.probabilities import Activation, activation_of
from onward.trainer.onnx_graph.surgery.selections import selection_before

LOG = "/log_probabilities"

# fmt: off
KEEPS_SCORES = frozenset((
    "ArgMax", "ArrayFeatureExtractor", "Cast", "Concat", "Flatten", "Gather", "Identity", "LabelEncoder", "Normalizer",
    "ReduceSum", "Div", "Reshape", "Squeeze", "Sub", "TopK", "Transpose", "Unsqueeze", "ZipMap",
))
"""Operators between the scores of classes and what classifiers return."""
UNTRAINED = ("TreeEnsembleClassifier", "SVMClassifier")
# fmt: on


def is_numeric(value: onnx.ValueInfoProto) -> bool:
    """Return whether a value holds numbers: a tensor, or a sequence or optional of tensors, and not of strings."""
    kind = innermost_type(value)
    return not kind.HasField("map_type") and kind.tensor_type.elem_type != TensorProto.STRING


def describe_type(value: onnx.ValueInfoProto) -> str:
    """Return the type of a value in a word or two, such as "int64" or "a sequence of maps"."""
    if value.type.HasField("tensor_type"):
        return str(TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()
    maps = value.type.sequence_type.elem_type.HasField("map_type")
    return "a sequence of maps" if maps else str(value.type.WhichOneof("value")).replace("_type", "")


def with_numeric_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without outputs of strings or maps, and without the nodes and tensors that only they need.

    If all outputs are such, the scores from which they are computed become the output. Returns the model itself if it
    has no such output.
    """
    kept = [value for value in model.graph.output if is_numeric(value)]
    if len(kept) == len(model.graph.output):
        return model
    if not kept:
        if (scores := next(score_tensors(model.graph), None)) is None:
            return model
        model = with_log_probabilities(model, scores[0])
        kept = [known_types(model).get(scores[0]) or onnx.ValueInfoProto(name=scores[0])]
    part = deepcopy(model)
    computed = set[str]()
    needed = set[str]()
    for value in kept:
        behind, names = nodes_between(model.graph, [value.name], set())
        computed.update(name for node in behind for name in node.output)
        needed |= names
    # in the order of the file, which is topological
    nodes = [node for node in model.graph.node if set(node.output) & computed]
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    for field, entries in (("output", kept), ("node", nodes), ("initializer", tensors)):
        part.graph.ClearField(field)
        getattr(part.graph, field).extend(entries)
    return part


# -- scores


def score_tensors(graph: onnx.GraphProto, outputs: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (tensor, what it is and the loss for it) of the scores from which labels and probabilities are computed.

    outputs: those to begin at; all if there are none. Where there is no such operator, the scores are what the first
    ArgMax reads.
    """
    index = Index(graph)
    seen = set[str]()
    compared = list[str]()
    names = [*outputs] or [value.name for value in graph.output]
    any_found = False
    # breadth first from the outputs: the scores nearest to an output come first
    while names:
        name = names.pop(0)
        node = index.makers.get(name)
        if node is None or name in seen:
            continue
        seen.update(node.output)
        if scores := _scores_of(node) or _scores_before(name, activation_of(index, name)):
            any_found = True
            # a softmax and its logarithm may stand behind the same scores, which are yielded once
            if scores[0] not in seen or scores[0] in node.output:
                seen.add(scores[0])
                yield scores
        elif node.op_type in KEEPS_SCORES:
            names += node.input
            if node.op_type == "ArgMax":
                compared += node.input[:1]
    if not any_found and compared:
        yield compared[0], "the scores before ArgMax, for the loss cross_entropy"


def _scores_before(name: str, found: Activation | None) -> tuple[str, str] | None:
    if found is None:
        return None
    if found.kind == "log_softmax":  # the cross-entropy of log-probabilities is that of the logits
        return name, f"the result of {found.name}, for the loss cross_entropy"
    loss = "bce_with_logits" if found.kind == "sigmoid" else "cross_entropy"
    return found.scores, f"the logits before {found.name}, for the loss {loss}"


def _scores_of(node: onnx.NodeProto) -> tuple[str, str] | None:
    if node.domain != ML_DOMAIN or len(node.output) < 2:
        return None
    if node.op_type in UNTRAINED:
        return node.output[1], f"the scores of {node.op_type}, which is not trained"
    if node.op_type != "LinearClassifier":
        return None
    transform = attributes_of(node).get("post_transform", "NONE")
    if transform == "NONE":
        return node.output[1], "the scores of LinearClassifier, for the loss cross_entropy"
    if _log_steps(node):
        return f"{node.output[1]}{LOG}", f"the logarithm of LinearClassifier's {transform}, for the loss cross_entropy"
    return None


def _log_steps(node: onnx.NodeProto) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (domain, operator, attributes) of the nodes from scores to log-probabilities; [] if there are none.

    Of two classes, scikit-learn stores a row and its negative, so that sigmoid(z) and sigmoid(-z) are a softmax over
    z / 2 and -z / 2. This softmax has opposite gradients for both rows: they stay each other's negative in training.
    """
    if (node.domain, node.op_type) != (ML_DOMAIN, "LinearClassifier") or len(node.output) < 2:
        return []
    attributes = attributes_of(node)
    intercepts = list(attributes.get("intercepts", ()))
    transform = attributes.get("post_transform", "NONE")
    if transform == "SOFTMAX" and len(intercepts) > 1:
        return [("", "LogSoftmax", {"axis": 1})]
    if transform != "LOGISTIC" or len(intercepts) < 2:
        return []
    if len(intercepts) > 2:  # log(sigmoid(x)) = -softplus(-x)
        return [("", "Neg", {}), ("", "Softplus", {}), ("", "Neg", {})]
    rows = np.column_stack([np.reshape(attributes["coefficients"], (2, -1)), intercepts])
    # opposite up to rounding: each row and its intercept, [2, features + 1]
    opposite = np.abs(rows.sum(0)).max() <= 1e-2 * np.abs(rows).max()
    half = (ML_DOMAIN, "Scaler", {"offset": [0.0], "scale": [0.5]})
    return [half, ("", "LogSoftmax", {"axis": 1})] if opposite else []


def with_log_probabilities(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Return a copy that computes the tensor `output` of `score_tensors`; the model itself if it is no such name.

    The cross-entropy of log-probabilities is that of the file's probabilities, divided by their sum if it is not 1.
    """
    logs = [f"{node.output[1]}{LOG}" if len(node.output) > 1 else "" for node in model.graph.node]
    if output not in filter(None, logs) or not (steps := _log_steps(model.graph.node[logs.index(output)])):
        return model
    copy = deepcopy(model)
    nodes = list(copy.graph.node)
    position = logs.index(output)
    classifier = nodes[position]
    scores = deepcopy(classifier)
    scores.output[1] = f"{classifier.output[1]}/scores"
    next(attribute for attribute in scores.attribute if attribute.name == "post_transform").s = b"NONE"
    # each step reads what the one before it computes, the last one computes `output`
    names = [scores.output[1], *(f"{output}/{number}" for number in range(1, len(steps))), output]
    made = [
        helper.make_node(operator, [before], [after], domain=domain, **attributes)
        for (domain, operator, attributes), before, after in zip(steps, names[:-1], names[1:], strict=True)
    ]
    # weights are named after the label, so it stays that of the scores; the node itself still gives the probabilities
    classifier.output[0] = f"{classifier.output[0]}/with_probabilities"
    nodes[position:position] = [scores, *made]
    replace_entries(copy.graph, node=nodes)
    shape: list[str | int | None] = ["N", len(attributes_of(scores)["intercepts"])]
    copy.graph.value_info.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, shape))
    if "" not in opsets_of(copy):
        copy.opset_import.append(helper.make_opsetid("", 13))
    return copy


# -- what the loss reads


def readable_output(model: onnx.ModelProto) -> str:
    """Return the first output that a loss can read, or the scores behind the others; empty if there is neither."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    floats = (name for name, kind in kinds.items() if kind in FLOAT_TYPES)
    return next(floats, "") or next((name for name, _ in score_tensors(model.graph)), "")


def class_order(graph: onnx.GraphProto) -> list[str]:
    """Return the file's class labels as `class_labels` does; [] if they are 0, 1, 2, ...

    The labels of the data are places in this order, counted from 0, whatever the file calls the classes.
    """
    names = class_labels(graph)
    return [] if names == [str(number) for number in range(len(names))] else names


def class_labels(graph: onnx.GraphProto) -> list[str]:
    """Return the class labels that operators of ai.onnx.ml hold, in the order of the scores; [] if there are none."""
    order: list[Any] = []
    stored = Index(graph).stored
    for node in graph.node:
        if node.domain != ML_DOMAIN:
            continue
        labels = [value for name, value in attributes_of(node).items() if name.startswith("classlabels_")]
        # the converter of some classifiers looks the label up in a stored list, by the position of the greatest score
        if node.op_type == "ArrayFeatureExtractor" and node.input[0] in stored:
            labels = [stored_array(stored[node.input[0]]).flatten().tolist()]
        # the labels of the last node are those that the file returns
        order = next(filter(None, labels), order)
    return [str(label) for label in order]


def unreadable_output(
    model: onnx.ModelProto, output: str, types: Mapping[str, onnx.ValueInfoProto] | None = None
) -> str:
    """Return a sentence if an output has no gradient, with the tensor that the loss can read instead; else "".

    types: those of inner tensors, which inference finds; without them only the graph's outputs are looked at.
    """
    declared = {value.name: value for value in model.graph.output}
    value = declared.get(output) or (types or {}).get(output)
    # an output without a declared type may be anything
    if value is None or not value.type.WhichOneof("value"):
        return ""
    kind = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else None
    if kind in FLOAT_TYPES or kind == TensorProto.UNDEFINED:
        return ""
    if chosen := selection_before(model.graph, output):
        return (
            f"the loss cannot read output {output!r} ({describe_type(value)}), which has no gradient; {chosen.remedy}"
        )
    readable = [f"{name!r} ({what})" for name, what in score_tensors(model.graph)]
    floats = [name for name, other in declared.items() if other.type.tensor_type.elem_type in FLOAT_TYPES]
    readable += [f"{name!r}, with the loss mse or l1: the file has no tensor of scores before it" for name in floats]
    return (
        f"the loss cannot read output {output!r} ({describe_type(value)}), which has no gradient; set model.output to "
        f"{readable[0] if readable else 'the tensor of scores from which it is computed'}{_numbering(model.graph)}"
    )


def selected_output(model: onnx.ModelProto, output: str) -> tuple[str, str]:
    """Return (what, remedy) if an output of floats holds what a detector has chosen among its boxes; else ("", "").

    output: "" = the first one.
    """
    name = output or model.graph.output[0].name
    chosen = selection_before(model.graph, name)
    if chosen is None or unreadable_output(model, name):
        return "", ""
    what = f"output {name!r} holds what {chosen.operator} has chosen, not a result for each row; no gradient"
    return f"{what} reaches how it chooses", chosen.remedy


def _numbering(graph: onnx.GraphProto) -> str:
    names = class_order(graph)
    if not names:
        return ""
    shown = ", ".join(f"{number} = {name!r}" for number, name in enumerate(names[:10]))
    return f"; number the labels of the data in the file's order of classes: {shown}{', ...' if names[10:] else ''}"
