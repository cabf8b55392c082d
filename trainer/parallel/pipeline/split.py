"""Split the graph at cut points: each part becomes a module of its own.

Cut after `tanh`:

    graph                           part 0                          part 1
    x       input                   x       input                   tanh, size   inputs
    w, v    parameters              w       parameter               v            parameter
    mm    = x @ w                   mm    = x @ w
    tanh  = tanh(mm)                tanh  = tanh(mm)
    v_t   = v.t()                                                   v_t   = v.t()           rematerialised
    size  = mm.size(1)              size  = tensor(mm.size(1))      n     = size.item()     a length that crosses
    y     = tanh @ v_t / size       return tanh, size               return tanh @ v_t / n

Rematerialised values (rematerialise.py) are computed in each part that reads them. A length is rematerialised where its
tensor is; where it is not, as for `mm` in part 1, it crosses as a tensor of one integer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from onward.trainer.onnx_import.imported_graph import ImportedGraph, mark_constants_nonpersistent, output_nodes
from onward.trainer.parallel.pipeline.cut_points import CutPoint
from onward.trainer.parallel.pipeline.rematerialise import (
    is_length,
    is_rematerialised,
    partitioned_nodes,
    rematerialised_for,
    tensors_read,
)
from onward.trainer.parallel.pipeline.stage import Part


def split(module: ImportedGraph, cuts: Sequence[CutPoint]) -> list[Part]:
    """Return the parts of the graph between the cuts. They share weights, buffers and modules with the graph, under the
    same paths."""
    splitter = _Splitter(module, cuts)
    return [splitter.part(number) for number in range(len(cuts) + 1)]


def length_as_tensor(length: int, like: Tensor) -> Tensor:
    """Return a length as an int64 tensor of no dimensions, on the device of another tensor: only tensors can cross."""
    return like.new_full((), length, dtype=torch.int64)


class _Splitter:
    """What each part computes, reads and returns, by the number of the part."""

    def __init__(self, module: ImportedGraph, cuts: Sequence[CutPoint]) -> None:
        self.module = module
        nodes = partitioned_nodes(module.graph)
        bounds = [0, *(cut.position for cut in cuts), len(nodes)]
        self.nodes = [nodes[start:stop] for start, stop in itertools.pairwise(bounds)]
        self.part_of = {node: number for number, members in enumerate(self.nodes) for node in members}
        self.graph_outputs = output_nodes(module.graph)
        self.tensors = [self._tensors(number) for number in range(len(self.nodes))]
        self.lengths = [self._lengths(number) for number in range(len(self.nodes))]
        # The graph's inputs are at hand in every part, so their lengths need not cross. All others do, even where
        # another tensor at hand was as long when the graph was traced: a stride may make equal lengths differ later.
        needed = set[fx.Node]().union(*self.lengths)
        self.crossing_lengths = {length for length in needed if length.all_input_nodes[0].op != "placeholder"}

    def part(self, number: int) -> Part:
        graph = fx.Graph()
        lengths = self.lengths[number] & self.crossing_lengths
        # inputs of the graph whose length the part computes itself
        measured = {length.all_input_nodes[0] for length in self.lengths[number] - lengths}
        needed = measured | self.tensors[number] | lengths
        # in the order of the graph, which is the same on every rank: stages exchange tensors by position
        inputs = [node for node in self.module.graph.nodes if node in needed]
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        # a length that has crossed is a tensor here; the nodes that read it expect a number
        for length in sorted(lengths):
            copies[length] = graph.call_method("item", (copies[length],))

        def copy(node: fx.Node) -> fx.Node:
            # copies what a node reads first: this is where values are rematerialised
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in self.nodes[number]:
            copy(node)
        outputs = self._outputs(number)
        results = []
        for node in outputs:
            if node in self.crossing_lengths:
                results.append(graph.call_function(length_as_tensor, (copy(node), copy(node.all_input_nodes[0]))))
            else:
                results.append(copy(node))
        graph.output(tuple(results))
        module = _module(self.module, graph, [node.name for node in inputs], [node.name for node in outputs])
        return Part(module, module.input_names, module.output_names, tuple(node.name for node in self.nodes[number]))

    def _reading_nodes(self, number: int) -> list[fx.Node]:
        """Return the nodes whose inputs a part must have: its own, and outputs of the graph that the last part
        rematerialises."""
        nodes = list(self.nodes[number])
        if number == len(self.nodes) - 1:
            nodes += [node for node in self.graph_outputs if is_rematerialised(node)]
        return nodes

    def _tensors(self, number: int) -> set[fx.Node]:
        """Return the inputs of the graph and the values of earlier parts that a part reads."""
        found = {read for node in self._reading_nodes(number) for read in tensors_read(node)}
        return {node for node in found if self.part_of.get(node, -1) != number}

    def _lengths(self, number: int) -> set[fx.Node]:
        """Return the `x.size(dim)` that a part needs of an x that it neither computes nor reads nor rematerialises."""

        def at_hand(x: fx.Node) -> bool:
            return x in self.tensors[number] or self.part_of.get(x, -1) == number or is_rematerialised(x)

        needed = rematerialised_for(self._reading_nodes(number))
        lengths = [node for node in needed if is_length(node)]
        return {length for length in lengths if not at_hand(length.all_input_nodes[0])}

    def _outputs(self, number: int) -> list[fx.Node]:
        """Return what a part computes for later parts or the caller: in the graph's order, lengths at the end."""
        read_later = {*self.graph_outputs}.union(*self.tensors[number + 1 :])
        outputs = [node for node in self.nodes[number] if node in read_later]
        if number == len(self.nodes) - 1:
            # an output of the graph that is rematerialised belongs to no part: the last one returns it
            outputs += [node for node in dict.fromkeys(self.graph_outputs) if is_rematerialised(node)]
        lengths = sorted(self.crossing_lengths)
        return outputs + [length for length in lengths if self.part_of.get(length.all_input_nodes[0], 0) == number]


def _module(
    original: ImportedGraph, graph: fx.Graph, input_names: Sequence[str], output_names: Sequence[str]
) -> ImportedGraph:
    """Return a module of some of a graph's nodes; it shares tensors and modules with the original."""
    module = ImportedGraph(original, graph, "ImportedGraph")
    paths = {path for path, _ in (*module.named_parameters(), *module.named_buffers())}
    module.onnx_names = {path: name for path, name in original.onnx_names.items() if path in paths}
    module.input_names = tuple(input_names)
    module.output_names = tuple(output_names)
    module.output_shapes = {}
    # the whole graph has them; a part is never written to a file
    module.roles = {}
    module.copies = {}
    module.quantizers = ()
    mark_constants_nonpersistent(module)
    return module
