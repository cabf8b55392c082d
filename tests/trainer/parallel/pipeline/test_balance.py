"""Stages of nearly equal work with few bytes between them, and the units of each stage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import onnx
import pytest
import torch
from torch import Tensor

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.cost import NodeCost, estimate_costs
from onward.trainer.parallel.pipeline import balance
from onward.trainer.parallel.pipeline.balance import SLACK, choose_cuts, choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import CutPoint, cuts_by_name, find_cut_points
from tests.support import graphs


def load(build: Callable[[], onnx.ModelProto]) -> tuple[ImportedGraph, list[Tensor], dict[str, NodeCost]]:
    model = build()
    module, inputs = to_module(model), [torch.from_numpy(value) for value in graphs.feed(model, 4).values()]
    return module.train(), inputs, estimate_costs(module, inputs)


# -- stages


def table(amounts: Sequence[int], sizes: Sequence[int]) -> tuple[list[CutPoint], list[int]]:
    """Return a cut point after each node but the last, with so many bytes crossing, and the work of the nodes."""
    return [CutPoint(place, ("x",), size, ("x",)) for place, size in enumerate(sizes, 1)], list(amounts)


@pytest.mark.parametrize(
    ("amounts", "sizes", "num", "cuts"),
    [
        ([1, 1, 1, 1], [9, 9, 9], 1, []),
        ([1, 1, 1, 1], [9, 9, 9], 2, [2]),
        ([1, 1, 1, 1], [1, 9, 1], 2, [2]),  # 3 and 1 is beyond the slack, however few bytes cross
        ([1, 1, 1, 1], [9, 9, 9], 4, [1, 2, 3]),
        ([6, 1, 1, 1], [9, 1, 1], 2, [1]),  # 7 is above 1.15 x 6
        ([9, 1, 1, 1, 1], [9, 1, 1, 1], 2, [2]),  # 10 is not above 1.15 x 9
        ([1, 1, 1, 10], [5, 5, 5], 2, [3]),  # with equal bytes the smaller largest part wins over 11
        ([0, 0, 0], [3, 2], 2, [2]),
        ([10] * 20, [100] * 10 + [1] * 9, 2, [11]),
    ],
)
def test_the_largest_part_is_nearly_the_smallest_possible_and_then_fewest_bytes_cross(
    amounts: list[int], sizes: list[int], num: int, cuts: list[int]
) -> None:
    assert [point.position for point in choose_cuts(*table(amounts, sizes), num)] == cuts


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cuts_are_better_than_those_chosen(seed: int) -> None:
    draw = random.Random(seed)
    length, num = draw.randint(6, 10), draw.randint(2, 5)
    points, amounts = table([draw.randint(0, 20) for _ in range(length)], draw.choices(range(9), k=length - 1))
    points = sorted(draw.sample(points, draw.randint(num - 1, len(points))), key=lambda point: point.position)

    def greatest(chosen: Sequence[CutPoint]) -> int:
        bounds = [0, *(point.position for point in chosen), length]
        return max(sum(amounts[start:stop]) for start, stop in itertools.pairwise(bounds))

    def crossing(chosen: Sequence[CutPoint]) -> int:
        return sum(point.num_bytes for point in chosen)

    every = [*itertools.combinations(points, num - 1)]
    least, found = min(map(greatest, every)), choose_cuts(points, amounts, num)
    assert greatest(found) <= SLACK * 1.002 * least
    near = [chosen for chosen in every if greatest(chosen) <= SLACK * least]
    assert crossing(found) <= min(map(crossing, near))
    assert greatest(found) <= 1.002 * min(greatest(other) for other in near if crossing(other) <= crossing(found))


def test_too_few_cut_points_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="in 2 places only, so into 3 parts at most, not 5"):
        choose_cuts(*table([1, 1, 1], [1, 1]), 5)


def test_a_transformer_is_cut_between_its_layers() -> None:
    module, _, found = load(graphs.tiny_transformer)
    points, amounts = find_cut_points(module.graph, found), node_work(module.graph, found)
    (middle,) = choose_cuts(points, amounts, 2)
    assert middle.crossing == ("add_6",)
    ends = [0, middle.position, len(amounts)]
    parts = [sum(amounts[start:stop]) for start, stop in itertools.pairwise(ends)]
    assert max(parts) < 0.6 * sum(parts)


# -- units


def unit_cuts(build: Callable[[], onnx.ModelProto], num: int, borders: Sequence[str] = ()) -> list[list[CutPoint]]:
    """Return the unit cuts of each stage."""
    module, _, found = load(build)
    points, amounts = find_cut_points(module.graph, found), node_work(module.graph, found)
    stages = cuts_by_name(module.graph, points, borders)
    places = choose_unit_cuts(module, points, amounts, stages, num)
    assert all(place.is_narrow and place in points and place not in stages for place in places)
    assert places == sorted(places, key=lambda place: place.position)
    bounds = itertools.pairwise([0, *(stage.position for stage in stages), len(amounts)])
    return [[place for place in places if start < place.position < stop] for start, stop in bounds]


@pytest.mark.parametrize(
    ("num", "borders", "expected"),
    [(1, (), [0]), (3, (), [2]), (99, (), [7]), (2, ("Add_35",), [1, 1]), (99, ("Add_35",), [3, 3])],
)
def test_each_stage_has_the_configured_number_of_units_as_far_as_it_has_narrow_cuts(
    num: int, borders: tuple[str, ...], expected: list[int]
) -> None:
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_transformer, num, borders)] == expected


def test_by_default_each_unit_has_at_least_unit_bytes_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unit_cuts(graphs.tiny_llama, 0) == [[]], "too small for more than one"
    total = sum(weight.nbytes for weight in to_module(graphs.tiny_llama()).parameters())
    monkeypatch.setattr(balance, "UNIT_BYTES", total // 3)
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_llama, 0)] == [2]
    monkeypatch.setattr(balance, "UNIT_BYTES", total // 20)
    monkeypatch.setattr(balance, "MAX_UNITS", 4)
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_llama, 0)] == [3]
