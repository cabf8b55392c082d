"""Estimate what each node of a graph costs: arithmetic, and memory kept for the backward pass.

The graph runs once on fake tensors (torch._subclasses.fake_tensor), which have shapes and types but no data, under the
autocast of training. So the costs are those of the operators that training calls, fused and tensor-parallel ones too.

FLOPs are counted by the formulas of flops.py, where the backward pass of a trained layer is twice its forward pass.
Kept memory is what autograd saves (torch.autograd.graph.saved_tensors_hooks), each storage once, without weights and
their casts to half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks

from onward.trainer.errors import UnsupportedModel
from onward.trainer.model.weight_casts import half, half_with_own_backward
from onward.trainer.parallel.planning.flops import flop_counter

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class NodeCost:
    """What one node takes for inputs of given shapes."""

    flops: int
    """Of the forward pass."""
    kept_bytes: int
    """What autograd saves because of this node and had not saved for a node before it."""
    outputs: tuple[Tensor, ...]
    """Meta tensors with the shape, type and `requires_grad` of its outputs; empty if they are plain numbers."""

    @property
    def output_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


def estimate_costs(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, autocast: Autocast = nullcontext, training: bool = True
) -> dict[str, NodeCost]:
    """Return the cost of every node by its name, for one micro-batch.

    inputs: tensors of the right shapes, [B, ...] each, on any device. Weights may be on the meta device. Changes
    neither weights nor running statistics. Raises UnsupportedModel when shapes depend on data.
    """
    device = next((tensor.device for tensor in inputs if tensor.device.type != "meta"), torch.device("cpu"))
    # stages share modules with the graph, and a stage may be in another mode
    modes = [(each, each.training) for each in module.modules()]
    module.train(training)
    try:
        # with gradients: only then autograd saves tensors, which are what `kept_bytes` counts
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            fakes = [torch.empty(value.shape, dtype=value.dtype, device=device) for value in inputs]
            return _CostInterpreter(module, device, autocast).estimate(fakes)
    finally:
        for each, mode in modes:
            each.training = mode


class _CostInterpreter(fx.Interpreter):
    """Run a graph node by node on fake tensors, and record what each node adds."""

    def __init__(self, module: fx.GraphModule, device: torch.device, autocast: Autocast) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._device = device
        self._autocast = autocast
        self._costs: dict[str, NodeCost] = {}
        self._fake_attributes: dict[Tensor, Tensor] = {}
        self._counted: set[int] = set()
        """Storages that do not count any more: saved before, or inputs, or stored tensors."""
        # saved tensors stay alive, because the address of a freed storage could be given to another one
        self._alive: list[Any] = []
        self._kept_bytes = 0
        self._flops = flop_counter()

    def estimate(self, inputs: Sequence[Tensor]) -> dict[str, NodeCost]:
        try:
            with saved_tensors_hooks(self._count_saved, lambda packed: packed), self._flops, self._autocast():
                self.run(*inputs)
        finally:
            # they refer to this object through autograd's hooks, a circle that Python does not see: it would keep the
            # weights, and the files that these are mapped from
            self._alive.clear()
            self._fake_attributes.clear()
        return self._costs

    def run_node(self, n: fx.Node) -> Any:
        kept_before = self._kept_bytes
        flops_before = self._flops.get_total_flops()
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            # an error of the graph itself must not be reported as a shape that depends on data
            if not _depends_on_data(error):
                raise
            # the message names the node; fx would append the node's source code
            self.extra_traceback = False
            raise UnsupportedModel(
                f"the shape of {n.name} depends on data ({error}), so the graph cannot be divided before it runs; "
                "train it with parallel.pipeline = 1, parallel.zero = 0, parallel.units = 0 and recompute.mode = 'none'"
            ) from error
        outputs = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        # inputs, weights and their casts are in memory whether or not autograd saves them
        if n.op in ("placeholder", "get_attr") or n.target in (half, half_with_own_backward):
            self._counted |= {_storage(tensor) for tensor in tensors}
        self._costs[n.name] = NodeCost(
            flops=self._flops.get_total_flops() - flops_before,
            kept_bytes=self._kept_bytes - kept_before,
            outputs=tuple(_meta_like(tensor) for tensor in tensors),
        )
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        # one fake tensor for each stored one, as tied weights are saved once
        if value not in self._fake_attributes:
            is_trained = isinstance(value, nn.Parameter) and value.requires_grad
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
            self._fake_attributes[value] = fake.requires_grad_(is_trained)
        return self._fake_attributes[value]

    def _count_saved(self, tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in self._counted:
            self._counted.add(storage)
            self._alive.append(tensor)
            self._kept_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _depends_on_data(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is that a shape or a number depends on data."""
    if error is None or isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return error is not None
    return _depends_on_data(error.__cause__)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _meta_like(tensor: Tensor) -> Tensor:
    # outside of the fake mode: a meta tensor made inside would turn whatever is computed from it into fake tensors
    with unset_fake_temporarily():
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return meta.requires_grad_(tensor.requires_grad)
