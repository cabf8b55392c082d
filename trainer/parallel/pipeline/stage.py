"""The types of a pipeline: a part of the graph as a module, a chain of parts, and a stage.

    graph      a  b  c  |  d  e  |  f  g  h      two cuts make three parts
               -------     ----     -------
    rank 0     stage 0: a chain of two parts     rank 1     stage 1: a chain of one part

A part is a *unit*: ZeRO gathers its weights, recomputation repeats it and torch.compile compiles it as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onward.trainer.onnx_import.imported_graph import ImportedGraph, output_nodes

if TYPE_CHECKING:
    from onward.trainer.parallel.cost import NodeCost


@dataclass(frozen=True)
class Part:
    """Consecutive nodes of the graph as a module of their own."""

    module: nn.Module
    """Takes the tensors `input_names` in order and returns a tuple of the tensors `output_names`. Its `onnx_names` are
    as ImportedGraph's, restricted to the stored tensors that it uses."""
    input_names: tuple[str, ...]
    """Names of the nodes whose values it takes: of earlier parts, or inputs of the graph."""
    output_names: tuple[str, ...]
    """Names of the nodes whose values it computes for later parts or the caller."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that it computes, without rematerialised ones."""


class Chain(nn.Module):
    """Run parts one after the other: takes the tensors `input_names`, returns a tuple of the tensors `output_names`."""

    def __init__(self, parts: Sequence[Part], *, input_names: Sequence[str], output_names: Sequence[str]) -> None:
        super().__init__()
        self.units = nn.ModuleList(part.module for part in parts)
        self.parts = tuple(parts)
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.input_names, tensors, strict=True))
        # `units` and not `part.module`: compilation, recomputation and ZeRO replace modules in `units` by wrapped ones
        for unit, part in zip(self.units, self.parts, strict=True):
            values.update(zip(part.output_names, unit(*(values[name] for name in part.input_names)), strict=True))
        return tuple(values[name] for name in self.output_names)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline."""

    index: int
    num_stages: int
    chain: Chain
    """Takes the tensors `received_names`, then the graph's inputs at `input_positions`."""
    received_names: tuple[str, ...]
    """What the stage receives from the one before it, in order. A value that only a later stage reads passes through
    every stage on the way."""
    input_positions: tuple[int, ...]
    """Positions of the graph's inputs that the stage reads. They come from the data, not from the stage before."""
    output_names: tuple[str, ...]
    """What the stage sends to the next one; of the last stage, the graph's outputs in order."""
    received_meta: tuple[Tensor, ...]
    """Meta tensors with the shape, type and `requires_grad` of what is received, for one micro-batch."""
    output_meta: tuple[Tensor, ...]
    """The same of what is sent."""


def build_stages(
    module: ImportedGraph, parts_of_stages: Sequence[Sequence[Part]], costs: Mapping[str, NodeCost]
) -> list[Stage]:
    """Return all stages of the graph, given the parts of each. costs: for the micro-batch that the meta tensors show.

    Stage 0 reads input x and computes a and b; stage 1 reads a, stage 2 reads b:

        x -> [stage 0] -- a, b --> [stage 1] -- c, b --> [stage 2] -> y
    """
    graph_inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph_outputs = tuple(node.name for node in output_nodes(module.graph))
    read = []
    computed = []
    for parts in parts_of_stages:
        read.append([name for part in parts for name in part.input_names])
        computed.append([name for part in parts for name in part.output_names])

    # borders[i]: what crosses from stage i - 1 to stage i, in the order in which it was computed
    borders: list[tuple[str, ...]] = [()]
    for number in range(1, len(parts_of_stages)):
        read_later = {*itertools.chain(*read[number:]), *graph_outputs}
        borders.append(tuple(name for name in itertools.chain(*computed[:number]) if name in read_later))
    borders.append(graph_outputs)

    stages = []
    for number, parts in enumerate(parts_of_stages):
        is_last = number == len(parts_of_stages) - 1
        # an output of the graph may be one of its inputs, unchanged
        needed = {*read[number], *(graph_outputs if is_last else ())}
        positions = tuple(position for position, name in enumerate(graph_inputs) if name in needed)
        # what only a later stage reads is received as well, and passed on
        received = borders[number]
        sent = borders[number + 1]
        chain = Chain(
            parts, input_names=(*received, *(graph_inputs[position] for position in positions)), output_names=sent
        )
        received_meta, output_meta = (tuple(_meta(name, costs) for name in names) for names in (received, sent))
        stages.append(Stage(number, len(parts_of_stages), chain, received, positions, sent, received_meta, output_meta))
    return stages


def _meta(name: str, costs: Mapping[str, NodeCost]) -> Tensor:
    outputs = costs[name].outputs if name in costs else ()
    # a length that crosses is a tensor of one integer; costs have tensors only
    return outputs[0] if outputs else torch.empty((), dtype=torch.int64, device="meta")
