r"""Find the places where a graph may be cut, and the cuts that the user names.

    node             1       2        3        4       5        6
                     embed - attend - add    - norm  - mlp    - add_1
                         \____________/ \_____________________/
    cut point            1       2        3        4       5
    crossing             embed   embed    add      add     add
                                 attend            norm    mlp
    narrow               yes     no       yes      no      no

At a *narrow* cut a single tensor with a gradient crosses (masks and lengths may cross beside it). In a transformer the
narrow cuts are those between layers. Rematerialised values (rematerialise.py) never cross.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.named_cuts import names_of_cut, unknown_tensors
from onward.trainer.parallel.cost import NodeCost
from onward.trainer.parallel.pipeline.rematerialise import partitioned_nodes, tensors_read


@dataclass(frozen=True)
class CutPoint:
    """A place between two nodes where the graph may be cut."""

    position: int
    """How many of the `partitioned_nodes` are before it."""
    crossing: tuple[str, ...]
    """The nodes whose values cross it, in order."""
    num_bytes: int
    """Size of these values for one micro-batch."""
    differentiable: tuple[str, ...]
    """The nodes of `crossing` whose values have a gradient."""

    @property
    def is_narrow(self) -> bool:
        """Whether exactly one value with a gradient crosses."""
        return len(self.differentiable) == 1


def find_cut_points(graph: fx.Graph, costs: Mapping[str, NodeCost]) -> list[CutPoint]:
    """Return every place that only plain tensors cross, in the order of the graph.

    A tuple cannot cross, and neither can what is inside a tensor-parallel region: it is sharded, or a summand of an
    all-reduce that has not happened yet.
    """
    nodes = partitioned_nodes(graph)
    last_use = _last_uses(graph, nodes)
    points = []
    crossing = dict[fx.Node, None]()
    for position, node in enumerate(nodes[:-1], start=1):
        crossing[node] = None
        # a dictionary as an ordered set: the values cross in the order in which they were computed
        crossing = {value: None for value in crossing if last_use.get(value, 0) > position}
        if all(_may_cross(value, costs) for value in crossing):
            names = tuple(value.name for value in crossing)
            differentiable = tuple(name for name in names if costs[name].outputs[0].requires_grad)
            num_bytes = sum(costs[name].output_bytes for name in names)
            points.append(CutPoint(position, names, num_bytes, differentiable))
    return points


def _last_uses(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Map each node to the number of the last node that reads it, counted from 1.

    The graph's outputs count as read after the last node.
    """
    last_use: dict[fx.Node, int] = {}
    for number, node in enumerate(nodes, start=1):
        # later readers overwrite earlier ones
        last_use |= dict.fromkeys(tensors_read(node), number)
    return last_use | dict.fromkeys(tensors_read(graph.output_node()), len(nodes) + 1)


def _may_cross(node: fx.Node, costs: Mapping[str, NodeCost]) -> bool:
    # a module that returns a tuple of one tensor looks like a tensor in `costs`, but is read by getitem
    is_tensor = len(costs[node.name].outputs) == 1 and not any(user.target is operator.getitem for user in node.users)
    return is_tensor and "tensor_parallel" not in node.meta


# -- cuts that the user names


def cuts_by_name(
    graph: fx.Graph, points: Sequence[CutPoint], entries: Sequence[str | tuple[str, ...]]
) -> list[CutPoint]:
    """Return the cut for each entry of `parallel.cuts`: the first place that the named tensors cross, and no others.

    Tensors without a gradient, such as masks, may cross unnamed. How an entry is read: `names_of_cut`. Raises
    ConfigError with every entry for which there is no such place.
    """
    node_names = names_that_cuts_may_use(graph)
    file_names = {node.name: (*node.meta.get("onnx", ()), node.name)[0] for node in graph.nodes}
    cuts = []
    problems = []
    for entry in entries:
        names = names_of_cut(entry, node_names)
        shown = " and ".join(names)
        if unknown := [name for name in names if name not in node_names]:
            problems.append(unknown_tensors(unknown, node_names))
            continue
        # the names may be those of the file or of the fx graph
        wanted = {node_names[name] for name in names}
        places = [point for point in points if wanted <= {*point.crossing}]
        # of each place that the named tensors cross: what else crosses it with a gradient
        unnamed = []
        for point in places:
            unnamed.append([file_names[name] for name in point.differentiable if name not in wanted])
        if [] in unnamed:
            cuts.append(places[unnamed.index([])])
        elif not places:
            problems.append(
                f"parallel.cuts: no cut is crossed by {shown}; name one tensor, or tensors that are in use at one place"
            )
        else:
            # the place where the user has the fewest tensors to add
            fewest = min(unnamed, key=len)
            problems.append(
                f"parallel.cuts: where {shown} crosses, so does {', '.join(fewest)}; name all of them, or another cut"
            )
    # stages follow one another, and none may be empty
    if [point.position for point in cuts] != sorted({point.position for point in cuts}):
        problems.append("parallel.cuts: list the cuts in the order of the graph, each at a different place")
    if problems:
        raise ConfigError(problems)
    return cuts


def names_that_cuts_may_use(graph: fx.Graph) -> dict[str, str]:
    """Return name -> fx node: the names of the nodes, and those of the file, which win over equal ones of a node."""
    # exporters use names such as "relu"
    node_names = {node.name: node.name for node in graph.nodes}
    return node_names | {name: node.name for node in graph.nodes for name in node.meta.get("onnx", ())}
