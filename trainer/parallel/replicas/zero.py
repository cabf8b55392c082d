"""ZeRO: shard optimizer state (1), gradients (2) and weights (3) over the replicas, with torch's FSDP2.

Each rank keeps and updates a shard of every weight. The weights of a unit are all-gathered before it computes:

    ZeRO   the full weights of a unit are in memory        its gradients are reduce-scattered
    1      from its first forward pass to its last         once, during the last backward pass
           backward pass of the step
    2      the same                                        after each backward pass
    3      during one forward or backward pass             after each backward pass

While a unit computes, the weights of the next unit and the gradients of the previous one are in transit.

Hybrid sharding (parallel.data = 4, parallel.shard = 2): shards within a group, equal copies across groups.

                     shard 0    shard 1
    replicate 0      rank 0     rank 1       all-gather and reduce-scatter along a row,
    replicate 1      rank 2     rank 3       all-reduce of gradient shards along a column, once per step

(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; hybrid: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.)
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from onward.trainer.config.sections import ParallelConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Weight
from onward.trainer.model.weight_casts import forget_casts
from onward.trainer.parallel.pipeline.stage import Chain, Stage
from onward.trainer.parallel.replicas.copies import ReplicatedWeights, TiedGradients
from onward.trainer.parallel.replicas.norms import gradient, local_squares, sum_over_world
from onward.trainer.parallel.replicas.reducer import Reducer

# FSDP2 warns of views that are changed in place; the graph has no in-place operators, and a unit may end with Reshape
warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)


class Sharded:
    """Shards the weights of one rank's stages over its replicas and sums the gradients of all ranks (ZeRO 1-3).

    weights: all that this rank stores, in graph order, their tensors those of the stages' modules; the same on the
    replicas of its stages; may be empty. The modules hold shards afterwards, and the parameters passed in are empty.
    shared: name -> pipeline coordinates that hold it, for every weight of the model that several stages hold.
    The tensors of `self.weights` may be changed in place between `reduce` and the next forward pass, or before
    `begin`; other forward passes may compute with weights gathered earlier.
    Collective: every rank of the world makes one.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        weights: Sequence[Weight],
        *,
        config: ParallelConfig,
        mesh: DeviceMesh,
        mpi: MPIContext,
        shared: Mapping[str, Sequence[int]],
        timeout_s: float,
    ) -> None:
        self._replicate = mesh["replicate"]
        shard = mesh["shard"]
        grid = mesh["replicate", "shard"] if self._replicate.size() > 1 else shard
        sharded = [weight for weight in weights if is_sharded(weight, zero=config.zero)]
        owners = _owners(stages)
        for stage in stages:
            _shard(stage.chain, {weight.tensor for weight in sharded}, grid, mpi.device, regather=config.zero == 3)
        # FSDP has replaced the parameters in their modules by DTensors, and keeps these for good
        held = [getattr(*owners[weight.tensor]) for weight in sharded]
        parts = {weight: _part(weight, parameter, shard) for weight, parameter in zip(sharded, held, strict=True)}
        self.weights = [parts.get(weight, weight) for weight in weights]
        """What this rank holds: of sharded weights its part, of the others the tensors passed in."""
        self._trained = [
            (parameter, part) for parameter, part in zip(held, parts.values(), strict=True) if part.trained
        ]
        trained = [part for _, part in self._trained]
        self._unsharded = Reducer(
            [weight for weight in weights if weight not in parts],
            mesh=mesh,
            mpi=mpi,
            config=config,
            shared=shared,
            timeout_s=timeout_s,
        )
        self._replicated = ReplicatedWeights(self.weights, mesh)
        self._tied = TiedGradients(trained, shared=shared, mesh=mesh, timeout_s=timeout_s)
        self._device = mpi.device
        self._passes = [_BackwardPasses(stage.chain, zero=config.zero) for stage in stages]
        if config.zero == 3:
            for stage in stages:
                _recast_in_backward(stage.chain, self._device)

    def begin(self, num_backwards: int, num_targets: float = 1.0, num_batchnorm_updates: int = 1) -> None:
        """Begin a step: drop the gradients, and remember the running statistics.

        Each stage of this rank will run `num_backwards` backward passes. What the last of them completes is sent at
        once, the rest in `reduce`. num_targets, num_batchnorm_updates: of this replica, as in `Reducer.begin`.
        """
        self._unsharded.begin(num_backwards, num_targets, num_batchnorm_updates)
        for _, weight in self._trained:
            weight.tensor.grad = None
        for passes in self._passes:
            passes.begin(num_backwards)

    def reduce(self) -> Tensor:
        """Complete the gradients of tied and unsharded weights, and merge the replicas' running statistics.

        Returns this rank's part of the squared global norm (see `local_squares`), which `sum` adds up. Collective:
        every rank of the world.
        """
        for parameter, weight in self._trained:
            found, parameter.grad = parameter.grad, None
            # FSDP leaves the gradient on its own parameter; the optimizer and the norms read it from the shard
            weight.tensor.grad = torch.zeros_like(weight.tensor) if found is None else _local(found)
        self._tied.gather()
        own = {weight for _, weight in self._trained}
        self._replicated.broadcast(gradient(weight) for weight in self._replicated.weights if weight in own)
        self._tied.broadcast()
        # groups of shards hold the same gradients, so each group squares only some of them
        share = [weight for _, weight in self._trained][self._replicate.get_local_rank() :: self._replicate.size()]
        return local_squares(share, self._device) + self._unsharded.reduce()

    def undo(self) -> None:
        """Restore the running statistics of `begin`: a skipped update must change nothing."""
        self._unsharded.undo()

    def multiply(self, factor: float) -> None:
        """Multiply every gradient in place; unscaling and clipping are one multiplication."""
        self._unsharded.multiply(factor)
        if factor != 1.0 and self._trained:
            torch._foreach_mul_([gradient(weight) for _, weight in self._trained], factor)

    def close(self) -> None:
        """End the background communication. Collective: every rank of the world."""
        self._unsharded.close()

    def sum(self, *numbers: float | Tensor) -> list[float]:
        """Sum a few numbers over all ranks. Collective: every rank of the world."""
        return sum_over_world(numbers, self._device)


