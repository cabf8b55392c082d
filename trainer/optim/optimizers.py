"""How weights change: update rules, the attributes of single weights, the learning rate as a pure function.

w weight, g gradient (summed, un-scaled and clipped by the loop, for every rule and every device), t updates
made by now (from 1), η learning rate, λ weight decay, α and β decay of the moments, ε epsilon. Everything is
done element by element or tensor by tensor in a fixed order: equal gradients give equal bits.

Weights may be parts of whole ones, without a single element even, or several copies of one name: a rule works on
what it is given. LAMB alone needs to know of a weight's other parts, and asks for it (`total_squares`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from onward.trainer.config.sections import OptimizerConfig, ScheduleConfig
from onward.trainer.distributed.placement import Placement
from onward.trainer.distributed.weights import Weight
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.optim.moments import Group, Stretch, in_fp32, make_moments, pieces

Weights = Iterable[Weight | tuple[str, Tensor]]
"""Trained weights; a name in the file with a parameter is a weight held whole."""
TotalSquares = Callable[[Tensor], Tensor]
"""[2, weights] squared norms of this rank's parts of weights and directions -> those of the whole weights."""

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


@dataclass(frozen=True)
class Others:
    """What a rule has to know beyond its own tensors."""

    seed: int
    """Of stochastic rounding."""
    total_squares: TotalSquares


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, in both of the predecessor's modes.

    m ← αm + (1-α)g;  v ← βv + (1-β)g²;  c1 = 1-αᵗ, c2 = 1-βᵗ (both 1 without bias correction)

    "pytorch":      w ← w - η·( (m/c1) / (√(v/c2) + ε) + λw )             = AdamW (Loshchilov, Hutter 2019)
    "huggingface":  u = η·√c2/c1 · m / (√v + ε);  w ← w - u - ηλ(w - u)   = (w - u)(1 - ηλ)

    Source: orttraining, cuda/optimizer/adam.cu, modes 0 and 1. One pass over memory by torch's fused kernel,
    which is AdamW: it leaves out the correction at t = ∞, and the second mode is it with ε/√c2 and without
    decay, which follows.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, others: Others) -> None:
        self._config = config
        self._seed = others.seed
        self._decays_after = config.name == "adam" and config.weight_decay_mode == "huggingface"
        super().__init__(groups, {"lr": config.learning_rate})
        make_moments(self, config)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            for piece in pieces(self, group, _gradients(group), whole=self._config.moments == "fp32"):
                with in_fp32(piece, seed=self._seed) as moments:
                    self._update(group, piece, *moments)

    def _update(self, group: Group, piece: list[Stretch], first: list[Tensor], second: list[Tensor]) -> None:
        config = self._config
        epsilon, decay = config.epsilon, group["weight_decay"]
        weights, steps = [stretch.weight for stretch in piece], [stretch.step for stretch in piece]
        if not config.bias_correction:
            steps = [torch.full_like(step, math.inf) for step in steps]
        elif self._decays_after:
            epsilon /= math.sqrt(1.0 - config.beta ** float(steps[0]))
        torch._fused_adamw_(
            weights,
            [stretch.gradient for stretch in piece],
            first,
            second,
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

    The norms are of one weight each, over the whole weight: `total_squares` adds up what its parts on other ranks
    have, called once a step. Source: orttraining, cuda/optimizer/lamb.cu. A step uses up the gradients: their memory
    holds the directions, which would take as much again.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, others: Others) -> None:
        self._config = config
        self._others = others
        super().__init__(groups, {"lr": config.learning_rate})
        make_moments(self, config)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient. Collective, as `total_squares` is."""
        directions = [self._directions(group) for group in self.param_groups]
        lengths, norms = self._others.total_squares(self._squares(directions)).sqrt()
        ratios = (lengths / norms).clamp(self._config.ratio_min, self._config.ratio_max)
        ratios = torch.where((lengths > 0) & (norms > 0), ratios, 1.0).float()
        for group, direction in zip(self.param_groups, directions, strict=True):
            if direction:
                torch._foreach_mul_(direction, list(ratios[group["numbers"]].unbind()))
                torch._foreach_add_(group["params"], direction, alpha=-group["lr"])

    def _directions(self, group: Group) -> list[Tensor]:
        directions = [gradient.contiguous() for gradient in _gradients(group)]
        for piece in pieces(self, group, directions):
            with in_fp32(piece, seed=self._others.seed) as moments:
                self._turn(group["weight_decay"], piece, *moments)
        return directions

    def _turn(self, decay: float, piece: list[Stretch], first: list[Tensor], second: list[Tensor]) -> None:
        """Make the gradients directions."""
        alpha, beta, corrected = self._config.alpha, self._config.beta, self._config.bias_correction
        steps, gradients = float(piece[0].step), [stretch.gradient for stretch in piece]
        torch._foreach_lerp_(first, gradients, 1.0 - alpha)
        torch._foreach_mul_(second, beta)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1.0 - beta**steps) if corrected else 1.0)
        torch._foreach_add_(root, self._config.epsilon)
        torch._foreach_copy_(gradients, first)
        torch._foreach_div_(gradients, root)
        torch._foreach_div_(gradients, 1.0 - alpha**steps if corrected else 1.0)
        torch._foreach_add_(gradients, [stretch.weight for stretch in piece], alpha=decay)

    def _squares(self, directions: Sequence[Sequence[Tensor]]) -> Tensor:
        """[2, weights] squared norms of weights and directions; in fp64, so that their roots are the norms again."""
        num_weights = sum(map(len, directions))
        device = next((direction[0].device for direction in directions if direction), None)
        squares = torch.zeros(2, num_weights, dtype=torch.float64, device=device)
        for group, direction in zip(self.param_groups, directions, strict=True):
            for row, tensors in enumerate((group["params"], direction)):
                if tensors:
                    squares[row, group["numbers"]] = torch.stack(torch._foreach_norm(tensors)).double().square()
        return squares


def _gradients(group: Group) -> list[Tensor]:
    gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
    assert len(gradients) == len(group["params"]), "a weight has no gradient"
    return gradients


def _sgd(groups: list[Group], config: OptimizerConfig, others: Others) -> torch.optim.SGD:
    """SGD: g ← g + λw; b ← momentum·b + g; w ← w - η·(g + momentum·b if nesterov else b).

    torch's own, with its velocities there from the start.
    """
    sgd = torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    for weight in (weight for group in groups for weight in group["params"] if config.momentum):
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


# -- building, saving, loading

RULES: dict[str, Callable[[list[Group], OptimizerConfig, Others], torch.optim.Optimizer]] = {
    "adam": Adam,
    "adamw": Adam,
    "lamb": Lamb,
    "sgd": _sgd,
}


def build_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    *,
    seed: int = 0,
    elsewhere: Collection[str] = (),
    total_squares: TotalSquares = lambda squares: squares,
) -> torch.optim.Optimizer:
    """The configured rule over weights, each of which must have a gradient at every step.

    Weights with equal attributes share a group. `seed`: of rounding to bf16. `elsewhere`: names of weights that
    other ranks train. `total_squares`, for LAMB: takes the squared norms [2, n], in fp64, of the n weights in the
    order given, and of their directions, as far as this rank holds them, and returns those of the whole weights;
    called once a step, with [2, 0] on the CPU where there are no weights. Raises ConfigError listing the patterns of
    `optimizer.weights` that match no weight.
    """
    groups: dict[Any, Group] = {}
    names = set(elsewhere)
    for number, weight in enumerate(_as_weights(weights)):
        names.add(weight.name)
        scale, decay = _attributes(config, weight.name)
        group = groups.setdefault((scale, decay, weight.tensor.dtype), _group(scale, decay))
        for key, value in (("params", weight.tensor), ("weights", weight), ("numbers", number)):
            group[key].append(value)
    unused = {each.pattern for each in config.weights if not any(fnmatchcase(name, each.pattern) for name in names)}
    if unused:
        raise ConfigError(
            f"optimizer.weights: pattern {pattern!r} matches no weight that is trained" for pattern in sorted(unused)
        )
    optimizer = RULES[config.name](list(groups.values()) or [_group(1.0, 0.0)], config, Others(seed, total_squares))
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def _group(scale: float, decay: float) -> Group:
    return {"params": [], "weights": [], "numbers": [], "learning_rate_scale": scale, "weight_decay": decay}


def _as_weights(weights: Weights) -> Iterator[Weight]:
    for weight in weights:
        if isinstance(weight, Weight):
            yield weight
        else:
            name, tensor = weight
            yield Weight(name, tensor, Placement.whole(tensor.shape), trained=True)


def _attributes(config: OptimizerConfig, name: str) -> tuple[float, float]:
    """(scale of the learning rate, weight decay) of a weight."""
    scale, decay = 1.0, config.weight_decay
    if any(fnmatchcase(name, pattern) for pattern in config.no_decay):
        decay = 0.0
    for attributes in config.weights:
        if fnmatchcase(name, attributes.pattern):
            scale = scale if attributes.learning_rate_scale is None else attributes.learning_rate_scale
            decay = decay if attributes.weight_decay is None else attributes.weight_decay
    return scale, decay


def optimizer_keys(config: OptimizerConfig, names: Iterable[str]) -> set[str]:
    """The names of all state of a whole model whose trained weights have these names."""
    keys: tuple[str, ...] = ("step", "moment_1", "moment_2")
    if config.name == "sgd":
        keys = ("momentum_buffer",) if config.momentum else ()
    return {f"optimizer/{name}/{key}" for name in names for key in keys}


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, Tensor]:
    """All state as `optimizer/<weight>/<key>`: the tensors themselves, not copies; of several copies the first's."""
    return {name: tensor for name, (tensor, _) in optimizer_parts(optimizer, weights).items()}


