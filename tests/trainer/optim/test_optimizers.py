"""Update rules against their formulas, schedules against their tables, parts of weights, state by name."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.sections.training import OptimizerConfig, ScheduleConfig, WeightAttributes
from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.optim.moments import CHUNK, hash_offset, noise, put_positions, round_
from onward.trainer.optim.optimizers import build_optimizer, clip_factor, set_learning_rate
from onward.trainer.optim.rules.rule import NoOtherParts, OtherParts
from onward.trainer.optim.rules.table import RULES as RULE_TABLE
from onward.trainer.optim.schedules import DECAY, learning_rate
from onward.trainer.optim.state import (
    load_optimizer_parts,
    optimizer_parts,
    optimizer_shapes,
    optimizer_tensors,
    state_bytes,
)
from onward.trainer.run.directory import RunDir
from tests.support.placements import share_of

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
        ("cosine_compatible", [0.5, 0.904508, 0.793893, 0.654508, 0.5, 0.345492, 0.206107, 0.095492, 0.024472, 0]),
        ("linear_compatible", [0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("poly_compatible", [0.5, 0.894427, 0.836660, 0.774597, 0.707107, 0.632456, 0.547723, 0.447214, 0.316228, 0]),
    ],
)
def test_compatible_schedules_give_the_numbers_of_onnx_runtimes_trainer(mode: str, table: list[float]) -> None:
    assert rates(mode=mode, warmup_ratio=0.2) == pytest.approx(table, abs=5e-7)


CONTINUOUS = {
    "none": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "cosine": [0.5, 1, 0.969846, 0.883022, 0.75, 0.586824, 0.413176, 0.25, 0.116978, 0.030154],
    "linear": [0.5, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9],
    "poly": [0.5, 1, 0.942809, 0.881917, 0.816497, 0.745356, 0.666667, 0.577350, 0.471405, 0.333333],
}


def test_every_schedule_is_computed_and_has_a_table_of_numbers_here() -> None:
    modes = {mode.removesuffix("_compatible") for mode in get_args(ScheduleConfig.model_fields["mode"].annotation)}
    assert set(DECAY) == modes
    assert set(CONTINUOUS) == modes


@pytest.mark.parametrize(("mode", "table"), CONTINUOUS.items())
def test_continuous_schedules_descend_from_where_warm_up_ends(mode: str, table: list[float]) -> None:
    assert rates(mode=mode, warmup_ratio=0.2) == pytest.approx(table, abs=5e-7)


@pytest.mark.parametrize("mode", ["cosine", "linear", "poly"])
def test_continuous_schedules_never_jump_and_end_just_above_the_floor(mode: str) -> None:
    curve = rates(mode=mode, warmup_ratio=0.3, floor=0.1, num_steps=10_000)
    assert max(abs(b - a) for a, b in itertools.pairwise(curve)) < 0.02
    assert max(curve) == 1.0
    assert curve[-1] > 0.1, "an update at the floor of 0 would be a wasted one"
    assert curve[-1] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("mode", get_args(ScheduleConfig.model_fields["mode"].annotation)[1:])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_no_warm_up_and_nothing_but_warm_up_are_finite(mode: str, warmup: float) -> None:
    curve = rates(mode=mode, warmup_ratio=warmup)
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
        name="lamb", learning_rate=0.01, weight_decay=0.1, bias_correction=corrected, trust_ratio=(low, high)
    )
    assert largest_difference(config, lamb(rate=0.01, decay=0.1, corrected=corrected, low=low, high=high)) < 2e-6


def test_lamb_gives_the_vector_of_onnx_runtimes_trainer() -> None:
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


@pytest.mark.parametrize("name", UPDATE_RULES)
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

RULES: list[dict[str, Any]] = [
    {"name": "adam", "weight_decay_mode": "huggingface"},
    {"name": "adamw"},
    {"name": "adamw", "moments": "bf16"},
    {"name": "lamb"},
    {"name": "lamb", "moments": "bf16"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd"},
    {"name": "nadam"},
    {"name": "nadam", "moments": "bf16"},
    {"name": "radam"},
    {"name": "rmsprop"},
    {"name": "adagrad"},
    {"name": "lion"},
    {"name": "lion", "moments": "bf16"},
    {"name": "adafactor"},
    {"name": "muon"},
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
    load_optimizer_parts(second, resumed, saved)
    go(resumed, second, first=saved_after, last=6)
    for (_, a), (_, b) in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)


class HostReads(TorchDispatchMode):
    """Count the values that the host reads from tensors; on a GPU it would wait for each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [*RULES, {"name": "adam", "bias_correction": False}], ids=str)
