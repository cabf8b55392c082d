"""Optimizers over the weights that one rank holds: Adam, AdamW, LAMB and SGD.

In the formulas: w weight, g gradient (summed, unscaled and clipped by the loop, for every optimizer and device), t
number of this update (from 1), η learning rate, λ weight decay, α and β decay of the moments, ε epsilon. Everything is
computed element by element or tensor by tensor in a fixed order, so equal gradients give equal bits.

A weight may be a part of a full one, or empty, or one of several copies; an update needs nothing but the local
tensors. Only LAMB needs norms of full weights, which `total_squares` sums over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.quantizer_scales import LOG_FACTOR
from onward.trainer.optim.moments import Group, Segment, in_fp32, make_moments, segments

Weights = Iterable[Weight | tuple[str, Tensor]]
"""Trained weights; a pair of initializer name and parameter is a weight that this rank holds in full."""
TotalSquares = Callable[[Tensor], Tensor]
"""[2, weights] squared norms of this rank's parts of weights and directions -> those of the full weights."""


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every weight: this rate times its `learning_rate_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["learning_rate_scale"]


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that reduces gradients of global L2 norm `norm` to `max_norm` (0: no limit)."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0


# -- the update rules


@dataclass(frozen=True)
class UpdateContext:
    """What an update needs besides its own tensors."""

    seed: int
    """Seed of stochastic rounding."""
    total_squares: TotalSquares


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, in both modes of ORT training.

    m ← αm + (1-α)g;  v ← βv + (1-β)g²;  c1 = 1-αᵗ, c2 = 1-βᵗ (both 1 without bias correction)

    "pytorch":      w ← w - η·( (m/c1) / (√(v/c2) + ε) + λw )             = AdamW (Loshchilov, Hutter 2019)
    "huggingface":  u = η·√c2/c1 · m / (√v + ε);  w ← w - u - ηλ(w - u)   = (w - u)(1 - ηλ)

    Source: orttraining, cuda/optimizer/adam.cu, modes 0 and 1. Computed in one pass over memory by torch's fused AdamW
    kernel. With t = ∞ it makes no bias correction; the second mode is the kernel with ε/√c2 in place of ε and without
    decay, followed by a multiplication.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        self._config = config
        self._seed = context.seed
        self._decays_after = config.name == "adam" and config.weight_decay_mode == "huggingface"
        super().__init__(groups, {"lr": config.learning_rate})
        make_moments(self, config)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            for batch in segments(self, group, _gradients(group), unsplit=self._config.moments == "fp32"):
                with in_fp32(batch, seed=self._seed, step=group["updates"]) as moments:
                    self._update(group, batch, *moments)

    def _update(self, group: Group, batch: list[Segment], first: list[Tensor], second: list[Tensor]) -> None:
        config = self._config
        epsilon, decay = config.epsilon, group["weight_decay"]
        weights, steps = [segment.weight for segment in batch], [segment.step for segment in batch]
        if not config.bias_correction:
            steps = [torch.full_like(steps[0], math.inf)] * len(steps)
        elif self._decays_after:
            epsilon /= math.sqrt(1.0 - config.beta ** group["updates"])
        torch._fused_adamw_(
            weights,
            [segment.gradient for segment in batch],
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

    Each norm is that of one full weight: `total_squares` sums the squares of its parts on all ranks, once per step.
    Source: orttraining, cuda/optimizer/lamb.cu. A step overwrites the gradients with the directions, which would need
    as much memory again.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> None:
        self._config = config
        self._context = context
        super().__init__(groups, {"lr": config.learning_rate})
        make_moments(self, config)
        # group by group, the place of each weight in the order given; made once, because an index that is a list would
        # be copied to the GPU in every step, and the host would wait for the copy
        device = next((weight.device for group in groups for weight in group["params"]), None)
        self._places = torch.tensor([number for group in groups for number in group["numbers"]], device=device).long()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight from its gradient. Collective, as `total_squares` is."""
        directions = [self._directions(group) for group in self.param_groups]
        lengths, norms = self._context.total_squares(self._squares(directions)).sqrt()
        ratios = (lengths / norms).clamp(self._config.ratio_min, self._config.ratio_max)
        # a weight of zeros would never change (ratio 0), and a direction of zeros would divide by 0
        ratios = torch.where((lengths > 0) & (norms > 0), ratios, 1.0).float()
        in_groups = ratios[self._places].split_with_sizes([len(direction) for direction in directions])
        for group, direction, own in zip(self.param_groups, directions, in_groups, strict=True):
            if direction:
                torch._foreach_mul_(direction, list(own.unbind()))
                torch._foreach_add_(group["params"], direction, alpha=-group["lr"])

    def _directions(self, group: Group) -> list[Tensor]:
        # the gradients themselves where they are contiguous: they are overwritten
        directions = [gradient.contiguous() for gradient in _gradients(group)]
        for batch in segments(self, group, directions):
            with in_fp32(batch, seed=self._context.seed, step=group["updates"]) as moments:
                self._turn(group, batch, *moments)
        return directions

    def _turn(self, group: Group, batch: list[Segment], first: list[Tensor], second: list[Tensor]) -> None:
        """Overwrite the gradients with the directions d."""
        alpha, beta, corrected = self._config.alpha, self._config.beta, self._config.bias_correction
        updates, gradients = group["updates"], [segment.gradient for segment in batch]
        torch._foreach_lerp_(first, gradients, 1.0 - alpha)
        torch._foreach_mul_(second, beta)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1.0 - beta**updates) if corrected else 1.0)
        torch._foreach_add_(root, self._config.epsilon)
        torch._foreach_copy_(gradients, first)
        torch._foreach_div_(gradients, root)
        torch._foreach_div_(gradients, 1.0 - alpha**updates if corrected else 1.0)
        # after the quotient: decoupled decay, which the moments do not see, but the trust ratio does
        torch._foreach_add_(gradients, [segment.weight for segment in batch], alpha=group["weight_decay"])

    def _squares(self, directions: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return [2, weights] squared norms of weights and directions; fp64 keeps their square roots exact."""
        squares = torch.zeros(2, len(self._places), dtype=torch.float64, device=self._places.device)
        weights = [group["params"] for group in self.param_groups]
        for row, lists in zip(squares, (weights, directions), strict=True):
            if norms := [torch.stack(torch._foreach_norm(tensors)) for tensors in lists if tensors]:
                row[self._places] = torch.cat([norm.double() for norm in norms]).square()
        return squares


def _gradients(group: Group) -> list[Tensor]:
    gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
    assert len(gradients) == len(group["params"]), "a weight has no gradient"
    return gradients


def _sgd(groups: list[Group], config: OptimizerConfig, context: UpdateContext) -> torch.optim.SGD:
    """SGD: g ← g + λw; b ← momentum·b + g; w ← w - η·(g + momentum·b if nesterov else b).

    This is torch's SGD, with momentum buffers made before the first step, so that they can always be saved.
    """
    sgd = torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    for weight in (weight for group in groups for weight in group["params"] if config.momentum):
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


# -- building an optimizer

OPTIMIZERS: dict[str, Callable[[list[Group], OptimizerConfig, UpdateContext], torch.optim.Optimizer]] = {
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
    """Build the configured optimizer over weights, each of which must have a gradient at every step.

    Weights with equal attributes share a group. seed: of rounding to bf16. elsewhere: names of weights that other ranks
    train. total_squares, for LAMB: takes the fp64 squared norms [2, n] of this rank's parts of the n weights, in the
    order given, and of their directions, and returns those of the full weights; called once per step, with [2, 0] on
    the CPU where there are no weights. Raises ConfigError listing the patterns of `optimizer.weights` that match no
    trained weight.
    """
    groups: dict[Any, Group] = {}
    names = set(elsewhere)
    for number, weight in enumerate(as_weights(weights)):
        names.add(weight.name)
        scale, decay = _attributes(config, weight.name)
        # also by type, because torch's foreach and fused kernels take lists of one type
        group = groups.setdefault((scale, decay, weight.tensor.dtype), _group(scale, decay))
        for key, value in (("params", weight.tensor), ("weights", weight), ("numbers", number)):
            group[key].append(value)
    unused = {each.pattern for each in config.weights if not any(fnmatchcase(name, each.pattern) for name in names)}
    if unused:
        raise ConfigError(
            f"optimizer.weights: pattern {pattern!r} matches no weight that is trained" for pattern in sorted(unused)
        )
    optimizer = OPTIMIZERS[config.name](
        # torch's Optimizer refuses an empty list of groups; a rank may hold no trained weight
        list(groups.values()) or [_group(1.0, 0.0)],
        config,
        UpdateContext(seed, total_squares),
    )
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def _group(scale: float, decay: float) -> Group:
    lists: Group = {"params": [], "weights": [], "numbers": []}
    return lists | {"updates": 0, "learning_rate_scale": scale, "weight_decay": decay}


def as_weights(weights: Weights) -> Iterator[Weight]:
    """Yield each weight; a (name, tensor) pair becomes a weight that this rank holds in full."""
    for weight in weights:
        if isinstance(weight, Weight):
            yield weight
        else:
            name, tensor = weight
            yield Weight(name, tensor, Placement.full(tensor.shape), trained=True)


def _attributes(config: OptimizerConfig, name: str) -> tuple[float, float]:
    """Return (learning rate scale, weight decay) of a weight."""
    scale, decay = 1.0, config.weight_decay
    # a scale of quantization whose factor decayed to 1 would go back to that of the file
    if any(fnmatchcase(name, pattern) for pattern in (*config.no_decay, f"*{LOG_FACTOR}")):
        decay = 0.0
    # in the order of the file: a later pattern has precedence over an earlier one
    for attributes in config.weights:
        if fnmatchcase(name, attributes.pattern):
            scale = scale if attributes.learning_rate_scale is None else attributes.learning_rate_scale
            decay = decay if attributes.weight_decay is None else attributes.weight_decay
    return scale, decay
