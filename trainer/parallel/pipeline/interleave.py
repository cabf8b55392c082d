"""Order a teacher's nodes between those of the model, so that each stage of a pipeline gets a part of both.

    as assembled    T1 T2 T3 T4 | S1 S2              two stages: the first would have no weight to train
    interleaved     T1 T2 S1 | T3 T4 S2

A graph is divided into segments where one value is alive, which are also the places between tensor-parallel regions.
A segment of the teacher comes before the first segment of the model that ends later, counted in nodes. The order within
the model and within the teacher stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from onward.trainer.parallel.pipeline.rematerialise import is_rematerialised

Segment = tuple[float, list[fx.Node]]
"""The share of the graph's nodes up to its end, and its nodes."""


def interleave_teacher(graph: fx.Graph) -> None:
    """Reorder the nodes of a graph in place, if some are a teacher's."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    teacher = [node for node in nodes if node.meta.get("teacher")]
    if not teacher:
        return
    own = [node for node in nodes if not node.meta.get("teacher")]
    # a stable sort: at equal ends the teacher comes first, whose results the model's losses read
    segments = sorted((*_segments(graph, teacher), *_segments(graph, own)), key=lambda segment: segment[0])
    end = graph.output_node()
    for _, members in segments:
        for node in members:
            # each node moves to the end of the graph in its turn, which leaves them in this order
            end.prepend(node)
            node.meta.pop("rematerialised", None)  # the graph is not divided yet
    graph.lint()


def _segments(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[Segment]:
    """Yield the segments of some nodes of a graph, in order."""
    numbers = {node: number for number, node in enumerate(nodes)}
    last = {node: max((numbers.get(user, len(nodes)) for user in node.users), default=0) for node in nodes}
    alive = set[fx.Node]()
    members = list[fx.Node]()
    for number, node in enumerate(nodes):
        members.append(node)
        if not is_rematerialised(node):
            alive.add(node)
        # values that nothing behind this node reads are dead
        alive = {value for value in alive if last[value] > number}
        # values that the end of the graph reads do not count: they cross everywhere behind
        if len([value for value in alive if last[value] < len(nodes)]) <= 1:
            yield (number + 1) / len(nodes), members
            members = []
    if members:
        yield 1.0, members
