"""Cutting the graph: into stages for the pipeline, and stages into units for ZeRO and recomputation.

    nodes in order    a b c | d e f | g h      parts
    crosses           c         c f            what a later part reads, or is on its way to one

What is computed from weights, constants and lengths alone (transposed weights, positions, numbers for Reshape) never
crosses: each part that needs it computes it again. So a cut is where the graph's own values are few and small.
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, fx, nn

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.imported_graph import ImportedGraph, mark_constants_nonpersistent
from onward.trainer.onnx_import.shape_assumptions import is_kept
from onward.trainer.parallel.cost import NodeCost


@dataclass(frozen=True)
class Part:
    """A stretch of the graph, contiguous in its order, as a module of its own."""

    module: nn.Module
    """Called with `reads` in order; returns the tuple `gives`, always a tuple. `module.onnx_names` as ImportedGraph's,
    of the stored tensors that it uses."""
    reads: tuple[str, ...]
    """Values that come from earlier parts, and inputs of the graph, by the names of their nodes."""
    gives: tuple[str, ...]
    """Values it computes that later parts or the caller need."""
    nodes: tuple[str, ...] = ()
    """The nodes of `order` that it computes."""


class Chain(nn.Module):
    """Parts one after the other. Called with `reads` in order; returns the tuple `gives`."""

    def __init__(self, parts: Sequence[Part], *, reads: Sequence[str], gives: Sequence[str]) -> None:
        super().__init__()
        self.units = nn.ModuleList(part.module for part in parts)
        self.parts = tuple(parts)
        self.reads, self.gives = tuple(reads), tuple(gives)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(self.reads, values, strict=True))
        for unit, part in zip(self.units, self.parts, strict=True):  # a unit may have been wrapped since
            known.update(zip(part.gives, unit(*(known[name] for name in part.reads)), strict=True))
        return tuple(known[name] for name in self.gives)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline, on the rank that holds it."""

    index: int
    num_stages: int
    chain: Chain
    """Reads `receives`, then `inputs`."""
    receives: tuple[str, ...]
    """What crosses from the stage before, in order, values on their way to a later stage included."""
    inputs: tuple[int, ...]
    """Which of the graph's inputs it reads, by position: they come from the data, not from the stage before."""
    gives: tuple[str, ...]
    """What crosses to the next stage; the graph's outputs in order if it is the last."""
    crossing: tuple[Tensor, ...]
    """On the meta device, what `receives` are for one micro-batch of the example, `requires_grad` included."""
    produced: tuple[Tensor, ...]
    """The same of `gives`."""


@dataclass(frozen=True)
class CutPoint:
    """A place between two nodes where the graph may be cut."""

    position: int
    """Nodes of `order` before it."""
    crossing: tuple[str, ...]
    """The nodes whose values cross it, in order."""
    num_bytes: int
    """What they take, for one micro-batch."""
    gradients: tuple[str, ...]
    """Those of them that have a gradient."""

    @property
    def narrow(self) -> bool:
        """Whether a single one of them has a gradient."""
        return len(self.gradients) == 1


def order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something of the data, as they run: what cuts are between."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output") and not _again(node)]


# -- what is computed again in each part


def _again(node: fx.Node) -> bool:
    """Whether a value is computed again wherever it is needed: from weights, constants and lengths alone."""
    if "again" not in node.meta:
        if node.op == "get_attr":
            again = True
        elif node.op not in ("call_function", "call_method") or is_kept(node) or node.is_impure():
            again = False
        else:
            again = _is_length(node) or (_draws_nothing(node) and all(map(_again, node.all_input_nodes)))
        node.meta["again"] = again
    return bool(node.meta["again"])


def _is_length(node: fx.Node) -> bool:
    """`x.size(dim)`: a number of any tensor."""
    return node.op == "call_method" and node.target == "size" and len(node.args) == 2


