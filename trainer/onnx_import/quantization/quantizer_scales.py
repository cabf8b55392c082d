"""Let the scales of QuantizeLinear and DequantizeLinear follow what is trained: recalibrated, or trained themselves.

    file        x --- QuantizeLinear(s, z) --- DequantizeLinear(s, z) --- Conv          frozen: s and z are constants

    recalibrate x --- RangeObserver --- s, z      in training those of the micro-batch's least and greatest x,
                                                  in evaluation those of the moving averages of both
                w --- s max|w| / max|w of the file|                                     for weights
    train       s exp(p), p a Parameter that begins at 0                                for weights and activations

The bias of a product is stored in int32 with the scale of its input times that of its weight, which onnxruntime's
kernels rely on; it keeps following these two.

Training: Esser et al., "Learned Step Size Quantization" (2020). The straight-through estimator of
ops/quantized/quant.py already yields their gradient of s; it is divided by sqrt(n Qmax), with n elements that share the
scale in one sample. Jain et al., "Trained Quantization Thresholds" (2020), train the logarithm, so that a scale stays
positive and a learning rate is a relative change; here p is the logarithm of the factor to the scale in the file. Zero
points stay as they are.

Recalibration: moving averages of the range, as Jacob et al., "Quantization and Training of Neural Networks" (2018).
They are running statistics like those of BatchNormalization: merged over replicas, and in checkpoints.

Which scales follow: quantizer_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import onnx
import torch
from torch import Tensor, nn

from onward.trainer.onnx_import.scaled_values import ScaleLayout, integer_bounds

if TYPE_CHECKING:
    from onward.trainer.onnx_import.quantization.quantized_weights import QuantizedWeight
    from onward.trainer.onnx_import.tracing.tracing import Tracer
    from onward.trainer.onnx_import.tracing.values import Traced, Value

ScaleMode = Literal["recalibrate", "train", "frozen"]

LOG_FACTOR = ".log_factor"
RANGE = ".range"
"""Ends of the names, in checkpoints, of p and of (least, greatest); they begin with the name of the scale."""
MOMENTUM = 0.1
"""The weight of one micro-batch in the moving averages of a range."""
LEAST_SCALE = 1e-10
INTEGER_TYPES = (torch.int8, torch.uint8, torch.int16, torch.uint16)
QDQ = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Quantizer:
    """A stored scale that follows what is trained, and its zero point."""

    kind: Literal["activation", "weight", "bias"]
    mode: ScaleMode
    scale: str
    """Its name in the file."""
    zero: str
    """The name of its zero point, "" if it has none."""
    state: str
    """The name of the range or of p in checkpoints; "" where the scale is computed from others."""
    initial: Tensor = field(compare=False)
    """The scale in the file."""
    initial_zero: Tensor = field(compare=False)
    """The zero point in the file, in fp32; 0 without one."""
    bounds: tuple[int, int]
    """The smallest and the greatest integer."""
    moves_zero: bool
    """Whether the zero point is computed again with the scale."""
    layout: ScaleLayout
    weight: str = ""
    """The stored tensor that it quantizes; "" for a computed value."""
    reads: tuple[str, ...] = ()
    """Of a bias: the names of the scales of input and weight."""
    greatest: Tensor | None = field(default=None, compare=False)
    """Of a weight: the greatest absolute value in the file for each scale."""
    factors: tuple[Tensor, ...] = field(default=(), compare=False)
    """Of a bias: the scales of input and weight in the file."""

    def follows(self, trained: Collection[str]) -> bool:
        """Return whether it has something to follow, of the stored tensors that are trained, and is none itself."""
        return self.scale not in trained and (not self.weight or self.weight in trained)

    @property
    def initial_range(self) -> Tensor:
        """Return the least and the greatest value that the file's scale represents, [2]."""
        # the inverse of `observed`, so that a range that nothing has moved gives the scale of the file
        ends = torch.tensor(self.bounds, dtype=torch.float32) - self.initial_zero.reshape(())
        return ends * self.initial.reshape(())

    def final(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return scale and zero point for the file; bit for bit those it has where nothing has changed.

        tensors: name -> tensor, of states, weights and the scales that it is computed from.
        """
        zero = self.initial_zero
        if self.kind == "bias":
            pair = [tensors.get(name, before) for name, before in zip(self.reads, self.factors, strict=True)]
            return product_scale(pair[0], pair[1], self.initial, *self.factors), zero
        if self.mode == "train":
            return trained_scale(tensors[self.state].detach(), self.initial), zero
        if self.kind == "weight":
            assert self.greatest is not None
            return weight_scale(tensors[self.weight].detach(), self.initial, self.greatest, self.layout), zero
        scale_and_zero = observed(
            tensors[self.state], self.initial_range, self.initial, zero, self.bounds, self.moves_zero
        )
        return scale_and_zero[0].reshape(self.initial.shape), scale_and_zero[1].reshape(zero.shape)


# -- the arithmetic, in fp32


def trained_scale(p: Tensor, initial: Tensor, gradient_factor: float = 1.0) -> Tensor:
    """Return initial exp(p), with the gradient of p multiplied by a factor: all of the shape of the scale."""
    if p.requires_grad and gradient_factor != 1.0:
        # the value of p stays, since both terms add up to it; the detached one passes no gradient
        p = p * gradient_factor + (p * (1.0 - gradient_factor)).detach()
    return initial * torch.exp(p)


def weight_scale(weight: Tensor, initial: Tensor, greatest: Tensor, layout: ScaleLayout) -> Tensor:
    """Return the scale of the file times the growth of the greatest absolute value that shares it; no gradient.

    initial, greatest and the result: of the shape of the scale.
    """
    # relative to the file, whose exporter may have chosen another scale than max|w| / 127
    now = greatest_values(weight.detach(), layout, initial.numel()).reshape(initial.shape)
    growth = now / torch.where(greatest > 0, greatest, 1.0)
    # a channel that was all zero had no scale of its own
    grown = torch.where(greatest > 0, initial * growth, torch.maximum(initial, now / 127.0))
    return grown.clamp(min=LEAST_SCALE).where(growth != 1.0, initial)


def greatest_values(weight: Tensor, layout: ScaleLayout, count: int) -> Tensor:
    """Return the greatest absolute value for each of `count` scales: a scalar, or [count] along an axis."""
    if count == 1:
        return weight.abs().amax()
    return weight.abs().transpose(0, layout[0]).flatten(1).amax(1) if weight.ndim > 1 else weight.abs()


def product_scale(
    first: Tensor, second: Tensor, initial: Tensor, first_before: Tensor, second_before: Tensor
) -> Tensor:
    """Return the product of two scales in the shape of `initial`; that of the file where they are those of the file.

    first: of one element, the scale of the input; second: of one or of as many as `initial`, that of the weight.
    """
    product = (first.reshape(()) * second).expand(initial.shape)
    same = (first.reshape(()) == first_before.reshape(())) & (second == second_before)
    return torch.where(same.expand(initial.shape), initial, product)


def observed(
    limits: Tensor, before: Tensor, scale: Tensor, zero: Tensor, bounds: tuple[int, int], moves_zero: bool
) -> Tensor:
    """Return (scale, zero point) of a range [2], as fp32 [2]; those of the file where the range is that of the file."""
    # 0 belongs to every range, so that an integer stands for it exactly
    least = limits[0].clamp(max=0.0)
    greatest = limits[1].clamp(min=0.0)
    low, high = bounds
    first = zero.reshape(())
    if moves_zero:
        new_scale = ((greatest - least) / (high - low)).clamp(min=LEAST_SCALE)
        middle = torch.round(low - least / new_scale).clamp(low, high)
    else:
        # an end that the zero point leaves no integers for cannot be represented at any scale
        above = greatest / torch.where(high > first, high - first, torch.inf)
        below = -least / torch.where(first > low, first - low, torch.inf)
        new_scale = torch.maximum(above, below).clamp(min=LEAST_SCALE)
        middle = first
    same = (limits == before).all()
    return torch.stack([torch.where(same, scale.reshape(()), new_scale), torch.where(same, first, middle)])


class RangeObserver(nn.Module):
    """Return the least and the greatest element of x, and 0, in training; in evaluation their moving averages.

    It holds no tensors: the averages are an operand, a running statistic that it updates.
    """

    def __init__(self, momentum: float = MOMENTUM) -> None:
        super().__init__()
        self.momentum = momentum

    def forward(self, x: Tensor, limits: Tensor) -> Tensor:
        """x: any shape; limits: [2]."""
        if not self.training or not x.numel():
            return limits.clone()
        with torch.no_grad():
            least, greatest = torch.aminmax(x.detach())
            # in training those of the micro-batch itself, so that nothing of it is clamped
            now = torch.stack([least, greatest]).to(limits.dtype)
            limits.lerp_(now, self.momentum)
        return now


# -- recording them on the graph


class FollowScales:
    """Puts the scales that follow in the place of the stored ones while a graph is traced."""

    def __init__(
        self, tracer: Tracer, quantizers: tuple[Quantizer, ...], integers: Mapping[str, QuantizedWeight]
    ) -> None:
        self.tracer = tracer
        self.names: dict[str, str] = {}
        """Path of a state in the module -> its name in checkpoints."""
        self._waiting = {quantizer.scale: quantizer for quantizer in quantizers if quantizer.kind != "weight"}
        self._states = {quantizer.state: self._add(quantizer) for quantizer in quantizers if quantizer.state}
        self._weights = [quantizer for quantizer in quantizers if quantizer.kind == "weight"]
        self._integers = integers

    def _add(self, quantizer: Quantizer) -> Traced:
        if quantizer.mode == "train":
            traced = self.tracer.tensor(quantizer.state, nn.Parameter(torch.zeros_like(quantizer.initial)))
        else:
            traced = self.tracer.tensor(quantizer.state, quantizer.initial_range)
        self.names[str(traced.node.target)] = quantizer.state
        return traced

    def before_all(self, values: dict[str, Value]) -> None:
        """Set the scales of weights, which depend on nothing else; `values` has the weights as floats."""
        for quantizer in self._weights:
            weight = values[quantizer.weight]
            if quantizer.mode == "train":
                scale = self._trained(quantizer, math.prod(weight.probes[0].shape) // quantizer.initial.numel())
            else:
                in_file = (quantizer.initial, quantizer.greatest, quantizer.layout)
                scale = self.tracer.call(weight_scale, weight, *in_file)
            values[quantizer.scale] = scale
            self._quantize(quantizer.weight, values, quantizer.scale)

    def _quantize(self, name: str, values: dict[str, Value], scale: str) -> None:
        """Replace the float of a weight that the file stores as integers by these, at the scale of now."""
        if (integers := self._integers.get(name)) is not None:
            values[name] = integers.traced(self.tracer, values[name], values[scale])

    def before(self, node: onnx.NodeProto, values: dict[str, Value]) -> None:
        """Set the scale and the zero point that a QuantizeLinear or DequantizeLinear reads, before its first reader."""
        if node.op_type not in QDQ or len(node.input) < 2 or node.input[1] not in self._waiting:
            return
        quantizer = self._waiting.pop(node.input[1])
        x = values[node.input[0]]
        if quantizer.kind == "bias":
            pair = [values[name] for name in quantizer.reads]
            values[quantizer.scale] = self.tracer.call(product_scale, *pair, quantizer.initial, *quantizer.factors)
            self._quantize(node.input[0], values, quantizer.scale)
        elif quantizer.mode == "train":
            # the elements of one sample: dynamic lengths, such as the batch, do not count
            fixed = [a for a, b in zip(x.probes[0].shape, x.probes[1].shape, strict=True) if a == b]
            values[quantizer.scale] = self._trained(quantizer, math.prod(fixed))
        else:
            name = f"{quantizer.scale}_observer"
            limits = self.tracer.call_module(name, RangeObserver(), x, self._states[quantizer.state])
            in_file = (quantizer.initial_range, quantizer.initial, quantizer.initial_zero, quantizer.bounds)
            scale_and_zero = self.tracer.call(observed, limits, *in_file, quantizer.moves_zero)
            values[quantizer.scale] = self.tracer.call("select", scale_and_zero, 0, 0)
            if quantizer.moves_zero:
                zero = self.tracer.call("select", scale_and_zero, 0, 1)
                values[quantizer.zero] = self.tracer.call("to", zero, values[quantizer.zero].dtype)

    def _trained(self, quantizer: Quantizer, count: int) -> Value:
        # the factor of Esser et al., by which the updates of scales and weights have a similar size
        factor = 1.0 / math.sqrt(max(count, 1) * max(quantizer.bounds[1], 1))
        return self.tracer.call(trained_scale, self._states[quantizer.state], quantizer.initial, factor)


def biases_last(model: onnx.ModelProto, quantizers: Sequence[Quantizer]) -> onnx.ModelProto:
    """Return the model with the nodes that dequantize biases before their first readers: after what they follow."""
    scales = {quantizer.scale for quantizer in quantizers if quantizer.kind == "bias"}
    dequantizing = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    moved = {node.output[0]: node for node in dequantizing if node.input[1] in scales}
    if not moved:
        return model
    result = onnx.ModelProto()
    # each is put before its first reader, of which there is at least one (quantizer_search.py)
    waiting = dict(moved)
    result.CopyFrom(model)
    del result.graph.node[:]
    for node in model.graph.node:
        if not node.output or node.output[0] not in moved:
            result.graph.node.extend(waiting.pop(name) for name in node.input if name in waiting)
            result.graph.node.append(node)
    return result


def final_scales(quantizers: tuple[Quantizer, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scales and zero points for the file, by initializer name. tensors: what the module stores, by name."""
    final: dict[str, Tensor] = {}
    for quantizer in sorted(quantizers, key=lambda quantizer: quantizer.kind == "bias"):
        if quantizer.state and quantizer.state not in tensors:
            continue  # nothing reads what it quantizes
        scale, zero = quantizer.final({**tensors, **final})
        final[quantizer.scale] = scale.detach()
        if quantizer.moves_zero:
            final[quantizer.zero] = zero.to(next(t for t in INTEGER_TYPES if quantizer.bounds == integer_bounds(t)))
    return final
