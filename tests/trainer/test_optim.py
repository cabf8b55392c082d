"""Update rules against their formulas, schedules against their tables, attributes and state by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig, ScheduleConfig, WeightAttributes
from trainer.errors import CheckpointError, ConfigError
from trainer.optim import (
    build_optimizer,
    clip_factor,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)

Array = np.ndarray[Any, np.dtype[Any]]
Rule = Callable[[Array, Array, dict[str, Array], int], Array]
"""(weight, gradient, state, t) -> the new weight, in float64; written from the formulas of the docstrings."""

# -- schedules


def rates(*, num_steps: int = 10, **schedule: Any) -> list[float]:
    optimizer = OptimizerConfig(learning_rate=1.0)
    config = ScheduleConfig(**schedule)
    return [
        learning_rate(t, optimizer=optimizer, schedule=config, num_steps=num_steps) for t in range(1, 1 + num_steps)
    ]


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        ("none", [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 0.904508, 0.793893, 0.654508, 0.5, 0.345492, 0.206107, 0.095492, 0.024472, 0]),
        ("linear", [0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("poly", [0.5, 0.894427, 0.836660, 0.774597, 0.707107, 0.632456, 0.547723, 0.447214, 0.316228, 0]),
    ],
)
def test_compatible_schedules_give_the_predecessors_numbers(mode: str, table: list[float]) -> None:
    assert rates(mode=mode, warmup_ratio=0.2, shape="compatible") == pytest.approx(table, abs=5e-7)


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        ("none", [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, 0.969846, 0.883022, 0.75, 0.586824, 0.413176, 0.25, 0.116978, 0.030154]),
        ("linear", [0.5, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9]),
        ("poly", [0.5, 1, 0.942809, 0.881917, 0.816497, 0.745356, 0.666667, 0.577350, 0.471405, 0.333333]),
    ],
)
def test_continuous_schedules_descend_from_where_warm_up_ends(mode: str, table: list[float]) -> None:
    assert rates(mode=mode, warmup_ratio=0.2) == pytest.approx(table, abs=5e-7)


@pytest.mark.parametrize("mode", ["cosine", "linear", "poly"])
def test_continuous_schedules_never_jump_and_end_just_above_the_floor(mode: str) -> None:
    curve = rates(mode=mode, warmup_ratio=0.3, floor=0.1, num_steps=10_000)
    assert max(abs(b - a) for a, b in itertools.pairwise(curve)) < 0.02
    assert max(curve) == 1.0
    assert curve[-1] > 0.1, "an update at the floor of 0 would be a wasted one"
    assert curve[-1] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("shape", ["compatible", "continuous"])
@pytest.mark.parametrize("mode", ["constant", "cosine", "linear", "poly"])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_no_warm_up_and_nothing_but_warm_up_are_finite(mode: str, shape: str, warmup: float) -> None:
    curve = rates(mode=mode, shape=shape, warmup_ratio=warmup)
    assert all(0.0 <= rate <= 1.0 for rate in curve)
    if warmup:
        assert curve[:-1] == pytest.approx([t / 10 for t in range(1, 10)])


def test_clipping_shortens_what_is_too_long_and_nothing_else() -> None:
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 2.0, 8.0)] == [1.0, 1.0, 1.0, 0.25]
    assert clip_factor(8.0, 0.0) == 1.0


# -- update rules


def adam(*, rate: float, decay: float, huggingface: bool, corrected: bool) -> Rule:
    def rule(w: Array, g: Array, state: dict[str, Array], t: int) -> Array:
        m = state["m"] = 0.9 * state.get("m", 0 * g) + 0.1 * g
        v = state["v"] = 0.999 * state.get("v", 0 * g) + 0.001 * g**2
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
        if huggingface:
            u = rate * math.sqrt(c2) / c1 * m / (np.sqrt(v) + 1e-8)
            return w - u - rate * decay * (w - u)
        return w - rate * ((m / c1) / (np.sqrt(v / c2) + 1e-8) + decay * w)

    return rule


def lamb(*, rate: float, decay: float, corrected: bool, low: float, high: float) -> Rule:
    def rule(w: Array, g: Array, state: dict[str, Array], t: int) -> Array:
        m = state["m"] = 0.9 * state.get("m", 0 * g) + 0.1 * g
        v = state["v"] = 0.999 * state.get("v", 0 * g) + 0.001 * g**2
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
        d = decay * w + (m / c1) / (np.sqrt(v / c2) + 1e-8)
        lengths = np.linalg.norm(w), np.linalg.norm(d)
        ratio = np.clip(lengths[0] / lengths[1], low, high) if all(lengths) else 1.0
        return w - rate * ratio * d

    return rule


def sgd(*, rate: float, decay: float, momentum: float, nesterov: bool) -> Rule:
    def rule(w: Array, g: Array, state: dict[str, Array], t: int) -> Array:
        g = g + decay * w
        b = state["b"] = momentum * state.get("b", 0 * g) + g
        return w - rate * (g + momentum * b if nesterov else b)

    return rule


def largest_difference(config: OptimizerConfig, rule: Rule, *, steps: int = 20) -> float:
    """Between torch and the rule after some steps, over three weights of which one begins at zero."""
    random = np.random.default_rng(0)
    shapes = [(3, 5), (7,), (2, 2, 2)]
    starts = [random.standard_normal(shape) * (number > 0) for number, shape in enumerate(shapes)]
    weights = [(f"w{number}", nn.Parameter(torch.tensor(start).float())) for number, start in enumerate(starts)]
    optimizer = build_optimizer(config, weights)
    states: list[dict[str, Array]] = [{} for _ in shapes]
    for t in range(1, steps + 1):
        gradients = [random.standard_normal(shape) for shape in shapes]
        for (_, weight), gradient in zip(weights, gradients, strict=True):
            weight.grad = torch.tensor(gradient).float()
        optimizer.step()
        starts = [rule(w, g, state, t) for w, g, state in zip(starts, gradients, states, strict=True)]
    return max(float(np.abs(w.detach().numpy() - s).max()) for (_, w), s in zip(weights, starts, strict=True))


@pytest.mark.parametrize("mode", ["pytorch", "huggingface"])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
def test_adam_keeps_to_its_formula(mode: str, corrected: bool, decay: float) -> None:
    settings = {"weight_decay": decay, "bias_correction": corrected, "weight_decay_mode": mode}
    config = OptimizerConfig.model_validate({"name": "adam", "learning_rate": 0.01, **settings})
    rule = adam(rate=0.01, decay=decay, huggingface=mode == "huggingface", corrected=corrected)
    assert largest_difference(config, rule) < 2e-6


def test_adamw_is_torchs_and_adams_pytorch_mode_bit_for_bit() -> None:
    def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(33, 7)), nn.Parameter(torch.randn(5))]
        optimizer = make(weights)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        return weights

    def ours(name: str) -> list[Tensor]:
        config = OptimizerConfig.model_validate({"name": name, "learning_rate": 0.01, "weight_decay": 0.1})
        return run(lambda weights: build_optimizer(config, [(f"w{i}", weight) for i, weight in enumerate(weights)]))

    theirs = run(lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1, fused=True))
    for first, second, third in zip(ours("adamw"), ours("adam"), theirs, strict=True):
        assert torch.equal(first, third)
        assert torch.equal(second, third)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1e30), (0.05, 0.3), (2.0, 5.0)])
def test_lamb_keeps_to_its_formula(corrected: bool, low: float, high: float) -> None:
    config = OptimizerConfig(
        name="lamb", learning_rate=0.01, weight_decay=0.1, bias_correction=corrected, ratio_min=low, ratio_max=high
    )
    assert largest_difference(config, lamb(rate=0.01, decay=0.1, corrected=corrected, low=low, high=high)) < 2e-6


def test_lamb_gives_the_predecessors_vector() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    weight.grad = torch.tensor([0.1, 0.2, -0.3])
    config = OptimizerConfig(name="lamb", learning_rate=0.01, weight_decay=0.01, epsilon=1e-6, bias_correction=False)
    build_optimizer(config, [("w", weight)]).step()
    assert weight.tolist() == pytest.approx([0.9782404, -2.02155718, 3.02148971], abs=3e-7)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_keeps_to_its_formula(momentum: float, nesterov: bool, decay: float) -> None:
    config = OptimizerConfig(name="sgd", learning_rate=0.01, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    assert largest_difference(config, sgd(rate=0.01, decay=decay, momentum=momentum, nesterov=nesterov)) < 2e-6


# -- attributes by name


def parameters(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(2))) for name in names]


def test_of_several_patterns_that_match_the_last_one_counts_for_each_setting() -> None:
    config = OptimizerConfig(
        weight_decay=0.1,
        weights=(
            WeightAttributes(pattern="head.*", learning_rate_scale=10.0, weight_decay=0.5),
            WeightAttributes(pattern="*.weight", learning_rate_scale=2.0),
            WeightAttributes(pattern="body.bias", weight_decay=0.3),
        ),
    )
    names = ("head.weight", "head.bias", "body.weight", "body.bias", "other.bias", "other")
    named = parameters(*names)
    optimizer = build_optimizer(config, named)
    set_learning_rate(optimizer, 0.01)
    of_weight = {id(w): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for w in g["params"]}
    assert [of_weight[id(weight)] for _, weight in named] == [
        (0.02, 0.5),
        (0.1, 0.5),
        (0.02, 0.1),
        (0.01, 0.3),
        (0.01, 0.0),
        (0.01, 0.1),
    ]


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "sgd"])
def test_a_weight_with_learning_rate_scale_0_does_not_move(name: str) -> None:
    weights = (WeightAttributes(pattern="still", learning_rate_scale=0.0),)
    config = OptimizerConfig.model_validate({"name": name, "weight_decay": 0.1, "weights": weights})
    named = parameters("still", "moving")
    optimizer = build_optimizer(config, named)
    for _, weight in named:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight.tolist() == [1.0, 1.0] for _, weight in named] == [True, False]


def test_every_pattern_that_matches_nothing_is_named() -> None:
    weights = tuple(WeightAttributes(pattern=pattern) for pattern in ("haed.*", "head.*", "boddy"))
    with pytest.raises(ConfigError) as refused:
        build_optimizer(OptimizerConfig(weights=weights), parameters("head.weight", "body"))
    assert [problem.split("'")[1] for problem in refused.value.problems] == ["boddy", "haed.*"]


# -- state by name

RULES = [
    {"name": "adam", "weight_decay_mode": "huggingface"},
    {"name": "adamw"},
    {"name": "lamb"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd"},
]


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.parametrize("saved_after", [0, 3])
def test_saved_state_goes_on_with_the_same_bits(settings: dict[str, Any], saved_after: int) -> None:
    def make() -> tuple[list[tuple[str, nn.Parameter]], torch.optim.Optimizer]:
        named = [("a.weight", nn.Parameter(torch.ones(9, 3))), ("b", nn.Parameter(torch.ones(4)))]
        return named, build_optimizer(OptimizerConfig.model_validate(settings | {"weight_decay": 0.1}), named)

    def go(named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, *, first: int, last: int) -> None:
        for t in range(first, last):
            for number, (_, weight) in enumerate(named):
                generator = torch.Generator().manual_seed(10 * t + number)
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()

    whole, optimizer = make()
    go(whole, optimizer, first=0, last=saved_after)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, whole).items()}
    saved |= {f"model/{name}": weight.detach().clone() for name, weight in whole}
    go(whole, optimizer, first=saved_after, last=6)

    resumed, second = make()
    for name, weight in resumed:
        weight.data.copy_(saved[f"model/{name}"])
    load_optimizer_tensors(second, resumed, saved)
    go(resumed, second, first=saved_after, last=6)
    for (_, a), (_, b) in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_another_optimizer_is_refused_with_every_name() -> None:
    named = parameters("a", "b")
    saved = optimizer_tensors(build_optimizer(OptimizerConfig(name="adamw"), named), named)
    saved["optimizer/a/moment_1"] = torch.zeros(3)
    del saved["optimizer/b/step"]
    saved["optimizer/c/step"] = torch.zeros(())
    with pytest.raises(CheckpointError) as refused:
        load_optimizer_tensors(build_optimizer(OptimizerConfig(name="lamb"), named), named, saved)
    for finding in ("a/moment_1 is (3,), not (2,)", "b/step is missing", "c/step is not of this optimizer or model"):
        assert finding in str(refused.value)
