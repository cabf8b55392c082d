"""Which settings of [optimizer] each update rule takes, with what defaults: one table, `UPDATE_RULES`.

The formulas and the state of the rules are in trainer/optim/rules/. This table imports no torch, because a
configuration is checked before anything is launched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptimizerName = Literal[
    "adam",
    "adamw",
    "lamb",
    "sgd",
    "nadam",
    "radam",
    "rmsprop",
    "adagrad",
    "lion",
    "adafactor",
    "muon",
]

ADAM = ("alpha", "beta", "epsilon", "bias_correction")
SETTINGS = (*ADAM, "trust_ratio", "moments", "weight_decay_mode", "momentum", "nesterov", "muon")
"""All settings of [optimizer] that only some rules take."""

BELOW_1 = (0.0, 1.0)
"""Of rules that divide by the size of the gradient: an update changes a weight by about the learning rate."""


@dataclass(frozen=True)
class UpdateRule:
    """What one rule takes."""

    takes: tuple[str, ...]
    """Settings of [optimizer] that it reads."""
    ignores: tuple[str, ...] = ()
    """Settings that it does not read, but that have always been accepted with it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its own defaults, where they differ from those of OptimizerConfig."""
    rates: tuple[float, float] = (0.0, math.inf)
    """The log warns of a learning rate outside of these: the source of the rule uses another order of magnitude."""
    in_onnx: bool = False
    """Whether the variant `training` can write it as an ONNX graph."""

    def takes_of_weight(self) -> set[str]:
        """Return the settings of [[optimizer.weights]] that it reads, beside those which every rule reads."""
        return set(self.takes) & {"alpha", "beta", "epsilon", "trust_ratio", "momentum", "rule"}


UPDATE_RULES: dict[str, UpdateRule] = {
    "adam": UpdateRule((*ADAM, "moments", "weight_decay_mode"), ignores=("trust_ratio",), rates=BELOW_1, in_onnx=True),
    "adamw": UpdateRule((*ADAM, "moments"), ignores=("trust_ratio",), rates=BELOW_1, in_onnx=True),
    "lamb": UpdateRule((*ADAM, "trust_ratio", "moments"), rates=BELOW_1, in_onnx=True),
    "sgd": UpdateRule(("momentum", "nesterov"), ignores=(*ADAM, "trust_ratio"), in_onnx=True),
    "nadam": UpdateRule(("alpha", "beta", "epsilon", "moments"), rates=BELOW_1),
    "radam": UpdateRule(("alpha", "beta", "epsilon", "moments"), rates=BELOW_1),
    # the defaults of torch's optimizers of these names
    "rmsprop": UpdateRule(("beta", "epsilon", "moments"), defaults={"beta": 0.99}, rates=BELOW_1),
    "adagrad": UpdateRule(("epsilon",), defaults={"epsilon": 1e-10}),
    # a step of Lion has size η in each element: the usual rate is a tenth of Adam's
    "lion": UpdateRule(("alpha", "beta", "moments"), defaults={"beta": 0.99}, rates=(0.0, 4e-4)),
    # the rate is relative to the size of the weight
    "adafactor": UpdateRule(("epsilon",), defaults={"epsilon": 2.0**-23}, rates=(2.5e-3, math.inf)),
    "muon": UpdateRule(
        (*ADAM, "momentum", "nesterov", "muon", "rule"),
        defaults={"momentum": 0.95, "nesterov": True},
        rates=(2e-3, 0.2),
    ),
}
"""`optimizer.name` -> what the rule takes."""


def rules_that_take(setting: str) -> str:
    """Return the names of the rules that take a setting, for a message: "adam, adamw and lamb"."""
    names = [name for name, rule in UPDATE_RULES.items() if setting in rule.takes]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def training_files_problems(name: OptimizerName) -> Iterator[str]:
    """Yield why the variant `training` cannot write this update rule."""
    if not UPDATE_RULES[name].in_onnx:
        known = [each for each, rule in UPDATE_RULES.items() if rule.in_onnx]
        yield (
            f"export.variants 'training' has no ONNX form of optimizer.name {name!r}, only of {', '.join(known)}; "
            "leave the variant out"
        )
