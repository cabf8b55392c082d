"""NAdam, RAdam, RMSprop and Adagrad."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.trainer.optim.moments import Group
from onward.trainer.optim.rules.rule import ElementwiseRule
from onward.trainer.optim.weight_settings import WeightSettings


class NAdam(ElementwiseRule):
    """NAdam (Dozat 2016, "Incorporating Nesterov Momentum into Adam"), with decoupled weight decay.

    m, v as in Adam;  μₜ = α·(1 - ½·0.96^(t/250));  Πₜ = μ₁·…·μₜ;  d = √(v/(1-βᵗ)) + ε
    w ← (1 - ηλ)w - η·(1-μₜ)/(1-Πₜ)·g/d - η·μₜ₊₁/(1-Πₜ₊₁)·m/d

    The same as torch.optim.NAdam with decoupled_weight_decay. The usual rate is 2e-3.
    """

    _product = (0, 1.0, 1.0)
    """t, its Πₜ, and the α of both. Made again from t = 1 when it is of another step, such as after a resume."""

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and moments in place."""
        first, second = moments
        settings: WeightSettings = group["settings"]
        t = group["updates"]
        rate = group["lr"]
        product, mu, following = self._factors(t, settings.alpha)
        # decoupled decay comes first: the moments do not see it
        torch._foreach_mul_(weights, 1.0 - rate * settings.weight_decay)
        update_moments(settings, gradients, first, second)
        root = torch._foreach_div(second, 1.0 - settings.beta**t)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, settings.epsilon)
        # Nesterov's step in two parts: of the gradient now, and of the momentum of the next step
        torch._foreach_addcdiv_(weights, gradients, root, -rate * (1.0 - mu) / (1.0 - product))
        torch._foreach_addcdiv_(weights, first, root, -rate * following / (1.0 - product * following))

    def _factors(self, t: int, alpha: float) -> tuple[float, float, float]:
        """Return Πₜ, μₜ and μₜ₊₁."""

        def mu(t: int) -> float:
            return float(alpha * (1.0 - 0.5 * 0.96 ** (t * 0.004)))

        done, product, of = self._product
        if (done, of) != (t, alpha):
            if (done, of) != (t - 1, alpha):
                done = 0
                product = 1.0
            # after a resume the product is made from t = 1 on, in the same order, so that it has the same bits
            for earlier in range(done + 1, t + 1):
                product *= mu(earlier)
            self._product = (t, product, alpha)
        return product, mu(t), mu(t + 1)


class RAdam(ElementwiseRule):
    """RAdam (Liu et al. 2020, https://arxiv.org/abs/1908.03265), with decoupled weight decay.

    m, v, c1, c2 as in Adam;  ρ∞ = 2/(1-β) - 1;  ρ = ρ∞ - 2tβᵗ/c2
    r = √( (ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ) ) · √c2 / (√v + ε)  where ρ > 5, else 1;  w ← (1 - ηλ)w - η·r·m/c1

    The same as torch.optim.RAdam with decoupled_weight_decay. It needs no warm-up.
    """

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and moments in place."""
        first, second = moments
        settings: WeightSettings = group["settings"]
        t = group["updates"]
        beta = settings.beta
        torch._foreach_mul_(weights, 1.0 - group["lr"] * settings.weight_decay)
        update_moments(settings, gradients, first, second)
        c1 = 1.0 - settings.alpha**t
        c2 = 1.0 - beta**t
        # ρ∞ and ρ: the length of the moving average, at last and now
        limit = 2.0 / (1.0 - beta) - 1.0
        length = limit - 2.0 * t * beta**t / c2
        rate = -group["lr"] / c1
        # so few updates give no estimate of the variance of 1/√v: the step is one of momentum alone
        if length <= 5.0:
            torch._foreach_add_(weights, first, alpha=rate)
            return
        root = torch._foreach_sqrt(second)
        torch._foreach_add_(root, settings.epsilon)
        variance = (length - 4.0) * (length - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * length)
        torch._foreach_addcdiv_(weights, first, root, rate * math.sqrt(variance * c2))


class RMSprop(ElementwiseRule):
    """RMSprop (Tieleman, Hinton 2012, Coursera lecture 6.5): g ← g + λw;  v ← βv + (1-β)g²;  w ← w - η·g/(√v + ε).

    The same as torch.optim.RMSprop, whose `alpha` is this β. The usual rate is 1e-2.
    """

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and the moment in place."""
        (second,) = moments
        settings: WeightSettings = group["settings"]
        # coupled decay: a part of the gradient, as in torch
        torch._foreach_add_(gradients, weights, alpha=settings.weight_decay)
        torch._foreach_mul_(second, settings.beta)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - settings.beta)
        _divide_by_root(group, weights, gradients, second)


class Adagrad(ElementwiseRule):
    """Adagrad (Duchi et al. 2011): g ← g + λw;  s ← s + g²;  w ← w - η·g/(√s + ε).

    The same as torch.optim.Adagrad. The usual rate is 1e-2. Its sum s only grows, so it is never kept in bf16.
    """

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor], *moments: list[Tensor]) -> None:
        """Change weights and the sum in place."""
        (total,) = moments
        torch._foreach_add_(gradients, weights, alpha=group["settings"].weight_decay)
        torch._foreach_addcmul_(total, gradients, gradients, 1.0)
        _divide_by_root(group, weights, gradients, total)


def update_moments(
    settings: WeightSettings, gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
) -> None:
    """Update both moments of Adam: m ← αm + (1-α)g;  v ← βv + (1-β)g²."""
    # m + (1 - α)(g - m), which is αm + (1 - α)g
    torch._foreach_lerp_(first, gradients, 1.0 - settings.alpha)
    torch._foreach_mul_(second, settings.beta)
    torch._foreach_addcmul_(second, gradients, gradients, 1.0 - settings.beta)


def _divide_by_root(group: Group, weights: list[Tensor], gradients: list[Tensor], squares: list[Tensor]) -> None:
    root = torch._foreach_sqrt(squares)
    torch._foreach_add_(root, group["settings"].epsilon)
    torch._foreach_addcdiv_(weights, gradients, root, -group["lr"])