def test_an_update_reads_no_value_from_the_device(settings: dict[str, Any]) -> None:
    named = [("a.weight", nn.Parameter(torch.ones(70, 1000))), ("b.bias", nn.Parameter(torch.ones(4)))]
    optimizer = build_optimizer(OptimizerConfig.model_validate(settings | {"weight_decay": 0.1}), named)
    for _, weight in named:
        weight.grad = torch.ones_like(weight)
    with HostReads() as reads:
        torch.ones(()).item()
        for _ in range(3):
            optimizer.step()
    assert reads.count == 1, "the one above, which shows that they are counted"
    for group in optimizer.param_groups:
        state = optimizer.state[group["params"][0]]
        assert group["updates"] == state.get("step", 0)


def test_a_checkpoint_of_another_optimizer_is_refused_with_every_name() -> None:
    named = parameters("a", "b")
    saved = optimizer_tensors(build_optimizer(OptimizerConfig(name="adamw"), named), named)
    saved["optimizer/a/moment_1"] = torch.zeros(3)
    del saved["optimizer/b/step"]
    saved["optimizer/c/step"] = torch.zeros(())
    with pytest.raises(CheckpointError) as refused:
        load_optimizer_parts(build_optimizer(OptimizerConfig(name="lamb"), named), named, saved)
    for finding in (
        "of 6 tensors 1 missing: optimizer/b/step;",
        "1 unexpected: optimizer/c/step;",
        "a/moment_1 is [3], the model's is [2]",
    ):
        assert finding in str(refused.value)


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_names_of_the_state_are_known_without_a_weight(settings: dict[str, Any]) -> None:
    config = OptimizerConfig.model_validate(settings)
    named = parameters("a", "b.c")
    state = optimizer_tensors(build_optimizer(config, named), named)
    shapes = optimizer_shapes(config, {name: tuple(tensor.shape) for name, tensor in named})
    assert shapes == {key: tuple(tensor.shape) for key, tensor in state.items()}


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_memory_estimate_counts_the_state_of_every_optimizer(settings: dict[str, Any]) -> None:
    config = OptimizerConfig.model_validate(settings)
    named = [*parameters("a", "b.c"), ("d", nn.Parameter(torch.ones(5, 3))), ("e", nn.Parameter(torch.ones(2, 3, 4)))]
    state = optimizer_tensors(build_optimizer(config, named), named)
    held = sum(tensor.nbytes for key, tensor in state.items() if not key.endswith("/step"))
    assert state_bytes(config, named) == held


def test_every_name_has_a_rule_its_settings_and_a_test() -> None:
    names = set(get_args(OptimizerConfig.model_fields["name"].annotation))
    assert names == RULE_TABLE.keys() == UPDATE_RULES.keys() == {settings["name"] for settings in RULES}


# -- parts of weights, copies of weights, no weights


def divided(shape: Sequence[int], *cuts: tuple[int, Sequence[int]]) -> list[Placement]:
    """Placements of the parts of a tensor cut along a dimension into these lengths; each part again by the next cut."""
    parts = [Placement.full(shape)]
    for dim, lengths in cuts:
        ends = list(itertools.accumulate(lengths, initial=0))
        parts = [part.narrow(dim, a, b) for part in parts for a, b in itertools.pairwise(ends)]
    return parts


def take(whole: Tensor, placement: Placement) -> Tensor:
    part = torch.empty(placement.local_shape)
    for where, content in placement.take(whole):
        part[tuple(slice(a, b) for a, b in where)] = content
    return part


