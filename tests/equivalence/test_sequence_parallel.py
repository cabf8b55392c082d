"""Tensor parallelism with values divided along the sequence between regions trains what one rank trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import layouts
from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, make_case, trained
from tests.support.runs import final_tensors, losses, train_run

GPT2, BERT, LLAMA, _ = MODELS
DIVIDED: Mapping[str, Any] = {"parallel": {"sequence_parallel": True}}

QUICK = [
    Case(GPT2, "tp2", sections=DIVIDED),
    Case(BERT, "tp2", sections=DIVIDED),
    Case(LLAMA, "dp2 x tp2", zero=1, sections=DIVIDED),
    Case(GPT2, "tp2 x pp2", sections=DIVIDED),
]
COMPILED: Mapping[str, Any] = {
    **DIVIDED,
    "graph": {"compile": True},
    "launch": {"heartbeat_timeout_s": 300},
}
SLOW = [
    *(Case(model, "2x2x2", zero, DIVIDED) for model in (GPT2, BERT, LLAMA) for zero in (0, 2, 3)),
    *(Case(model, "dp2 x tp2", zero, DIVIDED) for model in (GPT2, BERT, LLAMA) for zero in (0, 1, 2, 3)),
]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("cases", [pytest.param(QUICK, id="few"), pytest.param(SLOW, id="all")])
def test_what_is_divided_along_the_sequence_trains_as_on_one_rank(cases: list[Case], tmp_path: Path) -> None:
    alone = [Case(model, ALONE) for model in {case.model for case in cases}]
    runs = trained([*cases, *alone], tmp_path)
    found = {case.name: differences(runs[case], runs[Case(case.model, ALONE)]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}, found
    for case in cases:  # norms that a reader of the log sees, of gradients that were summed over the ranks once
        wanted = layouts.norms(runs[Case(case.model, ALONE)])
        least = 1e-3 * max(value for name, value in wanted.items() if "gradient_norm/" in name)
        assert layouts.norms(runs[case]) == pytest.approx(wanted, rel=5 * TOLERANCE, abs=5 * TOLERANCE * least), case


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_compiled_it_trains_as_on_one_rank(tmp_path: Path) -> None:
    # not through `trained`, whose counting of collectives cannot be compiled
    divided, alone = make_case(Case(GPT2, "tp2", sections=COMPILED), tmp_path / "1"), Case(GPT2, ALONE)
    train_run(divided, timeout_s=800)
    wanted = trained([alone], tmp_path / "2")[alone]
    assert losses(divided) == pytest.approx(losses(wanted), rel=TOLERANCE)
    found, weights = final_tensors(divided), final_tensors(wanted)
    for name, tensor in weights.items():
        if name.startswith("model/"):
            assert (found[name] - tensor).abs().max() <= 5 * TOLERANCE * tensor.abs().max().clamp(min=1e-6), name
