"""Which update rule belongs to which `optimizer.name`, and the state it keeps of a weight: one table, `RULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.adafactor import Adafactor, adafactor_state
from onward.trainer.optim.rules.adam import Adam
from onward.trainer.optim.rules.adaptive import Adagrad, NAdam, RAdam, RMSprop
from onward.trainer.optim.rules.lamb import Lamb
from onward.trainer.optim.rules.lion import Lion
from onward.trainer.optim.rules.muon import Muon, muon_state
from onward.trainer.optim.rules.rule import State, UpdateContext, counted
from onward.trainer.optim.rules.sgd import sgd, sgd_state


@dataclass(frozen=True)
class NamedRule:
    """An update rule and its state."""

    make: Callable[[list[Group], OptimizerConfig, UpdateContext], torch.optim.Optimizer]
    state: State
    """Checkpoints, their shapes and the estimates of memory all read it."""


RULES: dict[str, NamedRule] = {
    "adam": NamedRule(Adam, counted("moment_1", "moment_2")),
    "adamw": NamedRule(Adam, counted("moment_1", "moment_2")),
    "lamb": NamedRule(Lamb, counted("moment_1", "moment_2")),
    "sgd": NamedRule(sgd, sgd_state),
    "nadam": NamedRule(NAdam, counted("moment_1", "moment_2")),
    "radam": NamedRule(RAdam, counted("moment_1", "moment_2")),
    "rmsprop": NamedRule(RMSprop, counted("moment_2")),
    "adagrad": NamedRule(Adagrad, counted("sum_of_squares")),
    "adafactor": NamedRule(Adafactor, adafactor_state),
    "muon": NamedRule(Muon, muon_state),
    "lion": NamedRule(Lion, counted("moment_1")),
}