LAYOUTS = {
    "uneven rows, one rank without any": {"w": divided((3, 5), (0, (2, 1, 0))), "b": divided((7,), (0, (0, 7, 0)))},
    "columns": {"w": divided((3, 5), (1, (2, 2, 1))), "b": divided((7,), (0, (3, 2, 2)))},
    "fused": {
        "w": [share_of(Placement.full((3, 5)), 1, (2, 3), rank, 3) for rank in range(3)],
        "b": [share_of(Placement.full((7,)), 0, (3, 4), rank, 3) for rank in range(3)],
    },
}


class Sums:
    """What ranks send to each other, between threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.given = [torch.empty(0)] * num_ranks

    def of(self, rank: int) -> OtherParts:
        return PartsOnThreads(self, rank)


class PartsOnThreads:
    """All weights are sharded over all ranks."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self.sums, self.rank = sums, rank

    def squares(self, squares: Tensor) -> Tensor:
        self.sums.given[self.rank] = squares
        self.sums.barrier.wait()
        result = torch.stack(self.sums.given).sum(0)
        self.sums.barrier.wait()
        return result

    def sum(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        assert len(tensors) == len(numbers)
        return [self.squares(tensor) for tensor in tensors]

    def share(self, number: int) -> tuple[int, int]:
        return self.rank, len(self.sums.given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_parts_of_weights_go_where_the_whole_weights_go(settings: dict[str, Any], layout: str) -> None:
    config = OptimizerConfig.model_validate(settings | {"weight_decay": 0.1, "learning_rate": 0.01})
    torch.manual_seed(0)
    whole = [("w", nn.Parameter(torch.randn(3, 5))), ("b", nn.Parameter(torch.randn(7)))]
    sums, places = Sums(3), LAYOUTS[layout]

    def weight(name: str, tensor: Tensor, placement: Placement) -> Weight:
        return Weight(name, tensor, placement, trained=True, outputs=1 if name == "w" else None)

    reference = build_optimizer(config, [weight(n, w, Placement.full(w.shape)) for n, w in whole], seed=5)
    ranks = [
        [weight(n, nn.Parameter(take(w.detach(), places[n][rank])), places[n][rank]) for n, w in whole]
        for rank in range(3)
    ]
    optimizers = [build_optimizer(config, ranks[r], seed=5, parts=sums.of(r)) for r in range(3)]
    for _ in range(5):
        for name, full in whole:
            full.grad = torch.randn_like(full)
            for part in (part for rank in ranks for part in rank if part.name == name):
                part.tensor.grad = take(full.grad, part.placement)
        reference.step()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
    expected = dict(whole) | optimizer_tensors(reference, whole)
    for optimizer, rank in zip(optimizers, ranks, strict=True):
        found = {part.name: (part.tensor, part.placement) for part in rank} | optimizer_parts(optimizer, rank)
        assert found.keys() == expected.keys()
        for name, (part, placement) in found.items():
            torch.testing.assert_close(part.float(), take(expected[name].float(), placement), rtol=1e-5, atol=1e-7)
            # full matrices are put together exactly and computed with by one rank
            assert config.name != "muon" or torch.equal(part, take(expected[name], placement))


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_copies_of_a_weight_stay_equal_and_are_saved_once(settings: dict[str, Any]) -> None:
    config = OptimizerConfig.model_validate(settings)
    named = [("tied", nn.Parameter(torch.ones(5))), ("a", nn.Parameter(torch.ones(2)))]
    named.append(("tied", nn.Parameter(torch.ones(5))))
    optimizer = build_optimizer(config, named)

    def go() -> None:
        for name, weight in named:
            weight.grad = torch.linspace(-1, 1, len(weight)) if name == "tied" else torch.ones(2)
        optimizer.step()

    go()
    assert torch.equal(named[0][1], named[2][1])
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, named).items()}
    assert saved.keys() == optimizer_shapes(config, {"tied": (2,), "a": (2,)}).keys()
    for _, weight in named:
        for tensor in optimizer.state[weight].values():
            tensor.zero_()
    load_optimizer_parts(optimizer, named, saved)
    for part, tensor in optimizer.state[named[2][1]].items():
        assert torch.equal(tensor, saved[f"optimizer/tied/{part}"])
    go()
    assert torch.equal(named[0][1], named[2][1])


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_a_rank_without_a_trained_weight_takes_part(name: str) -> None:
    class Asked(NoOtherParts):
        def squares(self, squares: Tensor) -> Tensor:
            asked.append(tuple(squares.shape))
            return squares

    asked: list[tuple[int, ...]] = []
    config = OptimizerConfig.model_validate({"name": name, "weights": [WeightAttributes(pattern="h.*")]})
    optimizer = build_optimizer(config, [], elsewhere=["h.0"], parts=Asked())
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert asked == ([(2, 0)] if name in ("lamb", "adafactor") else [])
    assert optimizer_parts(optimizer, []) == {}
    with pytest.raises(ConfigError, match=r"pattern 'h\.\*' matches no weight"):
        build_optimizer(config, [], elsewhere=["g.0"])


