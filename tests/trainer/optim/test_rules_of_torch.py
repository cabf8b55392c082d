"""Each update rule takes the steps of torch's implementation, and of its own formula where torch has none.

The weights of the tables are a matrix, a vector, a convolution kernel and a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import ConfigError
from onward.trainer.optim.optimizers import build_optimizer, set_learning_rate

SHAPES = ((7, 5), (6,), (4, 3, 2, 2), ())
STEPS = 12

REFERENCES: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "nadam": (
        {"name": "nadam", "learning_rate": 0.02, "weight_decay": 0.1, "alpha": 0.8},
        lambda w: torch.optim.NAdam(w, lr=0.02, weight_decay=0.1, betas=(0.8, 0.999), decoupled_weight_decay=True),
    ),
    "radam": (
        {"name": "radam", "learning_rate": 0.02, "weight_decay": 0.1, "beta": 0.9},
        lambda w: torch.optim.RAdam(w, lr=0.02, weight_decay=0.1, betas=(0.9, 0.9), decoupled_weight_decay=True),
    ),
    "radam before its variance is known": (
        {"name": "radam", "learning_rate": 0.02},
        lambda w: torch.optim.RAdam(w, lr=0.02),
    ),
    "rmsprop": (
        {"name": "rmsprop", "learning_rate": 0.01, "weight_decay": 0.1},
        lambda w: torch.optim.RMSprop(w, lr=0.01, weight_decay=0.1),
    ),
    "adagrad": (
        {"name": "adagrad", "learning_rate": 0.01, "weight_decay": 0.1},
        lambda w: torch.optim.Adagrad(w, lr=0.01, weight_decay=0.1),
    ),
    "adafactor": (
        {"name": "adafactor", "learning_rate": 0.5, "weight_decay": 0.1},
        lambda w: torch.optim.Adafactor(w, lr=0.5, weight_decay=0.1),
    ),
    "adafactor with another epsilon": (
        {"name": "adafactor", "learning_rate": 0.01, "epsilon": 0.3},
        lambda w: torch.optim.Adafactor(w, lr=0.01, eps=(0.3, 1e-3)),
    ),
}
"""Case -> [optimizer], and the same optimizer of torch."""


def weights_after(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *, steps: int = STEPS
) -> list[nn.Parameter]:
    """The weights after some steps, the same start and gradients for every optimizer."""
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights


def of_onward(settings: dict[str, Any], **context: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = [(f"w{number}", weight) for number, weight in enumerate(weights)]
        config = OptimizerConfig.model_validate({"no_decay": [], **settings})
        optimizer = build_optimizer(config, named, **context)
        set_learning_rate(optimizer, config.learning_rate)
        return optimizer

    return make


@pytest.mark.parametrize("case", REFERENCES)
def test_a_rule_takes_the_steps_of_torchs_implementation(case: str) -> None:
    settings, reference = REFERENCES[case]
    for found, wanted in zip(weights_after(of_onward(settings)), weights_after(reference), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


def test_lion_keeps_to_its_formula_element_by_element() -> None:
    class Lion(torch.optim.Optimizer):
        """Algorithm 2 of the paper, in fp64."""

        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__(weights, {"lr": 0.02})
            self.moments = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for weight, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
                gradient = weight.grad.double()
                direction = torch.sign(0.9 * moment + 0.1 * gradient)
                weight.copy_(weight.double() - 0.02 * (direction + 0.1 * weight.double()))
                moment.copy_(0.99 * moment + 0.01 * gradient)

    settings = {"name": "lion", "learning_rate": 0.02, "weight_decay": 0.1}
    for found, wanted in zip(weights_after(of_onward(settings)), weights_after(Lion), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


# -- Muon


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the matrix, AdamW with a rate of its own for the rest."""

    def __init__(self, weights: list[nn.Parameter], rate: float, **settings: Any) -> None:
        super().__init__(weights, {})
        rest = [weight for weight in weights if weight.ndim != 2]
        self.both = (
            torch.optim.Muon(weights[:1], lr=rate, weight_decay=0.1, **settings),
            torch.optim.AdamW(rest, lr=3e-4, weight_decay=0.1),
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.both:
            each.step()


def muon_of_onward(*, outputs: int = 0, **settings: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        values = {"name": "muon", "learning_rate": 0.02, "weight_decay": 0.1, "no_decay": [], **settings}
        named = [
            Weight(f"w{n}", w, Placement.full(w.shape), trained=True, outputs=outputs if w.ndim == 2 else None)
            for n, w in enumerate(weights)
        ]
        return build_optimizer(OptimizerConfig.model_validate(values), named)

    return make


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_takes_the_steps_of_torchs_muon_bit_for_bit_and_those_of_adamw_for_the_rest(
    scale: str, nesterov: bool
) -> None:
    settings = {"nesterov": nesterov, "muon": {"arithmetic": "bf16", "scale": scale}}
    found = weights_after(muon_of_onward(**settings))
    wanted = weights_after(lambda w: MuonAndAdamW(w, 0.02, nesterov=nesterov, adjust_lr_fn=scale))
    assert torch.equal(found[0], wanted[0])
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    exact = weights_after(muon_of_onward(**settings | {"muon": {"scale": scale}}))
    torch.testing.assert_close(exact[0], found[0], rtol=0, atol=0.02)
    assert not torch.equal(exact[0], found[0])


def test_muon_of_a_matrix_stored_as_inputs_x_outputs_is_the_transpose_of_the_other() -> None:
    """ONNX's MatMul stores [in, out], torch's Linear [out, in]; the factor of the step depends on which is which."""

    def after(transposed: bool) -> Tensor:
        torch.manual_seed(0)
        matrix, gradient = torch.randn(2, 7, 3).unbind()
        weight = nn.Parameter(matrix.t().contiguous() if transposed else matrix)
        weight.grad = gradient.t().contiguous() if transposed else gradient
        muon_of_onward(outputs=int(transposed))([weight]).step()
        return weight.detach().t() if transposed else weight.detach()

    assert torch.equal(after(False), after(True))


def test_muon_flattens_kernels_and_refuses_what_is_no_matrix() -> None:
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2))
    flat = nn.Parameter(kernel.detach().flatten(1).clone())
    kernel.grad = torch.randn_like(kernel)
    flat.grad = kernel.grad.flatten(1)
    config = OptimizerConfig.model_validate({"name": "muon", "weights": [{"pattern": "w", "rule": "muon"}]})
    for weight in (kernel, flat):
        build_optimizer(config, [("w", weight)]).step()
    assert torch.equal(kernel.flatten(1), flat)
    with pytest.raises(ConfigError, match=r"rule 'muon' of 'w' \[5\].*needs a matrix"):
        build_optimizer(config, [("w", nn.Parameter(torch.ones(5)))])


