"""Which update rule belongs to which `optimizer.name`, and the state it keeps of a weight: one table, `RULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.adam import Adam
from onward.trainer.optim.rules.adaptive import Adagrad, NAdam, RAdam, RMSprop
from onward.trainer.optim.rules.lamb import Lamb
from onward.trainer.optim.rules.lion import Lion
from onward.trainer.optim.rules.rule import State, UpdateContext, all_dims
from onward.trainer.optim.rules.sgd import sgd, sgd_state


@dataclass(frozen=True)
class NamedRule:
    """An update rule and its state."""

    make: Callable[[list[Group], OptimizerConfig, UpdateContext], torch.optim.Optimizer]
    state: State
    """Checkpoints, their shapes and the estimates of memory all read it."""


RULES: dict[str, NamedRule] = {
    "adam": NamedRule(Adam, all_dims("moment_1", "moment_2")),
    "adamw": NamedRule(Adam, all_dims("moment_1", "moment_2")),
    "lamb": NamedRule(Lamb, all_dims("moment_1", "moment_2")),
    "sgd": NamedRule(sgd, sgd_state),
    "nadam": NamedRule(NAdam, all_dims("moment_1", "moment_2")),
    "radam": NamedRule(RAdam, all_dims("moment_1", "moment_2")),
    "rmsprop": NamedRule(RMSprop, all_dims("moment_2")),
    "adagrad": NamedRule(Adagrad, all_dims("sum_of_squares")),
    "lion": NamedRule(Lion, all_dims("moment_1")),
}
