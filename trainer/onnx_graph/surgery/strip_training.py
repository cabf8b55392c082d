"""Bring an ONNX graph from its training form into its inference form.

Dropout(x)                                                  ->  x
x / k * floor(k + uniform)        (stochastic_depth.py)     ->  x
BatchNormalization(training_mode=1) -> y, mean, var         ->  BatchNormalization -> y;  Identity -> mean, var
                                                                only with running statistics (training_norms.py)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper

from onward.trainer.onnx_graph.files.index import attributes_of, inner_graphs, nodes_inside
from onward.trainer.onnx_graph.files.operators import is_operator
from onward.trainer.onnx_graph.surgery.stochastic_depth import find_branches
from onward.trainer.onnx_graph.surgery.training_norms import Scope, TrainingNorm, training_norms


@dataclass(frozen=True)
class TrainingForm:
    """What a file computes in another way than its inference form does."""

    norms: int
    """BatchNormalization nodes with running statistics that normalise by the batch."""
    draws: int
    """Dropout nodes that are in training mode, and masks of stochastic depth and of dropout written out."""

    def __bool__(self) -> bool:
        return bool(self.norms or self.draws)


def training_form(model: onnx.ModelProto, base: Path | None = None) -> TrainingForm:
    """Return how many nodes of a model are in training form, those in inner graphs and functions included."""
    norms = sum(not norm.placeholder for norm in training_norms(model))
    dropouts = 0
    for body in (model.graph, *model.functions):
        nodes = list(nodes_inside(body.node))
        constants = [node for node in nodes if node.op_type == "Constant"]
        # an absent operand is false, too
        off = {"", *(node.output[0] for node in constants if _is_false(node))}
        if isinstance(body, onnx.GraphProto):
            booleans = [tensor for tensor in body.initializer if tensor.data_type == onnx.TensorProto.BOOL]
            off |= {tensor.name for tensor in booleans if not numpy_helper.to_array(tensor).any()}
        drops = [node for node in nodes if is_operator(node, "Dropout")]
        # a training mode that is computed counts: it may be true
        modes = [node.input[2] for node in drops if node.input[2:]]
        dropouts += sum(mode not in off for mode in modes)
    return TrainingForm(norms, dropouts + len(list(find_branches(model, base))))


def _is_false(constant: onnx.NodeProto) -> bool:
    value = attributes_of(constant).get("value")
    if not isinstance(value, onnx.TensorProto) or value.data_type != onnx.TensorProto.BOOL:
        return False
    return not numpy_helper.to_array(value).any()


def strip_training(
    model: onnx.ModelProto, *, keep: Iterable[str] = (), base: Path | None = None, norms: bool = True
) -> Counter[str]:
    """Convert a model in place; return how many nodes of each kind were removed or changed.

    Dropout nodes are removed. A Dropout whose result must keep its name (a graph output, one of `keep`, a value that
    an inner graph reads, a mask that is read) only loses its training mode, as in the functions of a model.
    BatchNormalization keeps its running statistics as inputs and computes no new ones; a node that has none stays as it
    is, in training form. Stochastic depth is removed from
    the main graph. Constants and initializers that nothing reads afterwards are removed too. Inner graphs are converted
    alike. base: the directory of external data. norms: False leaves BatchNormalization in training form.
    """
    keep = set(keep)
    running = defaultdict[Scope, dict[str, TrainingNorm]](dict)
    if norms:
        for norm in training_norms(model):
            if not norm.placeholder:
                running[norm.scope][norm.result] = norm
    removed = _strip_stochastic_depth(model, {*keep, *(value.name for value in model.graph.output)}, base)
    for function in model.functions:
        own = running[function.domain, function.name, function.overload]
        # the results of a function are read by its callers, so that no name may go
        removed += _strip_nodes(function.node, own, pinned=None)
        for graph in _innermost_first(function.node):
            removed += _strip_graph(graph, own, keep)
    for graph in _innermost_first(model.graph.node):
        removed += _strip_graph(graph, running[()], keep)
    return +(removed + _strip_graph(model.graph, running[()], keep))


def _strip_stochastic_depth(model: onnx.ModelProto, keep: set[str], base: Path | None) -> Counter[str]:
    branches = {branch.result: branch for branch in find_branches(model, base)}
    if not branches:
        return Counter()
    graph = model.graph
    read_before = _names_read_in(graph)
    pinned = keep | _names_read_inside(graph.node)
    renamed: dict[str, str] = {}
    for node in list(graph.node):
        for slot, name in enumerate(node.input):
            node.input[slot] = renamed.get(name, name)
        if not node.output or node.output[0] not in branches:
            continue
        # the value may itself be the result of a mask before it
        value = branches[node.output[0]].value
        value = renamed.get(value, value)
        # an inner graph or the caller refers to the value by this name
        if node.output[0] in pinned:
            node.CopyFrom(helper.make_node("Identity", [value], [node.output[0]], name=node.name))
        else:
            renamed[node.output[0]] = value
            graph.node.remove(node)
    _prune(graph, read_before)
    return Counter(branch.kind for branch in branches.values())


def _strip_graph(graph: onnx.GraphProto, norms: Mapping[str, TrainingNorm], keep: set[str]) -> Counter[str]:
    read_before = _names_read_in(graph)
    pinned = {*keep, *(value.name for value in graph.output)} | _names_read_inside(graph.node)
    if removed := _strip_nodes(graph.node, norms, pinned=pinned, read=read_before):
        _prune(graph, read_before)
    return removed


def _strip_nodes(
    nodes: Any, norms: Mapping[str, TrainingNorm], *, pinned: set[str] | None, read: set[str] | None = None
) -> Counter[str]:
    """Convert nodes in place. pinned: names that must stay; read: names that are read. None means all names.

    norms: the nodes in training form that have running statistics, by their first output.
    """
    removed = Counter[str]()
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in nodes:
        for slot, name in enumerate(node.input):
            # nodes are sorted topologically, so what a removed node computed has its new name before it is read
            node.input[slot] = renamed.get(name, name)
        if is_operator(node, "Dropout"):
            is_free = pinned is not None and not pinned & set(node.output)
            # its further output is the mask
            is_mask_read = bool((read or set()) & set(node.output[1:]))
            if is_free and not is_mask_read:
                removed["Dropout"] += 1
                renamed[node.output[0]] = node.input[0]
                continue
            removed["Dropout training mode"] += len(node.input) > 2
            # the third input of Dropout is training_mode, whose default is false
            del node.input[2:]
        kept.append(node)
        if is_operator(node, "BatchNormalization") and (norm := norms.get(node.output[0])) is not None:
            removed["BatchNormalization update"] += 1
            kept += _freeze_statistics(node, norm, set(node.output) if read is None else read)
    # `+` leaves out the kinds of which there were none
    if removed := +removed:
        # `del nodes[:]` invalidates references to the nodes, so copy them before
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del nodes[:]
        nodes.extend(copies)
    return removed


def _innermost_first(nodes: Iterable[onnx.NodeProto]) -> list[onnx.GraphProto]:
    """Return the graphs inside nodes, inner ones before those that contain them."""
    return list(inner_graphs(nodes))[::-1]


def _freeze_statistics(node: onnx.NodeProto, norm: TrainingNorm, read: set[str]) -> Iterable[onnx.NodeProto]:
    """Convert one BatchNormalization; yield an Identity for each statistic that other nodes read."""
    for result, statistic in zip(node.output[1:3], node.input[3:5], strict=False):
        if result in read:
            # in inference form the statistics are not updated: the outputs are the inputs
            yield helper.make_node("Identity", [statistic], [result])
    del node.output[1:]
    for mode in [attribute for attribute in node.attribute if attribute.name in ("training_mode", "is_test")]:
        node.attribute.remove(mode)
    if norm.opset < 7:  # where the training form is the default
        node.attribute.append(helper.make_attribute("is_test", 1))


def _prune(graph: onnx.GraphProto, read_before: set[str]) -> None:
    """Remove nodes and initializers whose results were read before and are not now, and their value_info."""
    # removing a node may leave the nodes before it without readers
    # only what was read before: a node that nothing read in the original file is the user's, and stays
    while unused := [node for node in graph.node if set(node.output) <= read_before - _names_read_in(graph)]:
        for node in unused:
            graph.node.remove(node)
    unread = read_before - _names_read_in(graph) - {value.name for value in graph.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in unread]:
        graph.initializer.remove(tensor)
    known = _names_read_in(graph) | {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in known]:
        graph.value_info.remove(value)


def _names_read_in(graph: onnx.GraphProto) -> set[str]:
    """Return every name that is read by nodes, by inner graphs or as an output."""
    return _names_read_by([graph, *inner_graphs(graph.node)])


def _names_read_inside(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return _names_read_by(inner_graphs(nodes))


def _names_read_by(graphs: Iterable[onnx.GraphProto]) -> set[str]:
    names = set[str]()
    for graph in graphs:
        names.update(value.name for value in graph.output)
        names.update(name for node in graph.node for name in node.input)
    return names - {""}
