"""ZeRO: shard optimizer state (1), gradients (2) and weights (3) over the replicas, with torch's FSDP2.

Each rank keeps and updates a shard of every weight. The weights of a unit are all-gathered before it computes:

    ZeRO   the full weights of a unit are in memory        its gradients are reduce-scattered
    1      from its first forward pass to its last         once, during the last backward pass
           backward pass of the step
    2      the same                                        after each backward pass
    3      during one forward or backward pass             after each backward pass

While a unit computes, the weights of the next unit and the gradients of the previous one are in transit: on a GPU by
FSDP2's streams, on the CPU by gloo's threads (background_scatter.py).

In bf16 and fp16 a weight that only products read is gathered in that type, in half the bytes:

    shard (fp32) -- cast -- all-gather -- weight (bf16) -- matmul ... gradient (bf16) -- cast -- reduce-scatter (fp32)

ZeRO 0 rounds at the same two places, since it casts the full weight and the gradient of that cast. Norms, embeddings
and whatever else autocast leaves in fp32 are gathered in fp32.

Hybrid sharding (parallel.data = 4, parallel.shard = 2): shards within a group, equal copies across groups.

                     shard 0    shard 1
    replicate 0      rank 0     rank 1       all-gather and reduce-scatter along a row,
    replicate 1      rank 2     rank 3       all-reduce of gradient shards along a column, once per step

(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; hybrid: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Weight
from onward.trainer.model.weight_casts import forget_casts
from onward.trainer.parallel.pipeline.stage import Chain, Stage
from onward.trainer.parallel.replicas.background_scatter import BackgroundScatter
from onward.trainer.parallel.replicas.copies import ReplicatedWeights, TiedGradients
from onward.trainer.parallel.replicas.fsdp_groups import gather_in_background, scatter_with, shard_chain, shard_dim
from onward.trainer.parallel.replicas.norms import gradient, local_squares
from onward.trainer.parallel.replicas.reducer import Reducer

# FSDP2 warns of views that are changed in place; the graph has no in-place operators, and a unit may end with Reshape
warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)


class Sharded:
    """Shards the weights of one rank's stages over its replicas and sums the gradients of all ranks (ZeRO 1-3).

    weights: all that this rank stores, in graph order, their tensors those of the stages' modules; the same on the
    replicas of its stages; may be empty. The modules hold shards afterwards, and the parameters passed in are empty.
    shared: name -> pipeline coordinates that hold it, for every weight of the model that several stages hold.
    half: the type that autocast computes in; None where it casts nothing.
    The tensors of `self.weights` may be changed in place between `reduce` and the next forward pass, or before
    `begin`; other forward passes may compute with weights gathered earlier, unless `regather` is called before.
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
        half: torch.dtype | None = None,
    ) -> None:
        self._replicate = mesh["replicate"]
        shard = mesh["shard"]
        grid = mesh["replicate", "shard"] if self._replicate.size() > 1 else shard
        sharded = [weight for weight in weights if is_sharded(weight, zero=config.zero)]
        owners = _owners(stages)
        # on a GPU, streams do what these do on the CPU
        is_cpu = mpi.device.type == "cpu"
        # with hybrid sharding the all-reduce between groups follows each scatter
        self._scatter = BackgroundScatter(at_once=self._replicate.size() > 1) if is_cpu else None
        for stage in stages:
            tensors = {weight.tensor for weight in sharded}
            shard_chain(stage.chain, tensors, grid, mpi.device, regather=config.zero == 3, half=half)
            if self._scatter is not None:
                gather_in_background(stage.chain)
                scatter_with(stage.chain, self._scatter)
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
        begin_pass = self._collect if is_cpu else lambda: None
        self._passes = [_BackwardPasses(stage.chain, zero=config.zero, begin_pass=begin_pass) for stage in stages]
        if config.zero == 3:
            for stage in stages:
                recast_in_backward(stage.chain, self._device)

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
        self._collect()
        for _, weight in self._trained:
            # no backward pass reached it; the norm and the optimizer expect a gradient
            if weight.tensor.grad is None:
                weight.tensor.grad = torch.zeros_like(weight.tensor)
        self._tied.gather()
        own = {weight for _, weight in self._trained}
        self._replicated.equalise(weight for weight in self._replicated.weights if weight in own)
        self._tied.broadcast()
        # groups of shards hold the same gradients, so each group squares only some of them
        share = [weight for _, weight in self._trained][self._replicate.get_local_rank() :: self._replicate.size()]
        return local_squares(share, self._device) + self._unsharded.reduce()

    def _collect(self) -> None:
        """Move the gradients from FSDP's parameters to the shards, where the optimizer and the norms read them.

        Before each pass in which FSDP would add to gradients that are still under way.
        """
        if self._scatter is not None:
            self._scatter.wait()
        for parameter, weight in self._trained:
            # taken away, so that FSDP does not add the gradient of the next pass to it
            found = parameter.grad
            parameter.grad = None
            if found is not None and weight.tensor.grad is None:
                weight.tensor.grad = _local(found)
            elif found is not None:
                gradient(weight).add_(_local(found))

    def undo(self) -> None:
        """Restore the running statistics of `begin`: a skipped update must change nothing."""
        self._unsharded.undo()

    def multiply(self, factor: float) -> None:
        """Multiply every gradient in place; unscaling and clipping are one multiplication."""
        self._unsharded.multiply(factor)
        if factor != 1.0 and self._trained:
            torch._foreach_mul_([gradient(weight) for _, weight in self._trained], factor)

    def regather(self) -> None:
        """Let the next forward pass gather the weights as they are now."""
        for passes in self._passes:
            passes.reshard()

    def close(self) -> None:
        """End the background communication. Collective: every rank of the world."""
        self._unsharded.close()


