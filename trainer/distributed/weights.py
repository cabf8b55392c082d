"""What one rank holds of the model's stored tensors: plain local tensors, and which part of the whole each one is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onward.trainer.distributed.placement import Placement
from onward.trainer.errors import CheckpointError


@dataclass(frozen=True)
class Weight:
    """A parameter, frozen or not, or a running statistic.

    A rank may hold several of one name: each stage that uses a weight has a copy of its own. Copies begin equal
    and are updated equally.
    """

    name: str
    """In the file."""
    tensor: Tensor
    """Plain and local, of shape `placement.local_shape`; the optimizer changes it in place. While it is trained,
    `.grad` is its gradient, summed over all that share it, from `reduce` to the next `begin`."""
    placement: Placement
    trained: bool
    counted: bool = True
    """Whether this copy counts in sums over the weights: of all ranks' copies of the same part exactly one does."""
    remains: float = 0.0
    """Of a running statistic: the share of it that one micro-batch leaves, the rest is new. 0 if that is unknown."""


def shape_of(tensor: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, type and `requires_grad`, without data."""
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)


def fill(weights: Iterable[Weight], tensors: Mapping[str, Tensor]) -> None:
    """Copy parts (name -> tensor of the local shape) into the weights. Raises CheckpointError unless all fit."""
    weights = list(weights)
    problems = [f"{weight.name} is missing" for weight in weights if weight.name not in tensors]
    for weight in weights:
        found = tensors.get(weight.name)
        if found is not None and found.shape != weight.tensor.shape:
            problems.append(f"{weight.name} is {list(found.shape)}, the model's is {list(weight.tensor.shape)}")
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(sorted(set(problems))[:5])}")
    for weight in weights:
        weight.tensor.detach().copy_(tensors[weight.name])