# -- moments in bf16


@pytest.mark.slow
def test_a_second_moment_rounded_to_the_nearest_stops_at_a_quarter_and_stochastically_arrives() -> None:
    """v -> g² = 1 by 1/1000 of the difference a step; bf16 loses those below 1/512 of v.

    Where v is too small every update is too large: 1 / √v of the learning rate.
    """
    num_steps, rate = 5000, 1e-3
    ends = {}
    for kept in ("stochastically", "to the nearest"):
        moments = "bf16" if kept == "stochastically" else "fp32"
        weight = nn.Parameter(torch.zeros(500))
        optimizer = build_optimizer(OptimizerConfig(moments=moments, learning_rate=rate), [("w", weight)])
        for _ in range(num_steps):
            weight.grad = torch.ones(500)
            optimizer.step()
            v = optimizer.state[weight]["moment_2"]
            v.copy_(v.bfloat16())  # nothing new if it is kept in bf16
        ends[kept] = v.float(), weight.detach() / (-rate * num_steps)
    v, way = ends["stochastically"]
    assert float(v.mean()) == pytest.approx(1.0 - 0.999**num_steps, rel=0.005)
    assert float(v.std()) < 0.05
    assert float((way - 1).abs().max()) < 0.03
    v, way = ends["to the nearest"]
    assert float(v.max()) < 0.3
    assert float(way.min()) > 1.5


def test_rounding_keeps_the_mean_and_goes_no_further_than_the_neighbours() -> None:
    values = torch.tensor([1.001, -3.14159, 1e-30, 6.5e4, 0.0, -0.0, 1.0])
    many = values.repeat(40_000, 1).flatten()
    places = torch.empty(many.numel(), dtype=torch.int32)
    put_positions(places, Placement.full(many.shape), 0, hash_offset(0, 1, "w"))
    rounded = many.clone()
    round_(rounded, noise(places)[0])
    assert torch.equal(rounded, rounded.bfloat16().float()), "bf16 has them exactly"
    relative = (rounded.reshape(-1, 7).double().mean(0) - values.double()) / values.abs().clamp(min=1e-45)
    assert float(relative.abs().max()) < 2**-8 / math.sqrt(40_000) * 3
    assert float(((rounded - many) / many.abs().clamp(min=1e-45)).abs().max()) < 2**-7
    assert torch.equal(rounded.reshape(-1, 7)[:, 4:], many.reshape(-1, 7)[:, 4:]), "what bf16 has stays"


def test_random_bits_are_even_and_those_of_two_moments_steps_and_weights_have_nothing_in_common() -> None:
    def draw(step: int, name: str) -> list[Tensor]:
        places = torch.empty(1 << 18, dtype=torch.int32)
        put_positions(places, Placement.full((1 << 18,)), 0, hash_offset(7, step, name))
        return [random.double() for random in noise(places)]

    draws = torch.stack([*draw(1, "w"), *draw(2, "w"), *draw(1, "v")])
    assert float(draws.min()) >= 0
    assert float(draws.max()) == 0xFFFF
    bits = torch.stack([(draws.long() >> bit) & 1 for bit in range(16)]).double()
    assert float((bits.mean(-1) - 0.5).abs().max()) < 0.005
    shifted = torch.cat([draws[:, :-1], draws[:, 1:]])  # neighbours, too
    correlations = torch.corrcoef(shifted) - torch.eye(len(shifted))
    assert float(correlations.abs().max()) < 0.01


