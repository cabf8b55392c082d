"""Which units are recomputed: those with a name that matches, or as few as fit into memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.pipeline.balance import choose_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import find_cut_points
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Chain, Part, build_stages
from onward.trainer.parallel.recomputation.recompute import Mode
from onward.trainer.parallel.recomputation.recompute_choice import (
    UnitCost,
    choose_by_budget,
    choose_by_name,
    peak_bytes,
)
from tests.support.graphs import MODELS, feed

# -- by name


def chain_of(num_units: int) -> Chain:
    """A chain that computes x1 from x0, x2 from x1 and so on."""
    parts = [Part(nn.Identity(), (f"x{number}",), (f"x{number + 1}",)) for number in range(num_units)]
    return Chain(parts, input_names=("x0",), output_names=(f"x{num_units}",))


def model_in_units(name: str, num_units: int) -> Chain:
    model = MODELS[name]()
    module = to_module(model)
    costs = estimate_costs(module, [torch.from_numpy(value) for value in feed(model, 5).values()])
    narrow = [point for point in find_cut_points(module.graph, costs) if point.is_narrow]
    cuts = choose_cuts(narrow, node_work(module.graph, costs), num_units)
    return build_stages(module, [split(module, cuts)], costs)[0].chain


def test_units_are_chosen_by_the_tensors_they_compute_and_the_weights_they_use() -> None:
    chain = chain_of(3)
    chain.units[1].onnx_names = {"up": "h.1.up"}  # type: ignore[assignment]
    assert choose_by_name(chain, ["x1"]) == (0,)
    assert choose_by_name(chain, ["h.1.*", "x3"]) == (1, 2)
    assert choose_by_name(chain, ["x*"]) == (0, 1, 2)
    assert choose_by_name(model_in_units("tiny_two_outputs", 1), ["late"]) == (0,), "a name in the file"
    units = model_in_units("tiny_transformer", 4)
    assert choose_by_name(units, ["transformer.h.1.*"])[0] > 0
    assert choose_by_name(units, ["transformer.wpe.*"]) == (0,)


def test_a_pattern_without_a_match_is_refused_with_similar_names() -> None:
    chain, later = chain_of(2), chain_of(1)
    later.parts = (Part(later.parts[0].module, ("x2",), ("logits",)),)
    assert choose_by_name(chain, ["x2", "logits"], elsewhere=later.parts) == (1,)
    with pytest.raises(ConfigError) as refused:
        choose_by_name(chain, ["x2", "logit", "nothing.*"], elsewhere=later.parts)
    assert len(refused.value.problems) == 2
    assert "no tensor or weight of the graph matches 'logit'; did you mean logits?" in refused.value.problems[0]


# -- by memory

EVEN = [UnitCost(flops=100, kept_bytes=80, product_bytes=30, input_bytes=10)] * 4
UNEVEN = [
    UnitCost(flops=400, kept_bytes=100, product_bytes=40, input_bytes=10),
    UnitCost(flops=10, kept_bytes=100, product_bytes=80, input_bytes=10),
    UnitCost(flops=50, kept_bytes=20, product_bytes=5, input_bytes=20),
]


@pytest.mark.parametrize(
    ("units", "in_flight", "budget", "expected"),
    [
        (EVEN, 1, 320, ("selective", ())),
        (EVEN, 1, 319, ("selective", (0,))),
        (EVEN, 1, 280, ("selective", (0,))),
        (EVEN, 1, 200, ("selective", (0, 1, 2))),
        (EVEN, 1, 199, ("whole", (0, 1))),
        (EVEN, 1, 110, ("whole", (0, 1, 2))),
        (EVEN, 2, 640, ("selective", ())),
        (EVEN, 2, 360, ("selective", (0, 1, 2, 3))),
        (EVEN, 2, 150, ("whole", (0, 1, 2, 3))),
        (UNEVEN, 1, 219, ("selective", (0,))),
        (UNEVEN, 1, 165, ("selective", (0, 1))),
        (UNEVEN, 1, 130, ("whole", (0,))),
        (UNEVEN, 1, 120, ("whole", (0, 1))),
        ([], 3, 0, ("selective", ())),
    ],
)
def test_the_cheapest_recomputation_that_fits_is_chosen(
    units: list[UnitCost], in_flight: int, budget: int, expected: tuple[Mode, tuple[int, ...]]
) -> None:
    mode, wanted = expected
    chosen = choose_by_budget(units, mode, in_flight=in_flight, budget_bytes=budget)
    assert chosen == wanted
    assert peak_bytes(units, mode, chosen, in_flight=in_flight) <= budget


def test_a_budget_below_full_recomputation_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4 micro-batches take 230 bytes with all 4 units .*but 200 are left"):
        choose_by_budget(EVEN, "whole", in_flight=4, budget_bytes=200)


def test_the_greedy_choice_is_within_a_third_of_the_fewest_flops() -> None:
    """Compared with every choice that fits into the budget."""
    random = np.random.default_rng(0)
    worst = 1.0
    for _ in range(40):
        units = [
            UnitCost(*(int(x) for x in (random.integers(1, 100), random.integers(50, 100), 50, random.integers(1, 20))))
            for _ in range(6)
        ]
        choices = [c for n in range(7) for c in itertools.combinations(range(6), n)]
        budget = int(random.integers(100, 400))
        fitting = [c for c in choices if peak_bytes(units, "whole", c, in_flight=1) <= budget]
        if not fitting:
            continue
        chosen = choose_by_budget(units, "whole", in_flight=1, budget_bytes=budget)
        least = min(sum(units[n].flops for n in c) for c in fitting)
        worst = max(worst, sum(units[n].flops for n in chosen) / max(least, 1))
    assert worst < 1.34
