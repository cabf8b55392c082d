"""Which node of the ONNX file each call of the fx graph belongs to, kept through the passes.

    ONNX file                        fx graph, as lowered          after a pass
    MatMul "fc/MatMul"   h = x w     matmul      fc/MatMul         t        fc/Add
    Add    "fc/Add"      y = h + b   add         fc/Add            linear   fc/Add, fused with fc/MatMul

A call that a later rewrite inserts, such as a copy into a tensor-parallel region, has no origin of its own: it counts
to the node that reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import onnx
from torch import fx

from onward.trainer.onnx_graph.files.index import operator_of

ORIGIN = "origin"
FUSED = "fused"
"""Keys of `fx.Node.meta`: the Origin of a call; the Origins of the other nodes that it computes as well."""


@dataclass(frozen=True)
class Origin:
    """A node of the main graph of the ONNX file."""

    output: str
    """Its first output, which identifies it: names of nodes may be absent or equal."""
    name: str
    """Its name in the file; of a node without one, its first output."""
    operator: str


def mark_origin(graph: fx.Graph, recorded: int, node: onnx.NodeProto) -> None:
    """Note the ONNX node as the origin of every call that was recorded since the graph had `recorded` nodes."""
    output = next(filter(None, node.output), "")
    origin = Origin(output, node.name or output, operator_of(node))
    for call in itertools.islice(reversed(graph.nodes), max(0, len(graph.nodes) - recorded)):
        call.meta.setdefault(ORIGIN, origin)


def mark_fused(made: Iterable[fx.Node], new: fx.Node, old: fx.Node, erased: Iterable[fx.Node]) -> None:
    """Give calls that a pass has made the origin of the call that they replace.

    new: the one of them with its result. erased: calls that nothing reads any more; `new` computes their nodes, too.
    """
    origin: Origin | None = old.meta.get(ORIGIN)
    if origin is None:
        return
    # only those without one: a call that a pass reuses keeps its own
    for call in made:
        call.meta.setdefault(ORIGIN, origin)
    # a dictionary, which keeps the order and drops what several calls have in common
    computed = dict.fromkeys(new.meta.get(FUSED, ()))
    for call in (old, *erased):
        if call.op not in ("get_attr", "placeholder"):
            computed |= dict.fromkeys((*call.meta.get(FUSED, ()), call.meta.get(ORIGIN)))
    computed.pop(None, None)
    computed.pop(new.meta.setdefault(ORIGIN, origin), None)
    new.meta[FUSED] = tuple(computed)


def rename_origins(call: fx.Node, prefix: str) -> None:
    """Put a prefix before the names of the nodes that a call belongs to."""
    renamed = {
        origin: replace(origin, output=prefix + origin.output, name=prefix + origin.name)
        for origin in (*call.meta.get(FUSED, ()), *filter(None, [call.meta.get(ORIGIN)]))
    }
    if FUSED in call.meta:
        call.meta[FUSED] = tuple(renamed[origin] for origin in call.meta[FUSED])
    if ORIGIN in call.meta:
        call.meta[ORIGIN] = renamed[call.meta[ORIGIN]]


def origin_of(call: fx.Node) -> Origin | None:
    """Return the node of the file that a call belongs to: its own, else that of the nearest call that reads it."""
    origin: Origin | None = nearest(call, ORIGIN)
    return origin


def nearest(call: fx.Node, key: str) -> Any:
    """Return what the metadata of a call has under a key, else that of the nearest call that reads it; else None."""
    seen = set[fx.Node]()
    waiting = [call]
    while waiting:
        each = waiting.pop(0)
        if found := each.meta.get(key):
            return found
        if each not in seen:
            seen.add(each)
            waiting += [user for user in each.users if user.op != "output"]
    return None
