"""Shard the weights of a chain of units with torch's FSDP2: which are gathered together, and in which type.

    units        [ embedding, norm, a ]   [ b, c ]   [ d, embedding ]
    FSDP groups    norm | a                 b, c       d                 embedding: the group of the chain

The weights of a group are gathered as one, and their gradients reduced as one. A weight that several units use belongs
to the chain, which gathers it before the first unit. In bf16 and fp16 the weights that only products read are a group
of their own, gathered in that type: a (autocast would cast them), but neither the norm nor the embedding. FSDP has one
group for a module, so the module of the other weights is put around the unit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from onward.trainer.model.weight_casts import read_in_half_only
from onward.trainer.onnx_graph.files.external_data import own_copy
from onward.trainer.parallel.pipeline.stage import Chain
from onward.trainer.parallel.replicas.background_scatter import BackgroundScatter


def gathered_in_half(chain: Chain) -> set[Tensor]:
    """Return the fp32 parameters of a chain that ZeRO gathers in half precision under autocast.

    One product reads each. The gradients of several would be summed in half precision, and without ZeRO are in fp32.
    """
    half = set[Tensor]()
    full = set[Tensor]()
    for part in chain.parts:
        read = read_in_half_only(part.module) if isinstance(part.module, fx.GraphModule) else set()
        half |= read
        full |= set(part.module.parameters()) - read
    # one unit may read in fp32 what another one reads in half precision only
    return half - full


class _TwoTypes(nn.Module):
    """A unit some of whose weights are gathered in half precision: by the unit itself, the others by this module."""

    def __init__(self, unit: nn.Module, others: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.unit = unit
        for place, parameter in enumerate(others):
            self.register_parameter(f"other_{place}", parameter)  # FSDP replaces it in the unit as well
        self.train(unit.training)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return self.unit(*values)  # type: ignore[no-any-return]


def shard_chain(
    chain: Chain,
    sharded: Set[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    regather: bool,
    half: torch.dtype | None,
) -> None:
    """Move the parameters of one chain to the device and shard them.

    One unit after the other: the device holds the shards and one unit, the host what is left. regather: free gathered
    weights after each pass. half: the type that autocast computes in; None where it casts nothing.
    """
    own = []
    for unit in chain.units:
        own.append([parameter for parameter in unit.parameters() if parameter in sharded])
    uses = Counter(parameter for parameters in own for parameter in parameters)
    # a parameter is in one FSDP group, so that weights of several units belong to the chain
    common = {parameter for parameter, times in uses.items() if times > 1}
    others = {parameter for parameter in chain.parameters() if parameter not in sharded}
    halves = gathered_in_half(chain) if half else set()
    for place, parameter in enumerate(parameter for parameter in uses if parameter in common):
        chain.register_parameter(f"common_{place}", parameter)  # FSDP replaces it in the units as well

    # the FSDP modules of each unit in the order in which they gather
    groups: list[list[FSDPModule]] = []
    for number, parameters in enumerate(own):
        unit = chain.units[number]
        # common weights are gathered by the chain, in fp32
        in_half = [parameter for parameter in parameters if parameter in halves - common]
        in_full = [parameter for parameter in parameters if parameter not in halves | common]
        groups.append([])
        if in_half:
            with _on_device(in_half, device):
                ignored = others | common | set(in_full)
                groups[-1] = [_fully_shard(unit, mesh, regather=regather, ignored=ignored, half=half)]
        # FSDP has one group for each module, and the unit has that of the first type already
        if in_half and in_full:
            unit = chain.units[number] = _TwoTypes(unit, in_full)
        if in_full:
            with _on_device(in_full, device):
                groups[-1].insert(0, _fully_shard(unit, mesh, regather=regather, ignored=others | common))
    # after the units, because FSDP gives a module the parameters that no submodule has taken
    with _on_device(common, device):
        root = _fully_shard(chain, mesh, regather=regather, ignored=others)
    _prefetch(root, [group for group in groups if group])


def gather_in_background(chain: Chain) -> None:
    """Let the thread compute while the weights that a sharded chain prefetches are on their way, on the CPU.

    On a GPU only a stream waits for them.
    """
    assert isinstance(chain, FSDPModule)
    chain._set_unshard_async_op(True)


def scatter_with(chain: Chain, scatter: BackgroundScatter) -> None:
    """Let a sharded chain reduce its gradients by `scatter`."""
    for module in chain.modules():
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group is not None:
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


def _prefetch(root: FSDPModule, units: Sequence[Sequence[FSDPModule]]) -> None:
    """Let each unit gather the weights of its neighbour while it computes.

    FSDP would prefetch in the order of the last pass, which is wrong with several micro-batches in flight.
    """
    forward = [[root], *map(list, units)]
    for this, following in itertools.pairwise(forward):
        # the last module of a unit to gather starts the next unit, so that two units at most are complete
        this[-1].set_modules_to_forward_prefetch(following)
    # the first unit prefetches itself, which does nothing
    for this, before in itertools.pairwise([[root], *map(list, reversed(units)), *map(list, units[:1])]):
        for module in this:
            module.set_modules_to_backward_prefetch(before)


@contextmanager
def _on_device(parameters: Collection[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Move parameters to the device for a block, and free them after it: FSDP has put its own in their place."""
    for parameter in parameters:
        parameter.data = _moved(parameter.data, device)
    yield
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)  # even if something else refers to the parameter


