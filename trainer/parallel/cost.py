"""What each node of a graph costs: arithmetic, and memory kept for the backward pass. Nothing is computed.

The graph runs once on fake tensors (shapes and types alone), as training would run it; so costs are those of the very
calls that are made, fused, divided and autocast ones included.
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
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from onward.trainer.errors import UnsupportedModel

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class NodeCost:
    """One node, for inputs of the shapes given."""

    flops: int
    """Of the forward pass: of products, convolutions and attention, the rest is not counted. The backward pass takes
    twice as many."""
    kept_bytes: int
    """What is kept for the backward pass because of this node and not because of one before it; weights do not count,
    they are there anyway."""
    outputs: tuple[Tensor, ...]
    """What it gives, on the meta device, `requires_grad` included; nothing if it gives numbers."""

    @property
    def output_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


def costs(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, autocast: Autocast = nullcontext, training: bool = True
) -> dict[str, NodeCost]:
    """Cost of every node by its name, for one micro-batch. inputs: tensors of the right shapes, on any device.

    Changes neither weights nor running statistics; weights may be on the meta device. Raises UnsupportedModel when
    shapes depend on data.
    """
    device = next((tensor.device for tensor in inputs if tensor.device.type != "meta"), torch.device("cpu"))
    modes = [(each, each.training) for each in module.modules()]  # stages that share some may be in another mode
    module.train(training)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            fakes = [torch.empty(value.shape, dtype=value.dtype, device=device) for value in inputs]
            return _Pricing(module, device, autocast).price(fakes)
    finally:
        for each, mode in modes:
            each.training = mode


class _Pricing(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, device: torch.device, autocast: Autocast) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._device, self._autocast = device, autocast
        self._found: dict[str, NodeCost] = {}
        self._stored: dict[int, Tensor] = {}
        self._known: set[int] = set()
        """Storages that do not count again."""
        self._alive: list[Any] = []  # a storage that is freed may have its number taken by another
        self._kept = 0
        self._counter = FlopCounterMode(
            display=False,
            custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops},
        )

    def price(self, inputs: Sequence[Tensor]) -> dict[str, NodeCost]:
        with saved_tensors_hooks(self._keep, lambda packed: packed), self._counter, self._autocast():
            self.run(*inputs)
        return self._found

    def run_node(self, n: fx.Node) -> Any:
        kept, flops = self._kept, self._counter.get_total_flops()
        try:
            result = super().run_node(n)
        except RuntimeError as error:
            if not _depends_on_data(error):
                raise
            self.extra_traceback = False  # the sentence says where; fx would add the node's source
            raise UnsupportedModel(
                f"what {n.name} gives depends on data ({error}), so the graph cannot be cut ahead; train it with "
                "parallel.pipeline = 1, parallel.zero = 0, parallel.units = 0 and recompute.mode = 'none'"
            ) from error
        outputs = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        if n.op in ("placeholder", "get_attr"):
            self._known |= {_storage(tensor) for tensor in tensors}
        self._found[n.name] = NodeCost(
            self._counter.get_total_flops() - flops, self._kept - kept, tuple(_meta(tensor) for tensor in tensors)
        )
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._stored:
            trained = isinstance(value, nn.Parameter) and value.requires_grad
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
            self._stored[id(value)] = fake.requires_grad_(trained)
        return self._stored[id(value)]

    def _keep(self, tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in self._known:
            self._known.add(storage)
            self._alive.append(tensor)
            self._kept += tensor.untyped_storage().nbytes()
        return tensor


def _depends_on_data(error: BaseException | None) -> bool:
    """Whether a shape or a number was not to be had, be it inside a node that wraps its errors."""
    if error is None or isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return error is not None
    return _depends_on_data(error.__cause__)


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _meta(tensor: Tensor) -> Tensor:
    with unset_fake_temporarily():  # what is made of a fake tensor later would be fake, too
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return plain.requires_grad_(tensor.requires_grad)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # torch counts none for the kernel of CPUs; it hands over shapes
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops
