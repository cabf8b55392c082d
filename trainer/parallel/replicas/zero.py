"""ZeRO: replicas divide among them optimizer state (1), gradients too (2), weights too (3). Over torch's FSDP2.

Each rank keeps a shard of every weight and updates that. The weights of a unit are gathered before it computes:

    zero   a unit's weights are whole                      its gradients are summed and divided up
    1      from its first forward pass to its last         once, while the last backward pass runs
           backward pass of the step
    2      the same                                        after each backward pass
    3      in one forward or backward pass at a time       after each backward pass

(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; hybrid: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.)
While a unit computes, the weights of the next one travel, and the gradients of the one before.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
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
from onward.trainer.parallel.pipeline.stage import Chain, Stage
from onward.trainer.parallel.replicas.reducer import (
    CommonTensors,
    Reducer,
    TiedGradients,
    global_norm,
    gradient,
    sum_over_world,
)

# graphs have no operators in place, of which it warns; and a unit may well end with a Reshape
warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)


class Sharded:
    """Divides the weights of one rank's stages among its replicas and makes the gradients of all ranks one (ZeRO 1-3).

    weights: all that this rank stores, in graph order, their tensors those of the stages' modules; the same on the
    replicas of its stages, and possibly none. The modules hold shards from here on, and the parameters that came are
    empty. shared: name -> pipeline coordinates that hold it, for every weight of the model that several stages hold;
    each stage has a copy of its own.
    The tensors of `self.weights` may be changed in place between `reduce` and the next forward pass, or before
    `begin`: other forward passes may see what was gathered before.
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
        divided = [weight for weight in weights if divides(weight, zero=config.zero)]
        homes = _homes(stages)
        for stage in stages:
            _shard(stage.chain, {id(weight.tensor) for weight in divided}, grid, regather=config.zero == 3)
        held = [getattr(*homes[id(weight.tensor)]) for weight in divided]  # what FSDP has put there, and leaves there
        parts = [_part(weight, parameter, shard) for weight, parameter in zip(divided, held, strict=True)]
        part_of = {id(weight): part for weight, part in zip(divided, parts, strict=True)}
        self.weights = [part_of.get(id(weight), weight) for weight in weights]
        """What this rank holds: of divided weights its part, of the others the tensors that came."""
        self._trained = [(parameter, part) for parameter, part in zip(held, parts, strict=True) if part.trained]
        for weight in divided:
            weight.tensor.data = weight.tensor.data.new_empty(0)  # frees it, whoever still has the parameter

        whole = [weight for weight in weights if id(weight) not in part_of]
        trained = [part for _, part in self._trained]
        self._whole = Reducer(whole, mesh=mesh, mpi=mpi, config=config, shared=shared, timeout_s=timeout_s)
        self._common = CommonTensors(self.weights, mesh)
        self._tied = TiedGradients(trained, shared=shared, mesh=mesh, timeout_s=timeout_s)
        self._device = mpi.device
        self._passes = [_Passes(stage.chain, zero=config.zero) for stage in stages]
        if config.zero == 3:
            for stage in stages:
                _forget_casts(stage.chain, self._device)

    def begin(self, num_backwards: int, num_targets: float = 1.0, num_moves: int = 1) -> None:
        """A step begins: no gradients; running statistics are remembered.

        Each stage of this rank will see `num_backwards` backward passes; what the last of them completes is sent at
        once, what they leave out in `reduce`. num_targets: of this replica. num_moves: of its running statistics.
        """
        self._whole.begin(num_backwards, num_targets, num_moves)
        for _, weight in self._trained:
            weight.tensor.grad = None
        for passes in self._passes:
            passes.begin(num_backwards)

    def reduce(self) -> Tensor:
        """Complete the gradients of all ranks: stages that share a weight, weights that are not divided. Join the
        running statistics of the replicas.

        Returns the global L2 norm (see `global_norm`). Collective: every rank of the world.
        """
        for parameter, weight in self._trained:
            found, parameter.grad = parameter.grad, None
            weight.tensor.grad = torch.zeros_like(weight.tensor) if found is None else _local(found)
        self._tied.gather()
        own = {id(weight) for _, weight in self._trained}
        self._common.spread(gradient(weight) for weight in self._common.weights if id(weight) in own)
        self._tied.spread()
        # groups of shards hold the same gradients: each measures its share of them
        share = [weight for _, weight in self._trained][self._replicate.get_local_rank() :: self._replicate.size()]
        return torch.hypot(global_norm(share, self._device), self._whole.reduce())

    def undo(self) -> None:
        """Put the running statistics back to what they were at `begin`: a skipped update changes nothing."""
        self._whole.undo()

    def multiply(self, factor: float) -> None:
        """Scale every gradient in place: un-scaling and clipping are one multiplication."""
        self._whole.multiply(factor)
        if factor != 1.0:
            for _, weight in self._trained:
                gradient(weight).mul_(factor)

    def close(self) -> None:
        """No gradient will be sent any more. Collective: every rank of the world."""
        self._whole.close()

    def sum(self, *numbers: float | Tensor) -> list[float]:
        """Sum a few numbers over all ranks. Collective: every rank of the world."""
        return sum_over_world(numbers, self._device)