def _draws_nothing(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not any(word in name for word in ("rand", "dropout", "bernoulli", "normal_", "uniform", "multinomial"))


def _tensors_read(node: fx.Node) -> set[fx.Node]:
    """The nodes whose tensors a node reads, itself or for what is computed again; not those it asks the length of."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        read = pending.pop()
        if read.op == "placeholder" or not _again(read):
            found.add(read)
        elif not _is_length(read):
            pending += read.all_input_nodes
    return found


# -- where it may be cut


def cut_points(graph: fx.Graph, costs: Mapping[str, NodeCost]) -> list[CutPoint]:
    """Every place where only tensors cross, and none of them is divided or part of a sum."""
    nodes = order(graph)
    last_use = _last_uses(graph, nodes)
    points, crossing = [], dict[fx.Node, None]()
    for position, node in enumerate(nodes[:-1], start=1):
        crossing[node] = None
        crossing = {value: None for value in crossing if last_use.get(value, 0) > position}
        if all(_may_cross(value, costs) for value in crossing):
            names = tuple(value.name for value in crossing)
            gradients = tuple(name for name in names if costs[name].outputs[0].requires_grad)
            points.append(CutPoint(position, names, sum(costs[name].output_bytes for name in names), gradients))
    return points


def _last_uses(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Node -> number of the last node that reads its tensor, from 1; the graph's outputs are read after all."""
    last_use: dict[fx.Node, int] = {}
    for number, node in enumerate(nodes, start=1):
        last_use |= dict.fromkeys(_tensors_read(node), number)
    (output,) = graph.find_nodes(op="output")
    return last_use | dict.fromkeys(_tensors_read(output), len(nodes) + 1)


def _may_cross(node: fx.Node, costs: Mapping[str, NodeCost]) -> bool:
    tensors = costs[node.name].outputs
    is_tensor = len(tensors) == 1 and not any(user.target is operator.getitem for user in node.users)
    return is_tensor and "tensor_parallel" not in node.meta


def work(graph: fx.Graph, costs: Mapping[str, NodeCost]) -> list[int]:
    """What each node of `order` takes: its arithmetic, and for what is none as much as it gives bytes."""
    return [costs[node.name].flops + costs[node.name].output_bytes for node in order(graph)]


SLACK = 1.15
"""What the longest stage may take, of what it must: in exchange for less that crosses."""


def balanced(points: Sequence[CutPoint], amounts: Sequence[int], num_parts: int) -> list[CutPoint]:
    """The cuts that make `num_parts` parts whose greatest is nearly as small as it can be; of those where least
    crosses; of those whose greatest is the smallest. amounts: what each node of `order` takes. Raises ConfigError
    when there are too few points."""
    if len(points) < num_parts - 1:
        raise ConfigError(
            f"the graph can be cut in {len(points)} places only, so into {len(points) + 1} parts at most, not "
            f"{num_parts}; lower parallel.pipeline or parallel.stages_per_rank"
        )
    before = [0]
    for amount in amounts:
        before.append(before[-1] + amount)
    ends = [before[point.position] for point in points]

    def within(limit: float) -> list[CutPoint] | None:
        return _cheapest(ends, before[-1], points, num_parts, limit)

    greatest = _least(before[-1] / num_parts, before[-1], lambda limit: within(limit) is not None)
    size = _crossing(within(SLACK * greatest))
    greatest = _least(greatest, SLACK * greatest, lambda limit: _crossing(within(limit)) <= size)
    found = within(greatest)
    assert found is not None
    return found


def _least(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The least limit, nearly, at which something holds; it does at `high`."""
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _crossing(cuts: Sequence[CutPoint] | None) -> float:
    return float("inf") if cuts is None else sum(point.num_bytes for point in cuts)


def _cheapest(
    ends: Sequence[int], total: int, points: Sequence[CutPoint], num_parts: int, limit: float
) -> list[CutPoint] | None:
    """The cuts with the fewest bytes of those that leave no part above the limit; None if there are none."""
    none = float("inf")
    best = [0.0] + [none] * len(points)  # place 0 is the beginning; place i is after point i - 1
    places = [0, *ends]
    froms: list[list[int]] = []
    for _ in range(num_parts - 1):
        best, chosen = _extended(best, places, points, limit)
        froms.append(chosen)
    last = min(
        (place for place in range(len(places)) if total - places[place] <= limit and best[place] < none),
        key=best.__getitem__,
        default=None,
    )
    if last is None:
        return None
    cuts = []
    for chosen in reversed(froms):
        cuts.append(points[last - 1])
        last = chosen[last]
    return cuts[::-1]


def _extended(
    best: Sequence[float], places: Sequence[int], points: Sequence[CutPoint], limit: float
) -> tuple[list[float], list[int]]:
    """One part more: the fewest bytes up to each place, and the place that part begins at. A minimum over a window."""
    costs, froms, window, first = [float("inf")], [0], list[int](), 0
    for place in range(1, len(places)):
        while len(window) > first and best[window[-1]] >= best[place - 1]:
            window.pop()
        window.append(place - 1)
        while first < len(window) and places[place] - places[window[first]] > limit:
            first += 1
        begin = window[first] if first < len(window) else place - 1
        fits = first < len(window)
        costs.append(best[begin] + points[place - 1].num_bytes if fits else float("inf"))
        froms.append(begin)
    return costs, froms


def named(graph: fx.Graph, points: Sequence[CutPoint], cuts: Sequence[str | tuple[str, ...]]) -> list[CutPoint]:
    """The cuts where just the named tensors cross, besides what has no gradient (masks).

    An entry may be written as the predecessor's cut lists are: edges with `:` between them, each a tensor's name,
    with `-consumer1/consumer2` behind it or not. Raises ConfigError for each that is no such place.
    """
    known = {node.name: node.name for node in graph.nodes}  # the file's names are stronger: exporters use the same
    known |= {name: node.name for node in graph.nodes for name in node.meta.get("onnx", ())}
    shown = {node.name: (*node.meta.get("onnx", ()), node.name)[0] for node in graph.nodes}
    found, problems = [], []
    for entry in cuts:
        edges = entry if not isinstance(entry, str) else [entry] if entry in known else entry.split(":")
        names = [edge if edge in known else edge.rpartition("-")[0] or edge for edge in edges]
        if unknown := [name for name in names if name not in known]:
            problems.append(f"parallel.cuts: the graph computes no tensor {', '.join(unknown)}" + _near(unknown, known))
            continue
        wanted = {known[name] for name in names}
        places = [point for point in points if wanted <= {*point.crossing}]
        others = [[shown[name] for name in point.gradients if name not in wanted] for point in places]
        if [] in others:
            found.append(places[others.index([])])
        elif not places:
            problems.append(f"parallel.cuts: {' and '.join(names)} cross no cut that can be made: not at one place")
        else:
            least = min(others, key=len)
            problems.append(f"parallel.cuts: where {' and '.join(names)} cross, so do others: {', '.join(least)}")
    if [point.position for point in found] != sorted({point.position for point in found}):
        problems.append("parallel.cuts: the cuts must be in the graph's order, each at a place of its own")
    if problems:
        raise ConfigError(problems)
    return found


def _near(unknown: Sequence[str], known: Iterable[str]) -> str:
    near = difflib.get_close_matches(unknown[0], list(known), n=3, cutoff=0.3)
    return f"; there is {', '.join(near)}" if near else ""


# -- the parts


def split(module: ImportedGraph, points: Sequence[CutPoint]) -> list[Part]:
    """The graph in parts, cut at the points; weights, buffers and modules are the graph's own, under the same paths."""
    splitter = _Splitter(module, points)
    return [splitter.part(number) for number in range(len(points) + 1)]


class _Splitter:
    """What each part computes, reads and gives."""

    def __init__(self, module: ImportedGraph, points: Sequence[CutPoint]) -> None:
        self.module = module
        nodes = order(module.graph)
        bounds = [0, *(point.position for point in points), len(nodes)]
        self.stretches = [nodes[start:stop] for start, stop in itertools.pairwise(bounds)]
        self.home = {node: number for number, stretch in enumerate(self.stretches) for node in stretch}
        self.results = _results(module.graph)
        self.reads = [self._reads(number) for number in range(len(self.stretches))]
        self.lengths = [self._lengths(number) for number in range(len(self.stretches))]
        self.sent = {
            length for found in self.lengths for length in found if length.all_input_nodes[0].op != "placeholder"
        }
        """Lengths of tensors that do not cross: they cross as tensors of one number. That another tensor was as long
        when the graph was traced says nothing: strides make one length of another."""

    def _uses(self, number: int) -> list[fx.Node]:
        last = number == len(self.stretches) - 1
        return [*self.stretches[number], *(node for node in self.results if last and _again(node))]

    def _reads(self, number: int) -> set[fx.Node]:
        """The tensors of inputs and earlier parts that a part reads."""
        uses = self._uses(number)
        again = [node for node in uses if _again(node)]
        found = {read for node in uses for read in _tensors_read(node)} | {
            r for node in again for r in _tensors_read(node)
        }
        return {node for node in found if self.home.get(node, -1) != number}

    def _lengths(self, number: int) -> set[fx.Node]:
        """The `x.size(dim)` that a part asks for, of an x that it neither computes nor reads."""
        own = self.reads[number]
        return {
            length
            for node in self._uses(number)
            for length in _lengths_read(node)
            for tensor in length.all_input_nodes
            if not (
                tensor in own or self.home.get(tensor, -1) == number or (tensor.op != "placeholder" and _again(tensor))
            )
        }

    def part(self, number: int) -> Part:
        graph = fx.Graph()
        lengths = self.lengths[number] & self.sent
        needed = {length.all_input_nodes[0] for length in self.lengths[number] - lengths} | self.reads[number] | lengths
        reads = [node for node in self.module.graph.nodes if node in needed]
        known: dict[fx.Node, fx.Node] = {}
        for node in reads:
            known[node] = graph.placeholder(node.name)
            known[node].meta = dict(node.meta)
        for length in sorted(lengths):
            known[length] = graph.call_method("item", (known[length],))

        def value(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = graph.node_copy(node, value)
            return known[node]

        for node in self.stretches[number]:
            value(node)
        gives = self._gives(number)
        tensors = [node for node in gives if node not in self.sent]
        sent = [
            graph.call_function(counted, (value(node), value(node.all_input_nodes[0])))
            for node in gives[len(tensors) :]
        ]
        graph.output((*(value(node) for node in tensors), *sent))
        nodes = tuple(node.name for node in self.stretches[number])
        module = _module(self.module, graph, [node.name for node in reads], [node.name for node in gives])
        return Part(module, module.input_names, module.output_names, nodes)

    def _gives(self, number: int) -> list[fx.Node]:
        """What of a part others read, in the graph's order; then the lengths that they ask for."""
        later = {node for reads in self.reads[number + 1 :] for node in reads} | {*self.results}
        last = number == len(self.stretches) - 1
        again = [node for node in dict.fromkeys(self.results) if last and node.op != "placeholder" and _again(node)]
        lengths = [length for length in sorted(self.sent) if self.home.get(length.all_input_nodes[0], 0) == number]
        return [*(node for node in self.stretches[number] if node in later), *again, *lengths]


def counted(length: int, like: Tensor) -> Tensor:
    """A length as a tensor, on the device of another: numbers cannot cross."""
    return like.new_full((), length, dtype=torch.int64)


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    return [results] if isinstance(results, fx.Node) else list(cast("Sequence[fx.Node]", results))


def _lengths_read(node: fx.Node) -> set[fx.Node]:
    """The `x.size(dim)` that a node needs, itself or for what is computed again for it."""
    found: set[fx.Node] = set()
    pending = [read for read in (node, *node.all_input_nodes) if read.op != "placeholder" and _again(read)]
    while pending:
        read = pending.pop()
        if _is_length(read):
            found.add(read)
        pending += [more for more in read.all_input_nodes if more.op != "placeholder" and _again(more)]
    return found


def _module(whole: ImportedGraph, graph: fx.Graph, reads: Sequence[str], gives: Sequence[str]) -> ImportedGraph:
    """A module of its own around some of a graph's nodes; it shares tensors and modules with the whole."""
    module = ImportedGraph(whole, graph, "ImportedGraph")
    paths = {path for path, _ in (*module.named_parameters(), *module.named_buffers())}
    module.onnx_names = {path: name for path, name in whole.onnx_names.items() if path in paths}
    module.input_names, module.output_names = tuple(reads), tuple(gives)
    module.roles, module.copies = {}, {}
    mark_constants_nonpersistent(module)
    return module


# -- stages


def whole(module: ImportedGraph) -> Stage:
    """The graph as the only stage, in one unit."""
    return stages(module, [[*split(module, ())]], {})[0]


def stages(module: ImportedGraph, groups: Sequence[Sequence[Part]], costs: Mapping[str, NodeCost]) -> list[Stage]:
    """All stages, each of the parts given. costs: of the micro-batch that `crossing` and `produced` are for."""
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    results = tuple(node.name for node in _results(module.graph))
    reads = [[name for part in parts for name in part.reads] for parts in groups]
    gives = [[name for part in parts for name in part.gives] for parts in groups]
    borders: list[tuple[str, ...]] = [()]
    for number in range(1, len(groups)):
        later = {*itertools.chain(*reads[number:]), *results}
        borders.append(tuple(name for name in itertools.chain(*gives[:number]) if name in later))
    borders.append(results)
    found = []
    for number, parts in enumerate(groups):
        last = number == len(groups) - 1
        asked = {*reads[number], *(results if last else ())}
        places = tuple(place for place, name in enumerate(inputs) if name in asked)
        receives, gives_here = borders[number], borders[number + 1]
        chain = Chain(parts, reads=(*receives, *(inputs[place] for place in places)), gives=gives_here)
        crossing, produced = (tuple(_meta(name, costs) for name in names) for names in (receives, gives_here))
        found.append(Stage(number, len(groups), chain, receives, places, gives_here, crossing, produced))
    return found


def _meta(name: str, costs: Mapping[str, NodeCost]) -> Tensor:
    outputs = costs[name].outputs if name in costs else ()
    return outputs[0] if outputs else torch.empty((), dtype=torch.int64, device="meta")


# -- units

UNIT_BYTES = 1 << 20
"""Weights of a unit, at least, where their number is left to the graph."""
MOST_UNITS = 64


def units(
    module: ImportedGraph, points: Sequence[CutPoint], amounts: Sequence[int], borders: Sequence[CutPoint], num: int
) -> list[CutPoint]:
    """The narrow places that make units of each stage: `num` of them, or (0) as many as its weights suggest.

    Fewer where a stage has fewer narrow places.
    """
    nodes, found = order(module.graph), []
    for start, stop in itertools.pairwise([0, *(point.position for point in borders), len(nodes)]):
        narrow = [point for point in points if point.narrow and start < point.position < stop]
        inside = [replace(point, position=point.position - start) for point in narrow]
        wanted = num or min(MOST_UNITS, _weight_bytes(module, nodes[start:stop]) // UNIT_BYTES)
        chosen = balanced(inside, amounts[start:stop], max(1, min(wanted, len(inside) + 1)))
        found += [narrow[inside.index(point)] for point in chosen]
    return found


def _weight_bytes(module: ImportedGraph, nodes: Sequence[fx.Node]) -> int:
    """Of all parameters that some nodes read, themselves or for what is computed again for them."""
    sizes = {path: tensor.nbytes for path, tensor in module.named_parameters()}
    pending, seen = list(nodes), set(nodes)
    while pending:
        more = [read for read in pending.pop().all_input_nodes if read not in seen and _again(read)]
        seen.update(more)
        pending += more
    return sum(sizes.get(str(node.target), 0) for node in seen if node.op == "get_attr")
