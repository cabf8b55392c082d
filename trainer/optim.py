"""How weights change: update rules, the attributes of single weights, the learning rate as a pure function.

w weight, g gradient (summed, un-scaled and clipped by the loop, for every rule and every device), t updates
made by now (from 1), η learning rate, λ weight decay, α and β decay of the moments, ε epsilon. Everything is
done element by element or tensor by tensor in a fixed order: equal gradients give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from trainer.config import OptimizerConfig, ScheduleConfig
from trainer.errors import CheckpointError, ConfigError

NamedParameters = Iterable[tuple[str, Tensor]]
"""Initializer names and the parameters themselves."""
Group = dict[str, Any]
"""torch's parameter group: `params`, `lr`, `learning_rate_scale`, `weight_decay`."""
State = dict[str, list[Tensor]]
"""State key -> one tensor for each weight of a group."""

# -- the learning rate

SHAPES: dict[str, Callable[[float], float]] = {
    "none": lambda p: 1.0,
    "constant": lambda p: 1.0,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "linear": lambda p: 1.0 - p,
    "poly": lambda p: math.sqrt(1.0 - p),
}
"""Schedule mode -> factor at progress p in [0, 1]."""


def learning_rate(step: int, *, optimizer: OptimizerConfig, schedule: ScheduleConfig, num_steps: int) -> float:
    """The learning rate of weight update `step`, counted from 1 to `num_steps`.

    With r = step / num_steps and w = warmup_ratio the factor grows as r/w up to w. Then it falls with
    p = (r-w)/(1-w + 1/num_steps) from 1 towards `floor`, which the step after the last would reach: an
    update at rate 0 would be a wasted one. In the `compatible` shape the last update has rate 0, and cosine
    and poly use p = r and so jump down where warm-up ends, as the predecessor's do (orttraining,
    models/runner/training_util.h).
    """
    progress, warmup = min(step / num_steps, 1.0), schedule.warmup_ratio
    compatible = schedule.shape == "compatible"
    if schedule.mode != "none" and (progress < warmup or (progress == warmup and not compatible)):
        return optimizer.learning_rate * progress / warmup
    if not compatible:
        progress = (progress - warmup) / (1.0 - warmup + 1.0 / num_steps)
    elif schedule.mode == "linear":
        progress = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    factor = schedule.floor + (1.0 - schedule.floor) * SHAPES[schedule.mode](progress)
    return optimizer.learning_rate * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every weight this rate times the scale of its own."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["learning_rate_scale"]


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of global L2 norm `norm` are multiplied by, so that it is at most `max_norm` (0: no limit)."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0


# -- the update rules


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, in both of the predecessor's modes.

    m ← αm + (1-α)g;  v ← βv + (1-β)g²;  c1 = 1-αᵗ, c2 = 1-βᵗ (both 1 without bias correction)

    "pytorch":      w ← w - η·( (m/c1) / (√(v/c2) + ε) + λw )             = AdamW (Loshchilov, Hutter 2019)
    "huggingface":  u = η·√c2/c1 · m / (√v + ε);  w ← w - u - ηλ(w - u)   = (w - u)(1 - ηλ)

    Source: orttraining, cuda/optimizer/adam.cu, modes 0 and 1. One pass over memory by torch's fused kernel,
    which is AdamW: it leaves out the correction at t = ∞, and the second mode is it with ε/√c2 and without
    decay, which follows.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        self._config = config
        self._decays_after = config.name == "adam" and config.weight_decay_mode == "huggingface"
        super().__init__(groups, {"lr": config.learning_rate})
        _moments(self)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            self._update(group, *_ready(self, group))

    def _update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], state: State) -> None:
        config = self._config
        epsilon, decay = config.epsilon, group["weight_decay"]
        steps = state["step"]
        if not config.bias_correction:
            steps = [torch.full_like(step, math.inf) for step in steps]
        elif self._decays_after:
            epsilon /= math.sqrt(1.0 - config.beta ** float(steps[0]))
        torch._fused_adamw_(
            weights,
            gradients,
            state["moment_1"],
            state["moment_2"],
            [],
            steps,
            lr=group["lr"],
            beta1=config.alpha,
            beta2=config.beta,
            weight_decay=0.0 if self._decays_after else decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )
        if self._decays_after and decay:
            torch._foreach_mul_(weights, 1.0 - group["lr"] * decay)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning"), with limits on the trust ratio.

    m, v, c1, c2 as in Adam;  d = λw + (m/c1) / (√(v/c2) + ε)
    w ← w - η·clamp(‖w‖/‖d‖, ratio_min, ratio_max)·d, the clamp being 1 when either norm is 0.

    The norms are of one weight each, over the whole weight. Source: orttraining, cuda/optimizer/lamb.cu.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        self._config = config
        super().__init__(groups, {"lr": config.learning_rate})
        _moments(self)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            weights, gradients, state = _ready(self, group)
            direction = self._direction(group["weight_decay"], weights, gradients, state)
            lengths = torch.stack(torch._foreach_norm(weights))
            norms = torch.stack(torch._foreach_norm(direction))
            ratios = (lengths / norms).clamp(self._config.ratio_min, self._config.ratio_max)
            ratios = torch.where((lengths > 0) & (norms > 0), ratios, 1.0)
            torch._foreach_mul_(direction, list(ratios.unbind()))
            torch._foreach_add_(weights, direction, alpha=-group["lr"])

    def _direction(self, decay: float, weights: list[Tensor], gradients: list[Tensor], state: State) -> list[Tensor]:
        alpha, beta, steps = self._config.alpha, self._config.beta, float(state["step"][0])
        torch._foreach_lerp_(state["moment_1"], gradients, 1.0 - alpha)
        torch._foreach_mul_(state["moment_2"], beta)
        torch._foreach_addcmul_(state["moment_2"], gradients, gradients, 1.0 - beta)
        corrected = self._config.bias_correction
        root = torch._foreach_sqrt(state["moment_2"])
        torch._foreach_div_(root, math.sqrt(1.0 - beta**steps) if corrected else 1.0)
        torch._foreach_add_(root, self._config.epsilon)
        direction = torch._foreach_div(state["moment_1"], root)
        torch._foreach_div_(direction, 1.0 - alpha**steps if corrected else 1.0)
        torch._foreach_add_(direction, weights, alpha=decay)
        return list(direction)


