"""Choose cuts: stages of nearly equal work with few bytes between them, and the units of each stage.

    node          0     1     2     3     4
    work          4     3     1     2     4         14 in total
    place      0     1     2     3     4     5      between nodes; 0 and 5 are the ends of the graph
    bytes            8     9     2     9            that cross, at each cut point

Two parts: the least possible work of the larger part is 7 (4 + 3 and 1 + 2 + 4, cut at place 2, where 9 bytes cross).
SLACK allows 8.05, and so the cut at place 3 (8 and 6), where only 2 bytes cross.

For one limit a dynamic program finds the cuts with the fewest bytes. `best[p]` is the fewest bytes with which the nodes
before place p can be divided into j parts; one part more gives

    best'[p] = bytes[p] + min(best[q] for q < p if work between q and p <= limit)

The places q that are near enough to p form a window that only moves forward, so a queue of candidates gives each
minimum in constant time, and all of it takes O(parts x places) time and memory. Bisection finds the limits, to 0.1 %.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.cost import NodeCost
from onward.trainer.parallel.pipeline.cut_points import CutPoint
from onward.trainer.parallel.pipeline.rematerialise import partitioned_nodes, rematerialised_for

SLACK = 1.15
"""How much more work than necessary the largest part may have, in exchange for fewer bytes between parts."""
UNIT_BYTES = 1 << 20
"""Least size of the weights of a unit, where the number of units is not configured."""
MAX_UNITS = 64
"""Most units of a stage, where their number is not configured."""


def node_work(graph: fx.Graph, costs: Mapping[str, NodeCost]) -> list[int]:
    """Return the work of each of the `partitioned_nodes`: its FLOPs, plus one for each byte of its outputs.

    The bytes stand for the time of operators without FLOPs, such as activations, which memory bandwidth limits.
    """
    return [costs[node.name].flops + costs[node.name].output_bytes for node in partitioned_nodes(graph)]


def choose_cuts(points: Sequence[CutPoint], work: Sequence[int], num_parts: int) -> list[CutPoint]:
    """Return the cuts that make `num_parts` parts of nearly equal work with few bytes between them.

    The largest part has at most SLACK times the least possible work; among such cuts the fewest bytes cross; among
    these the largest part is the smallest. work: of each of the `partitioned_nodes`. Raises ConfigError when there are
    too few points.
    """
    if len(points) < num_parts - 1:
        raise ConfigError(
            f"the graph can be cut in {len(points)} places only, so into {len(points) + 1} parts at most, not "
            f"{num_parts}; lower parallel.pipeline or parallel.stages_per_rank"
        )
    # the work before each place; the end of the graph is not among the places
    before = [0, *itertools.accumulate(work)]
    total = before[-1]
    places = [0, *(before[point.position] for point in points)]
    place_bytes = [0, *(point.num_bytes for point in points)]

    def cuts_within(limit: float) -> list[CutPoint] | None:
        found = _cheapest_places(places, place_bytes, total, num_parts, limit)
        return None if found is None else [points[place - 1] for place in found]

    def bytes_within(limit: float) -> float:
        cuts = cuts_within(limit)
        return float("inf") if cuts is None else sum(point.num_bytes for point in cuts)

    # total / num_parts: no division can be better than equal parts
    least = _bisect(total / num_parts, total, lambda limit: cuts_within(limit) is not None)
    # first the fewest bytes that SLACK allows, then the smallest limit with which so few are possible
    fewest_bytes = bytes_within(SLACK * least)
    limit = _bisect(least, SLACK * least, lambda limit: bytes_within(limit) <= fewest_bytes)
    cuts = cuts_within(limit)
    assert cuts is not None
    return cuts


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Return the smallest limit, to 0.1 %, where `holds` is true. It must be monotonic, and true at `high`."""
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _cheapest_places(
    places: Sequence[int], place_bytes: Sequence[int], total: int, num_parts: int, limit: float
) -> list[int] | None:
    """Return the numbers of the places where to cut, so that no part has more work than the limit.

    places: the work before each place. The fewest bytes cross the cuts; None where no cuts keep the limit.
    """
    # no part ends before any place but the first one, without bytes
    best = [0.0] + [float("inf")] * (len(places) - 1)
    begins: list[list[int]] = []  # for each part, by the place where it ends
    for _ in range(num_parts - 1):
        best, begin = _add_part(best, places, place_bytes, limit)
        begins.append(begin)
    # the last part reaches from one of the places to the end of the graph
    last_places = []
    for place, work_before in enumerate(places):
        if total - work_before <= limit and best[place] < float("inf"):
            last_places.append(place)
    if not last_places:
        return None
    place = min(last_places, key=best.__getitem__)
    # walk back: where a part begins is where the part before it ends
    cuts = []
    for begin in reversed(begins):
        cuts.append(place)
        place = begin[place]
    return cuts[::-1]


def _add_part(
    best: Sequence[float], places: Sequence[int], place_bytes: Sequence[int], limit: float
) -> tuple[list[float], list[int]]:
    """Return (fewest bytes with one part more up to each place, the place where that last part begins)."""
    extended = [float("inf")]
    begins = [0]
    # places in order, their bytes rising: a place is dropped once a later one is as cheap, since the later one stays
    # within the limit for longer
    window = deque[int]()
    for place in range(1, len(places)):
        while window and best[window[-1]] >= best[place - 1]:
            window.pop()
        window.append(place - 1)
        # the places at the front are too far away from this one, and so from all later ones
        while window and places[place] - places[window[0]] > limit:
            window.popleft()
        extended.append(best[window[0]] + place_bytes[place] if window else float("inf"))
        begins.append(window[0] if window else place - 1)
    return extended, begins


# -- units


def choose_unit_cuts(
    module: ImportedGraph,
    points: Sequence[CutPoint],
    work: Sequence[int],
    stage_cuts: Sequence[CutPoint],
    num_units: int,
) -> list[CutPoint]:
    """Return the narrow cuts that divide every stage into units of nearly equal work.

    num_units: of each stage, fewer where it has fewer narrow cuts; 0 = one for each UNIT_BYTES of weights.
    """
    nodes = partitioned_nodes(module.graph)
    cuts = []
    for start, stop in itertools.pairwise([0, *(point.position for point in stage_cuts), len(nodes)]):
        inside = [point for point in points if start < point.position < stop]
        narrow = [point for point in inside if point.is_narrow]
        # `choose_cuts` counts from the beginning of the stage
        relative = [replace(point, position=point.position - start) for point in narrow]
        wanted = num_units or min(MAX_UNITS, _weight_bytes(module, nodes[start:stop]) // UNIT_BYTES)
        chosen = choose_cuts(relative, work[start:stop], max(1, min(wanted, len(relative) + 1)))
        cuts += [narrow[relative.index(point)] for point in chosen]
    return cuts


def _weight_bytes(module: ImportedGraph, nodes: Sequence[fx.Node]) -> int:
    """Return the size of all parameters that some nodes read, directly or through rematerialised nodes."""
    sizes = {path: tensor.nbytes for path, tensor in module.named_parameters()}
    return sum(sizes.get(str(node.target), 0) for node in rematerialised_for(nodes) if node.op == "get_attr")