@pytest.mark.parametrize(
    "placement",
    [
        Placement.full(()),
        Placement.full((4, 6)).narrow(0, 1, 3),
        Placement.full((4, 6)).narrow(1, 2, 5),
        share_of(Placement.full((4, 6)), 0, (2, 2), 1, 2),
        share_of(Placement.full((4, 6)), 1, (3, 3), 0, 3).narrow(0, 1, 4),
        Placement.full((3, 4, 5)).narrow(1, 1, 3).narrow(2, 0, 4),
    ],
)
def test_every_layout_rounds_an_element_with_the_bits_of_its_place(placement: Placement) -> None:
    places = torch.arange(math.prod(placement.shape)).reshape(placement.shape)
    expected = take(places.float(), placement).flatten()
    for start in range(0, placement.numel, 3):
        out = torch.empty(min(3, placement.numel - start), dtype=torch.int32)
        put_positions(out, placement, start, 2**31 + 5)
        assert torch.equal(out.long() - (5 - 2**31), expected[start : start + 3].long())


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_moments_in_bf16_take_half_the_memory_whatever_chunks_they_are_updated_in(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chunk in (1 << 16, 100):
        monkeypatch.setitem(CHUNK, "cpu", chunk)
        torch.manual_seed(0)
        named = [(f"w{n}", nn.Parameter(torch.randn(n, 7))) for n in (0, 3, 50, 2)]
        optimizer = build_optimizer(OptimizerConfig.model_validate({"name": name, "moments": "bf16"}), named)
        for _ in range(3):
            for _, weight in named:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        results.append([weight for _, weight in named] + list(optimizer_tensors(optimizer, named).values()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    of_moments = sum(tensor.nbytes for tensor in results[0][4:] if tensor.ndim)
    assert of_moments == sum(weight.nbytes for weight in results[0][:4])


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_of_another_type_are_converted(before: str, after: str) -> None:
    named = parameters("a")
    first, second = (
        build_optimizer(OptimizerConfig.model_validate({"moments": moments}), named) for moments in (before, after)
    )
    for optimizer in (first, second):
        named[0][1].grad = torch.tensor([0.3, -0.7])
        optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first, named).items()}
    load_optimizer_parts(second, named, saved)
    for name, tensor in optimizer_tensors(second, named).items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype))
        assert name.endswith("step") or tensor.dtype == (torch.bfloat16 if after == "bf16" else torch.float32)


def test_a_checkpoint_keeps_bf16(tmp_path: Path) -> None:
    named = parameters("a", "b")
    optimizer = build_optimizer(OptimizerConfig(moments="bf16"), named)
    for _, weight in named:
        weight.grad = torch.tensor([0.3, -0.7])
    optimizer.step()
    run, mpi = RunDir(tmp_path), MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))
    run.begin_attempt()
    parts, state = optimizer_parts(optimizer, named), TrainState(step=1, samples_seen=1, scaler={}, metrics={})
    path = save(run, attempt=run.current_attempt, state=state, parts=parts, mpi=mpi)
    _, tensors = load(verify(path))
    assert tensors.keys() == parts.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, parts[name][0])
        assert tensor.dtype == parts[name][0].dtype


def trained(name: str, moments: str) -> tuple[float, Tensor]:
    """Mean loss of the last 100 of 600 steps of a small network on a fixed task, and its weights."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.sin(x @ torch.randn(8, 4)) + 0.1 * torch.randn(256, 4)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    config = OptimizerConfig.model_validate({"name": name, "moments": moments, "learning_rate": 0.003})
    optimizer = build_optimizer(config, network.named_parameters())
    losses = []
    for step in range(600):
        batch = torch.randint(256, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (network(x[batch]) - y[batch]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-100:]) / 100, nn.utils.parameters_to_vector(network.parameters()).detach()


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_training_with_moments_in_bf16_ends_within_3_percent_of_fp32(name: str) -> None:
    (loss, exact), (rounded_loss, rounded) = trained(name, "fp32"), trained(name, "bf16")
    assert rounded_loss == pytest.approx(loss, rel=0.01)
    assert float((rounded - exact).norm() / exact.norm()) < 0.03
