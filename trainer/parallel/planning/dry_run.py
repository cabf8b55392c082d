"""Measure the memory of one micro-batch in one stage by a dry run on fake tensors, which have shapes but no data.

The stage runs forward and backward exactly as in training, with its fused kernels, casts, recomputation and
tensor-parallel collectives, while every storage is counted from its allocation until it is freed:

    bytes alive
      peak_bytes  ─              ▄▄
                               ▄████▄
      kept_bytes  ─     ▂▄▆▇█▇██████▆▄
                     ▂▄▆██████████████▆▄▂
                     |  forward | backward |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward.trainer.model.losses.chunked_loss import few_chunks
from onward.trainer.model.weight_casts import casts_kept, make_casts
from onward.trainer.parallel.cost import Autocast
from onward.trainer.parallel.pipeline.stage import Stage


@dataclass(frozen=True)
class DryRun:
    """What one micro-batch takes in one stage, beyond weights and their gradients."""

    kept_bytes: int
    """Alive between its forward and its backward pass, without casts of weights."""
    peak_bytes: int
    """The most that is alive during either."""
    collectives: tuple[tuple[str, int], ...]
    """(name, bytes of the result) of each tensor-parallel collective in both passes."""


def dry_run(
    stage: Stage,
    inputs: Sequence[Tensor],
    autocast: Autocast,
    *,
    device: torch.device,
    loss: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> DryRun:
    """Run one micro-batch forward and backward through a stage on fake tensors, and return what it takes.

    inputs: all inputs of the graph for one micro-batch, [B, ...] each. loss: of the graph's outputs, on the last stage.
    Changes nothing. The stage needs its `received_meta`; its weights may be on any device.
    """
    counter = MemoryCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():

        def fake_like(tensor: Tensor, *, requires_grad: bool = False) -> Tensor:
            # no operator reads the tensor itself: each would first make a fake tensor of it, which takes longer
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=requires_grad
            )
            counter.ignore(fake)
            return fake

        def fake_weight(tensor: Tensor) -> Tensor:
            fake = fake_like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                fake.grad = fake_like(tensor) if tensor.requires_grad else None
            return fake

        # the modules of training run, with their weights replaced: a copy would have to copy the data too
        with replaced_weights(stage.chain, fake_weight), casts_kept(device), few_chunks():
            # casts of weights are made once in a step and not in each micro-batch, so stage_memory.py counts them
            with autocast():
                for cast in make_casts(stage.chain):
                    counter.ignore(cast)
            received = [fake_like(value, requires_grad=value.requires_grad) for value in stage.received_meta]
            arguments = [*received, *(fake_like(inputs[position]) for position in stage.input_positions)]
            with counter:
                with autocast():
                    outputs = stage.chain(*arguments)
                kept_bytes = counter.current_bytes
                if loss is not None:
                    results: list[Tensor] = [loss(outputs)]
                else:
                    results = [output for output in outputs if output.requires_grad]
                # what the next stage sends back is in a receive buffer, which stage_memory.py counts
                gradients = [fake_like(result) for result in results]
                if any(result.requires_grad for result in results):
                    torch.autograd.backward(results, gradients)
    return DryRun(kept_bytes, counter.peak_bytes, tuple(counter.collectives))


@contextmanager
def replaced_weights(module: nn.Module, place: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace each parameter and buffer of a module by what `place` returns for it, inside a block."""
    stored: list[tuple[Any, str, Tensor]] = []
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            stored += [(table, name, tensor) for name, tensor in table.items() if tensor is not None]
    # a tied weight is stored under several names, and counts once
    placed: dict[Tensor, Tensor] = {}
    for table, name, tensor in stored:
        if tensor not in placed:
            placed[tensor] = place(tensor)
        table[name] = placed[tensor]
    try:
        yield
    finally:
        for table, name, tensor in stored:
            table[name] = tensor


class MemoryCounter(TorchDispatchMode):
    """Count the bytes of all tensors that are made in a block and still alive, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = self.peak_bytes = 0
        self.collectives: list[tuple[str, int]] = []
        self._known: set[int] = set()

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a tensor, such as a weight."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # `wait_tensor` belongs to the collective before it
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            self.collectives.append((func._opname, result.nbytes))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.current_bytes += storage.nbytes()
        # the finalizer must not hold the storage itself, or it would never be freed
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.current_bytes -= size