class _Passes:
    """Counts the backward passes of one chain, and says to FSDP what each of them is to do.

    Whoever runs the chain need not know that it is divided: torch's PipelineStage drives FSDP otherwise, and counts
    otherwise.
    """

    def __init__(self, chain: Chain, *, zero: int) -> None:
        self._modules = [module for module in (*chain.units, chain) if isinstance(module, FSDPModule)]
        self._root = chain
        self._zero = zero
        self._left = 0
        chain.register_forward_hook(self._called)

    def begin(self, num_backwards: int) -> None:
        self._left = num_backwards
        self._say(last=False)
        for module in self._modules:
            module.reshard()  # evaluation leaves ZeRO 1 and 2 with whole weights, of which the shards may have changed

    def _called(self, chain: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        """After each forward pass: its backward pass is to be noticed when the first gradient comes in."""
        if torch.is_grad_enabled() and (tensors := [output for output in outputs if output.requires_grad]):
            register_multi_grad_hook(tensors, self._backward, mode="any")

    def _backward(self, first: Tensor) -> None:
        assert self._left > 0, "more backward passes than `begin` was told"
        self._left -= 1
        if self._left == 0:
            self._say(last=True)

    def _say(self, *, last: bool) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.set_is_last_backward(last)
        for module in self._modules:
            module.set_requires_gradient_sync(last or self._zero >= 2, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # hybrid: between groups of shards once in a step
            module.set_reshard_after_backward(last or self._zero == 3, recurse=False)


# -- autocast

VIEWS = {f"{view}Backward0" for view in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze")}
"""Steps of autograd that give the memory of a tensor another shape."""


def _forget_casts(chain: Chain, device: torch.device) -> None:
    """Under autocast, do not keep the weights in half precision beyond the unit that uses them.

    Autocast keeps such copies for the whole forward pass, and autograd for the backward pass: together half of all
    weights, where ZeRO 3 promises those of a unit. So they are cast again in the backward pass: the same bits.
    """
    hooks = saved_tensors_hooks(_pack, _unpack)
    inside = []

    def enter(chain: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type):
            hooks.__enter__()
            inside.append(True)

    def leave(chain: nn.Module, inputs: object, outputs: object) -> None:
        if inside:
            inside.pop()
            hooks.__exit__()

    chain.register_forward_pre_hook(enter)
    chain.register_forward_hook(leave, always_call=True)
    for unit in chain.units:
        unit.register_forward_hook(lambda unit, inputs, outputs: torch.clear_autocast_cache())


@dataclass(frozen=True)
class _Cast:
    """A weight in half precision, or a view of that."""

    weight: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _pack(tensor: Tensor) -> Tensor | _Cast:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    step = _behind_views(tensor.grad_fn)
    if step is None or step.name() != "ToCopyBackward0":
        return tensor
    weight = getattr(_behind_views(step.next_functions[0][0]), "variable", None)
    if weight is None or not weight.is_contiguous():
        return tensor
    # a cast keeps the order of the memory, transposed or not
    return _Cast(weight, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _behind_views(step: Node | None) -> Node | None:
    while step is not None and step.name() in VIEWS:
        step = step.next_functions[0][0]
    return step


def _unpack(kept: Tensor | _Cast) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.weight.detach().to(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


# -- dividing


def divides(weight: Weight, *, zero: int) -> bool:
    """Whether the replicas divide a weight. FSDP cannot divide scalars, and sums gradients of one type together;
    before ZeRO 3 there is no use in gathering frozen weights again and again."""
    tensor = weight.tensor
    if not isinstance(tensor, nn.Parameter) or tensor.ndim == 0 or tensor.numel() == 0:
        return False
    return tensor.dtype == torch.float32 if weight.trained else zero == 3


def _homes(stages: Iterable[Stage]) -> dict[int, tuple[nn.Module, str]]:
    """Parameter (by id) -> a module that has it, and its name there."""
    modules = [module for stage in stages for module in stage.chain.modules()]
    return {
        id(parameter): (module, name)
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
    }


def _shard(chain: Chain, divided: Set[int], mesh: DeviceMesh, *, regather: bool) -> None:
    """Divide the parameters of one chain: those of a unit travel together; those of several units belong to none."""
    own = [[parameter for parameter in unit.parameters() if id(parameter) in divided] for unit in chain.units]
    uses = Counter(parameter for parameters in own for parameter in parameters)
    common = {parameter for parameter, times in uses.items() if times > 1}
    others = {parameter for parameter in chain.parameters() if id(parameter) not in divided}
    for parameter in uses:
        parameter.data = parameter.data.contiguous()  # a tensor-parallel part may be a view of columns
    for place, parameter in enumerate(parameter for parameter in uses if parameter in common):
        chain.register_parameter(f"common_{place}", parameter)  # FSDP finds the units' uses of it by itself

    for unit, parameters in zip(chain.units, own, strict=True):
        if not common.issuperset(parameters):
            _fully_shard(unit, mesh, regather=regather, ignored=others | common)
    _fully_shard(chain, mesh, regather=regather, ignored=others)
    # said here what travels next: with several micro-batches on their way FSDP would guess, and wrongly
    assert isinstance(chain, FSDPModule)
    root: list[FSDPModule] = [chain]
    units: list[FSDPModule] = [unit for unit in chain.units if isinstance(unit, FSDPModule)]
    for this, following in itertools.pairwise(root + units):
        this.set_modules_to_forward_prefetch([following])
    for this, before in itertools.pairwise(root + units[::-1] + units[:1]):
        this.set_modules_to_backward_prefetch([before])  # the first unit itself: nothing


def _fully_shard(module: nn.Module, mesh: DeviceMesh, *, regather: bool, ignored: set[nn.Parameter]) -> None:
    size = mesh.size(mesh.ndim - 1)
    divided = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=regather,
        shard_placement_fn=lambda parameter: Shard(_dim(parameter.shape, size)),
        ignored_params=ignored,
    )
    # a gradient is a sum over targets: replicas add up, and gloo knows no other reduction
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)
    # replicas may take different branches of an If: what one did not use it sends as zeros, or they would mix them up
    if hasattr(divided, "set_reduce_scatter_unused_params"):
        divided.set_reduce_scatter_unused_params(True)
    else:  # before torch 2.13
        _send_unused(divided._get_fsdp_state()._fsdp_param_group)


def _send_unused(group: Any) -> None:
    if group is None:  # nothing of its own
        return
    complete = group.post_backward

    def post_backward(*unused: Any) -> None:
        weights = [each for each in group.fsdp_params if group.reduce_grads and hasattr(each, "_unsharded_param")]
        for weight in weights:
            whole = weight.unsharded_param
            if whole.requires_grad and whole.grad is None and weight.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        complete()

    group.post_backward = post_backward


def _dim(shape: Sequence[int], size: int) -> int:
    """Along which dimension a tensor is divided: the first if that comes out even, for its parts lie in one piece;
    else the longest that does; else the first, whose last parts are then shorter or empty."""
    even = [dim for dim, length in enumerate(shape) if length % size == 0]
    if 0 in even or not even:
        return 0
    return max(even, key=lambda dim: shape[dim])


def _part(weight: Weight, held: Tensor, shard: DeviceMesh) -> Weight:
    """The part of a weight that this rank keeps: the very memory that FSDP gathers from."""
    shape, size = weight.placement.local_shape, shard.size()
    dim = _dim(shape, size)
    length = math.ceil(shape[dim] / size)
    start, stop = (min(length * place, shape[dim]) for place in (shard.get_local_rank(), shard.get_local_rank() + 1))
    part = replace(weight, tensor=_local(held), placement=weight.placement.narrow(dim, start, stop))
    assert part.placement.local_shape == part.tensor.shape, (weight.name, part.placement, part.tensor.shape)
    return part


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