def _sgd(groups: list[Group], config: OptimizerConfig) -> torch.optim.SGD:
    """SGD: g ← g + λw; b ← momentum·b + g; w ← w - η·(g + momentum·b if nesterov else b).

    torch's own, with its velocities there from the start.
    """
    sgd = torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    for weight in _weights(sgd) if config.momentum else ():
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the state before the first step, so that it can be saved and loaded at any time."""
    for weight in _weights(optimizer):
        optimizer.state[weight] = {
            "step": torch.zeros((), device=weight.device),
            "moment_1": torch.zeros_like(weight, requires_grad=False),
            "moment_2": torch.zeros_like(weight, requires_grad=False),
        }


def _ready(optimizer: torch.optim.Optimizer, group: Group) -> tuple[list[Tensor], list[Tensor], State]:
    """The weights of a group, their gradients, and their states key by key, the step counted on."""
    weights: list[Tensor] = group["params"]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert len(gradients) == len(weights), "a weight has no gradient"
    states = [optimizer.state[weight] for weight in weights]
    state = {key: [each[key] for each in states] for key in ("step", "moment_1", "moment_2")}
    torch._foreach_add_(state["step"], 1.0)
    return weights, gradients, state


# -- building, saving, loading

RULES: dict[str, Callable[[list[Group], OptimizerConfig], torch.optim.Optimizer]] = {
    "adam": Adam,
    "adamw": Adam,
    "lamb": Lamb,
    "sgd": _sgd,
}


def build_optimizer(config: OptimizerConfig, named_parameters: NamedParameters) -> torch.optim.Optimizer:
    """The configured rule over parameters named as their initializers; each must have a gradient at every step.

    Weights with equal attributes share a group. Raises ConfigError listing the patterns of
    `optimizer.weights` that match no parameter.
    """
    groups: dict[Any, Group] = {}
    unused = {attributes.pattern for attributes in config.weights}
    for name, parameter in named_parameters:
        scale, decay = 1.0, config.weight_decay
        if any(fnmatchcase(name, pattern) for pattern in config.no_decay):
            decay = 0.0
        for attributes in config.weights:
            if fnmatchcase(name, attributes.pattern):
                unused.discard(attributes.pattern)
                scale = scale if attributes.learning_rate_scale is None else attributes.learning_rate_scale
                decay = decay if attributes.weight_decay is None else attributes.weight_decay
        group = {"params": [], "learning_rate_scale": scale, "weight_decay": decay}
        groups.setdefault((scale, decay, parameter.dtype), group)["params"].append(parameter)
    if unused:
        raise ConfigError(
            f"optimizer.weights: pattern {pattern!r} matches no weight that is trained" for pattern in sorted(unused)
        )
    optimizer = RULES[config.name](list(groups.values()), config)
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, Tensor]:
    """All state as `optimizer/<parameter>/<key>`: the tensors themselves, not copies."""
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in named_parameters
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters, tensors: Mapping[str, Tensor]
) -> None:
    """Copy `optimizer/...` of `tensors` into the state; other names are not looked at.

    Raises CheckpointError naming every tensor that is missing, unknown or of another shape; nothing has
    been copied then.
    """
    state = optimizer_tensors(optimizer, named_parameters)
    given = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
    problems = [f"{name} is missing" for name in state.keys() - given.keys()]
    problems += [f"{name} is not of this optimizer or model" for name in given.keys() - state.keys()]
    problems += [
        f"{name} is {tuple(given[name].shape)}, not {tuple(state[name].shape)}"
        for name in state.keys() & given.keys()
        if given[name].shape != state[name].shape
    ]
    if problems:
        raise CheckpointError("the checkpoint's optimizer does not fit: " + "; ".join(sorted(problems)))
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(given[name])
