"""Name, save and load the state of an optimizer under the keys of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, check_fit, optimizer_key, optimizer_state_in
from onward.trainer.optim.optimizers import Weights, as_weights
from onward.trainer.optim.rules.rule import dims_of, state_dtype
from onward.trainer.optim.rules.table import RULES
from onward.trainer.optim.weight_settings import settings_of


def optimizer_shapes(
    config: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]], matrices: Mapping[str, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return checkpoint key -> full shape of all state, given the full shapes of all trained weights by name.

    matrices: name -> dimension of the output features, of the weights that Muon takes by default.
    """
    outputs = matrices or {}
    state_shapes = {}
    for name, shape in shapes.items():
        for field in _fields(config, name, outputs.get(name), len(shape)):
            # a factored moment has only some dimensions of its weight
            state_shapes[optimizer_key(name, field)] = tuple(shape[dim] for dim in dims_of(field, len(shape)))
    return state_shapes


def state_bytes(config: OptimizerConfig, weights: Weights) -> int:
    """Return the size of the state of these weights, or parts of weights, but for their numbers of updates."""
    total = 0
    for weight in as_weights(weights):
        shape = weight.tensor.shape
        dtype = weight.tensor.dtype
        for field in _fields(config, weight.name, weight.outputs, len(shape)):
            numel = math.prod(shape[dim] for dim in dims_of(field, len(shape)))
            total += numel * state_dtype(field, config, dtype).itemsize if field != "step" else 0
    return total


def _fields(config: OptimizerConfig, name: str, outputs: int | None, ndim: int) -> tuple[str, ...]:
    return RULES[config.name].state(settings_of(config, name, outputs=outputs), ndim)


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, Tensor]:
    """Return checkpoint key -> state tensor (not a copy of it); for a weight with several copies, that of the first."""
    return {name: tensor for name, (tensor, _) in optimizer_parts(optimizer, weights).items()}


def optimizer_parts(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, tuple[Tensor, Placement]]:
    """Return `optimizer_tensors` with placements: the weight's for state of its shape, else the full one."""
    return {name: copies[0] for name, copies in _state(optimizer, weights).items()}


def load_optimizer_parts(optimizer: torch.optim.Optimizer, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Copy `optimizer/...` of `tensors` into the state of every copy of a weight; other tensors are ignored.

    They are the parts that `optimizer_parts` names. Moments saved in another dtype are converted. Raises
    CheckpointError, before anything is copied, naming what is missing, unexpected or of another shape.
    """
    state = _state(optimizer, weights)
    given = optimizer_state_in(tensors)
    shapes = {key: tuple(copies[0][0].shape) for key, copies in state.items()}
    # before the first copy, so that an error leaves the state as it is
    check_fit("the optimizer state", {key: tuple(tensor.shape) for key, tensor in given.items()}, shapes)
    with torch.no_grad():
        for key, copies in state.items():
            for tensor, _ in copies:
                tensor.copy_(given[key])
        for group in optimizer.param_groups:
            # the host's copy of the count, which the updates read
            if group["params"] and "step" in (state_of := optimizer.state[group["params"][0]]):
                group["updates"] = int(state_of["step"])


def _state(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, list[tuple[Tensor, Placement]]]:
    """Return checkpoint key -> (state tensor, placement) of each copy of the weight."""
    state: dict[str, list[tuple[Tensor, Placement]]] = {}
    for weight in as_weights(weights):
        for key, tensor in optimizer.state[weight.tensor].items():
            # moments are sharded like their weight; `step` is one number on every rank
            placement = weight.placement.of_dims(dims_of(key, weight.tensor.ndim))
            state.setdefault(optimizer_key(weight.name, key), []).append((tensor, placement))
    return state
