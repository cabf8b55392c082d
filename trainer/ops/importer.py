"""The import itself: an ONNX graph walked node by node onto an fx graph, whatever is refused being collected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import torch
from onnx import defs
from torch import fx, nn

from trainer.ops import foreign
from trainer.ops.bodies import function_body, has_definition
from trainer.ops.roles import Role
from trainer.ops.table import RULES, Call, run_rule
from trainer.ops.tracing import Tracer
from trainer.ops.values import Unsupported, Value, torch_dtype


def unknown_operators(model: onnx.ModelProto) -> list[str]:
    """A sentence for every node no rule, converter or definition exists for."""
    opsets = _opsets(model)
    problems = []
    for node in model.graph.node:
        opset = opsets.get(_domain(node), 1)
        if not _known(node, opset):
            version = _since(node, opset)
            problems.append(f"node {node.name or node.output[0]!r}: {_label(node)}-{version}: it is not implemented")
    return problems


def _known(node: onnx.NodeProto, opset: int) -> bool:
    version = _since(node, opset)
    if _domain(node) == "" and (node.op_type, version) in RULES:
        return True
    if _domain(node) == "" and has_definition(node, opset):
        return True
    return (foreign.users_converter(node, version) or foreign.stock_converter(node, version)) is not None


def _opsets(model: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _label(node: onnx.NodeProto) -> str:
    return f"{_domain(node)}.{node.op_type}" if _domain(node) else node.op_type


def _since(node: onnx.NodeProto, opset: int) -> int:
    """The opset in which the operator took the meaning it has in `opset`."""
    try:
        return int(defs.get_schema(node.op_type, opset, _domain(node)).since_version)
    except defs.SchemaError:
        return opset


def _without_unread(node: onnx.NodeProto, read: set[str]) -> onnx.NodeProto:
    """The node with the outputs nobody reads left out: rules then need not compute them."""
    if len(node.output) < 2 or node.op_type == "Split" or all(name in read for name in node.output):
        return node
    lean = onnx.NodeProto()
    lean.CopyFrom(node)
    lean.output[:] = [name if name in read else "" for name in node.output]
    return lean


# -- the sizes a graph is tried at

Lengths = Mapping[tuple[str, int], tuple[int, int]]
"""(input, dimension) -> the two lengths it is tried at."""

SMALL = ((3, 5), (7, 11), (13, 19), (17, 29), (23, 41), (31, 47))
"""Lengths for the batch and the other dynamic dimensions; no two pairs have the same difference or ratio."""
LARGE = ((3, 5), (224, 320), (256, 416), (288, 512), (352, 640), (384, 736))
"""The same for images of dynamic size, which a network halves several times."""


def plans(graph: onnx.GraphProto, stored: set[str]) -> Iterable[tuple[Lengths, int | None]]:
    """Sets of sizes to try, with the batch size the file declares if it is to be set free."""
    inputs = [value for value in graph.input if value.name not in stored]
    leading = {value.type.tensor_type.shape.dim[0].dim_value for value in inputs if value.type.tensor_type.shape.dim}
    batch = leading.pop() if len(leading) == 1 and 0 not in leading else None
    for free in [batch, None] if batch else [None]:
        for table in (SMALL, LARGE):
            yield _lengths(inputs, table, free_batch=free is not None), free


def _lengths(inputs: Sequence[onnx.ValueInfoProto], table: tuple[tuple[int, int], ...], *, free_batch: bool) -> Lengths:
    symbols: dict[str, int] = {"": 0}  # the batch comes first, whatever its name
    lengths: dict[tuple[str, int], tuple[int, int]] = {}
    for value in inputs:
        for position, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value > 0 and not (free_batch and position == 0):
                lengths[value.name, position] = (dim.dim_value, dim.dim_value)
                continue
            unnamed = "" if position == 0 else f"{value.name}[{position}]"
            if position == 0 and dim.dim_param:
                symbols.setdefault(dim.dim_param, 0)
            number = symbols.setdefault(dim.dim_param or unnamed, len(set(symbols.values())))
            first, second = table[number % len(table)]
            further = number // len(table)
            lengths[value.name, position] = (first + 50 * further, second + 90 * further)
    return lengths


# -- node by node


@dataclass
class Importer:
    """Walks the nodes; collects what is refused instead of stopping at the first."""

    model: onnx.ModelProto
    tracer: Tracer
    roles: Mapping[str, Role]
    batch: int | None
    problems: list[str] = field(default_factory=list)
    onnx_names: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        stored = {tensor.name for tensor in self.model.graph.initializer}
        return [value for value in self.model.graph.input if value.name not in stored]

    def build(self, stored: Mapping[str, torch.Tensor], lengths: Lengths) -> fx.Graph:
        """The whole graph on the tracer's fx graph, outputs last."""
        values: dict[str, Value] = {"": None}
        for value in self.inputs:
            self._input(value, lengths, values)
        for name, tensor in stored.items():
            values[name] = self._stored(name, tensor)
        self._run(self.model.graph, values, _opsets(self.model))
        missing = [value.name for value in self.model.graph.output if value.name not in values]
        if not self.problems and missing:
            self.problems.append(f"no node computes the graph's output {', '.join(missing)}")
        if not self.problems:
            sequences = [value.name for value in self.model.graph.output if isinstance(values[value.name], list)]
            self.problems += [f"output {name!r} is a sequence, not a tensor" for name in sequences]
        if not self.problems:
            outputs = tuple(self.tracer.to_tensor(values[value.name]) for value in self.model.graph.output)
            nodes = self.tracer._nodes(outputs)
            self.tracer.graph.output(nodes[0] if len(nodes) == 1 else nodes)
        return self.tracer.graph

    def _input(self, value: onnx.ValueInfoProto, lengths: Lengths, values: dict[str, Value]) -> None:
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            self.problems.append(f"input {value.name!r} is not a tensor of known rank")
            return
        try:
            dtype = torch_dtype(kind.elem_type)
        except Unsupported as error:
            self.problems.append(f"input {value.name!r}: {error}")
            return
        shapes = [[lengths[value.name, dim][side] for dim in range(len(kind.shape.dim))] for side in (0, 1)]
        probes = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        argument = "".join(c if c.isalnum() and c.isascii() else "_" for c in value.name)
        values[value.name] = self.tracer.placeholder(f"{argument}", (probes[0], probes[1]))

    def _stored(self, name: str, tensor: torch.Tensor) -> Value:
        role = self.roles.get(name)
        if role is None or role.kind == "frozen":
            return tensor
        traced = self.tracer.tensor(name, nn.Parameter(tensor) if role.kind == "trained" else tensor)
        self.onnx_names[str(traced.node.target)] = name
        return traced

    def _run(
        self, body: onnx.GraphProto | onnx.FunctionProto, values: dict[str, Value], opsets: Mapping[str, int]
    ) -> None:
        """Lower every node of a graph or a definition; the results go into `values`, by name."""
        returned = (output if isinstance(output, str) else output.name for output in body.output)
        read = {*returned, *(name for node in body.node for name in node.input)}
        for node in body.node:
            if node.op_type == "Constant" and node.output[0] in values:
                continue  # its tensor is stored
            if not all(name in values for name in node.input):
                continue  # it depends on a node that was refused
            try:
                results = self._lower(_without_unread(node, read), values, opsets.get(_domain(node), 1))
            except Unsupported as error:
                version = _since(node, opsets.get(_domain(node), 1))
                self.problems.append(f"node {node.name or node.output[0]!r}: {_label(node)}-{version}: {error}")
            else:
                values.update(zip(node.output, results, strict=False))
                values[""] = None

    def _lower(self, node: onnx.NodeProto, values: dict[str, Value], opset: int) -> Sequence[Value]:
        """The user's converter, else our rule, else onnx2torch's converter, else ONNX's own definition."""
        version = _since(node, opset)
        operands = [values[name] for name in node.input]
        rule = RULES.get((node.op_type, version)) if _domain(node) == "" else None
        converter = foreign.users_converter(node, version)
        if converter is None and rule is not None:
            return run_rule(Call(node, version, self.tracer, batch=self.batch), rule, operands)
        body = function_body(node, opset, operands) if _domain(node) == "" else None
        converter = converter or (None if body is not None else foreign.stock_converter(node, version))
        if converter is not None:
            return foreign.run_converter(converter, node, graph=self.model.graph, operands=operands, tracer=self.tracer)
        if body is None:
            raise Unsupported("it is not implemented")
        return self._expand(node, body, operands)

    def _expand(self, node: onnx.NodeProto, body: onnx.FunctionProto, operands: Sequence[Value]) -> Sequence[Value]:
        """Import a definition in place of the node it defines."""
        inner: dict[str, Value] = {"": None, **dict.fromkeys(body.input, None)}
        inner.update(zip(body.input, operands, strict=False))
        before = len(self.problems)
        self._run(body, inner, _opsets(body))
        if len(self.problems) > before:
            causes = self.problems[before:]
            del self.problems[before:]
            raise Unsupported(f"in its definition, {causes[0]}")
        wanted = [formal for formal, actual in zip(body.output, node.output, strict=False) if actual]
        if missing := [name for name in wanted if name not in inner]:
            raise Unsupported(f"its definition does not compute {', '.join(missing)}")
        return [inner.get(name) for name in body.output][: len(node.output)]
