"""Promise 3 for every optimizer: every layout trains what one rank trains, and continues the checkpoints of others.

Gradients that are 0 but for rounding, such as those of the biases of keys, would be scaled to the size of all others:
so `epsilon` is 1e-3 wherever there is one. Lion has none, so its steps may differ where a gradient is almost 0.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.run.directory import RunDir
from tests.equivalence import layouts
from tests.equivalence.layouts import ALONE, MODELS, NUM_STEPS, TOLERANCE, Case, make_case, tensors, trained
from tests.equivalence.test_layouts import with_a_planted_overflow
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_bits, events, final_tensors, losses

GPT2, BERT, LLAMA, CONV = MODELS
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay_mode": "huggingface"},
    "adamw": {"weights": [{"pattern": "*1*weight", "alpha": 0.5, "beta": 0.9}]},
    "lamb": {"weights": [{"pattern": "*1*weight", "trust_ratio": [0, 0.1]}]},
    "sgd": {"epsilon": 1e-8, "momentum": 0.9, "learning_rate": 0.05},
    "nadam": {},
    "radam": {},
    "rmsprop": {},
    "adagrad": {},
    "lion": {"epsilon": 1e-8, "learning_rate": 1e-4},
    "adafactor": {"learning_rate": 1e-2},
    "muon": {"learning_rate": 0.02},
}
"""`optimizer.name` -> its other settings."""
LAYOUTS = (
    *(("dp2", 0), ("tp2", 0), ("pp2", 0), ("dp2", 1), ("dp2", 3), ("dp2 x tp2", 3), ("2x2x2", 2)),
    *(("pp2 interleaved", 0), ("dp4 hybrid", 2), ("tp3", 0)),
)


def case(model: str, name: str, layout: str, zero: int = 0, **sections: Any) -> Case:
    replicas = layouts.LAYOUTS[layout].get("data", 1)
    batches = {"global_batch_size": 8, "gradient_accumulation_steps": 4 // replicas}
    kernels = {"weights": [{"pattern": "*conv*", "rule": "muon"}]} if (model, name) == (CONV, "muon") else {}
    optimizer = {"name": name, **OPTIMIZERS[name], **kernels}
    return Case(model, layout, zero, {"optimizer": optimizer, "train": batches, **sections})


def largest_difference(found: RunDir, wanted: RunDir, name: str) -> float:
    """Of losses and weights, relative to the largest value of each tensor; for Lion only where `signs` are certain."""
    assert losses(found).keys() <= losses(wanted).keys()
    worst = [abs(loss / losses(wanted)[step] - 1) for step, loss in losses(found).items()]
    mine, theirs = (tensors(run, NUM_STEPS, "model/") for run in (found, wanted))
    assert mine.keys() == theirs.keys()
    certain = signs(wanted) if name == "lion" else {}
    for key, weight in theirs.items():
        difference = (mine[key] - weight).abs() * certain.get(key, 1.0) / max(float(weight.abs().max()), 1e-6)
        worst.append(float(difference.max()))
    return max(worst)


def signs(run: RunDir) -> dict[str, torch.Tensor]:
    """Where Lion's direction 0.9m + 0.1g was more than rounding in every step, by weight; m moves by 0.01 (g - m)."""
    moments = [tensors(run, step, "optimizer/") for step in range(1, NUM_STEPS + 1)]
    keys = [key for key in moments[0] if key.endswith("/moment_1")]
    directions = {}
    for key in keys:
        before = [torch.zeros_like(moments[0][key]), *(each[key] for each in moments)]
        steps = [0.9 * m + 10.0 * (after - 0.99 * m) for m, after in itertools.pairwise(before)]
        directions[key.removesuffix("/moment_1")] = torch.stack(steps).abs().min(0).values
    limit = 1e-5 * max(float(each.max()) for each in directions.values())
    certain = {key: (each > limit).float() for key, each in directions.items()}
    assert statistics.mean(float(each.mean()) for each in certain.values()) > 0.8
    return certain


def test_every_optimizer_is_in_the_matrix() -> None:
    assert OPTIMIZERS.keys() == UPDATE_RULES.keys()


@pytest.mark.slow
@pytest.mark.mpi
def test_optimizers_that_need_full_weights_train_on_shards_of_shards_what_one_rank_trains(tmp_path: Path) -> None:
    names = ("adafactor", "muon")
    cases = [case(GPT2, name, layout, zero) for name in names for layout, zero in ((ALONE, 0), ("dp2 x tp2", 3))]
    runs = list(trained(cases, tmp_path).values())
    found = {name: largest_difference(runs[2 * n + 1], runs[2 * n], name) for n, name in enumerate(names)}
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", [GPT2, CONV])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_in_every_layout_what_one_rank_trains(name: str, model: str, tmp_path: Path) -> None:
    alone, *cases = [case(model, name, *each) for each in ((ALONE, 0), *LAYOUTS)]
    runs = trained([alone, *cases], tmp_path)
    found = {each.name: largest_difference(runs[each], runs[alone], name) for each in cases}
    assert {each: difference for each, difference in found.items() if difference > TOLERANCE} == {}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "nadam", "adafactor", "muon"])
def test_a_checkpoint_of_every_optimizer_is_continued_by_another_layout(name: str, tmp_path: Path) -> None:
    first = trained([case(GPT2, name, "dp2 x tp2", 3)], tmp_path / "first")
    (run,) = first.values()
    saved = {"checkpoint": {"period": 1, "load": str(run.checkpoint(1))}}
    others = [case(GPT2, name, *each, **saved) for each in ((ALONE, 0), ("pp2", 0), ("tp2", 0), ("dp2 x tp2", 3))]
    runs = {each.layout: make_case(each, tmp_path / str(place)) for place, each in enumerate(others)}
    for size in (1, 2, 4):
        roots = [str(runs[each.layout].root) for each in others if each.world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=300)
    for other in runs.values():
        assert sorted(losses(other)) == [2, 3]
        assert largest_difference(other, run, name) <= TOLERANCE
    assert_equal_bits(final_tensors(runs["dp2 x tp2"]), final_tensors(run))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_overflow_skips_the_step_of_an_optimizer_that_sums_over_ranks(name: str, tmp_path: Path) -> None:
    run = make_case(
        case(GPT2, name, "tp2 x pp2", 0, precision={"compute": "fp16", "loss_scale": ("dynamic", 1024.0)}), tmp_path
    )
    planted = "tests.equivalence.test_layouts:with_a_planted_overflow"
    assert with_a_planted_overflow.__name__ in planted
    steps = run_ranks(4, planted, str(run.root), 3, 2, timeout_s=300)
    assert steps == [layouts.NUM_STEPS] * 4
    skipped = [event for event in events(run, "scalars") if event.values.get("train/skipped")]
    assert [(event.step, event.values["train/loss_scale"]) for event in skipped] == [(2, 512.0)]
    assert sorted(losses(run)) == [1, 2, 3]
