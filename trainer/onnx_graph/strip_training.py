"""Takes out of an ONNX graph what only training needs: dropout, stochastic depth, the learning of statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from onward.trainer.onnx_graph.stochastic_depth import find_branches


def strip_training(model: onnx.ModelProto, *, keep: Iterable[str] = (), base: Path | None = None) -> Counter[str]:
    """Bring a graph into its inference form, in place; returns what was taken out, by kind and number.

    Dropout nodes go, their readers read what they read; one whose result has a name that must stay (a graph
    output, one of `keep`, a value read by an inner graph, a mask in use) only loses its training mode.
    BatchNormalization keeps its running statistics as inputs and no longer computes new ones. Constants and
    initializers that nobody reads any more go too. The graphs inside nodes are treated alike; in the model's
    own functions Dropout only loses its training mode. Stochastic depth written out (stochastic_depth.py) goes from
    the main graph with all that was computed for it alone; `base`: where the model's external data is, for its numbers.
    """
    removed = _strip_depth(model, {*keep, *(value.name for value in model.graph.output)}, base)
    for function in model.functions:
        removed += _strip_nodes(function.node, pinned=None)
    for graph in (*_inner(node for function in model.functions for node in function.node), *_inner(model.graph.node)):
        removed += _strip_graph(graph, set(keep))
    return +(removed + _strip_graph(model.graph, set(keep)))


def _strip_depth(model: onnx.ModelProto, keep: set[str], base: Path | None) -> Counter[str]:
    if not (found := {branch.result: branch for branch in find_branches(model, base)}):
        return Counter()
    graph = model.graph
    read_before = _reads(graph)
    pinned = keep | _inner_reads(graph.node)
    renamed: dict[str, str] = {}
    for node in list(graph.node):
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if not node.output or node.output[0] not in found:
            continue
        value = found[node.output[0]].value
        value = renamed.get(value, value)
        if node.output[0] in pinned:
            node.CopyFrom(helper.make_node("Identity", [value], [node.output[0]], name=node.name))
        else:
            renamed[node.output[0]] = value
            graph.node.remove(node)
    _prune(graph, read_before)
    return Counter(branch.kind for branch in found.values())


def _strip_graph(graph: onnx.GraphProto, keep: set[str]) -> Counter[str]:
    read_before = _reads(graph)
    pinned = {*keep, *(value.name for value in graph.output)} | _inner_reads(graph.node)
    if removed := _strip_nodes(graph.node, pinned=pinned, read=read_before):
        _prune(graph, read_before)
    return removed


def _strip_nodes(nodes: Any, *, pinned: set[str] | None, read: set[str] | None = None) -> Counter[str]:
    """Strip nodes in place. pinned: names that must stay, None = all; read: names that somebody reads, None = all."""
    removed = Counter[str]()
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if _is(node, "Dropout"):
            if pinned is not None and not pinned & set(node.output) and not (read or set()) & set(node.output[1:]):
                removed["Dropout"] += 1
                renamed[node.output[0]] = node.input[0]
                continue
            removed["Dropout training mode"] += len(node.input) > 2
            del node.input[2:]
        kept.append(node)
        if _is(node, "BatchNormalization") and (len(node.output) > 1 or _mode(node)):
            removed["BatchNormalization update"] += 1
            kept += _freeze_statistics(node, set(node.output) if read is None else read)
    if removed := +removed:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del nodes[:]
        nodes.extend(copies)
    return removed


def _inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside nodes, the innermost first."""
    for node in nodes:
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _inner(graph.node)
                yield graph


def _freeze_statistics(node: onnx.NodeProto, read: set[str]) -> Iterable[onnx.NodeProto]:
    """Inference form of one BatchNormalization; yields what still gives its statistics to those who read them."""
    for result, statistic in zip(node.output[1:3], node.input[3:5], strict=False):
        if result in read:
            yield helper.make_node("Identity", [statistic], [result])
    del node.output[1:]
    for mode in _mode(node):
        node.attribute.remove(mode)


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _mode(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return [attribute for attribute in node.attribute if attribute.name == "training_mode"]


def _prune(graph: onnx.GraphProto, read_before: set[str]) -> None:
    """Remove what was read before and is not now, and the value descriptions of what is gone."""
    while idle := [node for node in graph.node if set(node.output) <= read_before - _reads(graph)]:
        for node in idle:
            graph.node.remove(node)
    unread = read_before - _reads(graph) - {value.name for value in graph.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in unread]:
        graph.initializer.remove(tensor)
    known = _reads(graph) | {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in known]:
        graph.value_info.remove(value)


def _reads(graph: onnx.GraphProto) -> set[str]:
    """Every name read: by nodes, by inner graphs, as output."""
    names = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    return (names | _inner_reads(graph.node)) - {""}


def _inner_reads(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return set().union(*map(_reads, _inner(nodes)))