def _moved(data: Tensor, device: torch.device) -> Tensor:
    # a row-parallel shard may be a view of columns; FSDP reads its own part only of a mapped file, but computes with it
    if data.device.type == "cpu" and data.numel() and data.data_ptr() % data.element_size():
        data = own_copy(data)
    return data.contiguous().to(device)


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    regather: bool,
    ignored: set[nn.Parameter],
    half: torch.dtype | None = None,
) -> FSDPModule:
    """Shard the parameters of a module that are neither ignored nor sharded yet. half: their type when gathered."""
    size = mesh.size(mesh.ndim - 1)
    managed = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=regather,
        shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, size)),
        ignored_params=ignored,
        # activations keep their types, as without ZeRO
        mp_policy=MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False),
    )
    # gradients are sums over targets, so replicas are summed, not averaged; gloo has no other reduction
    managed.set_gradient_divide_factor(1.0)
    managed.set_force_sum_reduction_for_comms(True)
    # replicas may take different branches of an If; the gradient of an unused weight must be reduced as zeros, else
    # the replicas would reduce different weights together
    group = managed._get_fsdp_state()._fsdp_param_group  # None of a module without parameters of its own
    if group and hasattr(group.fsdp_params[0], "accumulate_unsharded_grad_if_needed"):
        _reduce_unused(group)
    elif group:  # from torch 2.15 on autograd accumulates in the type of the weight, and the reduction casts
        managed.set_reduce_scatter_unused_params(True)
    return managed


def _reduce_unused(group: Any) -> None:
    """Give unused weights of an FSDP group a gradient of zeros, and all gradients the type of those that ZeRO 1 has
    accumulated: a group reduces gradients of one type."""
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        reduced = group.fsdp_params if group.reduce_grads else []
        # FSDP makes the gathered form of a weight when it gathers it for the first time
        weights = [weight for weight in reduced if hasattr(weight, "_unsharded_param")]
        for weight in weights:
            weight.accumulate_unsharded_grad_if_needed()
        accumulated = any(weight.unsharded_accumulated_grad is not None for weight in weights)
        for weight in weights:
            full = weight.unsharded_param
            # neither this backward pass nor an earlier one of the step has reached the weight
            if full.requires_grad and full.grad is None and weight.unsharded_accumulated_grad is None:
                full.grad = torch.zeros_like(full)
            if accumulated:
                weight.to_accumulated_grad_if_needed()
        original()

    group.post_backward = post_backward


def shard_dim(shape: Sequence[int], size: int) -> int:
    """Return the dimension along which FSDP shards a tensor.

    The first if its length is a multiple of `size`, since its shards are contiguous; else the longest that is; else
    the first, and the last shards are shorter or empty.
    """
    # FSDP divides unevenly along the first dimension only
    even = [dim for dim, length in enumerate(shape) if length % size == 0]
    if 0 in even or not even:
        return 0
    return max(even, key=lambda dim: shape[dim])