def optimizer_parts(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, tuple[Tensor, Placement]]:
    """`optimizer_tensors`, and which part of the whole state each is: of a weight's shape, the weight's; else whole."""
    return {name: copies[0] for name, copies in _state(optimizer, weights).items()}


def load_optimizer_parts(optimizer: torch.optim.Optimizer, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Copy `optimizer/...` of `tensors` into the state, of every copy of a weight; other names are not looked at.

    They are the parts that `optimizer_parts` names. Moments that were kept in another type are converted. Raises
    CheckpointError naming every tensor that is missing, unknown or of another shape; nothing has been copied then.
    """
    state = {name: [tensor for tensor, _ in copies] for name, copies in _state(optimizer, weights).items()}
    given = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
    problems = {f"{name} is missing" for name in state.keys() - given.keys()}
    problems |= {f"{name} is not of this optimizer or model" for name in given.keys() - state.keys()}
    problems |= {
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name in state.keys() & given.keys()
        for tensor in state[name]
        if given[name].shape != tensor.shape
    }
    if problems:
        raise CheckpointError("the checkpoint's optimizer does not fit: " + "; ".join(sorted(problems)))
    with torch.no_grad():
        for name, copies in state.items():
            for tensor in copies:
                tensor.copy_(given[name])


def _state(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, list[tuple[Tensor, Placement]]]:
    """Name of a state tensor -> that of each copy of the weight, and which part it is."""
    state: dict[str, list[tuple[Tensor, Placement]]] = {}
    for weight in _as_weights(weights):
        for key, tensor in optimizer.state[weight.tensor].items():
            placement = weight.placement if tensor.shape == weight.tensor.shape else Placement.whole(tensor.shape)
            state.setdefault(f"optimizer/{weight.name}/{key}", []).append((tensor, placement))
    return state
