"""Lower an ONNX graph node by node: translate each node into calls recorded by a tracer.

What lowers a node, in this order:

    1. a function of the model itself             node.domain / op_type / overload in model.functions
    2. a converter that the user registered       converters.py
    3. an operator rule                           registry.py, ops/
    4. the function body that ONNX defines        function_bodies.py, lowered in turn
    5. onnx2torch's converter                     converters.py

A rule that raises NeedsRuntimeValues is lowered as a RuntimeNode: the same rule runs when the graph runs. Nodes that
nothing lowers are collected as problems, so that all of them are reported at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import defs
from torch.utils import _pytree as pytree

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.beyond_onnx import is_note_of_a_tool
from onward.trainer.onnx_graph.files.index import bodies_of, domain_of, nodes_inside, operator_of, opsets_of, subgraphs
from onward.trainer.onnx_graph.files.operators import functions_of, name_of
from onward.trainer.onnx_graph.shape_inference import Probes
from onward.trainer.onnx_graph.surgery.training_norms import BATCH_STATISTICS
from onward.trainer.onnx_import.lowering import converters
from onward.trainer.onnx_import.lowering.converter_table import RULES, Call, run_rule
from onward.trainer.onnx_import.lowering.converters import onnx2torch_converter, user_converter
from onward.trainer.onnx_import.lowering.function_bodies import (
    function_body,
    has_definition,
    hoist_stored_tensors,
    local_body,
    outer_names_read,
)
from onward.trainer.onnx_import.lowering.node_origins import mark_origin
from onward.trainer.onnx_import.lowering.runtime_node import LocalFunctions, NodeContext, RuntimeNode
from onward.trainer.onnx_import.tracing.eager import EagerTracer
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value

Body = onnx.GraphProto | onnx.FunctionProto


# cached: a graph has thousands of nodes and tens of operators, and is lowered once for each pair of trial sizes
@functools.cache
def _since(operator: str, opset: int, domain: str) -> int:
    try:
        return int(defs.get_schema(operator, opset, domain).since_version)
    except defs.SchemaError:
        # an operator of a domain that ONNX does not define, such as com.microsoft: its version is that of the domain
        return opset


def since_version(node: onnx.NodeProto, opset: int) -> int:
    """Return the version of the operator (ONNX's `since_version`) that is in force in an opset."""
    return _since(node.op_type, opset, domain_of(node))


def node_label(node: onnx.NodeProto, opset: int) -> str:
    """Return the node as messages name it, such as "node 'relu_1': Relu-14"."""
    return f"node {name_of(node)!r}: {operator_of(node)}-{since_version(node, opset)}"


def unknown_operators(model: onnx.ModelProto) -> list[str]:
    """Return a sentence for every node that nothing can lower, including those in inner graphs and functions."""
    unknown = [node_label(node, opset) for node, opset, route in _routes(model) if route == "nothing"]
    return list(dict.fromkeys(f"{label}: it is not implemented" for label in unknown))


def list_operators(model: onnx.ModelProto) -> Iterable[tuple[str, int, str]]:
    """Yield (operator, version, what lowers it) of every node, including those in inner graphs and functions."""
    for node, opset, route in _routes(model):
        yield operator_of(node), since_version(node, opset), route


def _routes(model: onnx.ModelProto) -> Iterable[tuple[onnx.NodeProto, int, str]]:
    """Yield (node, opset, what lowers it) of every node, including those in inner graphs and functions."""
    functions = functions_of(model)
    for nodes, opsets in bodies_of(model):
        for node in nodes_inside(nodes):
            opset = opsets.get(domain_of(node), 1)
            yield node, opset, "function" if _function(node, functions) is not None else _route(node, opset)


def _function(node: onnx.NodeProto, functions: LocalFunctions) -> onnx.FunctionProto | None:
    return functions.get((node.domain, node.op_type, node.overload))


def _route(node: onnx.NodeProto, opset: int) -> str:
    """Return what lowers a node, in the words that `onward doctor` prints."""
    version = since_version(node, opset)
    if user_converter(node, version) is not None:
        return "your converter"
    if _rule(node, version) is not None:
        return "rule"
    if has_definition(node, opset):
        return "definition"
    return "nothing" if onnx2torch_converter(node, version) is None else "onnx2torch"


def _rule(node: onnx.NodeProto, version: int) -> Any:
    return RULES.get((operator_of(node), version))


def _without_unread(node: onnx.NodeProto, read: set[str]) -> onnx.NodeProto:
    """Return the node without the outputs that nothing reads, so that rules need not compute them."""
    # the number of a Split's outputs says into how many parts it splits
    if len(node.output) < 2 or node.op_type == "Split":
        return node
    if all(name in read for name in node.output):
        return node
    lean = deepcopy(node)
    # blanked and not removed, because ONNX identifies outputs by position
    lean.output[:] = [name if name in read else "" for name in node.output]
    return lean


def lower_eagerly(
    node: onnx.NodeProto, values: Mapping[str, Value], context: NodeContext, tracer: EagerTracer
) -> Sequence[Value]:
    """Compute one node on real tensors; a RuntimeNode calls this when the graph runs."""
    return GraphLowering(tracer, onnx.GraphProto(), context.functions).lower(node, {"": None, **values}, context.opsets)


@dataclass
class GraphLowering:
    """Lowers the nodes of a graph in their order and collects the problems of all of them."""

    tracer: Tracer
    graph: onnx.GraphProto
    """The whole graph; onnx2torch converters read initializers and types from it."""
    functions: LocalFunctions = field(default_factory=dict)
    base: Any = None
    """The directory of external data."""
    problems: list[str] = field(default_factory=list)
    shapes: Callable[[], Mapping[str, Probes]] = dict
    """Returns the probes of values of the main graph that ONNX's shape inference knows."""
    before: Callable[[onnx.NodeProto, dict[str, Value]], None] = lambda node, values: None
    """Called for each node of the main graph before it is lowered."""
    depth: int = 0
    """How many function bodies and inner graphs the current node is in; `shapes` does not apply there."""

    @property
    def eager(self) -> bool:
        return isinstance(self.tracer, EagerTracer)

    def run(self, body: Body, values: dict[str, Value], opsets: Mapping[str, int]) -> None:
        """Lower every node of a graph or a function body and add the results to `values`, by name."""
        returned = (output if isinstance(output, str) else output.name for output in body.output)
        # with the names that inner graphs read: they are not inputs of the node, but must be kept as well
        read = {*returned, *(name for node in body.node for name in (*node.input, *outer_names_read(node)))}
        for node in body.node:
            if node.op_type == "Constant" and node.output[0] in values:
                continue  # the tensor was registered with the initializers
            if not all(name in values for name in (*node.input, *outer_names_read(node))):
                continue  # it depends on a node with a problem, which is reported once
            if not self.depth:
                # scales that follow what is trained are put in the place of the stored ones before their first reader
                self.before(node, values)
            recorded = len(self.tracer.graph.nodes)
            try:
                results = self._node(node if self.eager else _without_unread(node, read), values, opsets)
            except UnsupportedNode as error:
                problem = f"{node_label(node, opsets.get(domain_of(node), 1))}: {error}"
                # when the graph runs there is no report in which problems could be collected
                if self.eager:
                    raise UnsupportedNode(problem) from error
                self.problems.append(problem)
            else:
                values.update(zip(node.output, results, strict=False))
                # ONNX names an absent optional operand "", and zip has just stored a result under it if an output was
                # absent
                values[""] = None
                for name, result in zip(node.output, results, strict=False):
                    if isinstance(result, Traced):
                        result.node.meta["onnx"] = (*result.node.meta.get("onnx", ()), name)  # names for cuts
                if not self.depth and not self.eager:
                    mark_origin(self.tracer.graph, recorded, node)

    def _node(self, node: onnx.NodeProto, values: dict[str, Value], opsets: Mapping[str, int]) -> Sequence[Value]:
        """Lower one node; as a RuntimeNode if its rule needs values that are known only when the graph runs."""
        if self.eager:
            return self.lower(node, values, opsets)
        # a RuntimeNode owns no tensors, so stored tensors of inner graphs must become operands
        # Hoisted whether or not the node becomes a RuntimeNode: the rule may notice only after it has lowered the body
        # that it needs values.
        if any(subgraphs(node)):
            node, constants = hoist_stored_tensors(node, self.base)
            values.update(constants)
        try:
            return self.lower(node, values, opsets)
        except NeedsRuntimeValues:
            self._check_attributes(node, opsets.get(domain_of(node), 1))
            return self._runtime_node(node, values, opsets)

    def _check_attributes(self, node: onnx.NodeProto, opset: int) -> None:
        """Refuse attributes that the operator does not have; the rule itself has not read its attributes yet."""
        try:
            known = defs.get_schema(node.op_type, opset, domain_of(node)).attributes
        except defs.SchemaError:
            return
        given = {attribute.name for attribute in node.attribute}
        if unread := [name for name in sorted(given - {*known, BATCH_STATISTICS}) if not is_note_of_a_tool(name)]:
            raise UnsupportedNode(f"attribute {', '.join(unread)} is not implemented")

    def _runtime_node(
        self, node: onnx.NodeProto, values: dict[str, Value], opsets: Mapping[str, int]
    ) -> Sequence[Value]:
        context = NodeContext(opsets, self.functions)
        names = list(dict.fromkeys(name for name in (*node.input, *outer_names_read(node)) if name))
        args = [self.tracer.to_tensor(values[name]) for name in names]
        # all operands are constants: compute the result now
        if not any(isinstance(value, Traced) for value in pytree.tree_leaves(args)):
            tracer = EagerTracer(torch.device("cpu"), training=self.tracer.training)
            with torch.no_grad():
                return lower_eagerly(node, dict(zip(names, args, strict=True)), context, tracer)
        # names inside a function body or an inner graph are local, and may be those of other values of the main graph
        known = {} if self.depth else self.shapes()
        # a result whose shape ONNX's inference knows can be traced further; else its readers run at run time, too
        results = [known.get(output) for output in node.output]
        statistics = {name for name, arg in zip(names, args, strict=True) if self.tracer.is_running_statistic(arg)}
        module = RuntimeNode(node, names, context, lower_eagerly, statistics=statistics)
        return self.tracer.add_runtime_node(name_of(node), module, args, results)

    def lower(self, node: onnx.NodeProto, values: dict[str, Value], opsets: Mapping[str, int]) -> Sequence[Value]:
        """Lower one node by the first of the ways listed at the top of this file."""
        opset = opsets.get(domain_of(node), 1)
        operands = [values[name] for name in node.input]
        if (function := _function(node, self.functions)) is not None:
            return self._lower_function(node, local_body(function, node), values, opsets)
        version = since_version(node, opset)
        rule = _rule(node, version)
        converter = user_converter(node, version)
        # a converter of the user goes before the rule: it is how one replaces a rule that is wrong for one's model
        if converter is None and rule is not None:

            def run_body(body: onnx.GraphProto, inputs: Sequence[Value]) -> list[Value]:
                return self._lower_subgraph(body, inputs, values, opsets)

            return run_rule(Call(node, version, self.tracer, run_body=run_body), rule, operands)
        # ONNX's function body before onnx2torch's converter: the body follows the standard for every attribute
        body = function_body(node, opset, operands)
        converter = converter or (None if body is not None else onnx2torch_converter(node, version))
        if converter is not None:
            return converters.run_converter(converter, node, graph=self.graph, operands=operands, tracer=self.tracer)
        if body is None:
            raise UnsupportedNode("it is not implemented")
        return self._lower_function(node, body, values, opsets)

    def _lower_function(
        self, node: onnx.NodeProto, body: onnx.FunctionProto, outer: Mapping[str, Value], opsets: Mapping[str, int]
    ) -> Sequence[Value]:
        """Lower a function body in place of the node that calls it, in the opsets that the body imports."""
        inner: dict[str, Value] = {
            name: outer[name] for name in outer_names_read(node)
        }  # some bodies contain the node's inner graphs
        # the call may pass fewer operands than the function has formal inputs; the absent ones are optional
        inner.update({"": None, **dict.fromkeys(body.input, None)})
        inner.update(zip(body.input, (outer[name] for name in node.input), strict=False))
        # a body declares its own opsets, and its nodes have the semantics of these and not of the model's
        self._run_nested(body, inner, {**opsets, **opsets_of(body)}, "definition")
        # formal outputs that the node uses must be computed; others may be missing
        wanted = [formal for formal, actual in zip(body.output, node.output, strict=False) if actual]
        if missing := [name for name in wanted if name not in inner]:
            raise UnsupportedNode(f"its definition does not compute {', '.join(missing)}")
        return [inner.get(name) for name in body.output][: len(node.output)]

    def _lower_subgraph(
        self, body: onnx.GraphProto, inputs: Sequence[Value], outer: Mapping[str, Value], opsets: Mapping[str, int]
    ) -> list[Value]:
        """Lower an inner graph, which may read outer-scope values; return its results."""
        inner = {**outer, **dict(zip((value.name for value in body.input), inputs, strict=False))}
        self._run_nested(body, inner, opsets, "body")
        return [inner[value.name] for value in body.output]

    def _run_nested(self, body: Body, values: dict[str, Value], opsets: Mapping[str, int], what: str) -> None:
        """Lower nested nodes. The first problem among them becomes the problem of the outer node."""
        # problems of nested nodes are appended to the common list and taken off again below
        before = len(self.problems)
        self.depth += 1
        try:
            self.run(body, values, opsets)
        finally:
            self.depth -= 1
        # the user cannot see nodes of a function body, so the message is about the node that calls it
        if len(self.problems) > before:
            causes = self.problems[before:]
            del self.problems[before:]
            raise UnsupportedNode(f"in its {what}, {causes[0]}")