class _BackwardPasses:
    """Counts the backward passes of one chain and configures FSDP for the last of a step.

    FSDP is configured from hooks, so that the pipeline engine runs sharded and unsharded chains alike. (torch's own
    PipelineStage configures FSDP as well, but counts the passes differently.)
    """

    def __init__(self, chain: Chain, *, zero: int, begin_pass: Callable[[], None]) -> None:
        self._begin_pass = begin_pass
        self._modules = [module for module in chain.modules() if isinstance(module, FSDPModule)]
        self._root = chain
        self._zero = zero
        self._left = 0
        chain.register_forward_hook(self._watch_backward)

    def begin(self, num_backwards: int) -> None:
        self._left = num_backwards
        # the last backward pass of the previous step has set `last`
        self._configure(last=False)
        # evaluation leaves ZeRO 1 and 2 with gathered weights, and the optimizer has changed the shards since
        self.reshard()

    def reshard(self) -> None:
        """Drop the gathered weights."""
        for module in self._modules:
            module.reshard()

    def _watch_backward(self, chain: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        """After each forward pass, register a hook that runs when its backward pass begins."""
        if not torch.is_grad_enabled():
            return
        tensors = [output for output in outputs if output.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._backward, mode="any")

    def _backward(self, first: Tensor) -> None:
        assert self._left > 0, "more backward passes than `begin` announced"
        self._left -= 1
        self._begin_pass()
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


def _part(weight: Weight, held: Tensor, shard: DeviceMesh) -> Weight:
    """Return the shard of a weight that this rank keeps, as the memory that FSDP gathers from."""
    shape = weight.placement.local_shape
    size = shard.size()
    dim = shard_dim(shape, size)
    # FSDP divides like torch.chunk: the last shards may be shorter, or empty
    length = math.ceil(shape[dim] / size)
    start, stop = (min(length * place, shape[dim]) for place in (shard.get_local_rank(), shard.get_local_rank() + 1))
    part = replace(weight, tensor=_local(held), placement=weight.placement.narrow(dim, start, stop))
    assert part.placement.local_shape == part.tensor.shape, (weight.name, part.placement, part.tensor.shape)
    return part


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


# -- cast weights again in the backward pass, where ZeRO 3 gathers them in fp32 and autocast computes in half precision
#
#     forward    weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul
#     saved      by autograd: weight (bf16); with these hooks: a reference to weight (fp32), which FSDP frees
#     backward   weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul
#
# Casting again gives the same bits. Weights that are gathered in half precision need none of this; left are
# those that something reads in fp32 as well, such as an embedding that is also the output head.

VIEWS = {f"{view}Backward0" for view in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze")}
"""Nodes of the autograd graph that change the shape of a tensor and not its memory."""
CASTS = ("ToCopyBackward0", "_CastBackwardBackward")
"""Nodes whose first operand is what was cast: torch's, and that of `half_with_own_backward`."""


def recast_in_backward(chain: Chain, device: torch.device) -> None:
    """Let autograd save a reference to a weight in place of its cast to half precision.

    autocast and `weight_casts` keep the casts until the step ends, and autograd until the backward pass: half the bytes
    of all weights, where ZeRO 3 should need those of one unit.
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
    if step is None or step.name() not in CASTS:
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