class _BackwardPasses:
    """Counts the backward passes of one chain and configures FSDP for the last of a step.

    FSDP is configured from hooks, so that the pipeline engine runs sharded and unsharded chains alike. (torch's own
    PipelineStage configures FSDP as well, but counts the passes differently.)
    """

    def __init__(self, chain: Chain, *, zero: int) -> None:
        self._modules = [module for module in (*chain.units, chain) if isinstance(module, FSDPModule)]
        self._root = chain
        self._zero = zero
        self._left = 0
        chain.register_forward_hook(self._watch_backward)

    def begin(self, num_backwards: int) -> None:
        self._left = num_backwards
        # the last backward pass of the previous step has set `last`
        self._configure(last=False)
        for module in self._modules:
            # evaluation leaves ZeRO 1 and 2 with gathered weights, and the optimizer has changed the shards since
            module.reshard()

    def _watch_backward(self, chain: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        """After each forward pass, register a hook that runs when its backward pass begins."""
        if torch.is_grad_enabled() and (tensors := [output for output in outputs if output.requires_grad]):
            register_multi_grad_hook(tensors, self._backward, mode="any")

    def _backward(self, first: Tensor) -> None:
        assert self._left > 0, "more backward passes than `begin` announced"
        self._left -= 1
        # before the first gradient of the pass is computed, so FSDP reduces the gradients of this pass at once
        if self._left == 0:
            self._configure(last=True)

    def _configure(self, *, last: bool) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.set_is_last_backward(last)
        for module in self._modules:
            # ZeRO 1 keeps full gradients until the last backward pass, and saves the reduce-scatters of the others
            module.set_requires_gradient_sync(last or self._zero >= 2, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # hybrid: across groups of shards once per step
            module.set_reshard_after_backward(last or self._zero == 3, recurse=False)


# -- autocast

VIEWS = {f"{view}Backward0" for view in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze")}
"""Nodes of the autograd graph that change the shape of a tensor and not its memory."""


def _recast_in_backward(chain: Chain, device: torch.device) -> None:
    """Under autocast, cast weights to half precision again in the backward pass instead of saving the casts.

        forward    weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul
        saved      by autograd: weight (bf16); with these hooks: a reference to weight (fp32), which FSDP frees
        backward   weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul

    Autocast caches the casts for the whole forward pass, and autograd saves them for the backward pass: half the bytes
    of all weights, where ZeRO 3 should need those of one unit. Casting again gives the same bits.
    """
    hooks = saved_tensors_hooks(_pack, _unpack)
    inside = []

    def enter(chain: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type):
            hooks.__enter__()
            # `leave` also runs after an error, and must end only what `enter` has begun
            inside.append(True)

    def leave(chain: nn.Module, inputs: object, outputs: object) -> None:
        if inside:
            inside.pop()
            hooks.__exit__()

    chain.register_forward_pre_hook(enter)
    chain.register_forward_hook(leave, always_call=True)
    for unit in chain.units:
        # what is kept refers to the casts, and would keep those of all units until the step ends
        unit.register_forward_hook(lambda unit, inputs, outputs: forget_casts())


@dataclass(frozen=True)
class _Cast:
    """Stands for a weight cast to half precision, or a view of the cast, among autograd's saved tensors."""

    weight: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _pack(tensor: Tensor) -> Tensor | _Cast:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    # recognised by the autograd node that made it: a cast whose operand is a parameter
    step = _behind_views(tensor.grad_fn)
    if step is None or step.name() != "ToCopyBackward0":
        return tensor
    weight = getattr(_behind_views(step.next_functions[0][0]), "variable", None)
    if weight is None or not weight.is_contiguous():
        return tensor
    # the cast has the memory order of the weight, so size, stride and offset describe the view of either
    return _Cast(weight, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _behind_views(step: Node | None) -> Node | None:
    while step is not None and step.name() in VIEWS:
        step = step.next_functions[0][0]
    return step


def _unpack(kept: Tensor | _Cast) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.weight.detach().to(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


# -- sharding


def is_sharded(weight: Weight, *, zero: int) -> bool:
    """Return whether ZeRO shards a weight.

    FSDP cannot shard scalars, and reduces gradients of one dtype together. Below ZeRO 3 sharding a frozen weight would
    only cost all-gathers.
    """
    tensor = weight.tensor
    if not isinstance(tensor, nn.Parameter) or tensor.ndim == 0 or tensor.numel() == 0:
        return False
    return tensor.dtype == torch.float32 if weight.trained else zero == 3


def _owners(stages: Iterable[Stage]) -> dict[Tensor, tuple[nn.Module, str]]:
    """Return, for every parameter, a module that has it and its attribute there."""
    modules = [module for stage in stages for module in stage.chain.modules()]
    return {
        parameter: (module, name) for module in modules for name, parameter in module.named_parameters(recurse=False)
    }


def _shard(chain: Chain, sharded: Set[Tensor], mesh: DeviceMesh, device: torch.device, *, regather: bool) -> None:
    """Move the parameters of one chain to the device and shard them, each unit's as one FSDP group.

    One unit after the other: the device holds the shards and one unit, the host what is left.

        units        [ embedding, a ]   [ b, c ]   [ d, embedding ]
        FSDP groups    a                  b, c       d                 embedding: the group of the chain

    A parameter that several units use belongs to the chain, which gathers it before the first unit.
    """
    own = [[parameter for parameter in unit.parameters() if parameter in sharded] for unit in chain.units]
    uses = Counter(parameter for parameters in own for parameter in parameters)
    common = {parameter for parameter, times in uses.items() if times > 1}
    others = {parameter for parameter in chain.parameters() if parameter not in sharded}
    for place, parameter in enumerate(parameter for parameter in uses if parameter in common):
        chain.register_parameter(f"common_{place}", parameter)  # FSDP replaces it in the units as well

    for unit, parameters in zip(chain.units, own, strict=True):
        if alone := [parameter for parameter in parameters if parameter not in common]:
            with _on_device(alone, device):
                _fully_shard(unit, mesh, regather=regather, ignored=others | common)
    # after the units, because FSDP gives a module the parameters that no submodule has taken
    with _on_device(common, device):
        _fully_shard(chain, mesh, regather=regather, ignored=others)
    # FSDP would prefetch in the order of the last pass, which is wrong with several micro-batches in flight
    assert isinstance(chain, FSDPModule)
    root: list[FSDPModule] = [chain]
    units: list[FSDPModule] = [unit for unit in chain.units if isinstance(unit, FSDPModule)]
    for this, following in itertools.pairwise(root + units):
        this.set_modules_to_forward_prefetch([following])
    for this, before in itertools.pairwise(root + units[::-1] + units[:1]):
        this.set_modules_to_backward_prefetch([before])  # the first unit prefetches itself, which does nothing


@contextmanager
def _on_device(parameters: Collection[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Move parameters to the device for a block, and free them after it: FSDP has put its own in their place."""
    for parameter in parameters:
        parameter.data = _moved(parameter.data, device)
    yield
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)  # even if something else refers to the parameter


def _moved(data: Tensor, device: torch.device) -> Tensor:
    # a row-parallel shard may be a view of columns
    return data.contiguous().to(device)


def _fully_shard(module: nn.Module, mesh: DeviceMesh, *, regather: bool, ignored: set[nn.Parameter]) -> None:
    size = mesh.size(mesh.ndim - 1)
    managed = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=regather,
        shard_placement_fn=lambda parameter: Shard(_shard_dim(parameter.shape, size)),
        ignored_params=ignored,
    )
    # gradients are sums over targets, so replicas are summed, not averaged; gloo has no other reduction
    managed.set_gradient_divide_factor(1.0)
    managed.set_force_sum_reduction_for_comms(True)
    # replicas may take different branches of an If; the gradient of an unused weight must be reduced as zeros, else
    # the replicas would reduce different weights together
    if hasattr(managed, "set_reduce_scatter_unused_params"):
        managed.set_reduce_scatter_unused_params(True)
    else:  # torch < 2.13
        _reduce_unused(managed._get_fsdp_state()._fsdp_param_group)


def _reduce_unused(group: Any) -> None:
    """Give unused weights of an FSDP group a gradient of zeros, as set_reduce_scatter_unused_params does."""
    if group is None:  # this module has no parameters of its own
        return
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        weights = [each for each in group.fsdp_params if group.reduce_grads and hasattr(each, "_unsharded_param")]
        for weight in weights:
            full = weight.unsharded_param
            if full.requires_grad and full.grad is None and weight.unsharded_accumulated_grad is None:
                full.grad = torch.zeros_like(full)
        original()

    group.post_backward = post_backward


def _shard_dim(shape: Sequence[int], size: int) -> int:
    """Return the dimension along which FSDP shards a tensor.

    The first if its length is a multiple of `size`, since its shards are contiguous; else the longest that is; else
    the first, and the last shards are shorter or empty.
    """
    even = [dim for dim, length in enumerate(shape) if length % size == 0]
    if 0 in even or not even:
        return 0
    return max(even, key=lambda dim: shape[dim])


def _part(weight: Weight, held: Tensor, shard: DeviceMesh) -> Weight:
    """Return the shard of a weight that this rank keeps, as the memory that FSDP gathers from."""
    shape, size = weight.placement.local_shape, shard.size()
    dim = _shard_dim(shape, size)
    length = math.ceil(shape[dim] / size)
    start, stop = (min(length * place, shape[dim]) for place in (shard.get_local_rank(), shard.get_local_rank() + 1))
    part = replace(weight, tensor=_local(held), placement=weight.placement.narrow(dim, start, stop))
    assert part.placement.local_shape == part.tensor.shape, (weight.name, part.placement, part.tensor.shape)
    return part


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