# -- settings of single weights

OF_WEIGHTS: list[dict[str, Any]] = [
    *({"name": name, "alpha": 0.5, "beta": 0.7, "epsilon": 0.01} for name in ("adam", "adamw", "lamb")),
    {"name": "lamb", "trust_ratio": (0.4, 0.5)},
    {"name": "lamb", "trust_ratio": (0.0, 0.01)},
    {"name": "sgd", "momentum": 0.6},
    {"name": "nadam", "alpha": 0.5, "beta": 0.7, "epsilon": 0.01},
    {"name": "radam", "alpha": 0.5, "beta": 0.7, "epsilon": 0.01},
    {"name": "rmsprop", "beta": 0.7, "epsilon": 0.01},
    {"name": "adagrad", "epsilon": 0.01},
    {"name": "lion", "alpha": 0.5, "beta": 0.7},
    {"name": "adafactor", "epsilon": 0.3},
]


@pytest.mark.parametrize("settings", OF_WEIGHTS, ids=str)
def test_settings_by_pattern_are_those_of_a_run_with_them_for_all_weights(settings: dict[str, Any]) -> None:
    """The weights that match take the steps they take where the settings hold for all; the others do not change."""
    name, own = settings["name"], {key: value for key, value in settings.items() if key != "name"}
    common = {"name": name, "learning_rate": 0.05, "weight_decay": 0.1} | ({"momentum": 0.3} if name == "sgd" else {})
    mixed = weights_after(of_onward({**common, "weights": [{"pattern": "w[02]", **own}]}))
    for_all, for_none = weights_after(of_onward({**common, **own})), weights_after(of_onward(common))
    for number, weight in enumerate(mixed):
        assert torch.equal(weight, (for_all if number in (0, 2) else for_none)[number])
        # a number has one LAMB ratio whatever the limits, where they do not bind
        assert number == 3 or not torch.equal(for_all[number], for_none[number])


def test_weights_with_and_without_momentum_have_state_of_their_own() -> None:
    config = OptimizerConfig.model_validate({"name": "sgd", "weights": [{"pattern": "a", "momentum": 0.9}]})
    weights = [("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(2)))]
    optimizer = build_optimizer(config, weights)
    for _ in range(2):
        for _, weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
    expected: list[Tensor] = [torch.full((2,), 1 - 1e-3 * 2.9), torch.full((2,), 1 - 1e-3 * 2)]
    for (_, found), wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted)
    assert [list(optimizer.state[weight]) for _, weight in weights] == [["momentum_buffer"], []]
