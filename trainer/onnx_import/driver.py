"""The import itself: the sizes a graph is tried at, its inputs, weights and outputs, and the best attempt."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from onnx import TensorProto
from torch import fx, nn

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.element_types import PACKED, Unsupported, Value, torch_dtype
from onward.trainer.onnx_graph.shape_inference import inferred
from onward.trainer.onnx_import.lowering import Walk, functions_of, opsets_of, unknown_operators
from onward.trainer.onnx_import.roles import Role
from onward.trainer.onnx_import.tracing import Traced, Tracer

# -- the sizes a graph is tried at

Lengths = Mapping[tuple[str, int], tuple[int, int]]
"""(input, dimension) -> the two lengths it is tried at."""

SMALL = ((3, 5), (7, 11), (13, 19), (17, 29), (23, 41), (31, 47))
"""Lengths for the batch and the other dynamic dimensions; no two pairs have the same difference or ratio."""
LARGE = ((3, 5), (224, 320), (256, 416), (288, 512), (352, 640), (384, 736))
"""The same for images of dynamic size, which a network halves several times."""
MIXED = ((6, 17), (40, 171), (66, 229), (98, 309), (130, 357), (162, 425))
"""An even and an odd one, their difference a prime: nor do remainders agree, nor numbers of blocks."""
SHORT = ((3, 5), (7, 11), (6, 9), (8, 13), (4, 10), (2, 12))
"""For tables of few rows, such as the positions of a network of short sequences."""


def plans(graph: onnx.GraphProto, stored: set[str]) -> Iterable[tuple[Lengths, int | None]]:
    """Sets of sizes to try, with the batch size the file declares if it is to be set free."""
    inputs = [value for value in graph.input if value.name not in stored]
    leading = {value.type.tensor_type.shape.dim[0].dim_value for value in inputs if value.type.tensor_type.shape.dim}
    batch = leading.pop() if len(leading) == 1 and 0 not in leading else None
    for free in [batch, None] if batch else [None]:
        for table in (SMALL, LARGE, MIXED, SHORT):
            yield _lengths(inputs, table, free_batch=free is not None), free
    if any(_is_empty(dim) for value in inputs for dim in value.type.tensor_type.shape.dim):
        yield _lengths(inputs, SMALL, free_batch=False, empty=True), None


def _is_empty(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether a length of 0 is declared: some exporters mean by it that the length is not known."""
    return dim.HasField("dim_value") and dim.dim_value == 0


def _lengths(
    inputs: Sequence[onnx.ValueInfoProto], table: tuple[tuple[int, int], ...], *, free_batch: bool, empty: bool = False
) -> Lengths:
    symbols: dict[str, int] = {"": 0}  # the batch comes first, whatever its name
    lengths: dict[tuple[str, int], tuple[int, int]] = {}
    for value in inputs:
        for position, dim in enumerate(value.type.tensor_type.shape.dim):
            fixed = dim.dim_value > 0 or (empty and _is_empty(dim))
            if fixed and not (free_batch and position == 0):
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


# -- the graph


@dataclass
class Importer:
    """One attempt: the whole graph, at one plan's sizes."""

    model: onnx.ModelProto
    tracer: Tracer
    roles: Mapping[str, Role]
    batch: int | None
    base: Path | None = None
    """The directory of external data that was not loaded."""
    problems: list[str] = field(default_factory=list)
    onnx_names: dict[str, str] = field(default_factory=dict)

    @property
    def cost(self) -> tuple[int, int, int]:
        """How many nodes are refused, how much is assumed of lengths, how many are leaves."""
        return len(self.problems), len(self.tracer.assumed), len(self.tracer.leaves)

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
        graph = self.model.graph
        walk = Walk(self.tracer, graph, functions_of(self.model), self.batch, self.base, self.problems)
        if self.batch is None:  # a batch set free contradicts the shapes that such a file has as constants
            walk.shapes = functools.cache(lambda: inferred(self.model, stored, lengths))
        walk.run(graph, values, opsets_of(self.model))
        missing = [value.name for value in graph.output if value.name not in values]
        if not self.problems and missing:
            self.problems.append(f"no node computes the graph's output {', '.join(missing)}")
        if not self.problems:
            outputs = tuple(self._output(value, values[value.name]) for value in graph.output)
            nodes = self.tracer._nodes(outputs)
            self.tracer.graph.output(nodes[0] if len(nodes) == 1 else nodes)
        return self.tracer.graph

    def _input(self, value: onnx.ValueInfoProto, lengths: Lengths, values: dict[str, Value]) -> None:
        kind = value.type.tensor_type
        argument = "".join(c if c.isalnum() and c.isascii() else "_" for c in value.name)
        if (
            not argument.isidentifier()
            or keyword.iskeyword(argument)
            or argument in (*fx.graph._custom_builtins, "self")
        ):
            argument = f"input_{argument}"
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):  # a sequence, or of any rank
            values[value.name] = self.tracer.placeholder(argument, None)
            return
        try:
            dtype = torch_dtype(kind.elem_type)
        except Unsupported as error:
            self.problems.append(f"input {value.name!r}: {error}")
            return
        shapes = [[lengths[value.name, dim][side] for dim in range(len(kind.shape.dim))] for side in (0, 1)]
        probes = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        values[value.name] = self.tracer.placeholder(argument, (probes[0], probes[1]))
        values[value.name].packed = kind.elem_type if kind.elem_type in PACKED else None

    def _output(self, declared: onnx.ValueInfoProto, value: Value) -> Value:
        """A result as a tensor; shape arithmetic in int32 was done in ints of any size."""
        result = self.tracer.to_tensor(value)
        known = isinstance(result, torch.Tensor) or (isinstance(result, Traced) and result.known)
        narrow = known and result.dtype == torch.int64 and declared.type.tensor_type.elem_type == TensorProto.INT32
        return self.tracer.call("to", result, torch.int32) if narrow else result

    def _stored(self, name: str, tensor: torch.Tensor) -> Value:
        role = self.roles.get(name)
        if role is None or role.kind == "frozen":
            return tensor
        traced = self.tracer.tensor(name, nn.Parameter(tensor) if role.kind == "trained" else tensor)
        self.onnx_names[str(traced.node.target)] = name
        return traced


def import_graph(
    model: onnx.ModelProto, stored: Mapping[str, torch.Tensor], roles: Mapping[str, Role], base: Path | None = None
) -> tuple[Importer, fx.Graph]:
    """The attempt that costs least. Raises UnsupportedModel with all that is refused in the best one."""
    unknown = unknown_operators(model)
    attempts: list[tuple[Importer, fx.Graph]] = []
    for lengths, batch in plans(model.graph, set(stored)):
        importer = Importer(model, Tracer(), roles, batch, base)
        attempts.append((importer, importer.build(stored, lengths)))
        if not any(importer.cost):
            break
    best = min(attempts, key=lambda attempt: attempt[0].cost)
    if unknown or best[0].problems:
        raise UnsupportedModel(dict.fromkeys([*unknown, *best[0].problems]))
    return best
