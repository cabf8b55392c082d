"""Build the configured optimizer over the weights that one rank holds. The rules: trainer/optim/rules/."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import ConfigError
from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.rule import NoOtherParts, OtherParts, UpdateContext
from onward.trainer.optim.rules.table import RULES
from onward.trainer.optim.weight_settings import WeightSettings, settings_of

NO_SCALES: Mapping[str, float] = {}
Weights = Iterable[Weight | tuple[str, Tensor]]
"""Trained weights; a pair of initializer name and parameter is a weight that this rank holds in full."""


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every weight: this rate times its `learning_rate_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["learning_rate_scale"]


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that reduces gradients of global L2 norm `norm` to `max_norm` (0: no limit)."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0


def build_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    *,
    seed: int = 0,
    elsewhere: Collection[str] = (),
    parts: OtherParts | None = None,
    layer_scales: Mapping[str, float] = NO_SCALES,
) -> torch.optim.Optimizer:
    """Build the configured optimizer over weights, each of which must have a gradient at every step.

    Weights with equal settings share a group. seed: of rounding to bf16. elsewhere: names of weights that other ranks
    train. parts: the ranks that hold the other parts of these weights, if there are any; LAMB, Adafactor and Muon sum
    over them. layer_scales: name -> factor on the learning rate (model/layer_scales.py), which multiplies that of
    `optimizer.weights`; 1 for a weight without one. Raises ConfigError listing the patterns of `optimizer.weights` that
    match no trained weight.
    """
    groups: dict[Any, Group] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for number, weight in enumerate(as_weights(weights)):
        shapes[weight.name] = weight.placement.shape
        settings = settings_of(config, weight.name, outputs=weight.outputs)
        settings = settings.scaled(layer_scales.get(weight.name, 1.0))
        # also by type, because torch's foreach and fused kernels take lists of one type
        group = groups.setdefault((settings, weight.tensor.dtype), _group(settings))
        # the three lists of a group stay parallel
        for key, value in (("params", weight.tensor), ("weights", weight), ("numbers", number)):
            group[key].append(value)
    if problems := list(settings_problems(config, {*elsewhere, *shapes}, shapes)):
        raise ConfigError(problems)
    rule = RULES[config.name]
    context = UpdateContext(seed, parts or NoOtherParts(), rule.state)
    # torch's Optimizer refuses an empty list of groups; a rank may hold no trained weight
    optimizer = rule.make(list(groups.values()) or [_group(settings_of(config, ""))], config, context)
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def settings_problems(
    config: OptimizerConfig, names: Collection[str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Yield what is wrong with `optimizer.weights`, given the names of all trained weights and the shapes of some."""
    unused = set()
    for settings in config.weights:
        if not any(fnmatchcase(name, settings.pattern) for name in names):
            unused.add(settings.pattern)
    for pattern in sorted(unused):
        yield f"optimizer.weights: pattern {pattern!r} matches no weight that is trained"
    for name, shape in shapes.items():
        if len(shape) < 2 and settings_of(config, name).rule == "muon":
            yield f"optimizer.weights: rule 'muon' of {name!r} {list(shape)} needs a matrix; leave it to 'adamw'"


def _group(settings: WeightSettings) -> Group:
    lists: Group = {"params": [], "weights": [], "numbers": [], "updates": 0, "settings": settings}
    # under the names that torch's own optimizers read
    return lists | {"learning_rate_scale": settings.learning_rate_scale, "weight_decay": settings.weight_decay}


def as_weights(weights: Weights) -> Iterator[Weight]:
    """Yield each weight; a (name, tensor) pair becomes a weight that this rank holds in full."""
    for weight in weights:
        if isinstance(weight, Weight):
            yield weight
        else:
            name, tensor = weight
            yield Weight(name, tensor, Placement.full(tensor.shape), trained=True)
