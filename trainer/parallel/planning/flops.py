"""Count the floating-point operations (FLOPs) of a weight update of the whole model, from the graph that is trained.

The graph runs forward and backward on fake tensors (torch._subclasses.fake_tensor), which have shapes and no data, and
each operator is counted by its shapes. A multiplication and an addition are two operations:

    linear [B, I] x [I, O]        2 B I O                          the gradient of each factor: as much again
    convolution of G groups       2 B C_out H W k^2 C_in / G       likewise
    attention                     4 B h T^2 d                      backward pass: twice as much, four products for two
    recurrent layer of g gates    2 T B g H (I + H)                likewise; each direction
    everything else               0

The backward pass is the one that autograd runs: no weight gradient of a frozen weight, and nothing below the first
trained one. Attention counts every pair of tokens, masked ones as well. What is computed a second time to save memory
(recomputation, and that of fused attention kernels) does not count. So these are the model FLOPs of Chowdhery et al.
2022, PaLM, appendix B (https://arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from onward.trainer.onnx_import.imported_graph import ImportedGraph, output_nodes
from onward.trainer.onnx_import.ops.recurrent.rnn import Recurrence


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one weight update that takes all its samples at once."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_flops(module: ImportedGraph, inputs: Sequence[Tensor], outputs: Collection[str] = ()) -> Flops:
    """Return the FLOPs of an update with these inputs, of which only shapes and types are used.

    inputs: [B, ...] each. outputs: those that the losses read; () = all. On fake tensors of a CPU, so that the number
    is the same whatever the model is trained on. Changes nothing. Raises torch's errors where shapes depend on data:
    see `measure_flops`.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.train()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [torch.empty(value.shape, dtype=value.dtype, device="cpu") for value in inputs]
            return _Counter(module, outputs, _fake_weight).count(fakes)
    finally:
        for each, mode in modes:
            each.training = mode


def measure_flops(module: ImportedGraph, inputs: Sequence[Tensor], outputs: Collection[str] = ()) -> Flops:
    """Return the FLOPs of an update with these inputs, which a copy of the model really computes.

    inputs: [B, ...] each. For graphs whose shapes depend on data. What they do with other data may be more or less.
    """
    # a copy, since the backward pass leaves gradients and updates running statistics
    again = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=[]):
        return _Counter(again, outputs, lambda tensor: tensor).count([value.cpu() for value in inputs])


def _fake_weight(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(isinstance(tensor, nn.Parameter) and tensor.requires_grad)


class _Counter(fx.Interpreter):
    """Runs a graph forward and backward and counts."""

    def __init__(self, module: ImportedGraph, outputs: Collection[str], place: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self._place = place
        self._is_fake = place is _fake_weight
        self._placed: dict[Tensor, Tensor] = {}
        names = zip(module.output_names, output_nodes(module.graph), strict=True)
        self._read = [not outputs or name in outputs for name, _ in names]

    def count(self, inputs: Sequence[Tensor]) -> Flops:
        with flop_counter() as counter, torch.enable_grad():
            results = self.run(*inputs)
            forward = counter.get_total_flops()
            outputs = [results] if isinstance(results, Tensor) else results
            read_outputs = [output for output, is_read in zip(outputs, self._read, strict=True) if is_read]
            ends = [output for output in read_outputs if output.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.zeros_like(value) for value in ends])
            return Flops(forward, counter.get_total_flops() - forward)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        if value not in self._placed:  # one for each stored tensor, also for a tied one
            self._placed[value] = self._place(value)
        return self._placed[value]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, Recurrence) and self._is_fake:
            return _products_of(module, *args)
        return super().call_module(target, args, kwargs)


def _products_of(module: Recurrence, x: Tensor, w: Tensor, r: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Compute the products of a recurrent layer for all steps at once, with its results' shapes and gradients.

    Step by step it takes as many, but thousands of calls; and kernels differ in what torch counts of them.
    """
    first = module.layer.batch_first
    hidden = r.shape[2]
    has_cell = module.layer.kind == "LSTM"
    x = x.transpose(0, 1) if first else x
    directions = []
    for own, recurrent in zip(w.unbind(0), r.unbind(0), strict=True):
        gates = F.linear(x, own)  # [steps, batch, gates x hidden]
        directions.append((gates + F.linear(gates[..., :hidden], recurrent))[..., :hidden])
    y = torch.stack(directions, 1)  # [steps, directions, batch, hidden]
    states = [y[-1]] * (2 if has_cell else 1)
    if first:
        y = y.permute(2, 0, 1, 3)
        states = [state.transpose(0, 1) for state in states]
    return y, *states


# -- what an operator costs


def flop_counter() -> FlopCounterMode:
    """Return torch's counter with the formulas below."""
    return FlopCounterMode(display=False, custom_mapping=dict(FORMULAS))


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The arguments are shapes, [..., length, width]. Queries may share heads of keys, which the formula of torch 2.11
    # refuses: each head of the queries is multiplied with one.
    *heads, length, width = query
    return int(2 * math.prod(heads) * length * key[-2] * (width + value[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _attention(query, key, value)


def _convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    # torch's formula takes the weight gradient of grouped convolutions for that of ungrouped ones
    each: int = conv_flop_count(x, weight, grad, transposed=transposed)
    return each * sum(map(bool, output_mask[:2]))


def _recurrence(x: Any, w: Any, r: Any, *args: Any, **kwargs: Any) -> int:
    # x: [steps, batch, features]; w, r: [gates x hidden, features or hidden]
    steps, batch = x[:2]
    return int(2 * steps * batch * (math.prod(w) + math.prod(r)))


def _recurrence_backward(x: Any, w: Any, r: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _recurrence(x, w, r)


_ATEN = torch.ops.aten
FORMULAS: Mapping[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN.mkldnn_rnn_layer: _recurrence,
    _ATEN.mkldnn_rnn_layer_backward: _recurrence_backward,
}
"""Operators that torch has no formula for, or another one."""
