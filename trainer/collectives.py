"""Collectives inside the graph, with their gradients: what stands at the borders of a divided region.

    x ---- enter ---- column product ---- ... ---- row product ---- leave ---- + bias
           forward: nothing                                         forward: all-reduce
           backward: all-reduce                                     backward: nothing

f and g of Megatron-LM (Shoeybi et al. 2019, section 3). Groups are named, not passed: a name is a plain string in
the graph's code, which torch.compile and fake tensors understand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor


def enter(x: Tensor, group: str) -> Tensor:
    """The tensor itself, going into a divided region; its gradient is summed over the group. Collective in backward."""
    return _Enter.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' partial results, coming out of a divided region. Collective in forward."""
    return _Leave.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: str) -> Tensor:
    """The sum over the group, without a gradient. Collective."""
    total = functional.all_reduce(x.contiguous(), "sum", group)
    return functional.wait_tensor(total)  # type: ignore[no-any-return]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: str) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, context.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
